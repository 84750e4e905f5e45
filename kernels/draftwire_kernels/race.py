"""The draw: which token of a row has the largest score + gumbel, without making all of the noise.

Knows rows of scores on the host and level 0 of their noise. Knows nothing of how the scores were
made.

No token of a group has a value above its score - log(the group's smallest exponential), and for the
owner of that exponential this is the value itself. Tokens that cannot reach a value already known
need no noise of their own: of a language model's row of 49,152 some dozens remain, in about ten
groups of 64.
"""

from __future__ import annotations

import math

import numpy as np

from draftwire_kernels import noise
from draftwire_kernels.groups import (
    LEAST,
    SHIFT,
    Groups,
    Ids,
    Key,
    Level0,
    NonFiniteRow,
    argmax,
    check_finite,
    in_groups,
    line_below,
    make_level0,
)
from draftwire_kernels.noise import GROUP, Floats
from draftwire_kernels.race_bulk import largest_values

__all__ = [
    "NonFiniteRow",
    "Races",
    "argmax",
    "check_finite",
    "in_groups",
    "perturbed_argmax",
    "perturbed_argmax_of",
    "perturbed_top",
]

_TRIED, _TRIED_TOKENS = 32, 96
"""Groups of a row looked at first, and tokens looked at one by one before the rest is."""
_UP_TO = np.arange(_TRIED)
_NEAR, _MOST = np.float32(2.0**-20), np.float32(1e30)


class Races:
    """The draws of rows at consecutive positions: what they have in common is made at once, the
    rest when a row's winner is asked for.
    """

    def __init__(self, groups: Groups, key: Key, level0: Level0) -> None:
        """key: of the first row; level0: of all."""
        self._groups, self._key, self._level0 = groups, key, level0
        rows, size = groups.maxima.shape
        bounds = groups.maxima.ravel() - level0.logs
        self._bounds = bounds = bounds.reshape(rows, size)
        starts = np.arange(0, rows * size, size)
        # The groups with the best bounds, and a bound for all the others.
        tried = min(size, _TRIED)
        if tried < size:
            best = bounds.argpartition(-tried, axis=1)[:, -tried:]
            best += starts[:, None]
            others = bounds.take(best[:, 0])
        else:
            best = _UP_TO[:tried] + starts[:, None]
            others = np.full(rows, -np.inf, dtype=np.float32)
        flat = best.ravel()
        reach = groups.table.reshape(-1, GROUP).take(flat, 0)
        reach -= level0.logs.take(flat)[:, None]
        reach = reach.ravel()
        owned = reach.take(np.arange(0, reach.size, GROUP) + level0.owners.take(flat))
        floors = owned.reshape(rows, tried).max(1)
        # line_below of each. Beyond _MOST noise is lost to rounding, and no margin is needed.
        lines = np.maximum(floors - _NEAR * (1 + np.minimum(np.abs(floors), _MOST)), LEAST)
        cuts = np.maximum(lines, others)
        self._others = others
        live = (reach.reshape(rows, -1) >= cuts[:, None]).ravel().nonzero()[0]
        # Tokens count through all the rows, as groups do.
        self._tokens = flat.take(live >> SHIFT) * GROUP + (live & (GROUP - 1))
        self._reach = reach.take(live)
        self._ends = live.searchsorted(np.arange(rows + 1) * (tried * GROUP)).tolist()

    def winner(self, row: int) -> int:
        """Token of the largest score + gumbel, the lowest id among equals. Raises NonFiniteRow."""
        self._groups.largest(row)
        start, end = self._ends[row : row + 2]
        seed, position, purpose, base = self._key
        key = seed, position + row, purpose, base
        lead = _Lead(key, self._level0, row * self._bounds.shape[1])
        cut = lead.visit(self._tokens[start:end], self._reach[start:end])
        cut = max(cut, self._others.item(row))
        if cut >= lead.sure:
            self._visit_others(lead, row, cut)
        if lead.clear:
            return lead.token
        table, bounds = self._groups.table[row], self._bounds[row]
        level0 = self._level0.of_row(row, len(table))
        return largest_values(table, bounds, key, level0, 1, lead.sure)[0][0]

    def _visit_others(self, lead: _Lead, row: int, cut: float) -> None:
        """Let a lead visit what reaches it but no more than `cut`, above which all was visited."""
        size = self._bounds.shape[1]
        line = line_below(lead.sure)
        pending = (self._bounds[row] >= line).nonzero()[0]
        pending += row * size
        reach = self._groups.table.reshape(-1, GROUP).take(pending, 0)
        reach -= self._level0.logs.take(pending)[:, None]
        reach = reach.ravel()
        live = ((reach >= line) & (reach <= cut)).nonzero()[0]
        tokens = pending.take(live >> SHIFT) * GROUP + (live & (GROUP - 1))
        lead.leave(lead.visit(tokens, reach.take(live)))


class _Lead:
    """The token with the largest value of those visited, and how far it is ahead.

    Makes the noise of single tokens, best bound first: about a dozen. In fp64: values nearer to
    each other than `_near` may stand the other way round in fp32.
    """

    def __init__(self, key: Key, level0: Level0, first_group: int) -> None:
        self.token = -1
        self.sure = -math.inf
        """A value that `token` is sure to reach."""
        self._best = self._second = -math.inf
        self._exponential = noise.token_exponentials(*key)
        self._level0, self._first_group = level0, first_group

    @property
    def clear(self) -> bool:
        """Whether no other token comes near."""
        return self._second < self.sure

    def leave(self, bound: float) -> None:
        """Take note that tokens up to this value are not visited."""
        self._second = max(self._second, bound)

    def visit(self, tokens: Ids, reach: Floats) -> float:
        """Look at tokens, counted as groups are, of which `reach` is a bound. Returns a bound of
        those left out because they are too many.
        """
        order = reach.argsort()[::-1]
        left = -math.inf
        if order.size > _TRIED_TOKENS:
            left = reach.item(order.item(_TRIED_TOKENS))
            order = order[:_TRIED_TOKENS]
        best, second, sure = self._best, self._second, self.sure
        offset = self._first_group * GROUP
        exponential, log1p = self._exponential, math.log1p
        owner, least = self._level0.owners.item, self._level0.minima.item
        for token, value in zip(
            tokens.take(order).tolist(), reach.take(order).tolist(), strict=True
        ):
            if value < sure:
                left = -math.inf
                break
            group = token >> SHIFT
            if token & (GROUP - 1) != owner(group):
                value -= log1p(exponential(token - offset) / least(group))
            if value > best:
                best, second = value, best
                self.token = token - offset
                sure = best - _near(best)
            elif value > second:
                second = value
        self._best, self._second, self.sure = best, second, sure
        return left


def perturbed_argmax(
    scores: Floats, seed: int, position: int, purpose: int = noise.TARGET, base: int = 0
) -> int:
    """Token of the largest scores + gumbel(seed, position), the lowest id among equals.

    scores fp32 [V], log-probabilities up to a constant, -inf = excluded. Raises NonFiniteRow.
    """
    key = seed, position, purpose, base
    groups = in_groups(scores[None])
    return Races(groups, key, make_level0(key, groups.maxima.shape[1])).winner(0)


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
    key = seed, position, purpose, base
    return winner_of(tokens, scores, key, make_level0(key, (tokens.item(-1) >> SHIFT) + 1))


def winner_of(tokens: Ids, scores: Floats, key: Key, level0: Level0) -> int:
    """perturbed_argmax_of with the level 0 of at least the groups of the tokens."""
    groups = tokens >> SHIFT
    reach = scores - level0.logs.take(groups)
    owned = reach[level0.owners.take(groups) == (tokens & (GROUP - 1))]
    live = (reach >= line_below(owned.max().item() if owned.size else -np.inf)).nonzero()[0]
    lead = _Lead(key, level0, 0)
    lead.leave(lead.visit(tokens.take(live), reach.take(live)))
    if lead.clear:
        return lead.token
    table = np.full((level0.minima.size, GROUP), -np.inf, dtype=np.float32)
    table.ravel()[tokens] = scores
    return largest_values(table, table.max(1) - level0.logs, key, level0, 1, lead.sure)[0][0]


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
    groups = in_groups(scores[None])
    groups.largest(0)
    key = seed, position, purpose, base
    table = groups.table[0]
    level0 = make_level0(key, len(table))
    return largest_values(table, groups.maxima[0] - level0.logs, key, level0, count)


def _near(value: float) -> float:
    """More than the roundings of two values of about this size: no |gumbel| exceeds 46."""
    return 2.0**-20 * (64 + abs(value))
