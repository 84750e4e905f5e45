"""What is remembered of drafters and sessions, to judge what drafts are worth.

Knows: late proposals as survivals by depth, trust in claims, probes. Pure. Does not know: costs of
steps, messages, which decision follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verifier_service.budget import Floats, Ints, Prober, Wish
from verifier_service.survival import SessionTrust, Trust

_SESSION_MEMORY, _DRAFTER_MEMORY = 4, 8  # proposals
_HOPEFUL = 0.75  # chance of each token of a drafter that nothing is known of
_REACH = 4  # tokens that a path cut off at the depth asked for is imagined to go on


@dataclass(frozen=True, slots=True)
class Memory:
    """A late proposal: survival and depth (1 for children of the anchor) of its nodes."""

    survivals: Floats
    depths: Ints


def remember(survivals: Floats, depths: Sequence[int], asked_depth: int) -> Memory:
    """A proposal as an example for the next ones. What lies beyond the longest path asked for is
    imagined to go on as the path came there, or no length could ever be found too short."""
    at = np.asarray(depths, dtype=np.int64)
    deepest = int(at.max(initial=0))
    if not deepest or deepest < asked_depth:
        return Memory(survivals, at)
    last = float(survivals[at == deepest].max())
    further = np.arange(1, _REACH + 1)
    imagined = last * last ** (further / deepest)
    return Memory(np.concatenate([survivals, imagined]), np.concatenate([at, deepest + further]))


def hopeful(depth: int) -> Memory:
    """The example where nothing is known: good enough to be tried."""
    at = np.arange(1, max(1, min(depth, 8)) + 1)
    return Memory(np.power(_HOPEFUL, at.astype(np.float64)), at)


@dataclass(slots=True)
class DrafterMind:
    """What one drafter's proposals were worth, over all sessions; kept when its lane is lost."""

    trust: Trust = field(default_factory=Trust)
    late: dict[int, deque[Memory]] = field(default_factory=dict)  # by temperature class
    prober: Prober = field(default_factory=Prober)

    def add(self, warmth: int, memory: Memory) -> None:
        """One more proposal of a temperature class."""
        self.late.setdefault(warmth, deque(maxlen=_DRAFTER_MEMORY)).append(memory)

    def forget(self, warmth: int, kept: float) -> None:
        """Keep the share `kept` of what claims were worth, and no example."""
        self.trust.fade(kept)
        self.late.pop(warmth, None)


@dataclass(slots=True)
class Mind:
    """What one session's proposals were worth, and what is asked for it."""

    trust: SessionTrust = field(default_factory=SessionTrust)
    late: deque[Memory] = field(default_factory=lambda: deque(maxlen=_SESSION_MEMORY))
    drafter: DrafterMind = field(default_factory=DrafterMind)  # asked last
    wish: Wish | None = None
    decided: bool = False  # whether a plan has looked at it
    probe: int = 0  # rounds left of a probe
    plain_rounds: int = 0  # since a proposal of it was last verified

    def probed(self) -> None:
        """A round of a probe is over; with the last one its wish is, too."""
        if self.probe:
            self.probe -= 1
            if not self.probe:
                self.wish = None

    def examples(self, warmth: int, depth: int) -> list[Memory]:
        """Its late proposals, filled up with the drafter's until there are enough."""
        missing = _SESSION_MEMORY - len(self.late)
        others = list(self.drafter.late.get(warmth, ()))
        if not others and self.drafter.late:
            # Another temperature's examples are better than none: those there are most of.
            others = list(sorted(self.drafter.late.values(), key=len)[-1])
        found = [*self.late, *others[-missing:]] if missing else list(self.late)
        return found or [hopeful(depth)]
