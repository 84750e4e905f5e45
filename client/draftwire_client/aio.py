"""The client for asyncio, on grpc.aio.

Knows channels and which calls there are. What is sent is in `requests`, how an answer is read in
`aio_stream`, what is tried again in `retry`; `client` is the same client for threads.
"""

# ruff: noqa: ASYNC109 - `timeout` is the deadline the server is told, not a cancel scope here.

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.channel import open_channel
from draftwire.v1 import verifier_pb2, verifier_pb2_grpc
from draftwire_client.aio_stream import AsyncStream, task_is_cancelled
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
from draftwire_client.errors import NotFound, cancelled_by_caller, client_closed, from_call
from draftwire_client.info import Info
from draftwire_client.pools import AsyncBatch
from draftwire_client.requests import Messages, chat_request, generate_request
from draftwire_client.responses import read_health, read_info
from draftwire_client.retry import Attempts
from draftwire_client.trace import Metadata, TraceContext, trace_metadata
from draftwire_client.types import RequestOptions, Result

__all__ = ["AsyncClient", "AsyncStream"]


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
        trace: TraceContext | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """The answer to a text or to token ids, when it is complete.

        Cancelling the task cancels the call.

        `timeout` is the deadline in seconds, retries included. Raises DraftwireError (`partial_of`
        tells what had arrived) and, before anything is sent, TypeError for an unknown option or a
        value of the wrong type. `trace` is the caller's place in a trace, else OpenTelemetry's
        active span if there is one.
        """
        async with self.stream(prompt, timeout=timeout, trace=trace, **options) as stream:
            return await stream.result()

    def stream(
        self,
        prompt: str | Iterable[int],
        *,
        timeout: float | None = None,
        trace: TraceContext | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """The answer as it is made.

        The call starts now. Raises as generate, most of it while being read.
        """
        return self._stream(generate_request(prompt, options), timeout, trace_metadata(trace))

    async def chat(
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
        async with self.chat_stream(messages, timeout=timeout, trace=trace, **options) as stream:
            return await stream.result()

    def chat_stream(
        self,
        messages: Messages,
        *,
        timeout: float | None = None,
        trace: TraceContext | str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """The assistant's answer as it is made. Raises as stream."""
        return self._stream(chat_request(messages, options), timeout, trace_metadata(trace))

    async def batch(
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
        running = self.batch_as_completed(
            prompts,
            chat=chat,
            concurrency=concurrency,
            progress=progress,
            timeout=timeout,
            trace=trace,
            **options,
        )
        async with running:
            return sorted([item async for item in running], key=lambda item: item.index)

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
    ) -> AsyncBatch:
        """As batch, each outcome as soon as it is there, for `async for`.

        Prompts are taken as there is room, so they may come from a long or endless iterable.
        Leaving the loop early cancels what runs.
        """
        made = make_batch(prompts, options, chat=chat, concurrency=concurrency, progress=progress)
        seconds, metadata = check_timeout(timeout, self._config.timeout), trace_metadata(trace)
        return AsyncBatch(made, lambda request: self._stream(request, seconds, metadata))

    async def info(self, *, timeout: float | None = None) -> Info:
        """What the verifier is, its configuration, lanes and load. Raises DraftwireError."""
        attempts = Attempts(self._config.retry, check_timeout(timeout, CONTROL_TIMEOUT_S))
        while True:
            self._check_open()
            try:
                response = await self._control_call(
                    self._information.GetInfo(
                        verifier_pb2.VerifierGetInfoRequest(),
                        timeout=attempts.remaining(),
                        metadata=trace_metadata(None),
                    )
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
            response = await self._control_call(
                self._health.Check(
                    health_pb2.HealthCheckRequest(service=service),
                    timeout=check_timeout(timeout, CONTROL_TIMEOUT_S),
                )
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

    async def _control_call(self, call: Any) -> Any:
        """The response of a call on the control channel. Raises grpc.RpcError or Cancelled."""
        try:
            return await call
        except asyncio.CancelledError:
            if self._closed and not task_is_cancelled():
                raise cancelled_by_caller() from None
            raise

    def _stream(
        self, request: verifier_pb2.GenerateRequest, timeout: float | None, metadata: Metadata
    ) -> AsyncStream:
        def start(remaining: float) -> Any:
            self._check_open()
            return self._verifier.Generate(request, timeout=remaining, metadata=metadata)

        attempts = Attempts(self._config.retry, check_timeout(timeout, self._config.timeout))
        return AsyncStream(start, attempts, lambda: self._closed)
