"""The drafting loop: one thread that drafts for every session of every lane.

`step` is the walk: take in what the lanes said, extend the contexts, draft all ready sessions as one batch, answer each lane
once. The thread sleeps on a condition; the event loop only appends to the inbox. Knows sessions, cache and model. Does not
know the wire: lanes are numbers with a callback.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
import torch

from drafter_service.block_size import BlockSize, choose
from drafter_service.cache import Context, ContextPool, NoRoom
from drafter_service.drafting import Job, draft
from drafter_service.messages import FaultKind, Proposal, Reason, Step, StepResult
from drafter_service.metrics import Counters
from drafter_service.model import DraftModel
from drafter_service.session import Session, SessionTable
from drafter_service.tree import Part

log = structlog.get_logger(__name__)
T = TypeVar("T")

HEADROOM = 128  # rows reserved past what a session has, so that short answers never move
UNBOUNDED_NODES = 64


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of the engine. Times in seconds, sizes in tokens (block size with the anchor)."""

    block_size: int
    max_nodes: int
    parts: frozenset[Part]
    cache_rows: int
    max_sessions: int
    max_context: int
    max_tokens: int
    evict_idle_s: float = 60.0
    stall_s: float = 30.0


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


@dataclass(slots=True, eq=False)
class Seat:
    """What the engine keeps for a session: its extent of the cache, rows on their way into it, and when it last spoke."""

    context: Context | None
    incoming: list[torch.Tensor] = field(default_factory=list)
    last_heard: float = 0.0


Work = tuple[Lane, Step]


class Engine:
    """Owns model, cache and sessions; all of them are touched by its thread only."""

    def __init__(self, model: DraftModel, settings: EngineSettings) -> None:
        config = model.config
        self.model = model
        self.settings = settings
        self.counters = Counters()
        self.pool = ContextPool(
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rows=settings.cache_rows,
            dtype=model.dtype,
            device=model.device,
        )
        self._lanes: dict[int, Lane] = {}
        self._seats: dict[Session, Seat] = {}
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
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to whoever waits
                future.set_exception(error)

        self._put(run)
        return future

    def add_lane(self, limits: LaneLimits, deliver: Callable[[StepResult], None]) -> Lane:
        """Make a lane; call on the engine's thread (through `call`)."""
        self._next_lane += 1
        table = SessionTable(vocab_size=limits.embedding_rows, max_tokens=self.settings.max_tokens)
        lane = Lane(self._next_lane, limits, deliver, table)
        self._lanes[lane.lane_id] = lane
        return lane

    def remove_lane(self, lane: Lane) -> None:
        """Free all that a lane holds; call on the engine's thread (through `call`)."""
        self._lanes.pop(lane.lane_id, None)
        lane.table.release_all()
        self._free(lane)

    @property
    def session_count(self) -> int:
        """Open sessions of all lanes."""
        return len(self._seats)

    @property
    def lane_count(self) -> int:
        """Open lanes."""
        return len(self._lanes)

    def progressing(self) -> bool:
        """False if one step has lasted longer than `stall_s`."""
        since = self._busy_since
        return since is None or time.monotonic() - since < self.settings.stall_s

    # The engine's thread.

    def step(self, work: Iterable[Work]) -> list[tuple[Lane, StepResult]]:
        """One step over all that the lanes have said: returns one result for each lane that was heard."""
        heard: dict[Lane, Step] = {}
        for lane, message in work:
            self._take_in(lane, message)
            heard[lane] = message
        alive = [(lane, session) for lane in heard for session in lane.table.settle()]
        started = time.perf_counter_ns()
        self._extend(alive)
        extended_ns = time.perf_counter_ns() - started
        ready = [
            (lane, session) for lane, session in alive if session.ready and session in self._seats
        ]
        proposals, draft_ns = self._draft(ready)
        return self._answers(heard, proposals, extended_ns + draft_ns)

    def _take_in(self, lane: Lane, step: Step) -> None:
        """Ends, opens, features, outcomes: tokens move now, rows are set aside for `_extend`."""
        table, now = lane.table, time.monotonic()
        for end in step.ends:
            table.end(end)
        self._free(lane)
        for opening in step.opens:
            session = table.open(opening)
            self._free(lane)
            if session is not None:
                self._seat(lane, session)
        for features in step.features:
            session = table.features(features)
            if session is not None:
                self._seats[session].incoming.append(features.rows)  # type: ignore[union-attr]
        for outcome in step.outcomes:
            session = table.outcome(outcome)
            if session is None:
                continue
            seat = self._seats[session]
            if outcome.features is not None:  # type: ignore[union-attr]
                seat.incoming.append(outcome.features)  # type: ignore[union-attr]
            if outcome.had_proposal:  # type: ignore[union-attr]
                self.counters.rounds += 1
                self.counters.accepted_tokens += outcome.accepted  # type: ignore[union-attr]
        for session in table.touched.values():
            self._seats[session].last_heard = now
        self.counters.stale += table.stale
        table.stale = 0
        self._free(lane)

    def _seat(self, lane: Lane, session: Session) -> None:
        """Give a new session its place, or fault it."""
        self.counters.opened += 1
        if len(self._seats) >= self.settings.max_sessions:
            lane.table.fail(
                session, FaultKind.NO_ROOM, f"max_sessions = {self.settings.max_sessions} are open"
            )
            self._free(lane)
            return
        # Past the drafter's context there is nothing to keep: the session lives on n-grams.
        seat = Seat(None, last_heard=time.monotonic())
        self._seats[session] = seat
        if self._room(session) > 1 and self.model.has_target:
            self._with_room(lane, session, lambda: self._open_context(seat, session))

    def _open_context(self, seat: Seat, session: Session) -> None:
        wanted = session.base + HEADROOM + self.settings.block_size
        seat.context = self.pool.open(min(wanted, self.settings.max_context))

    def _with_room(self, lane: Lane, session: Session, action: Callable[[], None]) -> None:
        """Do what needs cache rows; evict idle sessions if they are short, fault the session if that is not enough."""
        while True:
            try:
                action()
                return
            except NoRoom as error:
                if self._evict_idle(keep=session):
                    continue
                lane.table.fail(session, FaultKind.NO_ROOM, f"{error}; option cache_rows")
                self._free(lane)
                return

    def _evict_idle(self, keep: Session) -> bool:
        """Let go of the session that has been silent longest, if for long enough."""
        latest = time.monotonic() - self.settings.evict_idle_s
        idle = [
            (seat.last_heard, lane, session)
            for lane in self._lanes.values()
            for session in lane.table.sessions.values()
            if (seat := self._seats[session]).context is not None
            and seat.last_heard <= latest
            and session is not keep
        ]
        if not idle:
            return False
        _, lane, session = min(idle, key=lambda entry: entry[0])
        lane.table.fail(
            session,
            FaultKind.UNKNOWN_SESSION,
            "evicted: silent for long and its cache rows were needed",
        )
        self.counters.evicted += 1
        self._free(lane)
        return True

    def _free(self, lane: Lane) -> None:
        for session in lane.table.take_released():
            seat = self._seats.pop(session, None)
            if seat is not None and seat.context is not None:
                self.pool.close(seat.context)

    def _extend(self, alive: list[tuple[Lane, Session]]) -> None:
        """Fuse raw features, then keys and values of all new rows of all sessions at once."""
        parts: list[tuple[Context, torch.Tensor]] = []
        raw: list[int] = []
        for lane, session in alive:
            seat = self._seats[session]
            rows = (
                seat.incoming[0]
                if len(seat.incoming) == 1
                else torch.cat(seat.incoming)
                if seat.incoming
                else None
            )
            seat.incoming.clear()
            if seat.context is None:
                continue
            if self._room(session) <= 1:
                self.pool.close(seat.context)
                seat.context = None
                continue
            context = seat.context
            needed = session.rows + self.settings.block_size
            self._with_room(lane, session, lambda c=context, n=needed: self.pool.reserve(c, n))  # type: ignore[misc]
            if rows is not None and session in self._seats:
                if lane.limits.raw_features:
                    raw.append(len(parts))
                parts.append((context, rows))
                self.counters.feature_rows += rows.shape[0]
        if raw:
            sizes = [parts[index][1].shape[0] for index in raw]
            joined = torch.cat([parts[index][1] for index in raw]).to(
                self.model.device, self.model.dtype
            )
            for index, fused in zip(raw, self.model.fuse(joined).split(sizes), strict=True):
                parts[index] = (parts[index][0], fused)
        # A session evicted for another's sake has given its extent back.
        self.model.extend(self.pool, [part for part in parts if part[0].capacity])

    def _draft(self, ready: list[tuple[Lane, Session]]) -> tuple[dict[Lane, list[Proposal]], int]:
        """One proposal for each ready session; a session whose numbers are not finite is faulted."""
        proposals: dict[Lane, list[Proposal]] = {}
        ready = [(lane, session) for lane, session in ready if session in self._seats]
        if not ready:
            return proposals, 0
        drafted = draft(
            self.model, self.pool, [self._job(lane, session) for lane, session in ready]
        )
        for (lane, session), proposal in zip(ready, drafted.proposals, strict=True):
            session.wants_proposal = False
            if proposal is None:
                lane.table.fail(session, FaultKind.INTERNAL, "the draft logits are not finite")
                self._free(lane)
                continue
            proposals.setdefault(lane, []).append(proposal)
            self.counters.proposals += 1
            self.counters.empty_proposals += not proposal.tree.tokens
            self.counters.nodes.update(Part(part) for part in proposal.tree.parts)
        return proposals, drafted.model_ns

    def _job(self, lane: Lane, session: Session) -> Job:
        settings, wishes = self.settings, session.speculation
        context = self._seats[session].context
        block: BlockSize = choose(
            preferred=settings.block_size,
            lane_max=lane.limits.max_block_size,
            speculation=wishes,
            budget=session.budget,
            room=None if context is None else self._room(session),
        )
        if context is None and self.model.has_target and block.reason == Reason.FIXED:
            block = BlockSize(block.size, Reason.CONTEXT)
        limits = (
            settings.max_nodes,
            lane.limits.max_nodes,
            wishes.max_nodes,
            session.budget.max_nodes,
        )
        parts = (wishes.parts & self.parts_available) or settings.parts
        return Job(session, context, block, min(limit for limit in limits if limit), parts)

    @property
    def parts_available(self) -> frozenset[Part]:
        """Parts that this model can draft with."""
        every = frozenset(Part)
        return every if self.model.config.branches > 1 else every - {Part.BRANCHES}

    def _room(self, session: Session) -> int:
        """Positions from the anchor on that the drafter's context still has."""
        return self.settings.max_context - session.base

    def _answers(
        self, heard: dict[Lane, Step], proposals: dict[Lane, list[Proposal]], model_ns: int
    ) -> list[tuple[Lane, StepResult]]:
        """One result a lane. Faults of lanes that were not heard wait for their next step."""
        self.counters.steps += 1
        self.counters.model_ns += model_ns
        results = []
        for lane, last in heard.items():
            faults = lane.table.take_faults()
            self.counters.faults.update(fault.kind for fault in faults)
            result = StepResult(
                last.sequence, proposals.get(lane, []), faults, model_ns, last.received_ns
            )
            results.append((lane, result))
        return results

    def _put(self, item: Work | Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                with self._wake:
                    while not self._inbox and not self._stopped:
                        self._busy_since = None
                        self._wake.wait()
                    if self._stopped:
                        return
                    inbox, self._inbox = self._inbox, []
                self._busy_since = time.monotonic()
                self._turn(inbox)

    def _turn(self, inbox: list[Work | Callable[[], None]]) -> None:
        """All of the inbox in order: calls run between steps, everything else between two calls is one step."""
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
        """A step that fails inside costs the sessions it was for, not the service."""
        try:
            results = self.step(work)
        except Exception:
            log.exception("drafting step failed", lanes=len({lane.lane_id for lane, _ in work}))
            results = self._fail_all(work)
        for lane, result in results:
            lane.deliver(result)

    def _fail_all(self, work: list[Work]) -> list[tuple[Lane, StepResult]]:
        heard = dict(work)
        for lane in heard:
            for session in list(lane.table.sessions.values()):
                lane.table.fail(
                    session,
                    FaultKind.INTERNAL,
                    "the drafter failed inside; its log has the details",
                )
            self._free(lane)
        return self._answers(heard, {}, 0)
