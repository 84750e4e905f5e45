"""One drafter as the engine sees it: what the handshake settled, who is on it, what it owes.

Knows: the data of a lane. Does not know: what is done with it (`lanes`), or sockets (`port`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from draftwire.v1 import drafter_pb2, types_pb2
from verifier_service.outbox import Outbox
from verifier_service.session import Session


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
    asked: int = 0  # sequence of the StepRequest that asked for the proposal awaited; 0: none is
    asked_at: float = 0.0


@dataclass(slots=True)
class Lane:
    """One drafter, as the engine sees it."""

    port: LanePort
    outbox: Outbox
    links: dict[int, Link] = field(default_factory=dict)
    acked: int = 0
    responses: int = 0
    oldest_unacked_at: float | None = None
    sent_at: deque[tuple[int, float]] = field(
        default_factory=deque
    )  # (sequence, time) of messages not acknowledged
    behind: bool = False
    misses: int = 0
    pause: int = 0  # rounds not to wait for, after repeated misses
    round_trip: float | None = None
    model_time: float = 0.0
    draining: bool = False

    @property
    def has_credit(self) -> bool:
        return self.outbox.sequence - self.acked < self.port.facts.credits
