"""One answer being read by threads, on gRPC's own synchronous stack.

Knows how a call is read, cancelled and tried again. What an answer means is in `answer`, when to
try again in `retry`; `aio_stream` is the same for asyncio.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from draftwire_client.answer import StreamState
from draftwire_client.errors import DraftwireError, Internal, cancelled_by_caller
from draftwire_client.retry import Attempts
from draftwire_client.types import Chunk, Result


class Stream(StreamState):
    """An answer as it is made: iterate over its Chunks, then ask for the `result`.

    Leaving the loop early, `cancel`, `close` and leaving `with` cancel the call; the server then
    frees it. One thread reads; any thread may cancel, and the reader then gets Cancelled.
    """

    def __init__(
        self, start: Callable[[float], Any], attempts: Attempts, closed: Callable[[], bool]
    ) -> None:
        super().__init__(attempts, closed)
        self._start = start
        self._stop = threading.Event()
        self._call = start(attempts.remaining())

    def __iter__(self) -> Iterator[Chunk]:
        # A generator, so that `break` ends the call at once and not when the garbage collector
        # comes.
        try:
            while (chunk := self._advance()) is not None:
                yield chunk
        finally:
            self.cancel()

    def __next__(self) -> Chunk:
        chunk = self._advance()
        if chunk is None:
            raise StopIteration
        return chunk

    def result(self) -> Result:
        """The complete answer; reads what is left of it. Raises what the stream raised."""
        while not self._ended:
            self._advance()
        return self._outcome()

    def cancel(self) -> None:
        """End the call now, from any thread; nothing happens if it has ended."""
        self._stop.set()
        self._call.cancel()

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def _advance(self) -> Chunk | None:
        """The next chunk; None when the answer has ended."""
        while not self._ended:
            try:
                message = next(self._call, None)
            except grpc.RpcError as exc:
                self._again(self._delay_or_fail(exc, cancelled=self._stop.is_set()))
                continue
            try:
                if message is None:
                    self._complete(self._call.trailing_metadata())
                elif (chunk := self._take(message)) is not None:
                    return chunk
            except Internal as error:
                self._call.cancel()
                raise self._fail(error) from None
        return None

    def _again(self, delay: float) -> None:
        if self._stop.wait(delay):
            raise self._fail(cancelled_by_caller())
        try:
            self._call = self._start(self._attempts.remaining())
        except DraftwireError as error:
            raise self._fail(error) from None
        if self._stop.is_set():  # cancelled between the wait and the new call
            self._call.cancel()
