"""The client for asyncio, on grpc.aio.

Knows how to open, read, cancel and close calls on an event loop. What is sent is in `requests`,
what an answer means in `answer`, what is tried again in `retry`; `client` is the same client for
threads.
"""

# ruff: noqa: ASYNC109 - `timeout` is the deadline the server is told, not a cancel scope here.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.channel import open_channel
from draftwire.v1 import verifier_pb2, verifier_pb2_grpc
from draftwire_client.answer import StreamState
from draftwire_client.config import CONTROL_TIMEOUT_S, check_timeout
from draftwire_client.connect import Connectable, ConnectConfig
from draftwire_client.enums import HealthStatus
from draftwire_client.errors import (
    DraftwireError,
    Internal,
    NotFound,
    cancelled_by_caller,
    client_closed,
    from_call,
)
from draftwire_client.info import Info
from draftwire_client.requests import Messages, chat_request, generate_request
from draftwire_client.responses import read_health, read_info
from draftwire_client.retry import Attempts
from draftwire_client.types import (
    Chunk,
    RequestOptions,
    Result,
)


class AsyncClient(Connectable):
    """A connection to a verifier, made by `connect` on the loop that uses it.

    Use it in `async with`, or `close` it.
    """

    def __init__(self, config: ConnectConfig) -> None:
        self._config = config
        self._closed = False
        self._channel = open_channel(config.target, config.channel)
        self._control = open_channel(config.target, config.control_channel)
        self._verifier = verifier_pb2_grpc.VerifierStub(self._channel)
        self._information = verifier_pb2_grpc.VerifierStub(self._control)
        self._health: Any = health_pb2_grpc.HealthStub(self._control)

    async def generate(
        self,
        prompt: str | Iterable[int],
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """The answer to a text or to token ids, when it is complete.

        Cancelling the task cancels the call.

        `timeout` is the deadline in seconds, retries included. Raises DraftwireError (`partial_of`
        tells what had arrived) and, before anything is sent, TypeError for an unknown option or a
        value of the wrong type.
        """
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            return await stream.result()

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """The answer as it is made.

        The call starts now. Raises as generate, most of it while being read.
        """
        return self._stream(generate_request(prompt, options), timeout)

    async def chat(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """The assistant's answer to messages, or to one text of the user, when it is complete.

        Raises as generate.
        """
        async with self.chat_stream(messages, timeout=timeout, **options) as stream:
            return await stream.result()

    def chat_stream(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """The assistant's answer as it is made. Raises as stream."""
        return self._stream(chat_request(messages, options), timeout)

    async def info(self, *, timeout: float | None = None) -> Info:
        """What the verifier is, its configuration, lanes and load. Raises DraftwireError."""
        attempts = Attempts(self._config.retry, check_timeout(timeout, CONTROL_TIMEOUT_S))
        while True:
            self._check_open()
            try:
                response = await self._information.GetInfo(
                    verifier_pb2.VerifierGetInfoRequest(), timeout=attempts.remaining()
                )
            except grpc.RpcError as exc:
                error = from_call(exc)
                delay = attempts.next_delay(error, exc)
                if delay is None:
                    raise error from exc
                await asyncio.sleep(delay)
            else:
                return read_info(response)

    async def health(self, service: str = "", *, timeout: float | None = None) -> HealthStatus:
        """Health of a service by name, "" for the whole server.

        Asks once. Raises DraftwireError.
        """
        self._check_open()
        try:
            response = await self._health.Check(
                health_pb2.HealthCheckRequest(service=service),
                timeout=check_timeout(timeout, CONTROL_TIMEOUT_S),
            )
        except grpc.RpcError as exc:
            error = from_call(exc)
            if isinstance(error, NotFound):
                return HealthStatus.SERVICE_UNKNOWN
            raise error from exc
        return read_health(response)

    async def close(self) -> None:
        """Close the connection; calls that are running end with Cancelled."""
        self._closed = True
        await self._channel.close()
        await self._control.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise client_closed()

    def _stream(self, request: verifier_pb2.GenerateRequest, timeout: float | None) -> AsyncStream:
        def start(remaining: float) -> Any:
            self._check_open()
            return self._verifier.Generate(request, timeout=remaining)

        attempts = Attempts(self._config.retry, check_timeout(timeout, self._config.timeout))
        return AsyncStream(start, attempts)


class AsyncStream(StreamState):
    """An answer as it is made: iterate over its Chunks, then await the `result`.

    Leaving the loop early, `cancel`, leaving `async with` and cancelling the reading task cancel
    the call; the server then frees it. One task reads; any task of the loop may cancel, and the
    reader then gets Cancelled.
    """

    def __init__(self, start: Callable[[float], Any], attempts: Attempts) -> None:
        super().__init__(attempts)
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
                self._call.cancel()
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                # grpc.aio says CancelledError for a call that was cancelled; nobody cancelled this
                # task.
                raise self._fail(cancelled_by_caller()) from None
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
