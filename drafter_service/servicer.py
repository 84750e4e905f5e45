"""The Drafter service on the wire: lanes and GetInfo.

One reader task and one writer, the handler itself, a stream. Knows grpc's handler shapes; what goes
over a lane is `lane`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration

from drafter_service.engine import Engine
from drafter_service.handshake import Facts, TargetInPlace
from drafter_service.journal import LaneTotals
from drafter_service.lane import LaneStream
from draftwire import tracing
from draftwire.codec import element_type
from draftwire.v1 import drafter_pb2 as pb
from draftwire.v1 import drafter_pb2_grpc, types_pb2


class DrafterServicer(drafter_pb2_grpc.DrafterServicer):
    """Drafter.Draft and Drafter.GetInfo. `in_place`: the target whose matrices are attached, kept
    from lane to lane.
    """

    def __init__(
        self,
        engine: Engine,
        facts: Facts,
        *,
        handshake_timeout_s: float,
        effective: Mapping[str, str],
        in_place: TargetInPlace | None = None,
        traces: tracing.Tracing | None = None,
    ) -> None:
        self.engine = engine
        self.totals = LaneTotals()
        self.traces = traces
        self.facts = facts
        self.in_place = in_place
        self.draining_grace_s: float | None = None
        self._timeout_s = handshake_timeout_s
        self._effective = dict(effective)
        self._streams: set[LaneStream] = set()
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self._started = time.monotonic()

    async def Draft(
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: Any
    ) -> AsyncIterator[pb.DraftResponse]:
        """A lane: handshake, then one StepResponse for every batch of StepRequests taken in."""
        stream = LaneStream(self, self._timeout_s)
        self._streams.add(stream)
        self._no_streams.clear()
        reader = asyncio.create_task(stream.read(request_iterator))
        try:
            while (item := await stream.outbound.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield stream.response(item)
        finally:
            reader.cancel()
            reader.add_done_callback(lambda _: stream.let_go())
            self._streams.discard(stream)
            if not self._streams:
                self._no_streams.set()

    async def GetInfo(
        self, request: pb.DrafterGetInfoRequest, context: Any
    ) -> pb.DrafterGetInfoResponse:
        """What the drafter is and how loaded."""
        engine, checkpoint = self.engine, self.facts.checkpoint
        config, predictor = checkpoint.config, self.facts.predictor
        spent = engine.predictor.time_ns
        version = types_pb2.ServiceVersion()
        version.CopyFrom(self.facts.version)
        version.uptime.FromMilliseconds(int((time.monotonic() - self._started) * 1000))
        return pb.DrafterGetInfoResponse(
            version=version,
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
            draining=self.draining_grace_s is not None,
            steps=engine.counters.steps,
            proposals=engine.counters.proposals,
            predicted_block_sizes=() if predictor is None else predictor.candidates,
            predictions=engine.predictor.predicted,
            predictions_missed=engine.predictor.missed,
            predictor_time=Duration(nanos=spent % 10**9, seconds=spent // 10**9),
        )

    async def drain(self, grace_s: float) -> None:
        """Tell every lane; returns when all of them have ended."""
        self.draining_grace_s = grace_s
        for stream in self._streams:
            if stream.ready:  # the others are told when they are
                stream.tell_draining(grace_s)
        await self._no_streams.wait()
