"""Acceptance statistics: of one session, or of many together.

Knows: the counts, and the messages that carry them. Pure. Does not know: sessions, or when a round
is booked (`session`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from draftwire.v1 import types_pb2

_UINT32, _UINT64 = 2**32 - 1, 2**64 - 1


@dataclass(slots=True)
class Statistics:
    """What speculation did; drafted = accepted + rejected + discarded."""

    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    discarded: int = 0
    stale: int = 0
    reopened: int = 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    drafted_at: Counter[int] = field(default_factory=Counter)
    block_sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    drafted_parts: Counter[int] = field(default_factory=Counter)
    accepted_parts: Counter[int] = field(default_factory=Counter)

    def add(self, other: Statistics) -> None:
        """Add the counts of another."""
        for name in (
            "rounds",
            "plain_rounds",
            "drafted",
            "accepted",
            "discarded",
            "stale",
            "reopened",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("accepted_at", "drafted_at", "block_sizes", "drafted_parts", "accepted_parts"):
            getattr(self, name).update(getattr(other, name))

    def to_proto(self) -> types_pb2.AcceptanceStats:
        """The message clients and trailers carry; counts past its width stay at the largest."""
        return types_pb2.AcceptanceStats(**self._fields(_UINT32))

    def to_totals(self) -> types_pb2.AcceptanceTotals:
        """The same of many requests."""
        return types_pb2.AcceptanceTotals(**self._fields(_UINT64))

    def _fields(self, most: int) -> dict[str, Any]:
        """What both messages have, counts of at most `most`."""

        def fit(count: int) -> int:
            return min(count, most)

        depth = max(self.drafted_at, default=-1) + 1
        return {
            "rounds": fit(self.rounds),
            "plain_rounds": fit(self.plain_rounds),
            "drafted_tokens": fit(self.drafted),
            "accepted_tokens": fit(self.accepted),
            "rejected_tokens": fit(self.drafted - self.accepted - self.discarded),
            "discarded_tokens": fit(self.discarded),
            "accepted_per_position": [fit(self.accepted_at[d]) for d in range(depth)],
            "drafted_per_position": [fit(self.drafted_at[d]) for d in range(depth)],
            "stale_proposals": fit(self.stale),
            "reopened": fit(self.reopened),
            "mean_acceptance_length": 1 + self.accepted / self.rounds if self.rounds else 1.0,
            "block_sizes": [
                {"block_size": size, "reason": reason, "rounds": fit(count)}
                for (size, reason), count in sorted(self.block_sizes.items())
            ],
            "accepted_per_part": [
                {"part": part, "drafted": fit(count), "accepted": fit(self.accepted_parts[part])}
                for part, count in sorted(self.drafted_parts.items())
            ],
        }
