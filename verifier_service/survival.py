"""How likely each drafted token is to be accepted: what the drafter claims, corrected by what its
claims were worth so far.

Knows: claims (log-probability of a node given its parent), parts, depths, temperature classes, and
which nodes the target chose. Pure. Does not know: costs, lanes, when anything is drafted.

The correction is a chain of shrunken ratios, the coarse before the fine: accepted over expected,
where expected is what the steps before it made of the claims. Each ratio starts at one and moves by
(accepted + k) / (expected + k), the posterior mean of a rate under a Gamma(k, k) prior; what is old
fades. Only children of nodes that the target reached say anything, so only they are counted; then a
tree that was cut by its claims biases nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from draftwire_kernels.sampling import GREEDY_BELOW

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

_LEAST, _MOST = 1e-4, 0.98  # no claim is believed to be certain, or impossible
_UNCLAIMED = 0.5  # taken where the drafter says nothing
_PARTS = 6  # values of DraftPart
_DEPTHS = 16  # deeper nodes count as the last
_BINS = np.log(np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9]))
# k: accepted tokens that a ratio of one is worth. A fine ratio speaks of what the coarse ones have
# been told already, so it needs more of it.
_COARSE, _FINE, _SESSION = 6.0, 20.0, 8.0
_LANE_FADE, _SESSION_FADE = 1 / 96, 1 / 48


def temperature_class(temperature: float) -> int:
    """0 greedy, 1 to 0.8, 2 to 1.2, 3 above: acceptance differs by temperature more than by
    anything else that is known beforehand."""
    # Below the least temperature the target takes the largest logit.
    return (
        0
        if temperature < GREEDY_BELOW
        else 1
        if temperature <= 0.8
        else 2
        if temperature <= 1.2
        else 3
    )


def claimed(log_probs: Sequence[float], count: int) -> Floats:
    """Claims as chances [count], within bounds. Missing ones, and such as are no numbers, say
    nothing."""
    if len(log_probs) != count:
        return np.full(count, _UNCLAIMED)
    values = np.asarray(log_probs, dtype=np.float64)
    chances = np.exp(np.minimum(values, 0.0, where=~np.isnan(values), out=np.zeros(count)))
    chances[np.isnan(values)] = _UNCLAIMED
    return np.clip(chances, _LEAST, _MOST)


def survival(parents: Sequence[int], chances: Floats) -> Floats:
    """Chance that the target comes to each node: the product of chances along its path. Never more
    than its parent's, so nodes in falling order keep parents before children."""
    reached = np.empty(len(parents))
    for node, parent in enumerate(parents):
        reached[node] = chances[node] * (reached[parent] if parent >= 0 else 1.0)
    return reached


@dataclass(frozen=True, slots=True)
class Nodes:
    """What is known of the nodes of a tree before it is verified; all arrays [nodes]."""

    claims: Floats
    parts: Ints
    depths: Ints  # 0 for children of the anchor
    warmth: int  # of `temperature_class`

    def __len__(self) -> int:
        return len(self.claims)

    def take(self, nodes: Sequence[int] | Ints) -> Nodes:
        """These nodes only."""
        index = np.asarray(nodes, dtype=np.int64)
        return Nodes(self.claims[index], self.parts[index], self.depths[index], self.warmth)


def nodes_of(
    log_probs: Sequence[float], parts: Sequence[int], depths: Sequence[int], temperature: float
) -> Nodes:
    """The nodes of a proposal; `parts` may be empty. `depths`: 0 for children of the anchor."""
    count = len(depths)
    kinds = np.asarray(parts if len(parts) == count else [0] * count, dtype=np.int64)
    return Nodes(
        claimed(log_probs, count),
        np.where((kinds >= 0) & (kinds < _PARTS), kinds, 0),
        np.minimum(np.asarray(depths, dtype=np.int64), _DEPTHS - 1),
        temperature_class(temperature),
    )


class _Ratios:
    """Accepted over expected in cells of some shape."""

    def __init__(self, shape: tuple[int, ...], weight: float, fade: float) -> None:
        self._expected = np.zeros(shape)
        self._accepted = np.zeros(shape)
        self._weight, self._fade = weight, fade

    def apply(self, chances: Floats, cells: tuple[Ints | int, ...]) -> Floats:
        ratio = (self._accepted[cells] + self._weight) / (self._expected[cells] + self._weight)
        corrected: Floats = np.clip(chances * ratio, _LEAST, _MOST)
        return corrected

    def learn(self, chances: Floats, cells: tuple[Ints | int, ...], taken: Floats) -> None:
        index = tuple(np.broadcast_to(cell, chances.shape) for cell in cells)
        np.multiply.at(self._expected, index, 1 - self._fade)
        np.multiply.at(self._accepted, index, 1 - self._fade)
        np.add.at(self._expected, index, chances)
        np.add.at(self._accepted, index, taken)

    def fade(self, share: float) -> None:
        """Keep `share` of what was learnt."""
        self._expected *= share
        self._accepted *= share


class SessionTrust:
    """What claims were worth in one session, by part."""

    def __init__(self) -> None:
        self.ratios = _Ratios((_PARTS,), _SESSION, _SESSION_FADE)


@dataclass(slots=True)
class Trust:
    """What one drafter's claims were worth, over all sessions: by temperature class; then by part
    and size of the claim; then by part and depth. `rounds`: trees it has learnt from."""

    rounds: int = 0
    _warmth: _Ratios = field(default_factory=lambda: _Ratios((4,), _COARSE, _LANE_FADE))
    _claim: _Ratios = field(
        default_factory=lambda: _Ratios((4, _PARTS, len(_BINS) + 1), _FINE, _LANE_FADE)
    )
    _depth: _Ratios = field(
        default_factory=lambda: _Ratios((4, _PARTS, _DEPTHS), _FINE, _LANE_FADE)
    )

    def chances(self, nodes: Nodes, session: SessionTrust) -> Floats:
        """Corrected chance of each node given its parent, float [nodes]."""
        chances = nodes.claims
        for ratios, cells in self._chain(nodes, session):
            chances = ratios.apply(chances, cells)
        return chances

    def learn(self, nodes: Nodes, session: SessionTrust, taken: Sequence[bool]) -> None:
        """Children of nodes that were reached: which of them the target took."""
        self.rounds += 1
        if not len(nodes):
            return
        found, chances = np.asarray(taken, dtype=np.float64), nodes.claims
        for ratios, cells in self._chain(nodes, session):
            ratios.learn(chances, cells, found)
            # What the coarse ratio has just explained is not explained again by the finer ones.
            chances = ratios.apply(chances, cells)

    def fade(self, share: float) -> None:
        """Keep `share` of what was learnt."""
        for ratios in (self._warmth, self._claim, self._depth):
            ratios.fade(share)

    def _chain(
        self, nodes: Nodes, session: SessionTrust
    ) -> tuple[tuple[_Ratios, tuple[Ints | int, ...]], ...]:
        bins = np.searchsorted(_BINS, np.log(nodes.claims))
        return (
            (self._warmth, (nodes.warmth,)),
            (self._claim, (nodes.warmth, nodes.parts, bins)),
            (self._depth, (nodes.warmth, nodes.parts, nodes.depths)),
            (session.ratios, (nodes.parts,)),
        )


def reached_children(parents: Sequence[int], path: Sequence[int]) -> tuple[list[int], list[bool]]:
    """Nodes whose parent the target reached, and whether it took each. `path`: accepted nodes."""
    on_path, reached = set(path), {-1, *path}
    children = [node for node, parent in enumerate(parents) if parent in reached]
    return children, [node in on_path for node in children]
