"""The drafters from the engine's side: what has been told, what is awaited.

Knows: the messages of a step, epochs and bases, credits, when an answer is overdue. Pure: hears of
lanes and responses through method calls with the time as an argument, asks its `Planner` what is
wanted, and talks through `LanePort`. Does not know: how a session finds its lane (`places`),
sockets, the model, sampling, what pays.

The verifier is the only truth: a proposal counts only if session, epoch and base are the present
ones; everything else is dropped and counted. A lane that misses its budget is not waited for again
until it has caught up. A session of which nothing is wanted is told of in one message for many
rounds, and opened only when something is: its features stay with the verifier meanwhile, so the
drafter misses none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from draftwire.meters import STEP_S, Distribution
from draftwire.v1 import drafter_pb2
from draftwire_kernels.tree import TreeError
from verifier_service.budget import Wish
from verifier_service.cache import PagedStore
from verifier_service.lane import Lane, LanePort
from verifier_service.messages import (
    checked_proposal,
    opening,
    outcome,
    round_budget,
    session_key,
)
from verifier_service.outbox import Outbox
from verifier_service.places import Places
from verifier_service.session import BlockSizeReason, Session
from verifier_service.waiting import Awaited

Fault = drafter_pb2.FaultKind


@dataclass(slots=True)
class Counters:
    """What went other than planned, by kind."""

    stale: int = 0
    malformed: int = 0
    late: int = 0
    reopened: int = 0
    faults: dict[int, int] = field(default_factory=dict)
    round_trips: Distribution = field(default_factory=lambda: Distribution(STEP_S))


class Planner(Protocol):
    """Says what is wanted of a lane."""

    def wish(self, session: Session, lane: Lane) -> Wish | None:
        """What to ask for in the name of `session`; None: nothing."""


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
        planner: Planner,
        recompute: Callable[[Session], None],
        capture: Callable[[int], None],
    ) -> None:
        self.counters = Counters()
        self._places = Places()
        self.lanes = self._places.lanes
        self._store = store
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._longest_wait = longest_wait
        self._lane_timeout = lane_timeout
        self._planner = planner
        self._recompute = recompute
        self._capture = capture

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
        self._places.remove(lane_id)

    def lane_draining(self, lane_id: int) -> None:
        """A drafter is going away: its sessions move at the end of their next round."""
        if lane := self.lanes.get(lane_id):
            lane.draining = True

    def response(self, lane_id: int, message: drafter_pb2.StepResponse, now: float) -> None:
        """Take in what a drafter said."""
        lane = self.lanes.get(lane_id)
        if lane is None:
            return
        round_trip = lane.acknowledged(message.ack_sequence, now)
        if round_trip is not None:
            self.counters.round_trips.add(round_trip)
        lane.outbox.responses_seen = message.sequence
        lane.model_time = message.model_time.seconds + 1e-9 * message.model_time.nanos
        for proposal in message.proposals:
            self._take_proposal(lane, proposal)
        for fault in message.faults:
            self._take_fault(lane, fault)
        for link in lane.links.values():
            if link.asked and link.asked <= lane.acked:
                link.asked = 0  # answered, without a proposal
                link.session.why_plain = BlockSizeReason.BLOCK_SIZE_REASON_EMPTY
        # A step may have begun, and told the lane more, while this answer was on its way: one
        # message behind is up to date.
        if lane.acked >= lane.outbox.sequence - 1:
            lane.behind = False

    def _take_proposal(self, lane: Lane, message: drafter_pb2.Proposal) -> None:
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
            link.asked = 0
            lane.misses = 0
        self._places.drafted(message.key.session_id)
        link.session.why_plain = BlockSizeReason.BLOCK_SIZE_REASON_EMPTY
        try:
            link.session.proposal = checked_proposal(
                link, message, self._vocab_size, self._max_context, lane.port.facts.max_block_size
            )
        except TreeError:
            self.counters.malformed += 1
            link.session.proposal = None

    def _take_fault(self, lane: Lane, fault: drafter_pb2.SessionFault) -> None:
        self.counters.faults[fault.kind] = self.counters.faults.get(fault.kind, 0) + 1
        link = lane.links.get(fault.key.session_id)
        if link is None or fault.key.epoch not in (0, link.epoch):
            return
        no_room = fault.kind == Fault.FAULT_KIND_NO_ROOM
        self._places.set_back(fault.key.session_id, no_room=no_room)

    # -- waiting

    def awaited(self, running: Iterable[Session]) -> list[Awaited]:
        """The proposals on their way that may be waited for: not from a lane that is behind, nor
        what was not asked yet for want of credits."""
        found = []
        for session in running:
            lane = self._places.lane_of(session)
            if lane is None or lane.behind or lane.pause or not session.at_anchor:
                continue
            link = lane.links[session.session_id]
            if 0 < link.asked <= lane.outbox.sequence:
                rows = lane.rows_asked(link.asked)
                found.append(
                    Awaited(
                        session.session_id,
                        lane.port.lane_id,
                        link.asked_at + lane.expected(rows),
                        link.asked_at + lane.longest(rows, self._longest_wait),
                        link.gain,
                        link.nodes,
                        not session.request.speculation.adaptive,
                    )
                )
        return found

    def give_up(self, running: Iterable[Session], now: float) -> None:
        """Lanes with an overdue answer are behind; waited for again once they caught up, less often
        each time."""
        late = set()
        for item in self.awaited(running):
            if item.overdue <= now:
                self.counters.late += 1
                late.add(item.lane)
        for lane_id in late:
            self.lanes[lane_id].missed()

    def step_begins(self, now: float) -> None:
        """A target step begins; what is on its way is not waited for while it runs."""
        for lane in self.lanes.values():
            lane.passed(now)

    # -- telling

    def lane_for(self, session: Session) -> Lane | None:
        """The lane a session is on, or the one it would be opened on."""
        return self._places.lane_for(session)

    def tell(self, session: Session, previous_base: int, accepted: int, had_proposal: bool) -> None:
        """A round of `session` is committed and it goes on: report the outcome, or open the session
        on a lane, if anything is wanted or too much is untold."""
        session.proposal = None
        session.why_plain = BlockSizeReason.BLOCK_SIZE_REASON_NO_DRAFTER
        if not session.request.speculation.enabled:
            return
        lane = self._places.lane_of(session)
        if lane is not None and lane.draining and self._places.choose() is not None:
            self.forget(session, drafter_pb2.EndReason.END_REASON_MOVED)
            lane = None
        if lane is None:
            self._open(session)
            return
        lane.told = True
        link = lane.links[session.session_id]
        wish = self._wish(session, lane)
        untold = session.base - link.told
        if wish is None and not had_proposal and untold < lane.most_untold:
            link.asked = 0
            return
        rows = self._rows(lane, session, link.told, session.base)
        features = lane.port.encode(rows)
        lane.row_bytes = features.ByteSize() // max(1, len(rows))
        depth = self._depth(session, lane)
        budget = round_budget(wish, depth)
        lane.outbox.outcome(
            outcome(link, features, budget, accepted=accepted, had_proposal=had_proposal)
        )
        link.told = session.base
        link.expect(wish, lane.outbox.sequence + 1, depth)

    def _open(self, session: Session) -> None:
        if self._places.stays_plain(session.session_id):
            return
        lane = self._places.choose()
        if lane is None:
            return
        lane.told = True
        wish = self._wish(session, lane)
        if wish is None:
            return
        if not (session.captured or frozenset()).issuperset(lane.port.facts.feature_layers):
            self._recompute(session)
            return
        link = self._places.take(session, lane)
        if link.epoch > 1:
            session.stats.reopened += 1
            self.counters.reopened += 1
        logits = None
        if lane.port.facts.wants_last_logits and session.last_logits is not None:
            logits = lane.port.encode_plain(session.last_logits)
        depth = self._depth(session, lane)
        lane.outbox.open(opening(link, logits, round_budget(wish, depth)))
        rows = self._rows(lane, session, 0, session.base)
        lane.outbox.features(session_key(session, link.epoch), 0, rows, lane.port.encode)
        link.expect(wish, lane.outbox.sequence + 1, depth)

    def forget(self, session: Session, reason: int) -> None:
        """The session is over, or no longer on its lane."""
        lane = self._places.lane_of(session)
        if lane is not None:
            lane.outbox.end(
                drafter_pb2.EndSession(
                    key=session_key(session, lane.links[session.session_id].epoch),
                    reason=reason,  # type: ignore[arg-type]
                )
            )
            self._places.leave(session.session_id)
        if reason != drafter_pb2.EndReason.END_REASON_MOVED:
            self._places.forget(session.session_id)

    def drop_lane_of(self, session: Session, why: str) -> None:
        """Something of the lane's own broke (a tensor could not be put on its carrier): cut it."""
        lane = self._places.lane_of(session)
        if lane is not None:
            lane.port.abandon(why)
            self.lane_down(lane.port.lane_id)

    def _rows(self, lane: Lane, session: Session, start: int, end: int) -> torch.Tensor:
        slots = torch.from_numpy(session.slots[start:end]).to(self._store.device)
        return self._store.read_features(lane.port.facts.feature_layers, slots)

    def _wish(self, session: Session, lane: Lane) -> Wish | None:
        """What the planner wants; without a wish, the reason for the plain round is noted."""
        depth = self._depth(session, lane)
        wish = self._planner.wish(session, lane) if depth > 0 else None
        if wish is None:
            session.why_plain = (
                BlockSizeReason.BLOCK_SIZE_REASON_NOT_WORTH
                if depth > 0
                else session.limit_reason(self._max_context)
            )
        return wish

    def _depth(self, session: Session, lane: Lane) -> int:
        return min(session.drafts_allowed(self._max_context), lane.port.facts.max_block_size - 1)

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
            if lane.told:
                lane.pause, lane.told = max(0, lane.pause - 1), False  # counted in rounds
            if lane.outbox.pending and lane.has_credit:
                lane.send(now)

    def check(self) -> None:
        """Raise RuntimeError if the books do not agree; called when the engine is idle."""
        self._places.check()
