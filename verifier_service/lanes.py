"""The drafters from the engine's side: which session is on which lane, what has been told, what is
awaited.

Knows: the messages of a step, epochs and bases, credits, when an answer is overdue. Pure: hears of
lanes and responses through method calls with the time as an argument, asks its `Planner` what is
wanted, and talks through `LanePort`. Does not know: sockets, the model, sampling, what pays.

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
from verifier_service.lane import Lane, LanePort, Link, Sent
from verifier_service.messages import (
    checked_proposal,
    sampling_to_proto,
    session_key,
    speculation_to_proto,
)
from verifier_service.outbox import Outbox
from verifier_service.session import BlockSizeReason, Session
from verifier_service.waiting import Awaited

Fault = drafter_pb2.FaultKind
_LONGEST_PAUSE = 64  # rounds
_UNTOLD = 32  # rounds of which a drafter need not hear until something is wanted of it


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
        self.lanes: dict[int, Lane] = {}
        self.counters = Counters()
        self._store = store
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._longest_wait = longest_wait
        self._lane_timeout = lane_timeout
        self._planner = planner
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
        while lane.sent and lane.sent[0].sequence <= lane.acked:
            sent = lane.sent.popleft()
            if sent.sequence == lane.acked:
                lane.answered(sent, now)
                self.counters.round_trips.add(now - sent.at)
        lane.outbox.responses_seen = message.sequence
        lane.oldest_unacked_at = None if lane.acked == lane.outbox.sequence else now
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
        self._setbacks.pop(message.key.session_id, None)
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
        times = self._setbacks.get(fault.key.session_id, (0, 0))[0] + 1
        rounds = (
            _LONGEST_PAUSE
            if fault.kind == Fault.FAULT_KIND_NO_ROOM
            else min(_LONGEST_PAUSE, 2 ** (times - 1) - 1)
        )
        self._setbacks[fault.key.session_id] = (times, rounds)
        self._unlink(fault.key.session_id)

    # -- waiting

    def awaited(self, running: Iterable[Session]) -> list[Awaited]:
        """The proposals on their way that may be waited for: not from a lane that is behind, nor
        what was not asked yet for want of credits."""
        found = []
        for session in running:
            lane = self._lane_of.get(session.session_id)
            if lane is None or lane.behind or lane.pause or not session.at_anchor:
                continue
            link = lane.links[session.session_id]
            if 0 < link.asked <= lane.outbox.sequence:
                rows = self._rows_asked(lane, link.asked)
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

    @staticmethod
    def _rows_asked(lane: Lane, sequence: int) -> int:
        return next((sent.rows for sent in lane.sent if sent.sequence == sequence), 1)

    def give_up(self, running: Iterable[Session], now: float) -> None:
        """Lanes with an overdue answer are behind; waited for again once they caught up, less often
        each time."""
        late = set()
        for item in self.awaited(running):
            if item.overdue <= now:
                self.counters.late += 1
                late.add(item.lane)
        for lane_id in late:
            lane = self.lanes[lane_id]
            lane.misses += 1
            lane.pause = 2 ** min(lane.misses - 1, 6) - 1
            lane.behind = True

    def step_begins(self, now: float) -> None:
        """A target step begins; what is on its way is not waited for while it runs."""
        for lane in self.lanes.values():
            for sent in lane.sent:
                if sent.passed_at is None:
                    sent.passed_at = now

    # -- telling

    def lane_for(self, session: Session) -> Lane | None:
        """The lane a session is on, or the one it would be opened on."""
        lane = self._lane_of.get(session.session_id)
        if lane is None and not self._setbacks.get(session.session_id, (0, 0))[1]:
            lane = self._choose()
        return lane

    def tell(self, session: Session, previous_base: int, accepted: int, had_proposal: bool) -> None:
        """A round of `session` is committed and it goes on: report the outcome, or open the session
        on a lane, if anything is wanted or too much is untold."""
        session.proposal = None
        session.why_plain = BlockSizeReason.BLOCK_SIZE_REASON_NO_DRAFTER
        if not session.request.speculation.enabled:
            return
        lane = self._lane_of.get(session.session_id)
        if lane is not None and lane.draining and self._choose() is not None:
            self.forget(session, drafter_pb2.EndReason.END_REASON_MOVED)
            lane = None
        if lane is None:
            self._open(session)
            return
        lane.told = True
        link = lane.links[session.session_id]
        wish = self._wish(session, lane)
        untold = session.base - link.told
        if wish is None and not had_proposal and untold < self._most_untold(lane):
            link.asked = 0
            return
        rows = self._rows(lane, session, link.told, session.base)
        features = lane.port.encode(rows)
        lane.row_bytes = features.ByteSize() // max(1, len(rows))
        lane.outbox.outcome(
            drafter_pb2.Outcome(
                key=session_key(session, link.epoch),
                previous_base=link.told,
                token_ids=session.tokens[link.told + 1 :],
                features=features,
                accepted=accepted,
                had_proposal=had_proposal,
                budget=self._round_budget(session, lane, wish),
            )
        )
        link.told = session.base
        self._expect(lane, link, wish)

    def _open(self, session: Session) -> None:
        times, rounds = self._setbacks.get(session.session_id, (0, 0))
        if rounds:
            self._setbacks[session.session_id] = (times, rounds - 1)
            return
        lane = self._choose()
        if lane is None:
            return
        lane.told = True
        wish = self._wish(session, lane)
        if wish is None:
            return
        if not (session.captured or frozenset()).issuperset(lane.port.facts.feature_layers):
            self._recompute(session)
            return
        epoch = self._epochs.get(session.session_id, 0) + 1
        self._epochs[session.session_id] = epoch
        if epoch > 1:
            session.stats.reopened += 1
            self.counters.reopened += 1
        link = Link(session, epoch, session.base)
        lane.links[session.session_id] = link
        self._lane_of[session.session_id] = lane
        wants_logits = lane.port.facts.wants_last_logits and session.last_logits is not None
        lane.outbox.open(
            drafter_pb2.OpenSession(
                key=session_key(session, epoch),
                token_ids=session.tokens,
                prompt_tokens=session.prompt_length,
                sampling=sampling_to_proto(session.request.sampling),
                speculation=speculation_to_proto(session.request.speculation),
                last_logits=lane.port.encode_plain(session.last_logits) if wants_logits else None,  # type: ignore[arg-type]
                budget=self._round_budget(session, lane, wish),
                request_id=session.request.request_id,
                traceparent=session.request.traceparent,
            )
        )
        rows = self._rows(lane, session, 0, session.base)
        lane.outbox.features(session_key(session, epoch), 0, rows, lane.port.encode)
        self._expect(lane, link, wish)

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

    @staticmethod
    def _most_untold(lane: Lane) -> int:
        """Rounds that may be told of later: their features have to fit one message."""
        limit = lane.port.facts.max_message_bytes // 8
        return max(1, min(_UNTOLD, limit // max(1, lane.row_bytes)))

    def _round_budget(
        self, session: Session, lane: Lane, wish: Wish | None
    ) -> drafter_pb2.RoundBudget:
        if wish is None:
            return drafter_pb2.RoundBudget(want_proposal=False)
        return drafter_pb2.RoundBudget(
            want_proposal=True,
            max_nodes=wish.nodes,
            max_depth=min(wish.depth, self._depth(session, lane)),
        )

    def _expect(self, lane: Lane, link: Link, wish: Wish | None) -> None:
        if wish is None:
            link.asked = 0
            return
        # The sequence the next flush will use; `flush` sets the time.
        link.asked = lane.outbox.sequence + 1
        link.asked_depth, link.nodes, link.gain = wish.depth, wish.verified, wish.gain
        shorter = wish.depth < self._depth(link.session, lane)
        link.limited_by = BlockSizeReason.BLOCK_SIZE_REASON_SURVIVAL if shorter else 0

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
            if not lane.outbox.pending or not lane.has_credit:
                continue
            first = lane.outbox.sequence + 1
            requests = lane.outbox.take()
            asked = [link for link in lane.links.values() if link.asked >= first]
            for link in asked:
                link.asked, link.asked_at = lane.outbox.sequence, now
            for request in requests:
                lane.port.send(request)
                last = request.sequence == lane.outbox.sequence
                rows = sum(1 + link.asked_depth for link in asked) if last else 0
                opening = any(r.opens for r in requests)
                lane.sent.append(Sent(request.sequence, now, rows, opening))
            if lane.oldest_unacked_at is None:
                lane.oldest_unacked_at = now

    def check(self) -> None:
        """Raise RuntimeError if the books do not agree; called when the engine is idle."""
        linked = {session_id for lane in self.lanes.values() for session_id in lane.links}
        if linked != set(self._lane_of):
            raise RuntimeError(
                f"links {sorted(linked)} != lanes of sessions {sorted(self._lane_of)}"
            )
