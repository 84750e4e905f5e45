"""What trees grow from: the candidates of a draft batch side by side, and the sums that make
chances of their scores.

Knows arrays. Does not know models, sessions or how trees grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from drafter_service.calibration import Regime
from drafter_service.ngram import NgramIndex

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bed:
    """What the trees of n sessions grow from, padded to common sizes; padding has logits -inf.

    ids int64 [n, slots, width] and logits float32 [n, branches, slots, width]: candidates of each
    slot, shared by the branches; noise float32 [n, slots, width]; log_prior float32 [n, branches];
    slots int64 [n]: slots the model filled; depth, nodes int64 [n]: limits of the trees;
    tokens int64 [n, 2]: the anchor and the token before it (the anchor again if there is none);
    regimes, grams: one a session, None: no look-ups.
    """

    ids: Ints
    logits: Floats
    noise: Floats
    log_prior: Floats
    slots: Ints
    depth: Ints
    nodes: Ints
    tokens: Ints
    regimes: Sequence[Regime]
    grams: Sequence[NgramIndex | None]


class Condition(Protocol):
    """The path-conditioned head over the slots of a bed."""

    def __call__(self, slot: int, sessions: Ints, parents: Ints, before: Ints) -> Floats:
        """Logits float32 [rows, branches, width] of the candidates of `slot` for paths that end in
        the tokens `before`, `parents`. Rows of one session lie together.
        """


def last_two(tokens: Sequence[int]) -> tuple[int, int]:
    """A session's row of `Bed.tokens`."""
    return tokens[-1], tokens[-2] if len(tokens) > 1 else tokens[-1]


def logsumexp(x: npt.NDArray[np.floating]) -> Reals:
    """Over the last axis; very low where all is -inf."""
    best = x.max(axis=-1)
    best = np.where(np.isfinite(best), best, 0.0)
    total: Reals = best + np.log(np.maximum(np.exp(x - best[..., None]).sum(axis=-1), 1e-300))
    return total


def log_softmax(x: npt.NDArray[np.floating]) -> Reals:
    """Over the last axis; rows of nothing but -inf stay so."""
    out: Reals = np.minimum(x - logsumexp(x)[..., None], 0.0)
    return out
