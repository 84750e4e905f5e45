"""One answer being read on an event loop, on grpc.aio.

Knows how a call is read, cancelled and tried again. What an answer means is in `answer`, when to
try again in `retry`; `stream` is the same for threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from draftwire_client.answer import StreamState
from draftwire_client.errors import DraftwireError, Internal, cancelled_by_caller
from draftwire_client.retry import Attempts
from draftwire_client.types import Chunk, Result


class AsyncStream(StreamState):
    """An answer as it is made: iterate over its Chunks, then await the `result`.

    Leaving the loop early, `cancel`, leaving `async with` and cancelling the reading task cancel
    the call; the server then frees it. One task reads; any task of the loop may cancel, and the
    reader then gets Cancelled.
    """

    def __init__(
        self, start: Callable[[float], Any], attempts: Attempts, closed: Callable[[], bool]
    ) -> None:
        super().__init__(attempts, closed)
        self._start = start
        self._stop = asyncio.Event()
        self._open()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return _Reading(self)

    async def __anext__(self) -> Chunk:
        chunk = await self._advance()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def result(self) -> Result:
        """The complete answer; reads what is left of it. Raises what the stream raised."""
        while not self._ended:
            await self._advance()
        return self._outcome()

    def cancel(self) -> None:
        """End the call now; nothing happens if it has ended."""
        self._stop.set()
        self._call.cancel()

    async def close(self) -> None:
        """As cancel."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def _open(self) -> None:
        self._call = self._start(self._attempts.remaining())
        # Not `read()`: once the status is in, it gives EOF and drops the messages that were not
        # read yet.
        self._messages = aiter(self._call)

    async def _advance(self) -> Chunk | None:
        """The next chunk; None when the answer has ended."""
        while not self._ended:
            try:
                message = await anext(self._messages, None)
            except grpc.RpcError as exc:
                await self._again(self._delay_or_fail(exc, cancelled=self._stop.is_set()))
                continue
            except asyncio.CancelledError:
                if task_is_cancelled():
                    self._call.cancel()
                    raise
                if self._stop.is_set() or self._closed():
                    raise self._fail(cancelled_by_caller()) from None
                # grpc.aio says CancelledError for the status CANCELLED too, whoever sent it.
                dropped = await _status(self._call)
                await self._again(self._delay_or_fail(dropped, cancelled=False))
                continue
            try:
                if message is None:
                    self._complete(await self._call.trailing_metadata())
                elif (chunk := self._take(message)) is not None:
                    return chunk
            except Internal as error:
                self._call.cancel()
                raise self._fail(error) from None
        return None

    async def _again(self, delay: float) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), delay)
        except TimeoutError:
            pass
        else:
            raise self._fail(cancelled_by_caller())
        try:
            self._open()
        except DraftwireError as error:
            raise self._fail(error) from None


class _Reading(AsyncIterator[Chunk]):
    """One loop over a stream. Cancels the call when it is dropped, so that `break` acts at once.

    An async generator would be closed only by a later turn of the loop.
    """

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    async def __anext__(self) -> Chunk:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.cancel()


def task_is_cancelled() -> bool:
    """Whether somebody has cancelled the running task, so that CancelledError is meant for it."""
    return (task := asyncio.current_task()) is not None and task.cancelling() > 0


async def _status(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call that has ended, as the exception of a failed call."""
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        await call.details(),
    )
