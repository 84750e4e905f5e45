"""The order of candidates: by the drafter's probabilities, the target's noise, and over branches.

Knows scores, noise and how a path through branches is ranked. Does not know trees, sessions or the
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from draftwire_kernels.noise import gumbel_rows

# The draft distribution is sharper than the target's temperature asks for: best ranking was
# measured at 0.6 to 0.8 of it.
DRAFT_TEMPERATURE = 0.8
# softmax(score / 1.5) of coupled scores comes closest to the rates at which the target takes each
# rank.
COUPLED_SPREAD = 1.5

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Ranked:
    """Candidates of each slot of one branch, best first, [slots, count], and the log of the
    estimated chance of each, float32.
    """

    ids: Ints
    log_chances: Floats


@dataclass(frozen=True, slots=True)
class RowDraws:
    """How each candidate row will be drawn from: `temperatures` [rows]; `coupled` bool [rows],
    whether the order uses the target's noise; `seeds` and `positions` of the noise, one a row
    (looked at in coupled rows only).
    """

    temperatures: Floats
    coupled: npt.NDArray[np.bool_]
    seeds: Sequence[int]
    positions: Sequence[int]


def rank(ids: Ints, logits: Floats, normaliser: Floats | None, draws: RowDraws) -> Ranked:
    """Order the candidates of all rows at once. ids, logits [rows, count], best first; normaliser
    [rows] or None.

    The order is log draft_probs at the draft temperature (up to a constant a row), plus, in coupled
    rows, the noise with which the target will draw at that position; at temperature 0 it is
    draft_probs.
    """
    greedy = draws.temperatures <= 0
    coupled = draws.coupled & ~greedy
    scale: Floats = np.where(greedy, 1, DRAFT_TEMPERATURE * draws.temperatures).astype(np.float32)
    scores: Floats = logits / scale[:, None]
    rows: list[int] = np.flatnonzero(coupled).tolist()
    if rows:
        seeds, positions = (
            [draws.seeds[row] for row in rows],
            [draws.positions[row] for row in rows],
        )
        scores[rows] += gumbel_rows(seeds, positions, torch.from_numpy(ids[rows])).numpy()
    spread: Floats = np.where(coupled, COUPLED_SPREAD, 1).astype(np.float32)
    flattened: Floats = scores / spread[:, None]
    total = _logsumexp(flattened)
    if normaliser is not None:
        total = np.where(greedy, normaliser, total)
    chances: Floats = flattened - total[:, None]
    order = np.argsort(-scores, axis=1, kind="stable")
    return Ranked(np.take_along_axis(ids, order, 1), np.take_along_axis(chances, order, 1))


class Ranker(Protocol):
    """Gives the ordered children of a path."""

    slots: int

    def root(self) -> object:
        """The state of the empty path."""

    def children(self, state: object, depth: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens, log chances and branches of the children at slot `depth`, best first."""

    def advance(self, state: object, depth: int, token: int) -> object:
        """The state after taking `token` at slot `depth`."""


class Single:
    """One branch: slots are independent, so all nodes of a depth share one list."""

    def __init__(self, ranked: Ranked, width: int) -> None:
        self.slots = ranked.ids.shape[0]
        # The child at rank r has r better siblings, so a tree of `width` nodes never looks past
        # that rank.
        self._ids: list[list[int]] = ranked.ids[:, :width].tolist()
        self._chances: list[list[float]] = ranked.log_chances[:, :width].tolist()
        self._branches = [0] * width

    def root(self) -> object:
        """No state."""
        return None

    def children(self, state: object, depth: int) -> tuple[list[int], list[float], list[int]]:
        """The slot's list."""
        return self._ids[depth], self._chances[depth], self._branches

    def advance(self, state: object, depth: int, token: int) -> object:
        """No state."""
        return None


class Mixture:
    """Several branches: a path weighs each branch by its prior and by how likely that branch finds
    the path so far, and ranks the children by the weighted mixture.
    """

    def __init__(self, ranked: Sequence[Ranked], log_prior: Sequence[float]) -> None:
        self.slots = ranked[0].ids.shape[0]
        self._prior = np.exp(np.asarray(log_prior, dtype=np.float64))
        self._ids: list[Ints] = []
        self._chances: list[npt.NDArray[np.float64]] = []
        self._columns: list[dict[int, int]] = []
        for slot in range(self.slots):
            ids = np.unique(np.concatenate([branch.ids[slot] for branch in ranked]))
            table = np.zeros((len(ranked), ids.size))
            for row, branch in enumerate(ranked):
                table[row, np.searchsorted(ids, branch.ids[slot])] = np.exp(
                    branch.log_chances[slot]
                )
            self._ids.append(ids)
            self._chances.append(table)
            self._columns.append({token: column for column, token in enumerate(ids.tolist())})

    def root(self) -> object:
        """The prior over the branches."""
        return self._prior

    def children(self, state: object, depth: int) -> tuple[list[int], list[float], list[int]]:
        """Children of the weighted mixture; the branch that contributes most is named."""
        assert isinstance(state, np.ndarray)
        shares = state[:, None] * self._chances[depth]
        chances = shares.sum(0) / max(float(state.sum()), 1e-300)
        order = np.argsort(-chances, kind="stable")
        order = order[chances[order] > 0]
        logs: list[float] = np.log(chances[order]).tolist()
        return self._ids[depth][order].tolist(), logs, shares.argmax(0)[order].tolist()

    def advance(self, state: object, depth: int, token: int) -> object:
        """Each branch's weight times its chance of the token."""
        assert isinstance(state, np.ndarray)
        return state * self._chances[depth][:, self._columns[depth][token]]


def _logsumexp(scores: Floats) -> Floats:
    best = scores.max(axis=1)
    total: Floats = best + np.log(np.exp(scores - best[:, None]).sum(axis=1))
    return total
