"""Races settled in bulk: the largest values of a row, in fp32 as the whole row of noise has them.

Knows one row in groups and its level 0. `race` is the quicker way to a single winner, where nothing
is too close to call.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from draftwire_kernels import noise
from draftwire_kernels.groups import SHIFT, Ids, Key, Level0, line_below, log
from draftwire_kernels.noise import GROUP, Floats

_FIRST = 8
"""Tokens tried first when more may win: a further pass costs as much as ten groups."""


def largest_values(
    table: Floats, bounds: Floats, key: Key, level0: Level0, count: int, floor: float = -math.inf
) -> list[tuple[int, float]]:
    """The `count` largest scores + gumbel as (token, value), in order, lower id first among equals.

    table fp32 [groups, 64]; bounds: its groups' maxima - level0.logs; floor: a value that `count`
    tokens are sure to reach. Fewer if fewer tokens are not excluded.
    """
    groups = np.arange(len(table))
    values = table[groups, level0.owners] - level0.logs
    line = max(line_below(_nth_largest(values, count)), floor)
    # The tokens, without the owners, whose bound reaches what is known.
    pending = np.flatnonzero(bounds >= line)
    reach = table[pending] - level0.logs[pending, None]
    reach[groups[: pending.size], level0.owners[pending]] = -np.inf
    reach = reach.ravel()
    live = np.flatnonzero(reach >= line)
    tokens = pending[live // GROUP] * GROUP + live % GROUP
    known = groups * GROUP + level0.owners, values
    return _race(tokens, table.ravel()[tokens], reach[live], key, level0, known, count)


def _race(
    tokens: Ids,
    scores: Floats,
    reach: Floats,
    key: Key,
    level0: Level0,
    known: tuple[Ids, Floats],
    count: int,
) -> list[tuple[int, float]]:
    """The largest of the values known and those of `tokens`, ascending, of which `reach` is a
    bound.
    """
    known_tokens, values = known
    groups = tokens >> SHIFT
    while tokens.size:
        first: slice | npt.NDArray[np.bool_] = slice(None)
        if tokens.size > 2 * (_FIRST + count):
            # The best of them first: that nearly always raises the floor above most others.
            bar = np.partition(reach, -_FIRST - count)[-_FIRST - count]
            opened = np.zeros(level0.minima.size, dtype=np.bool_)
            opened[groups[reach >= bar]] = True
            first = opened[groups]
        found = scores[first] - _log_energy(tokens[first], groups[first], key, level0)
        known_tokens = np.concatenate([known_tokens, tokens[first]])
        values = np.concatenate([values, found])
        if isinstance(first, slice):
            break
        rest = np.flatnonzero((reach >= line_below(_nth_largest(values, count))) & ~first)
        tokens, scores, reach, groups = tokens[rest], scores[rest], reach[rest], groups[rest]
    return _largest(known_tokens, values, count)


def _log_energy(tokens: Ids, groups: Ids, key: Key, level0: Level0) -> Floats:
    """log(E) of ascending tokens that do not own their group's smallest exponential."""
    new = np.empty(groups.size, dtype=np.bool_)
    new[0] = True
    np.not_equal(groups[1:], groups[:-1], out=new[1:])
    seed, position, purpose, base = key
    halves = noise.group_halves(seed, position, groups[new], purpose, base)
    energy = noise.exponential(noise.uniform32(halves[np.cumsum(new) - 1, tokens % GROUP]))
    energy += level0.minima[groups]
    return log(energy)


def _nth_largest(values: Floats, count: int) -> float:
    if count > values.size:
        return -np.inf
    if count == 1:
        return float(values.max())
    return float(np.partition(values, -count)[-count])


def _largest(tokens: Ids, values: Floats, count: int) -> list[tuple[int, float]]:
    if count == 1:
        best = values.max()
        return [(int(tokens[values == best].min()), float(best))]
    kept = np.flatnonzero((values >= _nth_largest(values, count)) & (values > -np.inf))
    kept = kept[np.lexsort((tokens[kept], -values[kept]))][:count]
    return list(zip(tokens[kept].tolist(), values[kept].tolist(), strict=True))
