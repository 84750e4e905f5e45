"""The loop: every running session, one packed target step at a time.

Knows: the order of a step. Pure but for its thread: hears of requests, cancellations and drafters
through `post`, speaks through `emit`, and takes time from the clock it is given. Does not know:
gRPC, what it takes to begin or to end a session (`roster`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from draftwire.errors import Internal
from draftwire.v1 import drafter_pb2
from draftwire_kernels.walk import NonFiniteRow, Verdict
from verifier_service import gauge, rounds
from verifier_service.acceptance import compacts
from verifier_service.cache import PagedStore, PagePool
from verifier_service.costs import StepCosts
from verifier_service.lane import LanePort
from verifier_service.lanes import Lanes
from verifier_service.metrics import Meter
from verifier_service.model import StepOutput, TargetHost
from verifier_service.policy import Policy
from verifier_service.reports import Emitted, token_logprobs
from verifier_service.roster import Roster
from verifier_service.scheduler import Budgets, Scheduler, Work
from verifier_service.session import Request
from verifier_service.text import Decoder
from verifier_service.waiting import Decision, decide

EndReason = drafter_pb2.EndReason


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Timing of the loop."""

    longest_draft_wait: float = 0.5
    lane_timeout: float = 10.0
    stall: float = 30.0


class Engine:
    """Owns the model, the pages and all sessions; everything in it happens on one thread."""

    def __init__(
        self,
        host: TargetHost,
        tokenizer: Decoder,
        pool: PagePool,
        budgets: Budgets,
        limits: EngineLimits,
        *,
        vocab_size: int,
        max_context: int,
        clock: Callable[[], float],
        emit: Callable[[list[Emitted]], None],
    ) -> None:
        self.host, self.pool, self.limits = host, pool, limits
        self.vocab_size = vocab_size
        self.store = PagedStore(pool, host.cache_shape, host.dtype, host.device)
        self.scheduler = Scheduler(pool, budgets)
        self.max_context = max_context
        self.policy = Policy(
            StepCosts(host.plan.buckets, budgets.max_step_rows),
            clock,
            max_context=max_context,
            row_limit=budgets.max_step_rows,
        )
        self.lanes = Lanes(
            self.store,
            vocab_size=vocab_size,
            max_context=self.max_context,
            longest_wait=limits.longest_draft_wait,
            lane_timeout=limits.lane_timeout,
            planner=self.policy,
            recompute=self.scheduler.recompute,
            capture=host.capture,
        )
        self.roster = Roster(
            self.scheduler, self.lanes, self.policy, tokenizer, vocab_size=vocab_size, emit=emit
        )
        self.sessions, self.totals = self.roster.sessions, self.roster.totals
        self.meter = Meter()
        self.steps = 0
        self.tokens = 0
        self.nonfinite_rows = 0
        self.step_time = 0.0
        # Refusals go by this: a slow spell must not lock clients out.
        self.quickest_step = float("inf")
        self._clock = clock
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._stopping = False
        self._last_step = clock()
        self._held: frozenset[int] = frozenset()  # sessions that sat the last step out
        self._busy = False
        self._log = structlog.get_logger("verifier.engine")

    # -- from other threads

    def post(self, action: Callable[[], None]) -> None:
        """Have `action` run on the engine's thread before the next step."""
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def post_response(self, lane_id: int, message: drafter_pb2.StepResponse) -> None:
        """A drafter answered; the time is taken now, not when the engine gets to it."""
        now = self._clock()
        self.post(lambda: self.lanes.response(lane_id, message, now))

    def stop(self) -> None:
        """End `run` after the present step and what was posted before."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def progress(self) -> bool:
        """False while there is work and no step was made for the stall time."""
        return self.since_step() < self.limits.stall

    def since_step(self) -> float:
        """Seconds since the last step while there is work, else 0; from any thread."""
        return self._clock() - self._last_step if self._busy else 0.0

    # -- actions posted

    def submit(self, session_id: int, request: Request) -> None:
        """Queue a request; a full queue is told to the client."""
        self.roster.submit(session_id, request)

    def cancel(self, session_id: int) -> None:
        """The client is gone: free the session here and on its drafter."""
        self.roster.cancel(session_id)

    def finish_all(self, reason: int) -> None:
        """End every session with what it has made so far."""
        self.roster.finish_all(reason)

    def lane_up(self, port: LanePort) -> None:
        """A drafter shook hands."""
        if self.lanes.lane_up(port):
            self.pool.forget_cached()

    # -- the loop

    def run(self) -> None:
        """Step until stopped. Sleeps while there is nothing to do or a proposal is worth waiting
        for."""
        while True:
            with self._wake:
                if not self._inbox and not self._stopping:
                    self._sleep()
                actions, self._inbox = self._inbox, []
                stopping = self._stopping
            for action in actions:
                self._act(action)
            if stopping:
                self.roster.flush()
                return
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001  the loop must outlive any fault of one step
                self._fail_step(error)

    def turn(self) -> None:
        """What happens between two sleeps: expire, wait for proposals or step, tell everybody."""
        now = self._clock()
        self.roster.expire(now + self._margin())
        if not self._busy:
            self._last_step = now  # the time without work does not count
        self._busy = bool(self.sessions)
        decision = self._decide(now)
        stepped = None
        if self.sessions and (decision.until is None or decision.until <= now):
            self.lanes.give_up(self.scheduler.running, now)
            self.lanes.step_begins(now)
            self.policy.passed([self.sessions[i] for i in decision.passed], len(decision.hold))
            stepped = self.step(decision.hold)
            taken = self._clock() - now
            self.step_time += 0.2 * (taken - self.step_time)
            self.quickest_step = min(self.quickest_step, taken)
        self.lanes.flush(self._clock(), heard=now)
        if stepped:
            gauge.measure(self.policy, stepped, self._clock() - now)
        self.roster.flush()
        self._last_step = self._clock()
        if not self.sessions:
            self.pool.check()
            self.lanes.check()

    def step(self, hold: frozenset[int] = frozenset()) -> list[Work]:
        """One target step for everybody who can go on and is not in `hold`; what was in it."""
        self.meter.mark()
        running = self.scheduler.running
        drawing = [s for s in running if s.at_anchor and s.session_id not in hold]
        self.policy.cut(drawing, self.scheduler.prompt_rows())
        work = self.scheduler.plan(hold)
        for session in self.scheduler.preempted:
            self.lanes.forget(session, EndReason.END_REASON_MOVED)
        self.meter.preemptions += len(self.scheduler.preempted)
        self.scheduler.preempted.clear()
        if not work:
            return work
        self._held = hold
        rounds.begin(work, self.store, self._clock())
        self.meter.begin(work)
        output = self.host.step([item.feed for item in work], self.store)
        self.meter.lap("target")
        verdicts = self._verify(work, output)
        self.meter.lap("acceptance")
        moves = rounds.Moves(self.store)
        survivors = []
        for item, verdict in zip(work, verdicts, strict=True):
            if verdict is not None and self._commit(item, verdict, moves):
                survivors.append((item, verdict))
        if not compacts(output):
            moves.make()
        self.policy.replan([s for s in running if s.at_anchor], self.lanes.lane_for)
        for item, verdict in survivors:
            self._tell(item, verdict)
        self.meter.lap("commit")
        self.steps += 1
        return work

    def _decide(self, now: float) -> Decision:
        """Step now, or sleep until when; and who sits the step out."""
        running = self.scheduler.running
        awaited = self.lanes.awaited(running)
        if not awaited:
            return Decision(None)
        self.scheduler.admit()  # newcomers do not wait for others' proposals
        ready = gauge.ready(running, awaited, self.policy, self.scheduler.prompt_rows())
        costs = self.policy.costs.beside(len(running), sum(s.base for s in running))
        return decide(now, ready, awaited, costs, self._held)

    def _tell(self, item: Work, verdict: Verdict) -> None:
        """Report the round to the drafter; a fault of the lane costs the lane and not the round."""
        try:
            self.lanes.tell(item.session, item.anchor, len(verdict.path), item.proposal is not None)
        except Exception as error:  # noqa: BLE001  the committed round stands whatever the lane does
            self._log.exception("lane failed", error=repr(error))
            self.lanes.drop_lane_of(item.session, repr(error))

    # -- parts of a step

    def _verify(self, work: Sequence[Work], output: StepOutput) -> list[Verdict | None]:
        """Draw the tokens of every round. A row that is not finite fails its own request alone."""
        verdicts: list[Verdict | None] = []
        found = rounds.verify(work, output, self.store, self.vocab_size)
        for item, verdict in zip(work, found, strict=True):
            if isinstance(verdict, NonFiniteRow):
                self.nonfinite_rows += 1
                message = f"the model's logits are not finite at row {verdict.row}"
                error = Internal("NONFINITE_LOGITS", message, row=verdict.row)
                self.roster.fail(item.session, error)
                verdict = None
            verdicts.append(verdict)
        return verdicts

    def _commit(self, item: Work, verdict: Verdict, moves: rounds.Moves) -> bool:
        """Take the verdict's tokens. Returns whether the session goes on; if so its pages hold
        exactly what is committed."""
        session, now = item.session, self._clock()
        first_round = session.made == 0
        delta = session.commit(verdict.tokens, self.max_context)
        if not first_round:
            session.count_round(item.proposal, verdict.path, len(delta.tokens))
            self.meter.round(session, item.proposal, verdict.path, len(delta.tokens))
            self.policy.learn(session, item.proposal, verdict.path)
        session.first_token_at = session.first_token_at or now
        session.last_token_at = now
        self.tokens += len(delta.tokens)
        logprobs = token_logprobs(verdict, len(delta.tokens)) if session.request.logprobs else ()
        if session.ending is not None:
            self.roster.finish(session, delta, logprobs)
            return False
        session.computed = item.anchor + 1 + len(verdict.path)
        moves.add(item, verdict.path)
        if first_round and session.captured == frozenset(self.store.features):
            self.pool.keep_prefix(session.request.prompt, session.pages)
        self.roster.go_on(session, delta, logprobs)
        return True

    def _margin(self) -> float:
        """Seconds before a deadline at which an answer is ended."""
        return max(0.02, 1.5 * self.step_time)

    def _act(self, action: Callable[[], None]) -> None:
        """What one event breaks is not the others' fault: each is taken in by itself."""
        try:
            action()
        except Exception as error:  # noqa: BLE001  see above
            self._log.exception("event failed", error=repr(error))

    def _fail_step(self, error: Exception) -> None:
        """A step broke: nobody knows what is in the pages of those who were in it, so they fail;
        the rest go on. With nobody in it, it broke on the one that was to come in."""
        self._log.exception("step failed", error=repr(error))
        self.meter.failed_steps += 1
        for session in list(self.scheduler.running) or self.scheduler.waiting[:1]:
            self.roster.fail(
                session, Internal("STEP_FAILED", "the target step failed; see the server's log")
            )
        self.roster.flush()

    def _sleep(self) -> None:
        """Called with the lock held: wait for something to do."""
        if not self.sessions:
            self._wake.wait()
            return
        now = self._clock()
        try:
            until = self._decide(now).until
        except Exception:  # noqa: BLE001  the turn that follows meets it too, and survives it
            return
        deadline = self.roster.first_deadline()
        if until is not None and deadline is not None:
            until = min(until, deadline - self._margin())
        if until is not None and until > now:
            self._wake.wait(until - now)
            waited = self._clock() - now
            self.meter.waited(waited)
            for session in self.scheduler.running:
                session.draft_wait += waited
