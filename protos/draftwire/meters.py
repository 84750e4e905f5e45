"""What services count, before anybody asks: plain numbers, cheap to write once a step.

Knows distributions over fixed bounds and what a reading is. Does not know Prometheus, names or who
reads; `metric_table` has the names, `exporter` the reader.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Seconds; a step of a small model takes 5 ms, a long answer minutes.
STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BLOCK_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)


class Distribution:
    """Counts of observations by upper bound, bounds included, and their sum.

    Written by one thread; a reader on another may see the last observation half counted.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """One observation, or several of one value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound as text, observations up to it), the last one "+Inf"."""
        seen, rows = 0, []
        for bound, count in zip([*self.bounds, None], list(self.counts), strict=True):
            seen += count
            rows.append(("+Inf" if bound is None else f"{float(bound):g}", float(seen)))
        return rows


@dataclass(frozen=True, slots=True)
class Reading:
    """A metric's value at this moment: its name in `metric_table`, label values in its order."""

    name: str
    value: float | Distribution
    labels: tuple[str, ...] = ()


def by_label(name: str, values: Iterable[tuple[str, float | Distribution]]) -> list[Reading]:
    """Readings of a metric with one label."""
    return [Reading(name, value, (label,)) for label, value in values]
