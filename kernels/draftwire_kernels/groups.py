"""Rows of scores in groups of 64, and what level 0 of the noise says of them.

Knows rows on the host and the layout of `noise`. Knows nothing of how scores were made, nor of who
wins a race.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from draftwire_kernels import noise
from draftwire_kernels.noise import GROUP, Floats

Ids = npt.NDArray[np.int64]
Key = tuple[int, int, int, int]
"""Seed, position, purpose and base of a draw."""

SHIFT = GROUP.bit_length() - 1
"""Of a token, to its group."""
LEAST = float(np.finfo(np.float32).min)


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


class Groups(NamedTuple):
    """Rows of scores in groups of 64."""

    table: Floats
    """fp32 [rows, groups, 64], the last group of a row filled up with -inf."""
    maxima: Floats
    """Largest score of each group, [rows, groups]; NaN where it holds one."""

    def largest(self, row: int) -> np.float32:
        """Largest score of a row. Raises NonFiniteRow."""
        largest: np.float32 = np.maximum.reduce(self.maxima[row])
        check_finite(float(largest))
        return largest


def in_groups(scores: Floats) -> Groups:
    """scores fp32 [rows, V]."""
    rows, size = scores.shape
    missing = -size % GROUP
    if missing:
        padding = np.full((rows, missing), -np.inf, dtype=np.float32)
        scores = np.concatenate([scores, padding], axis=1)
    table = scores.reshape(rows, -1, GROUP)
    return Groups(table, torch.from_numpy(table).amax(2).numpy())


def argmax(scores: Floats) -> int:
    """Token of the largest score, the lowest id among equals. Raises NonFiniteRow."""
    token = int(
        scores.argmax()
    )  # numpy's argmax stops at the first NaN, so the check below sees it
    check_finite(float(scores[token]))
    return token


class Level0(NamedTuple):
    """What level 0 of the noise tells of rows, group by group and row after row."""

    minima: Floats
    """Smallest exponential of each group."""
    logs: Floats
    """Their logarithms, less than which no token of the group has."""
    owners: Ids
    """Which of the 64 tokens has the smallest."""

    def of_row(self, row: int, groups: int) -> Level0:
        """The same of one row."""
        here = slice(row * groups, (row + 1) * groups)
        return Level0(self.minima[here], self.logs[here], self.owners[here])


def make_level0(key: Key, groups: int, rows: int = 1) -> Level0:
    seed, position, purpose, base = key
    minima, owners = noise.group_minima(seed, position, groups, purpose, base, rows)
    return Level0(minima, log(minima), owners)


def log(energy: Floats) -> Floats:
    logs: Floats = torch.from_numpy(energy).log().numpy()
    return logs


def line_below(floor: float) -> float:
    """What a bound must reach for its token to reach `floor`; bounds of excluded tokens do not.

    Two roundings lie between a value and its bound, and log need not be monotone.
    """
    return max(floor - 2.0**-20 * (1 + abs(floor)), LEAST) if floor > -np.inf else LEAST
