"""Answers clients: translates between gRPC and the engine, and nothing else.

Knows: messages, trailers, deadlines, cancellation. Does not know: how tokens come about.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import grpc

from draftwire import tracing
from draftwire.errors import DeadlineExceeded, DraftwireError, InvalidArgument, Unavailable
from draftwire.v1 import types_pb2, verifier_pb2
from verifier_service import admission
from verifier_service.decoding import deserializer
from verifier_service.engine import Engine
from verifier_service.messages import sampling_to_proto, speculation_to_proto
from verifier_service.record import Record, RequestMeter
from verifier_service.reports import Emitted
from verifier_service.session import Request

Context = grpc.aio.ServicerContext[Any, Any]
SERVICE = "draftwire.v1.Verifier"
USAGE_TRAILER = "draftwire-usage-bin"
ACCEPTANCE_TRAILER = "draftwire-acceptance-bin"
_LARGE_REQUEST = 8192  # bytes
_ENDLESS = 10 * 365 * 86400.0


class Describe(Protocol):
    """Makes the GetInfo answer."""

    async def __call__(self) -> verifier_pb2.VerifierGetInfoResponse:
        """The answer."""


class VerifierServicer:
    """The Verifier service. Made before the model is loaded; `open` is called when it is."""

    def __init__(self, *, log_prompts: bool = False) -> None:
        self._engine: Engine | None = None
        self._tokenizer: Any = None
        self._limits: admission.Limits | None = None
        self._describe: Describe | None = None
        self._queues: dict[int, asyncio.Queue[tuple[Emitted, float]]] = {}
        self._ids = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.meter = RequestMeter()
        self._log_prompts = log_prompts
        self._traces: tracing.Tracing | None = None

    def open(
        self,
        engine: Engine,
        tokenizer: Any,
        limits: admission.Limits,
        describe: Describe,
        traces: tracing.Tracing | None = None,
    ) -> None:
        """The model is there: requests can be taken."""
        self._traces = traces
        self._engine, self._tokenizer, self._limits, self._describe = (
            engine,
            tokenizer,
            limits,
            describe,
        )
        self._loop = asyncio.get_running_loop()

    def emit(self, batch: list[Emitted]) -> None:
        """What a step gave, from the engine's thread: one hand-over a step, whatever the number of
        clients."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, batch, time.perf_counter())

    def _deliver(self, batch: list[Emitted], emitted_at: float) -> None:
        for item in batch:
            queue = self._queues.get(item.session_id)
            if queue is not None:
                queue.put_nowait((item, emitted_at))

    async def wait_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service, with a deserializer that names what is wrong with malformed bytes."""
        methods: dict[str, Any] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.Generate,
                request_deserializer=deserializer(verifier_pb2.GenerateRequest),
                response_serializer=verifier_pb2.GenerateResponse.SerializeToString,
            ),
            "GetInfo": grpc.unary_unary_rpc_method_handler(
                self.GetInfo,
                request_deserializer=verifier_pb2.VerifierGetInfoRequest.FromString,
                response_serializer=verifier_pb2.VerifierGetInfoResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    async def Generate(
        self,
        request: verifier_pb2.GenerateRequest | InvalidArgument,
        context: Context,
    ) -> AsyncIterator[verifier_pb2.GenerateResponse]:
        known = verifier_pb2.GenerateRequest() if isinstance(request, InvalidArgument) else request
        record = Record(self.meter, self._traces, known, context, log_prompts=self._log_prompts)
        try:
            # A call may be cut off at the yield: the inner generator must end then and there.
            async with contextlib.aclosing(self._generate(request, context, record)) as responses:
                async for response in responses:
                    yield response
        except DraftwireError as error:
            record.failed(error)
            raise
        except Exception:
            record.broke()
            raise
        finally:
            record.close()

    async def _generate(
        self,
        request: verifier_pb2.GenerateRequest | InvalidArgument,
        context: Context,
        record: Record,
    ) -> AsyncGenerator[verifier_pb2.GenerateResponse, None]:
        if isinstance(request, InvalidArgument):
            raise request
        engine, limits = self._engine, self._limits
        if engine is None or limits is None:
            raise Unavailable("STARTING", "the model is still loading")
        if self.draining:
            raise Unavailable("DRAINING", "this server is going away")
        now = time.monotonic()
        deadline = _deadline(context, now, engine)
        admit = functools.partial(
            admission.admit, request, self._tokenizer, limits, now=now, deadline=deadline
        )
        if request.ByteSize() < _LARGE_REQUEST:
            admitted = admit()
        else:  # tokenising a long text takes longer than the loop may be held
            admitted = await asyncio.get_running_loop().run_in_executor(None, admit)
        admitted = record.admitted(admitted)
        session_id = next(self._ids)
        queue: asyncio.Queue[tuple[Emitted, float]] = asyncio.Queue()
        self._queues[session_id] = queue
        self._idle.clear()
        try:
            engine.post(lambda: engine.submit(session_id, admitted))
            yield _started(admitted)
            while True:
                item, emitted_at = await queue.get()
                if item.error is not None:
                    raise item.error
                if item.delta is not None and (item.delta.tokens or item.delta.text):
                    yield _delta(item)
                    record.sent(len(item.delta.tokens), emitted_at)
                if item.finished is not None:
                    record.finished(item.finished)
                    _set_trailers(context, item.finished)
                    yield verifier_pb2.GenerateResponse(finished=item.finished)
                    return
        finally:
            del self._queues[session_id]
            if not self._queues:
                self._idle.set()
            engine.post(lambda: engine.cancel(session_id))

    async def GetInfo(
        self, request: verifier_pb2.VerifierGetInfoRequest, context: Context
    ) -> verifier_pb2.VerifierGetInfoResponse:
        if self._describe is None:
            raise Unavailable("STARTING", "the model is still loading")
        return await self._describe()


def _deadline(context: Context, now: float, engine: Engine) -> float | None:
    """The deadline on our clock. Raises DeadlineExceeded if not even one step fits."""
    remaining = context.time_remaining()
    if remaining is None or remaining > _ENDLESS:
        return None
    if remaining <= max(0.02, 1.5 * engine.quickest_step):
        raise DeadlineExceeded(
            "DEADLINE_TOO_SHORT",
            f"{remaining:.3f} s remain, a step takes about {engine.quickest_step:.3f} s",
            field="deadline",
            value=f"{remaining:.3f} s",
            limit=f"more than {max(0.02, 1.5 * engine.quickest_step):.3f} s",
        )
    return now + remaining


def _started(request: Request) -> verifier_pb2.GenerateResponse:
    stop = types_pb2.StopConditions(
        max_tokens=request.max_tokens,
        min_tokens=max(0, request.sampling.banned_before - len(request.prompt)),
        ignore_eos=not request.eos_ids,
        stop_token_ids=sorted(request.stop_token_ids),
        stop_strings=request.stop_strings,
    )
    return verifier_pb2.GenerateResponse(
        started=verifier_pb2.Started(
            request_id=request.request_id,
            sampling=sampling_to_proto(request.sampling),
            stop=stop,
            speculation=speculation_to_proto(request.speculation),
            prompt_tokens=len(request.prompt),
        )
    )


def _delta(item: Emitted) -> verifier_pb2.GenerateResponse:
    assert item.delta is not None
    delta = verifier_pb2.Delta(
        text=item.delta.text, token_ids=item.delta.tokens, logprobs=item.logprobs
    )
    return verifier_pb2.GenerateResponse(delta=delta)


def _set_trailers(context: Context, finished: verifier_pb2.Finished) -> None:
    context.set_trailing_metadata(
        (
            (USAGE_TRAILER, finished.usage.SerializeToString()),
            (ACCEPTANCE_TRAILER, finished.acceptance.SerializeToString()),
        )
    )
