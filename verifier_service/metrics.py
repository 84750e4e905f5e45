"""What the verifier counts: the engine's meter, and everything as readings for the metrics.

The engine writes plain numbers, a few a step (under 50 µs at 64 sessions); names are those of
`draftwire.metric_table`. Does not know Prometheus or gRPC.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from draftwire.meters import BLOCK_SIZES, COUNTS, STEP_S, Distribution, Reading, by_label
from draftwire.metric_table import LABELS
from draftwire.v1 import drafter_pb2, types_pb2, verifier_pb2
from verifier_service.session import Proposal, Session
from verifier_service.stats import Statistics

if TYPE_CHECKING:
    from verifier_service.drafters import DrafterPool
    from verifier_service.engine import Engine
    from verifier_service.scheduler import Work

_TEMPERATURES = (0.0, 0.5, 1.0)  # upper bounds of LABELS["temperature"]
_OFFSETS = (31, 127, 511, 2047)  # of LABELS["offset"]
_PHASES = ("draft_wait", "plan", "target", "acceptance", "commit")
_SNAPSHOT_WAIT = 0.25  # seconds; an engine in a longer step is shown as it was last seen


class RoundWatch(Protocol):
    """Hears of each round of one request, on the engine's thread."""

    def __call__(
        self, *, tokens: int, accepted: int, drafted: int, block_size: int, reason: int
    ) -> None:
        """A round gave the answer `tokens` tokens, `accepted` of them drafted."""


class Meter:
    """The engine's own; one thread writes, a reader may see the last step half counted."""

    def __init__(self) -> None:
        self.rows, self.sessions = Distribution(COUNTS), Distribution(COUNTS)
        self.phases = {phase: Distribution(STEP_S) for phase in _PHASES}
        self.preemptions = 0
        self.failed_steps = 0
        # By temperature, then by offset.
        self.drafts = [[0] * (len(_OFFSETS) + 1) for _ in LABELS["temperature"]]
        self.accepted = [[0] * (len(_OFFSETS) + 1) for _ in LABELS["temperature"]]
        self._mark = 0.0

    def mark(self) -> None:
        """What the next `begin` or `lap` measures starts now."""
        self._mark = time.perf_counter()

    def begin(self, work: Sequence[Work]) -> None:
        """A step of `work` is planned."""
        self.sessions.add(len(work))
        self.rows.add(sum(len(item.feed.tokens) for item in work))
        self.lap("plan")

    def lap(self, phase: str) -> None:
        """A phase of the step ends."""
        now = time.perf_counter()
        self.phases[phase].add(now - self._mark)
        self._mark = now

    def waited(self, seconds: float) -> None:
        """One wait for proposals."""
        self.phases["draft_wait"].add(seconds)

    def round(
        self,
        session: Session,
        proposal: Proposal | None,
        path: Sequence[int],
        emitted: int,
    ) -> None:
        """As Session.count_round, which has just been called: a round after the first token."""
        accepted = min(len(path), emitted)
        if proposal is not None:
            at = bisect_left(_TEMPERATURES, session.request.sampling.temperature)
            offset = bisect_left(_OFFSETS, session.made - emitted)
            self.drafts[at][offset] += 1
            self.accepted[at][offset] += accepted
        if (watch := session.request.watch) is not None:
            watch(
                tokens=emitted,
                accepted=accepted,
                drafted=0 if proposal is None else len(proposal.tree.tokens),
                block_size=1 if proposal is None else proposal.block_size,
                reason=session.why_plain if proposal is None else proposal.reason,
            )


class Reader:
    """Makes readings of an engine, from any thread."""

    def __init__(self, engine: Engine, drafters: DrafterPool) -> None:
        self._engine = engine
        self._drafters = drafters
        self._last = Statistics()
        self._lock = threading.Lock()
        self._asked: threading.Event | None = None  # not answered yet

    def readings(self) -> Iterator[Reading]:
        """Everything of the engine, its lanes and sessions."""
        yield from self._speculation(self._totals())
        yield from self._steps()
        yield from self._queue()
        yield from self._lanes()

    def _totals(self) -> Statistics:
        """Statistics of all sessions, ended ones included, taken between two steps. While a step
        lasts, those taken before it: a counter never goes back, and a hung engine can be read."""
        with self._lock:
            answered, new = self._asked or threading.Event(), self._asked is None
            self._asked = answered

        def tell() -> None:
            found = totals(self._engine)
            with self._lock:
                self._last, self._asked = found, None
            answered.set()

        if new:
            self._engine.post(tell)
        answered.wait(_SNAPSHOT_WAIT)
        return self._last

    def _speculation(self, stats: Statistics) -> Iterator[Reading]:
        name = "draftwire_spec_decode_".__add__
        yield Reading(name("num_drafts_total"), stats.rounds)
        yield Reading(name("num_draft_tokens_total"), stats.drafted)
        yield Reading(name("num_accepted_tokens_total"), stats.accepted)
        yield Reading(name("num_discarded_tokens_total"), stats.discarded)
        for metric, counts in (
            ("num_accepted_tokens_per_pos_total", stats.accepted_at),
            ("num_drafted_per_pos_total", stats.drafted_at),
        ):
            yield from by_label(name(metric), ((str(d), n) for d, n in sorted(counts.items())))
        meter = self._engine.meter
        for metric, table in (
            ("drafts_by_request_total", meter.drafts),
            ("accepted_by_request_total", meter.accepted),
        ):
            for temperature, row in zip(LABELS["temperature"], table, strict=True):
                for offset, count in zip(LABELS["offset"], row, strict=True):
                    yield Reading(name(metric), count, (temperature, offset))
        for metric, parts in (
            ("draft_tokens_by_part_total", stats.drafted_parts),
            ("accepted_tokens_by_part_total", stats.accepted_parts),
        ):
            yield from by_label(
                name(metric),
                ((_name(types_pb2.DraftPart, "DRAFT_PART_", p), n) for p, n in parts.items()),
            )
        sizes = {reason: Distribution(BLOCK_SIZES) for reason in LABELS["reason"]}
        fallbacks = Counter[str]()
        for (size, reason), rounds in stats.block_sizes.items():
            label = _name(types_pb2.BlockSizeReason, "BLOCK_SIZE_REASON_", reason)
            sizes.get(label, sizes["other"]).add(size, rounds)
            if size == 1 and reason != types_pb2.BLOCK_SIZE_REASON_OFF:
                fallbacks[label] += rounds
        yield from by_label("draftwire_verifier_block_size", sizes.items())
        yield from by_label("draftwire_verifier_fallback_rounds_total", fallbacks.items())

    def _steps(self) -> Iterator[Reading]:
        engine, name = self._engine, "draftwire_verifier_".__add__
        meter = engine.meter
        yield Reading(name("steps_total"), engine.steps)
        yield Reading(name("step_rows"), meter.rows)
        yield Reading(name("step_sessions"), meter.sessions)
        yield from by_label(name("round_seconds"), meter.phases.items())
        yield Reading(name("generated_tokens_total"), engine.tokens)
        yield Reading(name("preemptions_total"), meter.preemptions)
        yield Reading(name("nonfinite_rows_total"), engine.nonfinite_rows)
        yield Reading(name("failed_steps_total"), meter.failed_steps)
        yield Reading(name("moving"), float(engine.progress()))
        yield Reading(name("seconds_since_step"), engine.since_step())

    def _queue(self) -> Iterator[Reading]:
        engine, name = self._engine, "draftwire_verifier_".__add__
        waiting = [session.request.arrival for session in list(engine.scheduler.waiting)]
        yield Reading(name("requests_running"), len(engine.scheduler.running))
        yield Reading(name("requests_waiting"), len(waiting))
        oldest = time.monotonic() - min(waiting) if waiting else 0.0
        yield Reading(name("oldest_waiting_seconds"), max(0.0, oldest))
        free, total = engine.pool.free_pages, engine.pool.num_pages - 1
        yield from by_label(name("kv_pages"), (("free", free), ("used", total - free)))

    def _lanes(self) -> Iterator[Reading]:
        engine, name = self._engine, "draftwire_verifier_".__add__
        states = dict.fromkeys(LABELS["lane_state"], 0)
        for status in list(self._drafters.status.values()):
            states[_name(verifier_pb2.LaneState, "LANE_STATE_", status.state)] += 1
        yield from by_label(name("lanes"), states.items())
        yield Reading(name("drafters_configured"), len(self._drafters.targets))
        yield Reading(name("lane_losses_total"), self._drafters.losses)
        yield from by_label("draftwire_carrier_bytes_total", dict(self._drafters.carried).items())
        lanes, counters = list(engine.lanes.lanes.values()), engine.lanes.counters
        yield Reading(name("lanes_behind"), sum(lane.behind for lane in lanes))
        yield Reading(name("lane_sessions"), sum(len(lane.links) for lane in lanes))
        yield Reading(name("lane_round_trip_seconds"), counters.round_trips)
        yield Reading(name("sessions_reopened_total"), counters.reopened)
        yield Reading(name("stale_proposals_total"), counters.stale)
        yield Reading(name("malformed_proposals_total"), counters.malformed)
        yield Reading(name("late_proposals_total"), counters.late)
        decided = engine.policy.counters
        yield from by_label(
            name("policy_decisions_total"),
            ((kind, getattr(decided, kind)) for kind in LABELS["decision"]),
        )
        yield from by_label(
            name("session_faults_total"),
            (
                (_name(drafter_pb2.FaultKind, "FAULT_KIND_", kind), count)
                for kind, count in dict(counters.faults).items()
            ),
        )


def totals(engine: Engine) -> Statistics:
    """Statistics of all sessions since start; on the engine's thread only."""
    found = Statistics()
    found.add(engine.totals)
    for session in engine.sessions.values():
        found.add(session.stats)
    return found


def _name(enum: Any, prefix: str, number: int) -> str:
    try:
        return str(enum.Name(number)).removeprefix(prefix).lower()
    except ValueError:  # of a newer peer
        return "other"
