"""Decides lengths: what is verified in this step, who is asked for how much in the next round.

Knows: modes, what is remembered of drafters and sessions, costs; turns `budget`'s choices into cuts
of proposals and wishes, each with its reason. Does not know: messages, lanes' streams, the model.

fixed and predicted: the size asked for, or the drafter's predicted one, every round. adaptive: as
much as pays, down to none; then nothing is asked for, and a few probes find out when drafts pay
again. Nothing here can change a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from verifier_service.budget import Floats, Hope, Ints, PlainLook, Plan, Wish, choose, plan
from verifier_service.costs import Beside, StepCosts
from verifier_service.lane import Lane
from verifier_service.minds import DrafterMind, Memory, Mind, remember
from verifier_service.session import BlockSizeReason as Reason
from verifier_service.session import Proposal, Session
from verifier_service.survival import (
    Nodes,
    nodes_of,
    reached_children,
    survival,
    temperature_class,
)

_PLAN_EVERY = 0.05  # seconds; plans are made no more often, and take a hundredth of the time
_PLAN_SHARE = 0.01
PROBE_ROUNDS = 6  # a look at a drafter is so many rounds of one session
PROBE_NODES = 3  # least nodes of it that are verified: a plain step has rows for them unfilled
_NO_DOUBT = 2.5  # times plain speed from which on no error about plain steps could matter
_YOUNG = 100  # rounds after which a drafter is known well enough to be doubted for less long
_PROBE_GAIN = 1.0  # accepted tokens for which a look is waited for
_KEPT_AT_PROBE = 0.5  # share of what was learnt that still counts then


@dataclass(slots=True)
class PolicyCounters:
    """Decisions by kind, since start."""

    plans: int = 0
    probes: int = 0
    asked: int = 0  # sessions that began to be asked for drafts
    stopped: int = 0  # sessions that ceased to be
    held: int = 0  # sessions that sat a step out for their proposal
    passed: int = 0  # proposals on their way that a step was not held up for
    cuts: Counter[int] = field(default_factory=Counter)  # by BlockSizeReason


class Policy:
    """State of the decisions. One thread uses it."""

    def __init__(
        self, costs: StepCosts, clock: Callable[[], float], *, max_context: int, row_limit: int
    ) -> None:
        self.costs = costs
        self.counters = PolicyCounters()
        self._clock = clock
        self._max_context = max_context
        self._row_limit = row_limit
        self._drafters: dict[tuple[str, str], DrafterMind] = {}
        self._minds: dict[int, Mind] = {}
        self._plain_look = PlainLook()
        self._in_doubt = False  # whether looking at a plain round can be had, and could matter
        self._next_plan = 0.0
        self._wait_ms = 0.0  # of the rounds planned
        self._usual: Wish | None = None  # of the last plan

    # -- this step

    def cut(self, sessions: Sequence[Session], prompt_rows: int) -> None:
        """Cut the proposals of `sessions`, all that draw in this step, to what pays."""
        rows, tokens = len(sessions) + prompt_rows, float(len(sessions))
        may_be_cut: list[tuple[Session, Proposal, Floats]] = []
        for session in sessions:
            if session.proposal is None:
                continue
            survivals = self._survivals(session, session.proposal)
            if session.request.speculation.adaptive:
                if not self.mind(session).probe:
                    may_be_cut.append((session, session.proposal, survivals))
                    continue
                # Rows that the step is padded with anyway cost nothing.
                free = self.costs.padded(rows + PROBE_NODES) - rows
                best = np.sort(np.argsort(-survivals, kind="stable")[:free])
                session.proposal = session.proposal.kept(best, Reason.BLOCK_SIZE_REASON_PROBE)
                session.proposal.reason = Reason.BLOCK_SIZE_REASON_PROBE
            rows += len(session.proposal.tree)
            tokens += float(survivals.sum())
        if not may_be_cut:
            return
        choice = choose(
            [survivals for _, _, survivals in may_be_cut],
            self._costs_of(sessions),
            anchors=tokens,
            rows=rows,
            wait_ms=self._wait_ms,
            most_nodes=self._row_limit - rows,
        )
        for (session, proposal, survivals), keep in zip(may_be_cut, choice.keep, strict=True):
            if len(keep) < len(survivals):
                self._keep(session, proposal, survivals, keep)

    def _keep(self, session: Session, proposal: Proposal, survivals: Floats, keep: Ints) -> None:
        """Take these nodes only; the load is to blame if the session alone would have had more."""
        costs = self._costs_of([session])
        alone = choose([survivals], costs, anchors=1, rows=1, wait_ms=self._wait_ms).keep[0]
        crowded = len(alone) > len(keep)
        reason = Reason.BLOCK_SIZE_REASON_LOAD if crowded else Reason.BLOCK_SIZE_REASON_SURVIVAL
        self.counters.cuts[reason] += 1
        session.proposal = proposal.kept(keep, reason) if len(keep) else None
        if session.proposal is None:
            session.why_plain = Reason.BLOCK_SIZE_REASON_NOT_WORTH

    def _costs_of(self, sessions: Sequence[Session]) -> Beside:
        """What steps of these sessions cost by their rows."""
        return self.costs.beside(len(sessions), sum(session.base for session in sessions))

    def _survivals(self, session: Session, proposal: Proposal) -> Floats:
        mind = self.mind(session)
        chances = mind.drafter.trust.chances(_nodes(session, proposal), mind.trust)
        return survival(proposal.tree.parents, chances)

    def passed(self, sessions: Sequence[Session], held: int) -> None:
        """A step begins without the proposals of `sessions`, which were not worth the wait, and
        without `held` sessions that wait for theirs."""
        self.counters.passed += len(sessions)
        self.counters.held += held
        for session in sessions:
            session.why_plain = Reason.BLOCK_SIZE_REASON_NOT_WORTH

    def expected_accepted(self, session: Session) -> float:
        """Accepted tokens expected of the proposal that is here, were it verified whole."""
        proposal = session.proposal
        return 0.0 if proposal is None else float(self._survivals(session, proposal).sum())

    # -- what came of it

    def learn(self, session: Session, proposal: Proposal | None, path: Sequence[int]) -> None:
        """A round was verified: its proposal, None if it was plain, and the accepted nodes."""
        mind = self.mind(session)
        if proposal is None:
            mind.plain_rounds += 1
            mind.probed()  # a look that is not answered ends too
            return
        nodes = _nodes(session, proposal)
        children, taken = reached_children(proposal.tree.parents, path)
        expected = float(self._survivals(session, proposal).sum())
        mind.drafter.trust.learn(nodes.take(children), mind.trust, taken)
        whole = proposal.whole or proposal  # what could have been verified
        memory = remember(self._survivals(session, whole), whole.tree.depths(), whole.asked_depth)
        mind.late.append(memory)
        mind.drafter.add(nodes.warmth, memory)
        mind.plain_rounds = 0
        if mind.probe:
            if len(path) > 2 * expected:
                mind.drafter.prober.promising()
            mind.probed()
            self._next_plan = 0.0

    def measured(
        self,
        rows: int,
        sessions: int,
        context: int,
        seconds: float,
        *,
        drafted: bool,
        prompts: bool,
    ) -> None:
        """A step of `sessions` with `context` positions before them took `seconds`. One with pieces
        of prompts costs other things too and says nothing."""
        if self._in_doubt:
            self._plain_look.stepped(drafted=drafted, measured=not prompts)
        if not prompts:
            ms = 1e3 * seconds
            self.costs.observe(rows, ms, drafted=drafted, sessions=sessions, context=context)
            for drafter in self._drafters.values():
                drafter.prober.earn(ms)

    def forget(self, session: Session) -> None:
        """The session is over."""
        self._minds.pop(session.session_id, None)

    # -- the next round

    def replan(
        self, sessions: Sequence[Session], lane_for: Callable[[Session], Lane | None]
    ) -> None:
        """Decide whom to ask. `sessions`: all that draw in the next step; `lane_for`: the lane that
        a session is on or would be opened on, if one may be asked."""
        now = self._clock()
        if now < self._next_plan:
            return
        lanes: dict[int, Lane] = {}
        hopes: list[Hope] = []
        rows, tokens = len(sessions), float(len(sessions))
        for session in sessions:
            lane = lane_for(session)
            if lane is None or not session.request.speculation.enabled:
                continue
            self._meet(session, lane)
            if not session.request.speculation.adaptive:
                outlook = self._outlook(session, lane)
                rows += round(outlook.nodes)
                tokens += outlook.gain
            elif not (lane.behind or lane.pause):
                lanes[lane.port.lane_id] = lane
                hopes.append(self._hope(session, lane))
        found = plan(
            hopes,
            self._costs_of(sessions),
            lambda lane_id, count: lanes[lane_id].costs.ms(count),
            anchors=tokens,
            rows=rows,
            row_limit=self._row_limit,
        )
        speculation = [session.request.speculation for session in sessions]
        gain = found.tokens / found.ms * found.plain_ms / max(1.0, tokens)
        self._in_doubt = gain < _NO_DOUBT and all(s.adaptive or not s.enabled for s in speculation)
        self.counters.plans += 1
        self._wait_ms = found.wait_ms
        self._usual = next(iter(found.wishes.values()), None)
        looking = {id(mind.drafter) for mind in self._minds.values() if mind.probe}
        for hope in hopes:
            self._decide(self._minds[hope.session_id], found.wishes.get(hope.session_id), looking)
        for lane_id, lane in lanes.items():
            self._probe([h for h in hopes if h.lane == lane_id], lane, found, rows)
        self._next_plan = now + max(_PLAN_EVERY, (self._clock() - now) / _PLAN_SHARE)

    def _decide(self, mind: Mind, wish: Wish | None, looking: set[int]) -> None:
        """`looking`: drafters that a probe is under way at; one at a time is enough."""
        if wish is not None:
            mind.drafter.prober.paid()
            mind.probe = 0
        if mind.probe:
            return
        if mind.decided and (wish is None) != (mind.wish is None):
            self.counters.asked += wish is not None
            self.counters.stopped += wish is None
        if wish is None and mind.wish is not None and id(mind.drafter) not in looking:
            looking.add(id(mind.drafter))
            # Wrongly stopped costs hundreds of rounds, a few more rounds next to nothing.
            young = mind.drafter.trust.rounds < _YOUNG
            mind.probe, depth = PROBE_ROUNDS * (2 if young else 1), mind.wish.depth
            wish = Wish(PROBE_NODES, min(PROBE_NODES, depth), _PROBE_GAIN, PROBE_NODES)
        mind.wish, mind.decided = wish, True

    def _hope(self, session: Session, lane: Lane) -> Hope:
        mind, outlook = self.mind(session), self._outlook(session, lane)
        return Hope(
            session.session_id,
            lane.port.lane_id,
            outlook.survivals,
            outlook.depths,
            outlook.weights,
            session.request.speculation.max_nodes,
            min(self.depth(session, lane), lane.port.facts.usual_block_size - 1),
            mind.wish is not None and not mind.probe,
            _warmth(session),
        )

    def _probe(self, hopes: Sequence[Hope], lane: Lane, found: Plan, rows: int) -> None:
        """Ask for one session that decodes plainly, if a look is paid for."""
        minds = {hope.session_id: self._minds[hope.session_id] for hope in hopes}
        plain = [h for h in hopes if minds[h.session_id].wish is None and h.most_depth > 0]
        if not plain or any(mind.probe for mind in minds.values()):
            return
        # The one longest without: what suits one text need not suit another.
        chosen = max(plain, key=lambda hope: minds[hope.session_id].plain_rounds)
        mind, depth = minds[chosen.session_id], min(PROBE_NODES, chosen.most_depth)
        step = self.costs.ms(rows + PROBE_NODES, drafted=True) - found.plain_ms
        cost = lane.costs.ms(1 + depth) + max(0.0, step)
        if not mind.drafter.prober.due(PROBE_ROUNDS * cost):
            return
        self.counters.probes += 1
        mind.probe, mind.wish = PROBE_ROUNDS, Wish(PROBE_NODES, depth, _PROBE_GAIN, PROBE_NODES)
        # What was not looked at for long counts for little beside a fresh look.
        mind.trust.ratios.fade(_KEPT_AT_PROBE)
        mind.late.clear()
        if not found.wishes:
            mind.drafter.forget(chosen.warmth, _KEPT_AT_PROBE)

    def wish(self, session: Session, lane: Lane) -> Wish | None:
        """What to ask `lane` for in the name of `session`; None: nothing, it decodes plainly."""
        depth, speculation = self.depth(session, lane), session.request.speculation
        if not speculation.enabled or depth < 1:
            return None
        mind = self._meet(session, lane)
        if not speculation.adaptive:
            most = speculation.max_nodes
            return Wish(most, depth, self.expected_gain(session, lane), most)
        # One that no plan has looked at yet does as the others do.
        wish = mind.wish if mind.decided else self._usual
        if wish is None or (self._in_doubt and self._plain_look.now):
            return None
        return replace(
            wish, nodes=min(wish.nodes, speculation.max_nodes), depth=min(wish.depth, depth)
        )

    def expected_gain(self, session: Session, lane: Lane) -> float:
        """Accepted tokens expected of a whole proposal."""
        return self._outlook(session, lane).gain

    def depth(self, session: Session, lane: Lane) -> int:
        """Longest path that `session` could verify from `lane` in its next round."""
        most = session.drafts_allowed(self._max_context)
        return min(most, lane.port.facts.max_block_size - 1)

    def mind(self, session: Session) -> Mind:
        """What is remembered of a session."""
        return self._minds.setdefault(session.session_id, Mind())

    def _meet(self, session: Session, lane: Lane) -> Mind:
        facts, mind = lane.port.facts, self.mind(session)
        key = (facts.name, facts.weights_sha256)
        mind.drafter = self._drafters.setdefault(key, DrafterMind())
        return mind

    def _outlook(self, session: Session, lane: Lane) -> Memory:
        return self.mind(session).outlook(_warmth(session), self.depth(session, lane))


def _warmth(session: Session) -> int:
    return temperature_class(session.request.sampling.temperature)


def _nodes(session: Session, proposal: Proposal) -> Nodes:
    return nodes_of(
        proposal.log_probs,
        proposal.parts,
        proposal.depths(),
        session.request.sampling.temperature,
    )
