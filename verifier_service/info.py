"""What the engine says of itself in GetInfo.

Knows: which part any thread may read, and which only the engine's. Does not know: who the service
is, or how long to wait for a busy engine (`service`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from draftwire.v1 import verifier_pb2
from verifier_service.drafters import DrafterStatus
from verifier_service.engine import Engine
from verifier_service.metrics import totals


def load(engine: Engine) -> verifier_pb2.LoadInfo:
    """Load and counters; read from other threads, each value whole in itself."""
    return verifier_pb2.LoadInfo(
        total_pages=engine.pool.num_pages - 1,
        page_size=engine.pool.page_size,
        running=len(engine.scheduler.running),
        waiting=len(engine.scheduler.waiting),
        free_pages=engine.pool.free_pages,
        steps=engine.steps,
        tokens=engine.tokens,
    )


def ask(
    engine: Engine, statuses: Sequence[DrafterStatus]
) -> Future[verifier_pb2.VerifierGetInfoResponse]:
    """The part of the answer that only the engine's thread may read, once it gets to it."""
    answer: Future[verifier_pb2.VerifierGetInfoResponse] = Future()

    def tell() -> None:
        # Whoever asked may be gone by now: a cancelled future takes no result.
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(_counts(engine, statuses))
        except Exception as error:  # noqa: BLE001  raised again by whoever asked
            answer.set_exception(error)

    engine.post(tell)
    return answer


def _counts(
    engine: Engine, statuses: Sequence[DrafterStatus]
) -> verifier_pb2.VerifierGetInfoResponse:
    found = totals(engine)
    return verifier_pb2.VerifierGetInfoResponse(
        totals=found.to_proto(),
        counters=found.to_totals(),
        lanes=[_lane_info(engine, status) for status in statuses],
    )


def _lane_info(engine: Engine, status: DrafterStatus) -> verifier_pb2.LaneInfo:
    info = verifier_pb2.LaneInfo(
        target=status.target,
        state=status.state,  # type: ignore[arg-type]
        losses=status.losses,
        last_error=status.last_error,
    )
    if status.facts is not None:
        info.drafter_name, info.trained = status.facts.name, status.facts.trained
        info.block_size = status.facts.block_size
    lane = engine.lanes.lanes.get(status.lane_id)
    if lane is not None:
        info.sessions = len(lane.links)
        info.round_trip.FromNanoseconds(int(1e9 * (lane.round_trip or 0)))
        info.model_time.FromNanoseconds(int(1e9 * lane.model_time))
        info.steps_sent, info.steps_received = lane.outbox.sequence, lane.responses
    return info
