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

_SESSION_MEMORY, _DRAFTER_MEMORY = 8, 32  # proposals
# Proposals of a session that what its drafter gave others counts as: gains are so unequal, many
# rounds with none and some with a whole block, that the mean of a few says little.
_PRIOR = 6
# Proposals that were never made but are counted in as good ones: a drafter is not given up for the
# bad luck of its first few. They count for less the more real ones there were.
_BENEFIT = 1.5
_BINS = 4  # kinds of nodes that are kept apart at each depth, in a drafter's summary
_HOPEFUL = 0.75  # chance of each token of a drafter that nothing is known of
_REACH = 4  # tokens that a path cut off at the depth asked for is imagined to go on


@dataclass(frozen=True, slots=True)
class Memory:
    """A late proposal: survival and depth (1 for children of the anchor) of its nodes. Or the mean
    of many: then `weights` says of how many nodes of a proposal each stands for."""

    survivals: Floats
    depths: Ints
    weights: Floats

    @property
    def nodes(self) -> float:
        """How many there are in a proposal."""
        return float(self.weights.sum())

    @property
    def gain(self) -> float:
        """Expected accepted tokens of a proposal."""
        return float(self.survivals @ self.weights)


def single(survivals: Floats, depths: Ints) -> Memory:
    """One proposal."""
    return Memory(survivals, depths, np.ones(len(survivals)))


def mean(memories: Sequence[Memory], shares: Sequence[float]) -> Memory:
    """Of several, each with its share."""
    return Memory(
        np.concatenate([memory.survivals for memory in memories]),
        np.concatenate([memory.depths for memory in memories]),
        np.concatenate([m.weights * share for m, share in zip(memories, shares, strict=True)]),
    )


def summary(memories: Sequence[Memory]) -> Memory:
    """The mean of several in few nodes: at each depth, sorted by survival, neighbours are merged
    until `_BINS` are left."""
    whole = mean(memories, [1 / len(memories)] * len(memories))
    order = np.lexsort((-whole.survivals, whole.depths))
    depths, survivals, weights = whole.depths[order], whole.survivals[order], whole.weights[order]
    first = np.searchsorted(depths, depths)  # where its depth begins
    count = np.searchsorted(depths, depths, side="right") - first
    bins = depths * _BINS + (np.arange(len(depths)) - first) * _BINS // np.maximum(count, 1)
    _, starts = np.unique(bins, return_index=True)
    heavy = np.add.reduceat(weights, starts)
    return Memory(np.add.reduceat(survivals * weights, starts) / heavy, depths[starts], heavy)


def remember(survivals: Floats, depths: Sequence[int], asked_depth: int) -> Memory:
    """A proposal as an example for the next ones. What lies beyond the longest path asked for is
    imagined to go on as the path came there, or no length could ever be found too short."""
    at = np.asarray(depths, dtype=np.int64)
    deepest = int(at.max(initial=0))
    if not deepest or deepest < asked_depth:
        return single(survivals, at)
    last = float(survivals[at == deepest].max())
    further = np.arange(1, _REACH + 1)
    imagined = last * last ** (further / deepest)
    return single(np.concatenate([survivals, imagined]), np.concatenate([at, deepest + further]))


def hopeful(depth: int) -> Memory:
    """The example where nothing is known: good enough to be tried."""
    at = np.arange(1, max(1, min(depth, 8)) + 1)
    return single(np.power(_HOPEFUL, at.astype(np.float64)), at)


@dataclass(slots=True)
class DrafterMind:
    """What one drafter's proposals were worth, over all sessions; kept when its lane is lost."""

    trust: Trust = field(default_factory=Trust)
    prober: Prober = field(default_factory=Prober)
    _late: dict[int, deque[Memory]] = field(default_factory=dict)  # by temperature class
    _seen: dict[int, int] = field(default_factory=dict)  # how many there were
    _summaries: dict[int, Memory] = field(default_factory=dict)

    def add(self, warmth: int, memory: Memory) -> None:
        """One more proposal of a temperature class."""
        self._late.setdefault(warmth, deque(maxlen=_DRAFTER_MEMORY)).append(memory)
        self._seen[warmth] = self._seen.get(warmth, 0) + 1
        self._summaries.pop(warmth, None)

    def forget(self, warmth: int, kept: float) -> None:
        """Keep the share `kept` of what claims were worth, and of the examples, the newest."""
        self.trust.fade(kept)
        late = self._late.get(warmth, deque())
        for _ in range(len(late) - int(kept * len(late))):
            late.popleft()
        if not late:
            self._late.pop(warmth, None)
        self._summaries.pop(warmth, None)

    def doubt(self, warmth: int) -> float:
        """Share of what is expected of it that it is given the benefit of the doubt for."""
        return _BENEFIT / (_BENEFIT + self._seen.get(warmth, 0))

    def usual(self, warmth: int) -> Memory | None:
        """What its proposals are like; None if there was none. Another temperature's are better
        than nothing: those there are most of."""
        if warmth not in self._late:
            if not self._late:
                return None
            warmth = max(self._late, key=lambda known: len(self._late[known]))
        if warmth not in self._summaries:
            self._summaries[warmth] = summary(self._late[warmth])
        return self._summaries[warmth]


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

    def outlook(self, warmth: int, depth: int) -> Memory:
        """What its next proposal may be like: its late ones, and its drafter's usual ones."""
        usual = self.drafter.usual(warmth)
        if usual is None:
            return hopeful(depth)
        doubt = self.drafter.doubt(warmth)
        each = (1 - doubt) / (len(self.late) + _PRIOR)
        shares = [each] * len(self.late) + [_PRIOR * each, doubt]
        return mean([*self.late, usual, hopeful(depth)], shares)
