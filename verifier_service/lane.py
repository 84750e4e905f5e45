"""One drafter as the engine sees it: what the handshake settled, who is on it, what it owes, how
long its answers take.

Knows: the data of a lane, what it is once a message is sent, answered or overdue. Does not know:
what is said on it and when (`lanes`), or sockets (`port`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from draftwire.v1 import drafter_pb2, types_pb2
from verifier_service.budget import Wish
from verifier_service.costs import DraftCosts
from verifier_service.outbox import Outbox
from verifier_service.session import BlockSizeReason, Session

_SMOOTHING = 0.2
_UNTOLD = 32  # rounds of which a drafter need not hear until something is wanted of it


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """What the handshake settled."""

    target: str
    name: str
    weights_sha256: str
    trained: bool
    feature_layers: tuple[int, ...]
    block_size: int
    max_block_size: int
    max_context: int
    credits: int
    wants_last_logits: bool
    max_message_bytes: int
    predicted_block_sizes: tuple[int, ...] = ()

    @property
    def usual_block_size(self) -> int:
        """The largest block it drafts without being asked for a size."""
        return min(self.max_block_size, max(self.block_size, *self.predicted_block_sizes, 2))


class LanePort(Protocol):
    """The lane's transport, as the engine may use it from its own thread."""

    lane_id: int
    facts: LaneFacts

    def encode(self, rows: torch.Tensor) -> types_pb2.Tensor:
        """Feature rows as the drafter wants them: fused or raw, in its dtype, by the carrier agreed
        on."""

    def encode_plain(self, tensor: torch.Tensor) -> types_pb2.Tensor:
        """A tensor as it is."""

    def send(self, request: drafter_pb2.StepRequest) -> None:
        """Queue a message; never blocks."""

    def acknowledge(self, sequence: int) -> None:
        """All messages up to `sequence` have been taken in."""

    def abandon(self, why: str) -> None:
        """Drop the stream; the pool connects again."""


@dataclass(slots=True)
class Link:
    """A session's place on a lane."""

    session: Session
    epoch: int
    told: int  # position of the anchor that the drafter knows of
    asked: int = 0  # sequence of the StepRequest that asked for the proposal awaited; 0: none is
    asked_at: float = 0.0
    asked_depth: int = 0  # longest path asked for
    gain: float = 0.0  # accepted tokens that are expected of it
    nodes: float = 0.0  # that are expected to be verified
    limited_by: int = 0  # BlockSizeReason of the depth asked for

    def expect(self, wish: Wish | None, sequence: int, depth: int) -> None:
        """What is wished for, None: nothing, is asked for in message `sequence`, whose time `send`
        sets; `depth`: the longest path that could be asked for."""
        if wish is None:
            self.asked = 0
            return
        self.asked = sequence
        self.asked_depth, self.nodes, self.gain = wish.depth, wish.verified, wish.gain
        shorter = wish.depth < depth
        self.limited_by = BlockSizeReason.BLOCK_SIZE_REASON_SURVIVAL if shorter else 0


@dataclass(slots=True)
class Sent:
    """A message that is not acknowledged: when it went, how many rows the drafter was asked to
    draft (anchors included; 0 in one that only tells), whether sessions began in it, and when a
    step was begun without waiting for its answer any longer."""

    sequence: int
    at: float
    rows: int
    opening: bool
    passed_at: float | None = None


@dataclass(slots=True)
class Lane:
    """One drafter, as the engine sees it."""

    port: LanePort
    outbox: Outbox
    links: dict[int, Link] = field(default_factory=dict)
    acked: int = 0
    responses: int = 0
    oldest_unacked_at: float | None = None
    sent: deque[Sent] = field(default_factory=deque)
    costs: DraftCosts = field(default_factory=DraftCosts)
    spread: float | None = None  # seconds by which answers miss what is expected, on average
    behind: bool = False
    misses: int = 0
    pause: int = 0  # rounds not to wait for, after repeated misses
    told: bool = False  # whether a round ended since the pause was last counted down
    round_trip: float | None = None  # seconds; of late, with whatever was asked
    row_bytes: int = 0  # of a feature row as sent
    model_time: float = 0.0
    draining: bool = False

    @property
    def has_credit(self) -> bool:
        return self.outbox.sequence - self.acked < self.port.facts.credits

    @property
    def most_untold(self) -> int:
        """Rounds that may be told of later: their features have to fit one message."""
        limit = self.port.facts.max_message_bytes // 8
        return max(1, min(_UNTOLD, limit // max(1, self.row_bytes)))

    def send(self, now: float) -> None:
        """Send what is pending; links that ask for something in it are asked now."""
        first = self.outbox.sequence + 1
        requests = self.outbox.take()
        asked = [link for link in self.links.values() if link.asked >= first]
        for link in asked:
            link.asked, link.asked_at = self.outbox.sequence, now
        for request in requests:
            self.port.send(request)
            last = request.sequence == self.outbox.sequence
            rows = sum(1 + link.asked_depth for link in asked) if last else 0
            opening = any(r.opens for r in requests)
            self.sent.append(Sent(request.sequence, now, rows, opening))
        if self.oldest_unacked_at is None:
            self.oldest_unacked_at = now

    def rows_asked(self, sequence: int) -> int:
        """Rows that the message asked for."""
        return next((sent.rows for sent in self.sent if sent.sequence == sequence), 1)

    def acknowledged(self, sequence: int, now: float) -> float | None:
        """The drafter took in all messages up to `sequence`. Returns the seconds since the last of
        them was sent, if it is newly taken in."""
        round_trip = None
        self.responses += 1
        self.acked = max(self.acked, min(sequence, self.outbox.sequence))
        self.port.acknowledge(self.acked)
        while self.sent and self.sent[0].sequence <= self.acked:
            sent = self.sent.popleft()
            if sent.sequence == self.acked:
                self.answered(sent, now)
                round_trip = now - sent.at
        self.oldest_unacked_at = None if self.acked == self.outbox.sequence else now
        return round_trip

    def passed(self, now: float) -> None:
        """A step begins without what is on its way."""
        for sent in self.sent:
            if sent.passed_at is None:
                sent.passed_at = now

    def missed(self) -> None:
        """An answer is overdue: the lane is behind; waited for again once it caught up, less often
        each time."""
        self.misses += 1
        self.pause = 2 ** min(self.misses - 1, 6) - 1
        self.behind = True

    def answered(self, sent: Sent, now: float) -> None:
        """Take the time of an answer. Late ones count too, else a lane that became slow would be
        waited for in vain for ever."""
        taken = now - sent.at
        known = self.round_trip
        self.round_trip = taken if known is None else known + _SMOOTHING * (taken - known)
        if not sent.rows:
            return
        if self.costs.known and sent.passed_at is not None:
            # A draft beside a step may be slow because of it: how long the answer would have taken
            # is known only to be at least as long as was waited, and no longer than it took.
            taken = min(taken, max(self.expected(sent.rows), sent.passed_at - sent.at))
        missed = abs(taken - self.expected(sent.rows)) if self.costs.known else taken / 2
        self.spread = (
            missed if self.spread is None else self.spread + _SMOOTHING * (missed - self.spread)
        )
        clean = not sent.opening and sent.passed_at is None
        self.costs.observe(sent.rows, 1e3 * taken, clean=clean)

    def expected(self, rows: int) -> float:
        """Seconds from asking for `rows` rows to the answer, on average."""
        return self.costs.ms(rows) / 1e3

    def longest(self, rows: int, limit: float) -> float:
        """Seconds after which the answer is overdue: four mean deviations past its time, as TCP's
        retransmission timer has it (RFC 6298); and no less than as long again as it takes anyway,
        since giving up wastes a draft that took so long. At most `limit`, and that while nothing
        is known."""
        if self.spread is None:
            return limit
        expected = self.expected(rows)
        return min(limit, expected + max(4 * self.spread, expected))
