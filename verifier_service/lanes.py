"""The drafters from the engine's side: which session is on which lane, what has been told, what is
awaited.

Knows: the messages of a step, epochs and bases, credits, how long a proposal is worth waiting for.
Pure: hears of lanes and responses through method calls with the time as an argument, and talks
through `LanePort`. Does not know: sockets, the model, sampling.

The verifier is the only truth: a proposal counts only if session, epoch and base are the present
ones; everything else is dropped and counted. A lane that misses its budget is not waited for again
until it has caught up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from draftwire.v1 import drafter_pb2
from draftwire_kernels.tree import TokenTree, TreeError
from verifier_service.cache import PagedStore
from verifier_service.lane import Lane, LanePort, Link
from verifier_service.messages import sampling_to_proto, session_key, speculation_to_proto
from verifier_service.outbox import Outbox
from verifier_service.session import Proposal, Session

Fault = drafter_pb2.FaultKind
_SMOOTHING = 0.2
_SLACK = 0.02  # seconds added to a lane's usual round trip: scheduling noise
_LONGEST_PAUSE = 64  # rounds


@dataclass(slots=True)
class Counters:
    """What went other than planned, by kind."""

    stale: int = 0
    malformed: int = 0
    late: int = 0
    reopened: int = 0
    faults: dict[int, int] = field(default_factory=dict)


class Lanes:
    """All drafters of the engine. Method order is the order of a step: hear, wait, tell, flush."""

    def __init__(
        self,
        store: PagedStore,
        *,
        vocab_size: int,
        max_context: int,
        longest_wait: float,
        lane_timeout: float,
        recompute: Callable[[Session], None],
        capture: Callable[[int], None],
    ) -> None:
        self.lanes: dict[int, Lane] = {}
        self.counters = Counters()
        self._store = store
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._longest_wait = longest_wait
        self._lane_timeout = lane_timeout
        self._recompute = recompute
        self._capture = capture
        self._lane_of: dict[int, Lane] = {}
        self._epochs: dict[int, int] = {}
        self._setbacks: dict[
            int, tuple[int, int]
        ] = {}  # session -> (times, rounds left to stay plain)

    # -- hearing

    def lane_up(self, port: LanePort) -> bool:
        """A drafter is ready. Returns whether feature layers were added, so that cached pages lack
        them."""
        new = [layer for layer in port.facts.feature_layers if layer not in self._store.features]
        for layer in new:
            self._store.add_feature_layer(layer)
            self._capture(layer)
        self.lanes[port.lane_id] = Lane(port, Outbox(port.facts.max_message_bytes))
        return bool(new)

    def lane_down(self, lane_id: int) -> None:
        """A drafter is gone: its sessions decode plainly until they are opened elsewhere, at the
        end of the next round."""
        lane = self.lanes.pop(lane_id, None)
        for session_id in list(lane.links) if lane else ():
            self._unlink(session_id)

    def lane_draining(self, lane_id: int) -> None:
        """A drafter is going away: its sessions move at the end of their next round."""
        if lane := self.lanes.get(lane_id):
            lane.draining = True

    def response(self, lane_id: int, message: drafter_pb2.StepResponse, now: float) -> None:
        """Take in what a drafter said."""
        lane = self.lanes.get(lane_id)
        if lane is None:
            return
        lane.responses += 1
        lane.acked = max(lane.acked, min(message.ack_sequence, lane.outbox.sequence))
        lane.port.acknowledge(lane.acked)
        self._measure(lane, now)
        lane.outbox.responses_seen = message.sequence
        lane.oldest_unacked_at = None if lane.acked == lane.outbox.sequence else now
        lane.model_time = message.model_time.seconds + 1e-9 * message.model_time.nanos
        for proposal in message.proposals:
            self._take_proposal(lane, proposal, now)
        for fault in message.faults:
            self._take_fault(lane, fault)
        for link in lane.links.values():
            if link.asked and link.asked <= lane.acked:
                link.asked = 0  # answered, with or without a proposal
        # A step may have begun, and told the lane more, while this answer was on its way: one
        # message behind is up to date.
        if lane.acked >= lane.outbox.sequence - 1:
            lane.behind = False

    def _measure(self, lane: Lane, now: float) -> None:
        """Round trips of late answers count too, else a lane that became slow would be waited for
        in vain for ever."""
        while lane.sent_at and lane.sent_at[0][0] <= lane.acked:
            sequence, sent = lane.sent_at.popleft()
            if sequence == lane.acked:
                taken = now - sent
                known = lane.round_trip
                lane.round_trip = taken if known is None else known + _SMOOTHING * (taken - known)

    def _take_proposal(self, lane: Lane, message: drafter_pb2.Proposal, now: float) -> None:
        link = lane.links.get(message.key.session_id)
        if (
            link is None
            or message.key.epoch != link.epoch
            or message.key.base_position != link.session.base
        ):
            self.counters.stale += 1
            if link is not None:
                link.session.stats.stale += 1
            return
        if link.asked:
            taken = now - link.asked_at
            lane.round_trip = (
                taken
                if lane.round_trip is None
                else lane.round_trip + _SMOOTHING * (taken - lane.round_trip)
            )
            link.asked = 0
            lane.misses = 0
        self._setbacks.pop(message.key.session_id, None)
        try:
            link.session.proposal = self._checked(link.session, message)
        except TreeError:
            self.counters.malformed += 1
            link.session.proposal = None

    def _checked(self, session: Session, message: drafter_pb2.Proposal) -> Proposal | None:
        tree = TokenTree(tuple(message.tree.token_ids), tuple(message.tree.parents))
        count = len(tree.tokens)
        tree.validate(
            self._vocab_size, max(1, session.request.speculation.max_nodes), max(1, count)
        )
        parts = tuple(message.tree.parts) if len(message.tree.parts) == count else ()
        proposal = Proposal(session.base, tree, parts, message.block_size, message.reason)
        return proposal.pruned(session.drafts_allowed(self._max_context))

    def _take_fault(self, lane: Lane, fault: drafter_pb2.SessionFault) -> None:
        self.counters.faults[fault.kind] = self.counters.faults.get(fault.kind, 0) + 1
        link = lane.links.get(fault.key.session_id)
        if link is None or fault.key.epoch not in (0, link.epoch):
            return
        times = self._setbacks.get(fault.key.session_id, (0, 0))[0] + 1
        rounds = (
            _LONGEST_PAUSE
            if fault.kind == Fault.FAULT_KIND_NO_ROOM
            else min(_LONGEST_PAUSE, 2 ** (times - 1) - 1)
        )
        self._setbacks[fault.key.session_id] = (times, rounds)
        self._unlink(fault.key.session_id)

    # -- waiting

    def wait_until(self, running: Iterable[Session]) -> float | None:
        """Time up to which proposals are worth waiting for; None if none of the running sessions
        awaits one."""
        until: float | None = None
        for session in running:
            lane = self._lane_of.get(session.session_id)
            if lane is None or lane.behind or lane.pause:
                continue
            link = lane.links[session.session_id]
            if link.asked and session.at_anchor:
                until = max(until or 0.0, link.asked_at + self._budget(lane))
        return until

    def _budget(self, lane: Lane) -> float:
        """Seconds a lane gets: some multiple of what it usually takes, up to the configured longest
        wait."""
        if lane.round_trip is None:
            return self._longest_wait
        return min(self._longest_wait, 3 * lane.round_trip + _SLACK)

    def give_up_waiting(self, running: Iterable[Session]) -> None:
        """The wait is over: lanes that did not answer are behind; waited for again once they caught
        up, less often each time."""
        late = set()
        for session in running:
            lane = self._lane_of.get(session.session_id)
            if lane is not None and lane.links[session.session_id].asked and session.at_anchor:
                self.counters.late += 1
                late.add(lane.port.lane_id)
        for lane_id in late:
            lane = self.lanes[lane_id]
            if not lane.behind and not lane.pause:
                lane.misses += 1
                lane.pause = 2 ** min(lane.misses - 1, 6) - 1
            lane.behind = True

    # -- telling

    def tell(self, session: Session, previous_base: int, accepted: int, had_proposal: bool) -> None:
        """A round of `session` is committed and it goes on: report the outcome, or open the session
        on a lane."""
        session.proposal = None
        if not session.request.speculation.enabled:
            return
        lane = self._lane_of.get(session.session_id)
        if lane is not None and lane.draining and self._choose() is not None:
            self.forget(session, drafter_pb2.EndReason.END_REASON_MOVED)
            lane = None
        if lane is None:
            self._open(session)
            return
        link = lane.links[session.session_id]
        rows = self._rows(lane, session, previous_base, session.base)
        budget = self._round_budget(session, lane)
        lane.outbox.outcome(
            drafter_pb2.Outcome(
                key=session_key(session, link.epoch),
                previous_base=previous_base,
                token_ids=session.tokens[previous_base + 1 :],
                features=lane.port.encode(rows),
                accepted=accepted,
                had_proposal=had_proposal,
                budget=budget,
            )
        )
        self._expect(lane, link, budget)

    def _open(self, session: Session) -> None:
        times, rounds = self._setbacks.get(session.session_id, (0, 0))
        if rounds:
            self._setbacks[session.session_id] = (times, rounds - 1)
            return
        lane = self._choose()
        if lane is None or session.drafts_allowed(self._max_context) == 0:
            return
        if not (session.captured or frozenset()).issuperset(lane.port.facts.feature_layers):
            self._recompute(session)
            return
        epoch = self._epochs.get(session.session_id, 0) + 1
        self._epochs[session.session_id] = epoch
        if epoch > 1:
            session.stats.reopened += 1
            self.counters.reopened += 1
        link = Link(session, epoch)
        lane.links[session.session_id] = link
        self._lane_of[session.session_id] = lane
        budget = self._round_budget(session, lane)
        wants_logits = lane.port.facts.wants_last_logits and session.last_logits is not None
        lane.outbox.open(
            drafter_pb2.OpenSession(
                key=session_key(session, epoch),
                token_ids=session.tokens,
                prompt_tokens=session.prompt_length,
                sampling=sampling_to_proto(session.request.sampling),
                speculation=speculation_to_proto(session.request.speculation),
                last_logits=lane.port.encode_plain(session.last_logits) if wants_logits else None,  # type: ignore[arg-type]
                budget=budget,
                request_id=session.request.request_id,
            )
        )
        rows = self._rows(lane, session, 0, session.base)
        lane.outbox.features(session_key(session, epoch), 0, rows, lane.port.encode)
        self._expect(lane, link, budget)

    def forget(self, session: Session, reason: int) -> None:
        """The session is over, or no longer on its lane."""
        lane = self._lane_of.get(session.session_id)
        if lane is not None:
            lane.outbox.end(
                drafter_pb2.EndSession(
                    key=session_key(session, lane.links[session.session_id].epoch),
                    reason=reason,  # type: ignore[arg-type]
                )
            )
            self._unlink(session.session_id)
        if reason != drafter_pb2.EndReason.END_REASON_MOVED:
            self._epochs.pop(session.session_id, None)
            self._setbacks.pop(session.session_id, None)

    def drop_lane_of(self, session: Session, why: str) -> None:
        """Something of the lane's own broke (a tensor could not be put on its carrier): cut it."""
        lane = self._lane_of.get(session.session_id)
        if lane is not None:
            lane.port.abandon(why)
            self.lane_down(lane.port.lane_id)

    def _unlink(self, session_id: int) -> None:
        lane = self._lane_of.pop(session_id, None)
        if lane is not None:
            lane.links.pop(session_id).session.proposal = None

    def _choose(self) -> Lane | None:
        """The lane with the fewest sessions among those that take new ones; lanes that keep up go
        first."""
        open_lanes = [lane for lane in self.lanes.values() if not lane.draining]
        return min(
            open_lanes,
            key=lambda lane: (lane.behind, len(lane.links), lane.port.lane_id),
            default=None,
        )

    def _rows(self, lane: Lane, session: Session, start: int, end: int) -> torch.Tensor:
        slots = torch.from_numpy(session.slots[start:end]).to(self._store.device)
        return self._store.read_features(lane.port.facts.feature_layers, slots)

    def _round_budget(self, session: Session, lane: Lane) -> drafter_pb2.RoundBudget:
        depth = min(session.drafts_allowed(self._max_context), lane.port.facts.max_block_size - 1)
        nodes = session.request.speculation.max_nodes
        return drafter_pb2.RoundBudget(
            want_proposal=depth > 0 and nodes > 0, max_nodes=nodes, max_depth=depth
        )

    def _expect(self, lane: Lane, link: Link, budget: drafter_pb2.RoundBudget) -> None:
        # The sequence the next flush will use; `flush` sets the time.
        link.asked = lane.outbox.sequence + 1 if budget.want_proposal else 0

    # -- flushing

    def flush(self, now: float, heard: float | None = None) -> None:
        """Send each lane what it has to be told: one message a step, more only for features that do
        not fit. `heard`: time up to which all answers have been taken in, if not `now`."""
        for lane in list(self.lanes.values()):
            waiting = lane.oldest_unacked_at
            silent = 0.0 if waiting is None else (now if heard is None else heard) - waiting
            if silent > self._lane_timeout:
                lane.port.abandon(f"no answer for {silent:.1f} s")
                self.lane_down(lane.port.lane_id)
                continue
            if not lane.outbox.pending or not lane.has_credit:
                continue
            lane.pause = max(0, lane.pause - 1)  # counted in rounds that were told
            first = lane.outbox.sequence + 1
            for request in lane.outbox.take():
                lane.port.send(request)
                lane.sent_at.append((request.sequence, now))
            if lane.oldest_unacked_at is None:
                lane.oldest_unacked_at = now
            for link in lane.links.values():
                if link.asked >= first:
                    link.asked, link.asked_at = lane.outbox.sequence, now

    def check(self) -> None:
        """Raise RuntimeError if the books do not agree; called when the engine is idle."""
        linked = {session_id for lane in self.lanes.values() for session_id in lane.links}
        if linked != set(self._lane_of):
            raise RuntimeError(
                f"links {sorted(linked)} != lanes of sessions {sorted(self._lane_of)}"
            )
