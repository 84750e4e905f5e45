"""The client for threads, on gRPC's own synchronous stack.

Knows how to open, read, cancel and close calls. What is sent is in `requests`, what an answer means
in `answer`, what is tried again in `retry`; `aio` is the same client for asyncio.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.channel import open_sync_channel
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


class Client(Connectable):
    """A connection to a verifier, made by `connect`.

    Threads may share it; use it in `with`, or `close` it.
    """

    def __init__(self, config: ConnectConfig) -> None:
        self._config = config
        self._closed = False
        self._channel = open_sync_channel(config.target, config.channel)
        self._control = open_sync_channel(config.target, config.control_channel)
        self._verifier = verifier_pb2_grpc.VerifierStub(self._channel)
        self._information = verifier_pb2_grpc.VerifierStub(self._control)
        self._health: Any = health_pb2_grpc.HealthStub(self._control)

    def generate(
        self,
        prompt: str | Iterable[int],
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """The answer to a text or to token ids, when it is complete.

        `timeout` is the deadline in seconds, retries included. Raises DraftwireError (`partial_of`
        tells what had arrived) and, before anything is sent, TypeError for an unknown option or a
        value of the wrong type.
        """
        with self.stream(prompt, timeout=timeout, **options) as stream:
            return stream.result()

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """The answer as it is made.

        The call starts now. Raises as generate, most of it while being read.
        """
        return self._stream(generate_request(prompt, options), timeout)

    def chat(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """The assistant's answer to messages, or to one text of the user, when it is complete.

        Raises as generate.
        """
        with self.chat_stream(messages, timeout=timeout, **options) as stream:
            return stream.result()

    def chat_stream(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """The assistant's answer as it is made. Raises as stream."""
        return self._stream(chat_request(messages, options), timeout)

    def info(self, *, timeout: float | None = None) -> Info:
        """What the verifier is, its configuration, lanes and load. Raises DraftwireError."""
        attempts = Attempts(self._config.retry, check_timeout(timeout, CONTROL_TIMEOUT_S))
        while True:
            self._check_open()
            try:
                response = self._information.GetInfo(
                    verifier_pb2.VerifierGetInfoRequest(), timeout=attempts.remaining()
                )
            except grpc.RpcError as exc:
                error = from_call(exc)
                delay = attempts.next_delay(error, exc)
                if delay is None:
                    raise error from exc
                time.sleep(delay)
            else:
                return read_info(response)

    def health(self, service: str = "", *, timeout: float | None = None) -> HealthStatus:
        """Health of a service by name, "" for the whole server.

        Asks once. Raises DraftwireError.
        """
        self._check_open()
        try:
            response = self._health.Check(
                health_pb2.HealthCheckRequest(service=service),
                timeout=check_timeout(timeout, CONTROL_TIMEOUT_S),
            )
        except grpc.RpcError as exc:
            error = from_call(exc)
            if isinstance(error, NotFound):
                return HealthStatus.SERVICE_UNKNOWN
            raise error from exc
        return read_health(response)

    def close(self) -> None:
        """Close the connection; calls that are running end with Cancelled."""
        self._closed = True
        self._channel.close()
        self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise client_closed()

    def _stream(self, request: verifier_pb2.GenerateRequest, timeout: float | None) -> Stream:
        def start(remaining: float) -> grpc.Call:
            self._check_open()
            call: grpc.Call = self._verifier.Generate(request, timeout=remaining)
            return call

        return Stream(
            start, Attempts(self._config.retry, check_timeout(timeout, self._config.timeout))
        )


class Stream(StreamState):
    """An answer as it is made: iterate over its Chunks, then ask for the `result`.

    Leaving the loop early, `cancel`, `close` and leaving `with` cancel the call; the server then
    frees it. One thread reads; any thread may cancel, and the reader then gets Cancelled.
    """

    def __init__(self, start: Callable[[float], Any], attempts: Attempts) -> None:
        super().__init__(attempts)
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
