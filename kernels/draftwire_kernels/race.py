"""The draw: which token of a row has the largest score + gumbel, without making all of the noise.

Knows one row of scores on the host and the layout of `noise`. Knows nothing of how the scores were
made.

A group's best possible value is (its best score) - log(its smallest exponential), and the value of
the smallest exponential's owner is known at once. Groups whose bound is below a value already known
need no noise of their own: of the 768 groups of a language model's row of 49,152 about ten remain.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from draftwire_kernels import noise
from draftwire_kernels.noise import GROUP, Floats

Ids = npt.NDArray[np.int64]

_FIRST = 8
"""Groups made first when more may hold the winner: a further pass costs as much as ten groups."""
_SLACK = 2.0**-20
"""Two roundings lie between a value and its group's bound, and log need not be monotone."""
_IN_GROUP = np.arange(GROUP)


class NonFiniteRow(ValueError):
    """A row of logits holds NaN or +inf, or excludes every token. Carries the row and the find."""

    def __init__(self, row: int, found: str) -> None:
        super().__init__(f"row {row} of the logits has {found}")
        self.row = row
        self.found = found


def check_finite(largest: float, row: int = 0) -> None:
    """Raise NonFiniteRow unless a row's largest entry (NaN if it holds one) is a number."""
    if largest != largest:
        raise NonFiniteRow(row, "NaN")
    if largest == np.inf:
        raise NonFiniteRow(row, "+inf")
    if largest == -np.inf:
        raise NonFiniteRow(row, "no finite entry")


def in_groups(scores: Floats) -> Floats:
    """Scores as [groups, 64], the last group filled up with -inf."""
    missing = -scores.size % GROUP
    if missing:
        scores = np.concatenate([scores, np.full(missing, -np.inf, dtype=np.float32)])
    return scores.reshape(-1, GROUP)


def group_maxima(table: Floats) -> Floats:
    """Largest score of each group, fp32 [groups]; NaN where the group holds one."""
    maxima: Floats = torch.from_numpy(table).amax(1).numpy()
    return maxima


def argmax(scores: Floats) -> int:
    """Token of the largest score, the lowest id among equals. Raises NonFiniteRow."""
    token = int(
        scores.argmax()
    )  # numpy's argmax stops at the first NaN, so the check below sees it
    check_finite(float(scores[token]))
    return token


def perturbed_argmax(
    scores: Floats, seed: int, position: int, purpose: int = noise.TARGET, base: int = 0
) -> int:
    """Token of the largest scores + gumbel(seed, position), the lowest id among equals.

    scores fp32 [V], log-probabilities up to a constant, -inf = excluded. Raises NonFiniteRow.
    """
    return perturbed_top(scores, 1, seed, position, purpose, base)[0][0]


def perturbed_top(
    scores: Floats,
    count: int,
    seed: int,
    position: int,
    purpose: int = noise.TARGET,
    base: int = 0,
) -> list[tuple[int, float]]:
    """The `count` largest scores + gumbel as (token, value), in order, lower id first among equals.

    Fewer if fewer tokens are not excluded. Raises NonFiniteRow.
    """
    table = in_groups(scores)
    maxima = group_maxima(table)
    check_finite(float(maxima.max()))
    # 1. What level 0 of the noise tells: every group's bound, and the value of every owner.
    minima, owners = noise.group_minima(seed, position, len(table), purpose, base)
    luck = torch.from_numpy(minima).log().neg_().numpy()
    bounds = maxima + luck
    groups = np.arange(len(table))
    tokens, values = groups * GROUP + owners, table[groups, owners] + luck
    # 2. Token by token, the groups that may hold more; if they are many, the best of them first,
    # which nearly always raises the floor above most of the others.
    unseen = maxima > -np.inf
    for most in (_FIRST + count, len(table)):
        floor = _nth_largest(values, count)
        pending = np.flatnonzero((bounds >= floor - _SLACK * (1 + abs(floor))) & unseen)
        if pending.size == 0:
            break
        few = pending.size <= most
        if not few:
            pending = np.sort(pending[np.argpartition(-bounds[pending], most)[:most]])
        halves = noise.group_halves(seed, position, pending, purpose, base)
        energy = noise.exponential(noise.uniform32(halves))
        energy += minima[pending, None]
        energy[np.arange(pending.size), owners[pending]] = np.inf  # they have their values already
        found = table[pending] - torch.from_numpy(energy).log_().numpy()
        tokens = np.concatenate([tokens, (pending[:, None] * GROUP + _IN_GROUP).ravel()])
        values = np.concatenate([values, found.ravel()])
        if few:
            break
        unseen[pending] = False
    return _largest(tokens, values, count)


def _nth_largest(values: Floats, count: int) -> float:
    if count == 1:
        return float(values.max())
    if count > values.size:
        return -np.inf
    return float(np.partition(values, -count)[-count])


def _largest(tokens: Ids, values: Floats, count: int) -> list[tuple[int, float]]:
    if count == 1:
        best = values.max()
        return [(int(tokens[values == best].min()), float(best))]
    kept = np.flatnonzero((values >= _nth_largest(values, count)) & (values > -np.inf))
    kept = kept[np.lexsort((tokens[kept], -values[kept]))][:count]
    return list(zip(tokens[kept].tolist(), values[kept].tolist(), strict=True))
