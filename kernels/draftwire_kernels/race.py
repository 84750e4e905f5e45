"""The draw: which token of a row has the largest score + gumbel, without making all of the noise.

Knows one row of scores on the host and the layout of `noise`. Knows nothing of how the scores were
made.

No token of a group has a value above its score - log(the group's smallest exponential), and for the
owner of that exponential this is the value itself. Tokens that cannot reach a value already known
need no noise of their own: of a language model's row of 49,152 some dozens remain, in about ten
groups of 64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from draftwire_kernels import noise
from draftwire_kernels.noise import GROUP, Floats

Ids = npt.NDArray[np.int64]
Key = tuple[int, int, int, int]
"""Seed, position, purpose and base of a draw."""

_FIRST = 8
"""Tokens tried first when more may win: a further pass costs as much as ten groups."""
_TRIED, _TRIED_TOKENS = 32, 96
"""Groups and tokens a single draw looks at one by one; a row that needs more is done in bulk."""
_UP_TO = np.arange(_TRIED)
_LEAST = float(np.finfo(np.float32).min)


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


@dataclass(frozen=True, slots=True)
class _Level0:
    """What level 0 of the noise tells of a row, group by group."""

    key: Key
    minima: Floats
    """Smallest exponential of each group."""
    luck: Floats
    """Its gumbel: no token of the group has more."""
    owners: Ids
    """Which of the 64 tokens has it."""


def _level0(key: Key, groups: int) -> _Level0:
    seed, position, purpose, base = key
    minima, owners = noise.group_minima(seed, position, groups, purpose, base)
    return _Level0(key, minima, -_log(minima), owners)


def perturbed_argmax(
    scores: Floats, seed: int, position: int, purpose: int = noise.TARGET, base: int = 0
) -> int:
    """Token of the largest scores + gumbel(seed, position), the lowest id among equals.

    scores fp32 [V], log-probabilities up to a constant, -inf = excluded. Raises NonFiniteRow.
    """
    table = in_groups(scores)
    maxima = group_maxima(table)
    check_finite(float(maxima.max()))
    level0 = _level0((seed, position, purpose, base), len(table))
    bounds = maxima + level0.luck
    # The groups with the best bounds, and a bound for all the others.
    best, others = _UP_TO[: bounds.size], -np.inf
    if bounds.size > _TRIED:
        best = np.argpartition(bounds, -_TRIED)[-_TRIED:]
        others = float(bounds[best[0]])
    reach = table[best] + level0.luck[best, None]
    floor = float(reach[_UP_TO[: best.size], level0.owners[best]].max())
    reach = reach.ravel()
    live = np.flatnonzero(reach >= max(_line(floor), others))
    tokens = best[live // GROUP] * GROUP + live % GROUP
    token, floor = _lead(tokens, reach[live], others, level0)
    return _in_bulk(table, bounds, level0, 1, floor)[0][0] if token is None else token


def perturbed_argmax_of(
    tokens: Ids,
    scores: Floats,
    seed: int,
    position: int,
    purpose: int = noise.TARGET,
    base: int = 0,
) -> int:
    """perturbed_argmax of a row in which all but some tokens are excluded: their ascending ids, at
    least one, and their finite scores, fp32.
    """
    groups = tokens // GROUP
    level0 = _level0((seed, position, purpose, base), int(groups[-1]) + 1)
    reach = scores + level0.luck[groups]
    owned = reach[level0.owners[groups] == tokens % GROUP]
    live = np.flatnonzero(reach >= _line(float(owned.max()) if owned.size else -np.inf))
    token, floor = _lead(tokens[live], reach[live], -np.inf, level0)
    if token is None:
        table = np.full((level0.minima.size, GROUP), -np.inf, dtype=np.float32)
        table.ravel()[tokens] = scores
        token = _in_bulk(table, group_maxima(table) + level0.luck, level0, 1, floor)[0][0]
    return token


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
    level0 = _level0((seed, position, purpose, base), len(table))
    return _in_bulk(table, maxima + level0.luck, level0, count, -np.inf)


def _lead(tokens: Ids, reach: Floats, others: float, level0: _Level0) -> tuple[int | None, float]:
    """The token with the largest value, None unless it is clear of all others and of tokens not
    given, bounded by `others`; and a value that some token is sure to reach.

    Makes the noise of single tokens, best bound first: about a dozen. In fp64: values nearer to
    each other than `_near` may stand the other way round in fp32.
    """
    order = np.argsort(-reach)
    if order.size > _TRIED_TOKENS:
        others = max(others, float(reach[order[_TRIED_TOKENS]]))
        order = order[:_TRIED_TOKENS]
    tokens = tokens[order]
    groups = tokens // GROUP
    best, second, winner = -math.inf, others, None
    uniform = noise.token_uniforms(*level0.key)
    for token, bound, least, owner in zip(
        tokens.tolist(),
        reach[order].tolist(),
        level0.minima[groups].tolist(),
        level0.owners[groups].tolist(),
        strict=True,
    ):
        if bound < best - _near(best):
            break
        value = bound
        if token % GROUP != owner:
            value -= math.log1p(-math.log1p(-uniform(token)) / least)
        if value > best:
            best, second, winner = value, max(second, best), token
        else:
            second = max(second, value)
    if winner is None:
        return None, best
    sure = best - _near(best)
    return winner if second < sure else None, sure


def _near(value: float) -> float:
    """More than the roundings of two values of about this size: no |gumbel| exceeds 46."""
    return 2.0**-20 * (64 + abs(value))


def _in_bulk(
    table: Floats, bounds: Floats, level0: _Level0, count: int, floor: float
) -> list[tuple[int, float]]:
    """perturbed_top in fp32 throughout, given that `count` tokens are sure to reach `floor`."""
    groups = _UP_TO[: len(table)] if len(table) <= _UP_TO.size else np.arange(len(table))
    values = table[groups, level0.owners] + level0.luck
    line = max(_line(_nth_largest(values, count)), floor)
    # The tokens, without the owners, whose bound reaches what is known.
    pending = np.flatnonzero(bounds >= line)
    reach = table[pending] + level0.luck[pending, None]
    reach[groups[: pending.size], level0.owners[pending]] = -np.inf
    reach = reach.ravel()
    live = np.flatnonzero(reach >= line)
    tokens = pending[live // GROUP] * GROUP + live % GROUP
    known = groups * GROUP + level0.owners, values
    return _race(tokens, table.ravel()[tokens], reach[live], level0, known, count)


def _race(
    tokens: Ids,
    scores: Floats,
    reach: Floats,
    level0: _Level0,
    known: tuple[Ids, Floats],
    count: int,
) -> list[tuple[int, float]]:
    """The largest of the values known and those of `tokens`, ascending, of which `reach` is a
    bound.
    """
    known_tokens, values = known
    groups = tokens // GROUP
    while tokens.size:
        first: slice | npt.NDArray[np.bool_] = slice(None)
        if tokens.size > 2 * (_FIRST + count):
            # The best of them first: that nearly always raises the floor above most others.
            bar = np.partition(reach, -_FIRST - count)[-_FIRST - count]
            opened = np.zeros(level0.minima.size, dtype=np.bool_)
            opened[groups[reach >= bar]] = True
            first = opened[groups]
        found = scores[first] - _log_energy(tokens[first], groups[first], level0)
        known_tokens = np.concatenate([known_tokens, tokens[first]])
        values = np.concatenate([values, found])
        if isinstance(first, slice):
            break
        rest = np.flatnonzero((reach >= _line(_nth_largest(values, count))) & ~first)
        tokens, scores, reach, groups = tokens[rest], scores[rest], reach[rest], groups[rest]
    return _largest(known_tokens, values, count)


def _log_energy(tokens: Ids, groups: Ids, level0: _Level0) -> Floats:
    """log(E) of ascending tokens that do not own their group's smallest exponential."""
    new = np.empty(groups.size, dtype=np.bool_)
    new[0] = True
    np.not_equal(groups[1:], groups[:-1], out=new[1:])
    seed, position, purpose, base = level0.key
    halves = noise.group_halves(seed, position, groups[new], purpose, base)
    energy = noise.exponential(noise.uniform32(halves[np.cumsum(new) - 1, tokens % GROUP]))
    energy += level0.minima[groups]
    return _log(energy)


def _log(energy: Floats) -> Floats:
    logs: Floats = torch.from_numpy(energy).log().numpy()
    return logs


def _line(floor: float) -> float:
    """What a bound must reach for its token to reach `floor`; bounds of excluded tokens do not.

    Two roundings lie between a value and its bound, and log need not be monotone.
    """
    return max(floor - 2.0**-20 * (1 + abs(floor)), _LEAST) if floor > -np.inf else _LEAST


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
