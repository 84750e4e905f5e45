"""Which tokens of a row on the host top-k, top-p and min-p keep, without sorting the row.

Knows one row of scores and its groups of 64. Knows neither noise nor how the scores were made.
Order and ties as in `reference`: top-k, top-p of what is left, min-p; lower ids first among equals.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch

from draftwire_kernels.groups import LEAST, SHIFT, Groups, Ids
from draftwire_kernels.noise import GROUP, Floats
from draftwire_kernels.sampling import Sampling

_SURELY = 1 + 1e-4
"""More than fp32 sums of a row's weights differ by."""
_FEW_GROUPS = 128
"""Up to this many groups are looked at before the whole row is."""
_BINS_A_NAT, _NATS = 64, 32
"""Bins of scores below the largest, and where they end: the last holds the rest, nearly nothing."""


class Filtered:
    """A row and what the filters of a Sampling keep of it, worked out no further than asked."""

    def __init__(self, row: Floats, groups: Groups, index: int, sampling: Sampling) -> None:
        """row fp32 [V], -inf = excluded already, and where it is in `groups`. All that is asked of
        it raises NonFiniteRow.
        """
        self._row, self._sampling = row, sampling
        self._groups, self._index = groups, index
        self._table, self._maxima = groups.table[index], groups.maxima[index]

    @cached_property
    def _largest(self) -> np.float32:
        return self._groups.largest(self._index)

    @cached_property
    def ids(self) -> Ids | None:
        """Finite tokens kept, ascending; None: all of them."""
        row, sampling = self._row, self._sampling
        ids: Ids | None = None
        largest = self._largest
        if 0 < sampling.top_k < row.size:
            ids = _at_least(self._table, self._maxima, row, sampling.top_k)
            ids = ids[_first(row[ids], sampling.top_k)]
        if sampling.top_p < 1:
            ids = self._top_p() if ids is None else _top_p_of(row, ids, largest, sampling.top_p)
        if sampling.min_p > 0:
            least = _least(largest, sampling.min_p)
            ids = (
                _upper(self._table, self._maxima, least) if ids is None else ids[row[ids] >= least]
            )
        if ids is not None and float(row[ids].min()) == -np.inf:
            ids = ids[row[ids] > -np.inf]
        return ids

    @property
    def few(self) -> bool:
        """Whether min-p leaves so few tokens that `ids` is quickly made."""
        if self._sampling.min_p == 0:
            return False
        least = _least(self._largest, self._sampling.min_p)
        return int((self._maxima >= least).sum()) <= _FEW_GROUPS // 2

    def surely_keeps(self, token: int) -> bool:
        """Whether top-p and min-p keep a token; False also if that takes `ids` to say.

        Looks at the tokens not less likely than it: top-p keeps it if the others of them have less
        than top_p together.
        """
        sampling = self._sampling
        table, maxima, largest = self._table, self._maxima, self._largest
        value = self._row[token]
        if sampling.min_p > 0 and value < _least(largest, sampling.min_p):
            return False
        if sampling.top_p == 1:
            return True
        own = math.exp(value - largest)
        above = (maxima >= value).nonzero()[0]
        if above.size <= _FEW_GROUPS:
            values = table.take(above, 0)
            if int((values >= value).sum()) == 1:
                return True  # the most likely token
            weights = _weights(values, largest)
            before = float(weights[values >= value].sum()) - own
            # Of each other group at least its largest token counts.
            others = float(_weights(maxima, largest).sum()) - float(weights.max(1).sum())
            if before * _SURELY < sampling.top_p * (float(weights.sum()) + others):
                return True
        else:
            before = float(np.dot(self._weights, (self._row >= value).astype(np.float32))) - own
        return before * _SURELY < sampling.top_p * self._total

    @cached_property
    def _weights(self) -> Floats:
        return _weights(self._row, self._largest)

    @cached_property
    def _total(self) -> float:
        return float(torch.from_numpy(self._weights).sum())

    def _top_p(self) -> Ids:
        """The shortest prefix of the row, by score and then id, that reaches top_p."""
        row, largest = self._row, self._largest
        need = self._sampling.top_p * self._total
        # Few tokens hold most of a model's row. Of any upper set that holds enough, the prefix is
        # the same.
        for count in (16, 128):
            ids = _at_least(self._table, self._maxima, row, count)
            if float(self._weights[ids].sum()) >= need:
                return ids[_first(row[ids], _prefix(row[ids], largest, need))]
        # The bin in which the sum reaches what is needed; only its tokens are put in order.
        depth = np.minimum(largest - row, np.float32(_NATS))
        depth *= np.float32(_BINS_A_NAT)
        bins = depth.astype(np.int64)
        sums = np.cumsum(np.bincount(bins, self._weights))
        edge = min(int(np.searchsorted(sums, need)), sums.size - 1)
        ids = np.flatnonzero(bins == edge)
        before = float(sums[edge - 1]) if edge else 0.0
        kept = bins < edge
        kept[ids[_first(row[ids], _prefix(row[ids], largest, need - before))]] = True
        return np.flatnonzero(kept)


def _top_p_of(row: Floats, ids: Ids, largest: np.float32, top_p: float) -> Ids:
    values = row[ids]
    need = top_p * float(_weights(values, largest).sum(dtype=np.float64))
    return ids[_first(values, _prefix(values, largest, need))]


def _least(largest: np.float32, min_p: float) -> np.float32:
    return largest + np.float32(math.log(min_p))


def _weights(values: Floats, largest: np.float32) -> Floats:
    weights: Floats = torch.from_numpy(values - largest).exp_().numpy()
    return weights


def _at_least(table: Floats, maxima: Floats, row: Floats, count: int) -> Ids:
    """Ids, ascending, of an upper set of the row: at least `count`, or all that are finite."""
    if count <= maxima.size // 2:
        # That many groups have a token as large as this one, hence that many tokens do.
        least = np.partition(maxima, -count)[-count]
    else:
        count = min(count, row.size)
        least = np.partition(row, -count)[-count]
    return _upper(table, maxima, least)


def _upper(table: Floats, maxima: Floats, least: np.float32) -> Ids:
    """Ids, ascending, of the finite tokens that reach `least`."""
    least = np.maximum(least, np.float32(LEAST))
    some = (maxima >= least).nonzero()[0]
    where = (table.take(some, 0).ravel() >= least).nonzero()[0]
    ids: Ids = some.take(where >> SHIFT) * GROUP + (where & (GROUP - 1))
    return ids


def _prefix(values: Floats, largest: np.float32, need: float) -> int:
    """How many of the values, largest first, it takes for exp(value - largest) to sum to `need`."""
    sums = np.cumsum(_weights(np.sort(values)[::-1], largest), dtype=np.float64)
    # A need just out of reach, by the last bits of the row's fp32 total, means all of them.
    return min(int(np.searchsorted(sums, need)) + 1, values.size)


def _first(values: Floats, count: int) -> Ids:
    """Places, ascending, of the `count` largest values, the first ones among equals."""
    if count >= values.size:
        return np.arange(values.size)
    least = np.partition(values, -count)[-count]
    above = values > least
    spare = count - int(above.sum())
    above[np.flatnonzero(values == least)[:spare]] = True
    return np.flatnonzero(above)
