"""The loop: every running session, one packed target step at a time.

Knows: the order of a step. Pure but for its thread: hears of requests, cancellations and drafters
through `post`, speaks through
`emit`, and takes time from the clock it is given. Does not know gRPC.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch

from draftwire.errors import DraftwireError, Internal, ResourceExhausted
from draftwire.v1 import drafter_pb2, verifier_pb2
from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk import NonFiniteRow, Verdict
from verifier_service.acceptance import Round, accept, compacts
from verifier_service.cache import PagedStore, PagePool
from verifier_service.costs import StepCosts
from verifier_service.lane import LanePort
from verifier_service.lanes import Lanes
from verifier_service.metrics import Meter
from verifier_service.model import StepOutput, TargetHost
from verifier_service.policy import Policy
from verifier_service.reports import Emitted, finished_message, token_logprobs
from verifier_service.scheduler import Budgets, Scheduler, Work
from verifier_service.session import Delta, Ending, FinishReason, Request, Session, Statistics
from verifier_service.text import Decoder
from verifier_service.waiting import Decision, Ready, decide

EndReason = drafter_pb2.EndReason
_NO_TREE = TokenTree()


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
        self.sessions: dict[int, Session] = {}
        self.totals = Statistics()
        self.meter = Meter()
        self.steps = 0
        self.tokens = 0
        self.nonfinite_rows = 0
        self.step_time = 0.0
        self.quickest_step = float(
            "inf"
        )  # refusals go by this: a slow spell must not lock clients out
        self._tokenizer = tokenizer
        self._clock = clock
        self._emit = emit
        self._out: list[Emitted] = []
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
        try:
            session = Session(session_id, request, self.vocab_size, self._tokenizer)
            self.scheduler.add(session)
        except ResourceExhausted as error:
            self._out.append(Emitted(session_id, error=error))
            return
        except Exception as error:  # noqa: BLE001  nobody else would answer this client
            self._log.exception("request not taken", error=repr(error))
            refusal = Internal("SUBMIT_FAILED", "the request was not taken; see the server's log")
            self._out.append(Emitted(session_id, error=refusal))
            return
        self.sessions[session_id] = session

    def cancel(self, session_id: int) -> None:
        """The client is gone: free the session here and on its drafter."""
        if session := self.sessions.get(session_id):
            self._retire(session, EndReason.END_REASON_CANCELLED)

    def finish_all(self, reason: int) -> None:
        """End every session with what it has made so far."""
        for session in list(self.sessions.values()):
            session.ending = Ending(reason)
            self._finish(session, Delta(session.text.finish(), ()), ())

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
                self._flush_out()
                return
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001  the loop must outlive any fault of one step
                self._fail_step(error)

    def turn(self) -> None:
        """What happens between two sleeps: expire, wait for proposals or step, tell everybody."""
        now = self._clock()
        self._expire(now)
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
            self._measure(stepped, self._clock() - now)
        self._flush_out()
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
        self._begin(work)
        self.meter.begin(work)
        output = self.host.step([item.feed for item in work], self.store)
        self.meter.lap("target")
        verdicts = self._verify(work, output)
        self.meter.lap("acceptance")
        moves: list[tuple[np.ndarray, np.ndarray]] = []
        survivors = []
        for item, verdict in zip(work, verdicts, strict=True):
            if verdict is not None and self._commit(item, verdict, moves):
                survivors.append((item, verdict))
        if not compacts(output):
            self._compact(moves)
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
        missing = {item.session_id for item in awaited}
        here = [s for s in running if s.at_anchor and s.session_id not in missing]
        trees = [s.proposal for s in here if s.proposal is not None]
        gain = sum(self.policy.expected_accepted(s) for s in here)
        rows = len(here) + self.scheduler.prompt_rows() + sum(len(p.tree) for p in trees)
        # A prompt is as good as a token, or it would wait for others' proposals for nothing.
        prompts = sum(not s.at_anchor for s in running)
        ready = Ready(len(here) + prompts + gain, rows, bool(trees))
        costs = self.policy.costs.beside(len(running), sum(s.base for s in running))
        return decide(now, ready, awaited, costs, self._held)

    def _measure(self, work: Sequence[Work], seconds: float) -> None:
        """Tell the policy what the step cost, all that belongs to it included."""
        rows = sum(len(item.feed.tokens) for item in work)
        drafted = any(item.proposal is not None for item in work)
        prompts = any(item.session.made <= 1 or not item.draws for item in work)
        context = sum(item.feed.base for item in work)
        self.policy.measured(rows, len(work), context, seconds, drafted=drafted, prompts=prompts)

    def _tell(self, item: Work, verdict: Verdict) -> None:
        """Report the round to the drafter; a fault of the lane costs the lane and not the round."""
        previous = item.feed.base + _committed_rows(item) - 1
        try:
            self.lanes.tell(item.session, previous, len(verdict.path), item.proposal is not None)
        except Exception as error:  # noqa: BLE001  the committed round stands whatever the lane does
            self._log.exception("lane failed", error=repr(error))
            self.lanes.drop_lane_of(item.session, repr(error))

    # -- parts of a step

    def _begin(self, work: Sequence[Work]) -> None:
        now = self._clock()
        layers = frozenset(self.store.features)
        for item in work:
            session = item.session
            if session.started_at is None:
                session.started_at = now
            session.captured = layers if session.captured is None else session.captured & layers

    def _verify(self, work: Sequence[Work], output: StepOutput) -> list[Verdict | None]:
        """Draw the tokens of every round. A row that is not finite fails its own request alone."""
        rounds = [
            Round(
                index,
                item.proposal.tree if item.proposal else _NO_TREE,
                item.session.request.sampling,
                len(item.session.tokens),
                item.session.history,
                item.session.request.logprobs,
                item.session.request.top_logprobs,
            )
            for index, item in enumerate(work)
            if item.draws
        ]
        found = iter(accept(output, rounds, self.store, self.vocab_size))
        verdicts: list[Verdict | None] = []
        for index, item in enumerate(work):
            verdict = next(found) if item.draws else None
            if isinstance(verdict, NonFiniteRow):
                self._fail_nonfinite(item.session, verdict.row)
                verdict = None
            elif verdict is None:
                item.session.computed += len(item.feed.tokens)
            elif item.session.made == 0:
                last = output.of(index, len(item.feed.logit_rows))[-1, : self.vocab_size]
                item.session.last_logits = last.clone()
            verdicts.append(verdict)
        return verdicts

    def _fail_nonfinite(self, session: Session, row: int) -> None:
        self.nonfinite_rows += 1
        message = f"the model's logits are not finite at row {row}"
        self._fail(session, Internal("NONFINITE_LOGITS", message, row=row))

    def _commit(
        self, item: Work, verdict: Verdict, moves: list[tuple[np.ndarray, np.ndarray]]
    ) -> bool:
        """Take the verdict's tokens. Returns whether the session goes on; if so its pages hold
        exactly what is committed."""
        session, now = item.session, self._clock()
        first_round = session.made == 0
        anchor = item.feed.base + _committed_rows(item) - 1
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
            self._finish(session, delta, logprobs)
            return False
        session.computed = anchor + 1 + len(verdict.path)
        if verdict.path:
            rows = np.asarray(verdict.path) + anchor + 1
            places = np.arange(anchor + 1, anchor + 1 + len(rows))
            if not np.array_equal(rows, places):
                moves.append((session.slots[rows], session.slots[places]))
        if first_round and session.captured == frozenset(self.store.features):
            self.pool.keep_prefix(session.request.prompt, session.pages)
        self._out.append(Emitted(session.session_id, delta, logprobs))
        return True

    def _compact(self, moves: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Bring the accepted paths of trees to consecutive slots: the only rollback there is."""
        if moves:
            source, target = (
                torch.from_numpy(np.concatenate(side)).to(self.store.device)
                for side in zip(*moves, strict=True)
            )
            self.store.move(source, target)

    # -- endings

    def _finish(
        self, session: Session, delta: Delta, logprobs: Sequence[verifier_pb2.TokenLogprob]
    ) -> None:
        self._retire(session, EndReason.END_REASON_FINISHED)
        finished = finished_message(session)
        self._out.append(Emitted(session.session_id, delta, logprobs, finished))

    def _fail(self, session: Session, error: DraftwireError) -> None:
        self._retire(session, EndReason.END_REASON_FAILED)
        self._out.append(Emitted(session.session_id, error=error))

    def _retire(self, session: Session, reason: int) -> None:
        self.scheduler.remove(session)
        self.lanes.forget(session, reason)
        self.policy.forget(session)
        self.totals.add(session.stats)
        self.sessions.pop(session.session_id, None)

    def _expire(self, now: float) -> None:
        """End sessions whose deadline would pass during the next step, with what they have."""
        for session in list(self.sessions.values()):
            deadline = session.request.deadline
            if deadline is not None and now + self._margin() >= deadline:
                session.ending = Ending(FinishReason.FINISH_REASON_DEADLINE)
                self._finish(session, Delta(session.text.finish(), ()), ())

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
            self._fail(
                session, Internal("STEP_FAILED", "the target step failed; see the server's log")
            )
        self._flush_out()

    def _flush_out(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._emit(out)

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
        deadlines = [s.request.deadline for s in self.sessions.values() if s.request.deadline]
        if until is not None and deadlines:
            until = min(until, min(deadlines) - self._margin())
        if until is not None and until > now:
            self._wake.wait(until - now)
            waited = self._clock() - now
            self.meter.waited(waited)
            for session in self.scheduler.running:
                session.draft_wait += waited

    def info(self) -> dict[str, Any]:
        """Load and counters; read from other threads, each value whole in itself."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "free_pages": self.pool.free_pages,
            "steps": self.steps,
            "tokens": self.tokens,
        }


def _committed_rows(item: Work) -> int:
    """Rows of the feed that were committed before the round: the anchor, or the piece of the
    prompt."""
    return 1 if item.proposal is not None else len(item.feed.tokens)
