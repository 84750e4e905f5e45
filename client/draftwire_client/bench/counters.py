"""Acceptance from two places: what the answers said, and what the server counted meanwhile.

Knows how both are compared and what a disagreement means. Does not know the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from draftwire_client.bench.measure import Record
from draftwire_client.bench.summary import total
from draftwire_client.types import Acceptance

_COUNTS = ("rounds", "plain_rounds", "drafted", "accepted", "rejected", "discarded")
_POSITIONS = ("accepted_per_position", "drafted_per_position")


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether the two sums are one. `unknown` answers ended without statistics."""

    agree: bool
    server: Acceptance
    answers: Acceptance
    unknown: int
    differences: tuple[str, ...]

    def keys(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "agree": self.agree,
            "differences": list(self.differences),
            "answers_without_statistics": self.unknown,
            "server": {name: getattr(self.server, name) for name in _COUNTS},
            "answers": {name: getattr(self.answers, name) for name in _COUNTS},
        }


def difference(before: Acceptance, after: Acceptance) -> Acceptance:
    """What was counted between two readings."""
    rounds, accepted = after.rounds - before.rounds, after.accepted - before.accepted
    return Acceptance(
        rounds=rounds,
        plain_rounds=after.plain_rounds - before.plain_rounds,
        drafted=after.drafted - before.drafted,
        accepted=accepted,
        rejected=after.rejected - before.rejected,
        discarded=after.discarded - before.discarded,
        accepted_per_position=_minus(after.accepted_per_position, before.accepted_per_position),
        drafted_per_position=_minus(after.drafted_per_position, before.drafted_per_position),
        mean_acceptance_length=1 + accepted / rounds if rounds > 0 else 0.0,
    )


def agreement(before: Acceptance, after: Acceptance, records: Sequence[Record]) -> Agreement:
    """The server's counts between two readings against the sum over the answers.

    They must be equal. Where an answer ended without statistics (its connection broke) the server
    may only have counted more. A server that also serves others, or was started anew, disagrees:
    its figures are not this run's.
    """
    server = difference(before, after)
    answers = total(record.acceptance for record in records)
    unknown = sum(r.acceptance is None and r.sent is not None for r in records)
    found = []
    for name in _COUNTS:
        ours, theirs = getattr(answers, name), getattr(server, name)
        if theirs < ours or (theirs > ours and not unknown):
            found.append(f"{name}: answers say {ours}, the server counted {theirs}")
    for name in _POSITIONS:
        ours, theirs = _trimmed(getattr(answers, name)), getattr(server, name)
        if ours != theirs and not unknown:
            found.append(f"{name}: answers say {list(ours)}, the server counted {list(theirs)}")
    return Agreement(not found, server, answers, unknown, tuple(found))


def _minus(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return _trimmed([a - b for a, b in zip_longest(after, before, fillvalue=0)])


def _trimmed(row: Sequence[int]) -> tuple[int, ...]:
    found = list(row)
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)
