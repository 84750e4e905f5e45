"""The Drafter service on the wire: lanes and GetInfo.

One reader task and one writer (the handler) a stream. Translates and nothing else: what a message means is the session's,
what to draft the engine's. Does not know torch beyond handing tensors on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch

from drafter_service.engine import Engine, Lane, LaneLimits
from drafter_service.handshake import EMBEDDING, FUSION, HEAD, Facts, TargetInPlace, Terms, agree
from drafter_service.messages import StepResult
from drafter_service.wire import read_step, write_result
from draftwire.carriers import Ring, SharedMemoryRing
from draftwire.codec import Assembler, chunks, element_type
from draftwire.errors import (
    DeadlineExceeded,
    DraftwireError,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from draftwire.v1 import drafter_pb2 as pb
from draftwire.v1 import drafter_pb2_grpc, types_pb2

log = structlog.get_logger(__name__)
CHUNK_BYTES = 1 << 20
RING_BYTES = 1 << 30  # largest ring of a verifier that is attached
Outbound = pb.DraftResponse | StepResult | DraftwireError | Exception | None


@dataclass(slots=True, eq=False)
class Stream:
    """One lane's stream: what waits to be written, and where it stands."""

    outbound: asyncio.Queue[Outbound] = field(default_factory=asyncio.Queue)
    lane: Lane | None = None
    ring: Ring | None = None
    verifier: str = ""
    feature_size: int = 0
    received: int = 0
    acknowledged: int = 0
    sent: int = 0
    closed_clean: bool = False


class DrafterServicer(drafter_pb2_grpc.DrafterServicer):
    """Drafter.Draft and Drafter.GetInfo. `in_place`: the target whose matrices are attached, kept from lane to lane."""

    def __init__(
        self,
        engine: Engine,
        facts: Facts,
        *,
        handshake_timeout_s: float,
        effective: dict[str, str],
        in_place: TargetInPlace | None = None,
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._timeout_s = handshake_timeout_s
        self._effective = effective
        self._in_place = in_place
        self._streams: set[Stream] = set()
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._started = time.monotonic()

    async def Draft(
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: Any
    ) -> AsyncIterator[pb.DraftResponse]:
        """A lane: handshake, then one StepResponse for every batch of StepRequests taken in."""
        stream = Stream()
        self._streams.add(stream)
        self._empty.clear()
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            while (item := await stream.outbound.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield self._step_response(stream, item) if isinstance(item, StepResult) else item
        finally:
            reader.cancel()
            self._let_go(stream)

    async def GetInfo(
        self, request: pb.DrafterGetInfoRequest, context: Any
    ) -> pb.DrafterGetInfoResponse:
        """What the drafter is and how loaded."""
        engine, checkpoint, config = (
            self._engine,
            self._facts.checkpoint,
            self._facts.checkpoint.config,
        )
        return pb.DrafterGetInfoResponse(
            version=self._version(),
            model=types_pb2.ModelIdentity(
                name=checkpoint.name,
                tokenizer_sha256=config.tokenizer_sha256,
                vocabulary_sha256=config.vocabulary_sha256,
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                num_layers=config.num_layers,
                max_context=engine.settings.max_context,
                dtype=element_type(checkpoint.model.dtype),
                weights_sha256=checkpoint.sha256,
            ),
            trained=config.trained,
            config=self._effective,
            lanes=engine.lane_count,
            sessions=engine.session_count,
            free_cache_rows=engine.pool.free_rows,
            total_cache_rows=engine.pool.total_rows,
            draining=self._draining,
            steps=engine.counters.steps,
            proposals=engine.counters.proposals,
        )

    async def drain(self, grace_s: float) -> None:
        """Tell every lane; returns when all of them have ended."""
        self._draining = True
        for stream in self._streams:
            stream.outbound.put_nowait(self._draining_message(grace_s))
        await self._empty.wait()

    # One stream.

    async def _read(self, stream: Stream, requests: AsyncIterator[pb.DraftRequest]) -> None:
        """Everything that comes in; what goes out, errors too, passes through the outbound queue."""
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._handshake(stream, requests)
            except TimeoutError:
                raise DeadlineExceeded(
                    "HANDSHAKE_TIMEOUT",
                    f"the lane was not ready within handshake_timeout_s = {self._timeout_s:g}",
                    option="handshake_timeout_s",
                    limit=self._timeout_s,
                ) from None
            async for request in requests:
                if request.HasField("close"):
                    stream.closed_clean = True
                    return
                self._take_step(stream, request)
        except Exception as error:  # noqa: BLE001 - raised again by the writer
            stream.outbound.put_nowait(error)
        finally:
            stream.outbound.put_nowait(None)

    async def _handshake(self, stream: Stream, requests: AsyncIterator[pb.DraftRequest]) -> None:
        """Hello -> HelloReply and fusion weights -> the verifier's weights -> Ready."""
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            kind = None if first is None else first.WhichOneof("message")
            raise InvalidArgument("message", kind or "none", "hello, first on a lane")
        hello = first.hello
        stream.verifier = hello.verifier_name
        terms = agree(
            hello,
            self._facts,
            self._in_place,
            self._engine.lane_count,
            lambda o: _attach(stream, o),
        )
        stream.feature_size = terms.reply.feature_size
        terms.reply.version.CopyFrom(self._version())
        stream.outbound.put_nowait(pb.DraftResponse(hello=terms.reply))
        self._send_fusion(stream, hello, terms)
        received = await self._receive_weights(requests, terms)
        limits = LaneLimits(
            embedding_rows=hello.target.embedding_rows,
            max_block_size=hello.max_block_size,
            max_nodes=hello.max_nodes,
            raw_features=terms.raw_features,
        )
        stream.lane = await _awaited(
            self._engine.call(lambda: self._join(stream, hello, terms, received, limits))
        )
        log.info(
            "lane ready",
            lane=stream.lane.lane_id,
            verifier=stream.verifier,
            target=hello.target.name,
            received=sorted(received),
        )
        ready = pb.DraftResponse(ready=pb.LaneReady(lane_id=stream.lane.lane_id))
        stream.outbound.put_nowait(ready)
        if self._draining:
            stream.outbound.put_nowait(self._draining_message(0))

    def _send_fusion(self, stream: Stream, hello: pb.Hello, terms: Terms) -> None:
        model = self._facts.checkpoint.model
        tensors = dict(zip(FUSION, (model.fc.weight, model.hidden_norm.weight), strict=True))
        limit = (
            CHUNK_BYTES
            if not hello.max_message_bytes
            else min(CHUNK_BYTES, hello.max_message_bytes // 2)
        )
        for name in terms.reply.tensors_sent:
            for chunk in chunks(name, tensors[name], max(limit, 1024)):
                stream.outbound.put_nowait(pb.DraftResponse(weights=chunk))

    async def _receive_weights(
        self, requests: AsyncIterator[pb.DraftRequest], terms: Terms
    ) -> dict[str, torch.Tensor]:
        """The tensors that were asked for, complete; nothing else is taken."""
        missing = dict(terms.shapes_needed)
        assembler = Assembler(sum(rows * width * 4 for rows, width in missing.values()))
        received: dict[str, torch.Tensor] = {}
        while missing:
            request = await anext(requests, None)
            if request is None or not request.HasField("weights"):
                kind = "none" if request is None else request.WhichOneof("message") or "none"
                raise InvalidArgument(
                    "message", kind, f"weights, until {', '.join(missing)} are complete"
                )
            chunk = request.weights
            if chunk.name not in missing:
                raise InvalidArgument("weights.name", chunk.name, f"one of {', '.join(missing)}")
            if tuple(chunk.shape) != missing[chunk.name]:
                raise InvalidArgument(
                    f"{chunk.name}.shape", list(chunk.shape), list(missing[chunk.name])
                )
            complete = assembler.add(chunk)
            if complete is not None:
                name, tensor = complete
                if not tensor.is_floating_point():
                    raise InvalidArgument(f"{name}.dtype", str(tensor.dtype), "a floating type")
                received[name] = tensor
                del missing[name]
        return received

    def _join(
        self,
        stream: Stream,
        hello: pb.Hello,
        terms: Terms,
        received: dict[str, torch.Tensor],
        limits: LaneLimits,
    ) -> Lane:
        """On the engine's thread: attach the target, make the lane."""
        model, target = self._facts.checkpoint.model, hello.target
        if received:
            before = self._in_place
            if (
                before is not None
                and self._engine.lane_count
                and before.sha256 != target.weights_sha256
            ):
                raise FailedPrecondition(
                    "ANOTHER_TARGET_IN_USE",
                    f"verifier {hello.verifier_name} has target {target.name}, another came first",
                    verifier=target.weights_sha256,
                    drafter=before.sha256,
                )
            model.attach_target(
                received[EMBEDDING],
                received.get(HEAD),
                vocab_size=target.vocab_size,
                mask_embedding=self._facts.checkpoint.mask_embedding,
            )
            self._in_place = TargetInPlace(
                target.weights_sha256, target.embedding_rows, target.hidden_size, True
            )
        model.limit_vocabulary(target.vocab_size)
        loop = self._loop

        def deliver(result: StepResult) -> None:
            # The loop may be gone when the service closes.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stream.outbound.put_nowait, result)

        return self._engine.add_lane(limits, deliver)

    def _take_step(self, stream: Stream, request: pb.DraftRequest) -> None:
        received_ns = time.perf_counter_ns()
        if not request.HasField("step") or stream.lane is None:
            raise InvalidArgument(
                "message", request.WhichOneof("message") or "none", "step or close, once Ready"
            )
        step = request.step
        if step.sequence != stream.received + 1:
            raise InvalidArgument(
                "step.sequence", step.sequence, f"{stream.received + 1}, one more than the last"
            )
        stream.received = step.sequence
        if stream.received - stream.acknowledged > self._facts.credits:
            raise ResourceExhausted(
                "NO_CREDIT",
                f"{stream.received - stream.acknowledged} steps are unanswered, credits = {self._facts.credits}",
                limit=self._facts.credits,
                option="credits",
            )
        self._engine.submit(
            stream.lane, read_step(step, stream.feature_size, stream.ring, received_ns)
        )

    def _step_response(self, stream: Stream, result: StepResult) -> pb.DraftResponse:
        stream.sent += 1
        stream.acknowledged = result.ack_sequence
        return pb.DraftResponse(step=write_result(result, stream.sent))

    def _let_go(self, stream: Stream) -> None:
        """However the stream ended: its sessions are freed in the engine's next step."""
        self._streams.discard(stream)
        if not self._streams:
            self._empty.set()
        if stream.ring is not None:
            stream.ring.close()
        lane = stream.lane
        if lane is not None:
            self._engine.call(lambda: self._engine.remove_lane(lane))
            log.info(
                "lane ended",
                lane=lane.lane_id,
                verifier=stream.verifier,
                clean=stream.closed_clean,
                steps=stream.sent,
            )

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return self._event_loop

    def bind_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop that serves; results come back to it."""
        self._event_loop = loop

    def _version(self) -> types_pb2.ServiceVersion:
        version = types_pb2.ServiceVersion()
        version.CopyFrom(self._facts.version)
        version.uptime.FromMilliseconds(int((time.monotonic() - self._started) * 1000))
        return version

    @staticmethod
    def _draining_message(grace_s: float) -> pb.DraftResponse:
        response = pb.DraftResponse(draining=pb.Draining())
        response.draining.grace.FromMilliseconds(int(grace_s * 1000))
        return response


def _attach(stream: Stream, offer: pb.CarrierOffer) -> bool:
    """Whether the verifier's ring could be attached; inline is used where it cannot."""
    if offer.kind != types_pb2.CARRIER_KIND_SHARED_MEMORY or stream.ring is not None:
        return False
    try:
        stream.ring = SharedMemoryRing.attach(offer, RING_BYTES)
    except DraftwireError as error:
        log.info(
            "ring refused", verifier=stream.verifier, reason=error.reason, detail=error.message
        )
        return False
    return True


async def _awaited(future: Future[Lane]) -> Lane:
    return await asyncio.wrap_future(future)
