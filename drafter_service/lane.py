"""One lane's stream: handshake, steps in, responses out.

The reader puts everything that goes out, errors too, into one queue; the servicer writes from it.
Translates and keeps count of credits; what a message means is the session's, what to draft the
engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Protocol

import structlog
import torch

from drafter_service.engine import Engine, Lane, LaneLimits
from drafter_service.handshake import EMBEDDING, FUSION, HEAD, Facts, TargetInPlace, Terms, agree
from drafter_service.journal import LaneJournal, LaneTotals
from drafter_service.messages import StepResult
from drafter_service.wire import read_step, write_result
from draftwire import tracing
from draftwire.carriers import Ring, SharedMemoryRing
from draftwire.codec import Assembler, chunks
from draftwire.errors import (
    DeadlineExceeded,
    DraftwireError,
    FailedPrecondition,
    InvalidArgument,
)
from draftwire.v1 import drafter_pb2 as pb
from draftwire.v1 import types_pb2

log = structlog.get_logger(__name__)
CHUNK_BYTES = 1 << 20
RING_BYTES = 1 << 30  # largest ring of a verifier that is attached
Requests = AsyncIterator[pb.DraftRequest]


class Host(Protocol):
    """What the lanes of one drafter share."""

    engine: Engine
    facts: Facts
    in_place: TargetInPlace | None
    totals: LaneTotals
    traces: tracing.Tracing | None
    draining_grace_s: float | None
    """Set once the drafter is going away."""


class LaneStream:
    """The state of one stream. `outbound` ends with None, after which nothing is written."""

    def __init__(self, host: Host, handshake_timeout_s: float) -> None:
        self.outbound: asyncio.Queue[pb.DraftResponse | StepResult | Exception | None] = (
            asyncio.Queue()
        )
        self._host = host
        self._timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._lane: Lane | None = None
        self._ring: Ring | None = None
        self._journal: LaneJournal | None = None
        self._verifier = ""
        self._feature_size = 0
        self._answered = asyncio.Event()
        self._received = 0
        self._acknowledged = 0
        self._sent = 0
        self._closed_clean = False

    @property
    def ready(self) -> bool:
        """Whether the handshake is complete."""
        return self._lane is not None

    async def read(self, requests: Requests) -> None:
        """Take in the stream until it ends, by Close or otherwise."""
        try:
            await self._ready_in_time(requests)
            async for request in requests:
                if request.HasField("close"):
                    self._closed_clean = True
                    return
                self._take_step(request)
                # A verifier that overdraws its credits is read no further until it is answered.
                while self._received - self._acknowledged >= self._host.facts.credits:
                    self._answered.clear()
                    await self._answered.wait()
        except Exception as error:  # noqa: BLE001 - raised again by the writer
            self.outbound.put_nowait(error)
        finally:
            self.outbound.put_nowait(None)

    def response(self, item: pb.DraftResponse | StepResult) -> pb.DraftResponse:
        """What to write for an item of the queue."""
        if isinstance(item, pb.DraftResponse):
            return item
        self._sent += 1
        if self._journal is not None:
            self._journal.answered(item)
        self._acknowledged = item.ack_sequence
        self._answered.set()
        if self._host.draining_grace_s is not None:
            self.end_if_idle()
        return pb.DraftResponse(step=write_result(item, self._sent))

    def tell_draining(self, grace_s: float) -> None:
        """Queue the notice that this drafter is going away; a lane without sessions ends there."""
        notice = pb.Draining()
        notice.grace.FromMilliseconds(int(grace_s * 1000))
        self.outbound.put_nowait(pb.DraftResponse(draining=notice))
        self.end_if_idle()

    def end_if_idle(self) -> None:
        """End the stream if it is ready and holds no session."""
        lane = self._lane
        if lane is not None and not lane.table.sessions:
            self._closed_clean = True
            self.outbound.put_nowait(None)

    def let_go(self) -> None:
        """However the stream ended: its sessions are freed before the engine's next step."""
        if self._ring is not None:
            self._ring.close()
        if self._journal is not None:
            self._journal.close()
        # The engine's inbox is in order: a lane still being made is there when this runs.
        self._host.engine.call(self._leave)

    def _leave(self) -> None:
        """On the engine's thread."""
        lane, self._lane = self._lane, None
        if lane is None:
            return
        self._host.engine.remove_lane(lane)
        log.info(
            "lane ended",
            lane=lane.lane_id,
            verifier=self._verifier,
            clean=self._closed_clean,
            steps=self._sent,
        )

    async def _ready_in_time(self, requests: Requests) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._handshake(requests)
        except TimeoutError:
            raise DeadlineExceeded(
                "HANDSHAKE_TIMEOUT",
                f"the lane was not ready within handshake_timeout_s = {self._timeout_s:g}",
                option="handshake_timeout_s",
                limit=self._timeout_s,
            ) from None

    async def _handshake(self, requests: Requests) -> None:
        """Hello -> HelloReply and fusion weights -> the verifier's weights -> Ready."""
        host = self._host
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            kind = None if first is None else first.WhichOneof("message")
            raise InvalidArgument("message", kind or "none", "hello, first on a lane")
        hello = first.hello
        self._verifier = hello.verifier_name
        terms = agree(hello, host.facts, host.in_place, host.engine.lane_count, self._attach)
        self._feature_size = terms.reply.feature_size
        self.outbound.put_nowait(pb.DraftResponse(hello=terms.reply))
        self._send_fusion(hello, terms)
        received = await self._receive_weights(requests, terms)
        joining = host.engine.call(lambda: self._join(hello, terms, received))
        lane = await asyncio.wrap_future(joining)
        self._journal = LaneJournal(
            host.totals, host.traces, lane=lane.lane_id, verifier=self._verifier
        )
        log.info(
            "lane ready",
            lane=lane.lane_id,
            verifier=self._verifier,
            target=hello.target.name,
            received=sorted(received),
        )
        self.outbound.put_nowait(pb.DraftResponse(ready=pb.LaneReady(lane_id=lane.lane_id)))
        if host.draining_grace_s is not None:
            self.tell_draining(host.draining_grace_s)

    def _send_fusion(self, hello: pb.Hello, terms: Terms) -> None:
        model = self._host.facts.checkpoint.model
        tensors = dict(zip(FUSION, (model.fc.weight, model.hidden_norm.weight), strict=True))
        limit = min(CHUNK_BYTES, hello.max_message_bytes // 2 or CHUNK_BYTES)
        for name in terms.reply.tensors_sent:
            for chunk in chunks(name, tensors[name], max(limit, 1024)):
                self.outbound.put_nowait(pb.DraftResponse(weights=chunk))

    async def _receive_weights(self, requests: Requests, terms: Terms) -> dict[str, torch.Tensor]:
        """The tensors that were asked for, complete; nothing else is taken."""
        missing = dict(terms.shapes_needed)
        assembler = Assembler(sum(rows * width * 4 for rows, width in missing.values()))
        received: dict[str, torch.Tensor] = {}
        while missing:
            wanted = ", ".join(missing)
            request = await anext(requests, None)
            if request is None or not request.HasField("weights"):
                kind = None if request is None else request.WhichOneof("message")
                limit = f"weights, until {wanted} are complete"
                raise InvalidArgument("message", kind or "none", limit)
            chunk = request.weights
            if chunk.name not in missing:
                raise InvalidArgument("weights.name", chunk.name, f"one of {wanted}")
            if tuple(chunk.shape) != missing[chunk.name]:
                shape = list(missing[chunk.name])
                raise InvalidArgument(f"{chunk.name}.shape", list(chunk.shape), shape)
            complete = assembler.add(chunk)
            if complete is not None:
                name, tensor = complete
                if not tensor.is_floating_point():
                    raise InvalidArgument(f"{name}.dtype", str(tensor.dtype), "a floating type")
                received[name] = tensor
                del missing[name]
        return received

    def _join(self, hello: pb.Hello, terms: Terms, received: dict[str, torch.Tensor]) -> Lane:
        """On the engine's thread: attach the target, make the lane."""
        host, target = self._host, hello.target
        model = host.facts.checkpoint.model
        if received:
            # Another lane may have come in while these weights travelled.
            before = host.in_place
            if (
                before is not None
                and host.engine.lane_count
                and (not before.sha256 or before.sha256 != target.weights_sha256)
            ):
                raise FailedPrecondition(
                    "ANOTHER_TARGET_IN_USE",
                    f"verifier {hello.verifier_name} has target {target.name}, another came first",
                    verifier=target.weights_sha256,
                    drafter=before.sha256,
                )
            embedding, head = received[EMBEDDING], received.get(HEAD)
            if head is not None and torch.equal(embedding, head):
                head = None  # tied: one matrix in memory is enough
            model.attach_target(
                embedding,
                head,
                vocab_size=target.vocab_size,
                mask_embedding=host.facts.checkpoint.mask_embedding,
            )
            host.in_place = TargetInPlace(
                target.weights_sha256, target.embedding_rows, target.hidden_size, True
            )
        model.limit_vocabulary(target.vocab_size)
        limits = LaneLimits(
            embedding_rows=target.embedding_rows,
            max_block_size=hello.max_block_size,
            max_nodes=hello.max_nodes,
            raw_features=terms.raw_features,
        )
        self._lane = host.engine.add_lane(limits, self._deliver)
        return self._lane

    def _deliver(self, result: StepResult) -> None:
        """On the engine's thread; the loop may be gone when the service closes."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.outbound.put_nowait, result)

    def _take_step(self, request: pb.DraftRequest) -> None:
        received_ns = time.perf_counter_ns()
        lane, kind = self._lane, request.WhichOneof("message")
        if kind != "step" or lane is None:
            limit = "step or close, once the lane is ready"
            raise InvalidArgument("message", kind or "none", limit)
        step = request.step
        if step.sequence != self._received + 1:
            limit = f"{self._received + 1}, one more than the last"
            raise InvalidArgument("step.sequence", step.sequence, limit)
        self._received = step.sequence
        message = read_step(step, self._feature_size, self._ring, received_ns)
        if self._journal is not None:
            self._journal.heard(step, message)
        self._host.engine.submit(lane, message)

    def _attach(self, offer: pb.CarrierOffer) -> bool:
        """Whether the verifier's ring could be attached; inline is used where it cannot."""
        if offer.kind != types_pb2.CARRIER_KIND_SHARED_MEMORY or self._ring is not None:
            return False
        try:
            self._ring = SharedMemoryRing.attach(offer, RING_BYTES)
        except DraftwireError as error:
            log.info("ring refused", verifier=self._verifier, reason=error.reason, why=str(error))
            return False
        return True
