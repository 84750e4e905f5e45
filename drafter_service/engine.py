"""The drafting loop: one thread that drafts for every session of every lane.

`step` is the walk: take in what the lanes said, extend the contexts, draft all ready sessions as
one batch, answer each lane once. The thread sleeps on a condition; the event loop only appends to
the inbox. Does not know the wire: a lane is a number and a callback.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import structlog
import torch

from drafter_service.drafting import draft
from drafter_service.jobs import job
from drafter_service.messages import FaultKind, Malformed, Proposal, Step, StepResult
from drafter_service.metrics import Counters
from drafter_service.model import DraftModel
from drafter_service.predictor import BlockSizePredictor
from drafter_service.predictor_calls import PredictorCalls
from drafter_service.seats import SeatLimits, Seats
from drafter_service.session import Session, SessionTable
from drafter_service.tree import Part

log = structlog.get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of the engine. Times in seconds, sizes in tokens (block size with the anchor).
    `path_head`: whether the checkpoint's path-conditioned head is used; `ngram_depth`: the deepest
    node that repetition may give, 0: the block's.
    """

    block_size: int
    max_nodes: int
    parts: frozenset[Part]
    cache_rows: int
    max_sessions: int
    max_context: int
    max_tokens: int
    evict_idle_s: float = 60.0
    stall_s: float = 30.0
    path_head: bool = True
    ngram_depth: int = 0


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """What the verifier of a lane takes (0: no limit of its own), and how it sends features."""

    embedding_rows: int
    max_block_size: int = 0
    max_nodes: int = 0
    raw_features: bool = False


@dataclass(slots=True, eq=False)
class Lane:
    """A lane as the engine has it; `deliver` is called on the engine's thread."""

    lane_id: int
    limits: LaneLimits
    deliver: Callable[[StepResult], None]
    table: SessionTable


Work = tuple[Lane, Step]
Ready = list[tuple[Lane, Session]]


class Engine:
    """Owns model, cache and sessions; all of them are touched by its thread only."""

    def __init__(
        self,
        model: DraftModel,
        settings: EngineSettings,
        predictor: BlockSizePredictor | None = None,
    ) -> None:
        self.model = model
        self.predictor = PredictorCalls(predictor, model)
        self.settings = settings
        self.counters = Counters()
        limits = SeatLimits(
            cache_rows=settings.cache_rows,
            max_sessions=settings.max_sessions,
            max_context=settings.max_context,
            block_size=max(settings.block_size, self.predictor.largest),
            evict_idle_s=settings.evict_idle_s,
        )
        self.seats = Seats(model, limits)
        self.pool = self.seats.pool
        every = frozenset(Part)
        self._parts_available = every if model.config.branches > 1 else every - {Part.BRANCHES}
        self._lanes: dict[int, Lane] = {}
        self._inbox: list[Work | Callable[[], None]] = []
        self._wake = threading.Condition()
        self._stopped = False
        self._busy_since: float | None = None
        self._next_lane = 0
        self._thread: threading.Thread | None = None

    # Called from any thread.

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="drafter-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step it is in; waits for it."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def submit(self, lane: Lane, step: Step) -> None:
        """Hand over what a lane said."""
        self._put((lane, step))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has gone
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                future.set_exception(error)

        self._put(run)
        return future

    @property
    def session_count(self) -> int:
        """Open sessions of all lanes."""
        return len(self.seats)

    @property
    def lane_count(self) -> int:
        """Open lanes."""
        return len(self._lanes)

    def progressing(self) -> bool:
        """False if one step has lasted longer than `stall_s`."""
        since = self._busy_since
        return since is None or time.monotonic() - since < self.settings.stall_s

    # On the engine's thread; others come here through `call`.

    def add_lane(self, limits: LaneLimits, deliver: Callable[[StepResult], None]) -> Lane:
        """Make a lane."""
        self._next_lane += 1
        table = SessionTable(vocab_size=limits.embedding_rows, max_tokens=self.settings.max_tokens)
        lane = Lane(self._next_lane, limits, deliver, table)
        self._lanes[lane.lane_id] = lane
        return lane

    def remove_lane(self, lane: Lane) -> None:
        """Free all that a lane holds."""
        self._lanes.pop(lane.lane_id, None)
        lane.table.release_all()
        self.seats.free(lane.table)

    def step(self, work: Iterable[Work]) -> list[tuple[Lane, StepResult]]:
        """One step over all that the lanes have said; one result for each lane that was heard."""
        self.counters.begin()
        heard: dict[Lane, Step] = {}
        for lane, message in work:
            self._take_in(lane, message)
            heard[lane] = message
        alive = [(lane, session) for lane in heard for session in lane.table.settle()]
        self.counters.lap("take_in")
        started = time.perf_counter_ns()
        self.counters.feature_rows += self.seats.extend([session for _, session in alive])
        extend_ns = time.perf_counter_ns() - started
        self.counters.lap("extend")
        ready = [entry for entry in alive if entry[1].ready and entry[1] in self.seats]
        predictor_ns = self.predictor.run([session for _, session in ready])
        proposals, draft_ns = self._draft(ready)
        self.counters.lap("draft")
        return self._answers(heard, proposals, extend_ns + draft_ns, predictor_ns)

    def _take_in(self, lane: Lane, step: Step) -> None:
        """Ends, opens, features, outcomes: tokens move now, rows are set aside for `extend`."""
        table, seats = lane.table, self.seats
        for end in step.ends:
            table.end(end)
        seats.free(table)
        for opening in step.opens:
            session = table.open(opening)
            seats.free(table)
            if session is not None:
                self.counters.opened += 1
                self.predictor.opened(session, opening)
                seats.open(table, session, raw=lane.limits.raw_features)
                seats.free(table)
        for features in step.features:
            session = table.features(features)
            if session is not None and not isinstance(features, Malformed):
                seats.add_rows(session, features.rows)
                first, raw = features.first_position, lane.limits.raw_features
                self.predictor.rows(session, first, features.rows, raw=raw)
        for outcome in step.outcomes:
            session = table.outcome(outcome)
            if session is None or isinstance(outcome, Malformed):
                continue
            if outcome.features is not None:
                seats.add_rows(session, outcome.features)
            if outcome.had_proposal:
                self.counters.rounds += 1
                self.counters.accepted_tokens += outcome.accepted
        seats.heard(list(table.touched.values()))
        seats.free(table)
        self.counters.stale += table.stale
        table.stale = 0

    def _draft(self, ready: Ready) -> tuple[dict[Lane, list[Proposal]], int]:
        """One proposal for each ready session; one whose numbers are not finite is faulted."""
        proposals: dict[Lane, list[Proposal]] = {}
        if not ready:
            return proposals, 0
        self.counters.step_sessions.add(len(ready))
        jobs = [
            job(self.settings, lane.limits, self._parts_available, session, self.seats)
            for lane, session in ready
        ]
        drafted = draft(self.model, self.pool, jobs, path_head=self.settings.path_head)
        for (lane, session), proposal in zip(ready, drafted.proposals, strict=True):
            session.wants_proposal = False
            if proposal is None:
                self.counters.nonfinite += 1
                lane.table.fail(session, FaultKind.INTERNAL, "the draft logits are not finite")
                self.seats.free(lane.table)
                continue
            proposals.setdefault(lane, []).append(proposal)
            self.counters.proposals += 1
            self.counters.empty_proposals += not proposal.tree.tokens
            self.counters.nodes.update(Part(part) for part in proposal.tree.parts)
            self.counters.block_sizes[proposal.reason].add(proposal.block_size)
        return proposals, drafted.model_ns

    def _answers(
        self,
        heard: dict[Lane, Step],
        proposals: dict[Lane, list[Proposal]],
        model_ns: int,
        predictor_ns: int = 0,
    ) -> list[tuple[Lane, StepResult]]:
        """One result a lane. Faults of lanes that were not heard wait for their next step."""
        self.counters.steps += 1
        self.counters.model_ns += model_ns
        self.counters.evicted = self.seats.evicted
        results = []
        for lane, last in heard.items():
            faults = lane.table.take_faults()
            self.counters.faults.update(fault.kind for fault in faults)
            mine = proposals.get(lane, [])
            result = StepResult(
                last.sequence, mine, faults, model_ns, last.received_ns, predictor_ns
            )
            results.append((lane, result))
        return results

    # The thread.

    def _put(self, item: Work | Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._wake:
                    self._busy_since = None
                    self._wake.wait_for(lambda: self._inbox or self._stopped)
                    if self._stopped:
                        return
                    inbox, self._inbox = self._inbox, []
                self._busy_since = time.monotonic()
                self._turn(inbox)

    def _turn(self, inbox: list[Work | Callable[[], None]]) -> None:
        """All of the inbox in order: calls run between steps, the work between two calls is one
        step.
        """
        work: list[Work] = []
        for item in [*inbox, None]:
            if isinstance(item, tuple):
                if item[0].lane_id in self._lanes:
                    work.append(item)
                continue
            if work:
                self._guarded_step(work)
                work = []
            if item is not None:
                item()

    def _guarded_step(self, work: list[Work]) -> None:
        """A step that fails inside costs the sessions of its lanes, not the service."""
        try:
            results = self.step(work)
        except Exception:
            log.exception("drafting step failed", lanes=len({lane.lane_id for lane, _ in work}))
            results = self._fail_all(work)
        for lane, result in results:
            lane.deliver(result)
        self.counters.lap("answer")

    def _fail_all(self, work: list[Work]) -> list[tuple[Lane, StepResult]]:
        heard = dict(work)
        for lane in heard:
            lane.table.touched.clear()
            for session in list(lane.table.sessions.values()):
                detail = "the drafter failed inside; its log has the details"
                lane.table.fail(session, FaultKind.INTERNAL, detail)
            self.seats.free(lane.table)
        return self._answers(heard, {}, 0)
