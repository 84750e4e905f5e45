"""Counters of the drafter, for GetInfo and logs. Does not know who reads them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from drafter_service.messages import FaultKind
from drafter_service.tree import Part


@dataclass(slots=True)
class Counters:
    """Written by the engine thread only; readers may see a step half counted, never a wrong
    number.
    """

    steps: int = 0
    proposals: int = 0
    empty_proposals: int = 0
    opened: int = 0
    evicted: int = 0
    stale: int = 0
    feature_rows: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    model_ns: int = 0
    nodes: Counter[Part] = field(default_factory=Counter)
    faults: Counter[FaultKind] = field(default_factory=Counter)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts a round, over all rounds with a proposal; 0 before the first."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else 0.0
