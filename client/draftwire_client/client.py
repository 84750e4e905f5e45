"""The client for threads, on gRPC's own synchronous stack.

Knows channels and which calls there are. What is sent is in `requests`, how an answer is read in
`stream`, what is tried again in `retry`; `aio` is the same client for asyncio.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.channel import open_sync_channel
from draftwire.v1 import verifier_pb2, verifier_pb2_grpc
from draftwire_client.batch import (
    DEFAULT_CONCURRENCY,
    BatchItem,
    BatchRequest,
    Progress,
    Prompt,
    make_batch,
)
from draftwire_client.config import CONTROL_TIMEOUT_S, check_timeout
from draftwire_client.connect import Connectable, ConnectConfig
from draftwire_client.enums import HealthStatus
from draftwire_client.errors import NotFound, client_closed, from_call
from draftwire_client.info import Info
from draftwire_client.pools import in_threads
from draftwire_client.requests import Messages, chat_request, generate_request
from draftwire_client.responses import read_health, read_info
from draftwire_client.retry import Attempts
from draftwire_client.stream import Stream
from draftwire_client.trace import Metadata, TraceContext, trace_metadata
from draftwire_client.types import RequestOptions, Result

__all__ = ["Client", "Stream"]


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
        trace: TraceContext | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """The answer to a text or to token ids, when it is complete.

        `timeout` is the deadline in seconds, retries included. Raises DraftwireError (`partial_of`
        tells what had arrived) and, before anything is sent, TypeError for an unknown option or a
        value of the wrong type. `trace` is the caller's place in a trace, else OpenTelemetry's
        active span if there is one.
        """
        with self.stream(prompt, timeout=timeout, trace=trace, **options) as stream:
            return stream.result()

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        timeout: float | None = None,
        trace: TraceContext | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """The answer as it is made.

        The call starts now. Raises as generate, most of it while being read.
        """
        return self._stream(generate_request(prompt, options), timeout, trace_metadata(trace))

    def chat(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        trace: TraceContext | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """The assistant's answer to messages, or to one text of the user, when it is complete.

        Raises as generate.
        """
        with self.chat_stream(messages, timeout=timeout, trace=trace, **options) as stream:
            return stream.result()

    def chat_stream(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        trace: TraceContext | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """The assistant's answer as it is made. Raises as stream."""
        return self._stream(chat_request(messages, options), timeout, trace_metadata(trace))

    def batch(
        self,
        prompts: Iterable[Prompt | BatchRequest],
        *,
        chat: bool = False,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: Progress | bool = False,
        timeout: float | None = None,
        trace: TraceContext | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[BatchItem]:
        """The outcomes of many prompts, in their order, at most `concurrency` running at once.

        A prompt is what generate takes, or chat if `chat`; a BatchRequest brings options of its
        own. One that fails keeps its typed error and stops no other; `timeout` is the deadline of
        each. `progress` is called after each outcome; True shows a bar on stderr. Raises TypeError
        for wrong types, which ends the batch.
        """
        items = self.batch_as_completed(
            prompts,
            chat=chat,
            concurrency=concurrency,
            progress=progress,
            timeout=timeout,
            trace=trace,
            **options,
        )
        return sorted(items, key=lambda item: item.index)

    def batch_as_completed(
        self,
        prompts: Iterable[Prompt | BatchRequest],
        *,
        chat: bool = False,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: Progress | bool = False,
        timeout: float | None = None,
        trace: TraceContext | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[BatchItem]:
        """As batch, each outcome as soon as it is there.

        Prompts are taken as there is room, so they may come from a long or endless iterable.
        Leaving the loop early cancels what runs.
        """
        made = make_batch(prompts, options, chat=chat, concurrency=concurrency, progress=progress)
        seconds, metadata = check_timeout(timeout, self._config.timeout), trace_metadata(trace)
        return in_threads(made, lambda request: self._stream(request, seconds, metadata))

    def info(self, *, timeout: float | None = None) -> Info:
        """What the verifier is, its configuration, lanes and load. Raises DraftwireError."""
        attempts = Attempts(self._config.retry, check_timeout(timeout, CONTROL_TIMEOUT_S))
        while True:
            self._check_open()
            try:
                response = self._information.GetInfo(
                    verifier_pb2.VerifierGetInfoRequest(),
                    timeout=attempts.remaining(),
                    metadata=trace_metadata(None),
                )
            except grpc.RpcError as exc:
                error = from_call(exc, given_up=self._closed)
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
            error = from_call(exc, given_up=self._closed)
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

    def _stream(
        self, request: verifier_pb2.GenerateRequest, timeout: float | None, metadata: Metadata
    ) -> Stream:
        def start(remaining: float) -> Any:
            self._check_open()
            return self._verifier.Generate(request, timeout=remaining, metadata=metadata)

        attempts = Attempts(self._config.retry, check_timeout(timeout, self._config.timeout))
        return Stream(start, attempts, lambda: self._closed)
