"""Numbers from samples: percentiles, means, bootstrap intervals.

Pure Python, since the client has no numpy. Does not know what the numbers mean.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A statistic with its 95 % bootstrap interval, over `count` resampled units."""

    value: float
    low: float
    high: float
    count: int


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of ascending values, linear between neighbours (numpy's default); nan if empty."""
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mean(values: Sequence[float]) -> float:
    """Mean; nan if empty."""
    return math.fsum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of the values themselves (divided by n); nan if empty."""
    if not values:
        return math.nan
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))


def ratio_of_sums(
    rows: Sequence[tuple[float, ...]],
    statistic: Callable[[Sequence[float]], float],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """`statistic` of the column sums of `rows`, with the interval over resampled rows.

    Rows are the units that were measured together (a prompt with all its arms), so resampling them
    keeps the pairing. Percentile bootstrap, Efron 1979. None without rows.
    """
    if not rows:
        return None
    columns = list(zip(*rows, strict=True))
    value = statistic([math.fsum(column) for column in columns])
    rng = random.Random(f"bootstrap {seed}")
    places = range(len(rows))
    drawn = []
    for _ in range(resamples):
        chosen = rng.choices(places, k=len(rows))
        drawn.append(statistic([sum(column[i] for i in chosen) for column in columns]))
    drawn = sorted(x for x in drawn if not math.isnan(x))
    return Interval(value, percentile(drawn, 2.5), percentile(drawn, 97.5), len(rows))


def cdf(values: Sequence[float], points: int = 200) -> list[tuple[float, float]]:
    """(value, share at or below it), ascending, thinned to about `points`."""
    ordered = sorted(values)
    count = len(ordered)
    if count <= points:
        return [(value, (i + 1) / count) for i, value in enumerate(ordered)]
    places = sorted({round(k * (count - 1) / (points - 1)) for k in range(points)})
    return [(ordered[i], (i + 1) / count) for i in places]
