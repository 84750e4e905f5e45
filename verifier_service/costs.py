"""What a target step and a draft cost, in ms: profiled, then corrected by what is measured.

Knows: that a step's time depends on its rows, which come in quanta and cliffs, on whether trees are
in it, and on how many sessions and how much context its rows look at; that a draft's time depends
on the drafter's rows; that none of them falls when rows are added. Pure. Does not know: whose the
sessions are, lanes, clocks.

    ms = scale x (curve[trees or none](rows) + per_session x sessions + per_position x context)

What is measured is noisy, so an observation moves a curve by a bounded share of its logarithm, and
what is read is the closest curve that never falls (pool adjacent violators, weighted by what each
value rests on; Barlow et al. 1972). The scale, what a slow or busy machine changes at once, is the
median of the last few steps: any change is believed after some steps, and no single stall is.

While all steps are of one size, the scale takes up all that is wrong about that size, and says it
of the others too. So the longer a size was not seen, the more its next observation moves it: steps
one after the other share the machine's mood, and tell best how their sizes compare.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from verifier_service.packing import bucket

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

_LARGEST_SURPRISE = math.log(2)  # what one observation may say at most, up or down
_WINDOW = 9  # steps whose median is the scale
_TRUST = 2  # steps that the profile counts for in it, at first
_LEAST_SHARE = 0.1  # of a step that is left to its rows, whatever its sessions are believed to cost
_SLOWEST = 0.05  # least share by which the figure of these rows moves
_STALE = 0.03  # share of what is known of a size that is lost with each step of another
_MOST_STALE = 0.5  # most of it that is
# Row counts at which a smooth cost is remembered: at most a third apart, so that the nearest is
# near.
GRID = tuple(
    sorted({base << shift for shift in range(13) for base in (1, 3)} | {5, 7, 10, 14, 20, 28})
)


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence closest to `values` in weighted squares. Weights are positive."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, u, m), (b, v, n) = blocks[-2:]
            blocks[-2:] = [((a * u + b * v) / (u + v), u + v, m + n)]
    return [mean for mean, _, length in blocks for _ in range(length)]


class Curve:
    """ms at ascending row counts, some of them not observed yet.

    `fixed_share`: what is believed beyond the outermost observation: that share of its cost does
    not depend on rows, the rest is proportional to them.
    """

    def __init__(self, points: Sequence[int], fixed_share: float) -> None:
        self.points = np.asarray(points, dtype=np.float64)
        self.counts = [0] * len(points)
        self._weights = [0.0] * len(points)  # observations that each value rests on
        self._cells = [0.0] * len(points)
        self._share = fixed_share
        self._fit: Floats | None = None

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return any(self.counts)

    def observe(self, index: int, ms: float, unseen: int = 0) -> None:
        """One observation at points[index]; a later one counts less, down to a twentieth, but more
        after `unseen` steps elsewhere."""
        weight = 1.0
        if self.counts[index]:
            lost = min(_MOST_STALE, 1 - (1 - _STALE) ** unseen)
            share = max(1 / (self._weights[index] + 1), lost, _SLOWEST)
            surprise = math.log(ms / self._cells[index])
            weight = 1 / share
            if abs(surprise) > _LARGEST_SURPRISE:
                # What is too surprising is a stall, or a change of scale on its way: it says little
                # and makes what is known no surer.
                share, weight = _SLOWEST, self._weights[index]
                surprise = math.copysign(_LARGEST_SURPRISE, surprise)
            self._cells[index] *= math.exp(share * surprise)
        else:
            self._cells[index] = ms
        self._weights[index] = weight
        self.counts[index] += 1
        self._fit = None

    def nearest(self, rows: float) -> int:
        """Index of the point closest to `rows` in ratio."""
        return int(np.abs(np.log(self.points / max(rows, 1.0))).argmin())

    def fit(self) -> Floats:
        """ms at every point, never falling; zeros while nothing is known."""
        if self._fit is None:
            self._fit = self._filled()
        return self._fit

    def _filled(self) -> Floats:
        seen = [i for i, count in enumerate(self.counts) if count]
        if not seen:
            return np.zeros(len(self.points))
        values = isotonic([self._cells[i] for i in seen], [self._weights[i] for i in seen])
        at = self.points[seen]
        filled = np.interp(self.points, at, values)
        below, above = self.points < at[0], self.points > at[-1]
        filled[below] = self._beyond(self.points[below], at[0], values[0])
        # From about half as many rows: neighbours may be equal only because they are noisy.
        half = max(0, int(np.searchsorted(at, at[-1] / 2, side="right")) - 1)
        slope = (values[-1] - values[half]) / (at[-1] - at[half]) if half < len(at) - 1 else 0.0
        filled[above] = np.maximum(
            self._beyond(self.points[above], at[-1], values[-1]),
            values[-1] + slope * (self.points[above] - at[-1]),
        )
        return filled

    def _beyond(self, rows: Floats, from_rows: float, ms: float) -> Floats:
        return ms * (self._share + (1 - self._share) * rows / from_rows)


@dataclass(frozen=True, slots=True)
class Beside:
    """`StepCosts` for steps of certain sessions: what they cost whatever their rows is in it."""

    costs: StepCosts
    fixed_ms: float

    def ms(self, rows: int, *, drafted: bool) -> float:
        """Expected ms of a step of `rows` rows."""
        return float(self.curve(np.asarray([rows]), drafted=drafted)[0])

    def curve(self, rows: Ints | Floats, *, drafted: bool) -> Floats:
        """Expected ms for each of `rows`."""
        return self.costs.curve(rows, drafted=drafted) + self.fixed_ms

    def padded(self, rows: int) -> int:
        """Rows that a step of `rows` rows really has."""
        return self.costs.padded(rows)


class StepCosts:
    """ms of a target step by its rows, without trees and with them.

    `buckets`: the row counts a step is padded to; a single 1 means that it is not padded.
    `per_session`, `per_position`: ms for each session in a step, and for each position of context
    that a session in it has.
    """

    def __init__(self, buckets: Sequence[int], most_rows: int) -> None:
        self._buckets = tuple(buckets)
        self._smooth = self._buckets == (1,)
        last = self._buckets[-1]
        points = (
            [p for p in GRID if p <= max(most_rows, 1)]
            if self._smooth
            else [*self._buckets, *range(2 * last, bucket(most_rows, self._buckets) + 1, last)]
        )
        self.plain, self.drafted = Curve(points, 1.0), Curve(points, 1.0)
        self.per_session = self.per_position = 0.0
        self.scale = 1.0
        self._ratios = deque([0.0] * _TRUST, maxlen=_WINDOW)  # logarithms
        self._steps = 0  # that were observed
        self._last: dict[tuple[bool, int], int] = {}  # step in which a size was seen last
        self._fits: dict[bool, Floats] = {}

    @property
    def known(self) -> bool:
        """Whether any step was profiled or measured."""
        return self.plain.known or self.drafted.known

    def padded(self, rows: int) -> int:
        """Rows that a step of `rows` rows really has."""
        return rows if self._smooth else bucket(rows, self._buckets)

    def profile(
        self, rows: int, ms: float, *, drafted: bool, sessions: int = 0, context: int = 0
    ) -> None:
        """A step made for the purpose, before there were requests, took `ms`."""
        curve, index = self.drafted if drafted else self.plain, self._index(rows)
        own = ms - self._fixed(sessions, context)
        unseen = self._steps - self._last.get((drafted, index), 0)
        curve.observe(index, max(own, _LEAST_SHARE * ms), max(0, unseen - 1))
        self._last[drafted, index] = self._steps
        self._fits.clear()

    def observe(
        self, rows: int, ms: float, *, drafted: bool, sessions: int = 0, context: int = 0
    ) -> None:
        """A real step took `ms`. Ignored unless positive and finite."""
        if not (math.isfinite(ms) and ms > 0 and rows > 0):
            return
        self._steps += 1
        if self.known:
            expected = self.beside(sessions, context).ms(rows, drafted=drafted) / self.scale
            self._ratios.append(math.log(ms / expected))
            self.scale = math.exp(statistics.median(self._ratios))
        self.profile(rows, ms / self.scale, drafted=drafted, sessions=sessions, context=context)

    def beside(self, sessions: int, context: int) -> Beside:
        """Costs of steps with so many sessions, whose contexts have so many positions together."""
        return Beside(self, self.scale * self._fixed(sessions, context) if self.known else 0.0)

    def _fixed(self, sessions: int, context: int) -> float:
        return self.per_session * sessions + self.per_position * context

    def ms(self, rows: int, *, drafted: bool) -> float:
        """Expected ms of a step of `rows` rows; 1.0 while nothing is known."""
        return float(self.curve(np.asarray([rows]), drafted=drafted)[0])

    def curve(self, rows: Ints | Floats, *, drafted: bool) -> Floats:
        """Expected ms for each of `rows`."""
        if not self.known:
            return np.ones(len(rows))
        points, fit = self.plain.points, self._fit(drafted)
        if self._smooth:
            found = np.interp(rows, points, fit)
        else:
            found = fit[np.minimum(np.searchsorted(points, rows), len(points) - 1)]
        over = rows > points[-1]
        if over.any():
            found = np.where(over, fit[-1] * rows / points[-1], found)
        return self.scale * found

    def describe(self) -> str:
        """One line for GetInfo: rows and ms, trees after the slash."""
        seen = [i for i in range(len(self.plain.points)) if self.plain.counts[i]]
        seen = sorted({*seen, *(i for i, count in enumerate(self.drafted.counts) if count)})
        plain, drafted = self.scale * self._fit(False), self.scale * self._fit(True)
        rows = ", ".join(
            f"{int(self.plain.points[i])}: {plain[i]:.3g}/{drafted[i]:.3g} ms" for i in seen
        )
        session, position = self.scale * self.per_session, self.scale * self.per_position
        return f"{rows}; a session {session:.3g} ms, 100 positions {100 * position:.3g} ms"

    def _fit(self, drafted: bool) -> Floats:
        if drafted not in self._fits:
            self._fits[drafted] = self._fitted(drafted)
        return self._fits[drafted]

    def _fitted(self, drafted: bool) -> Floats:
        """A curve nothing is known of is taken from the other one; trees never cost less than none,
        so that noise cannot make a draft pay by making the step quicker."""
        if not self.plain.known:
            return self.drafted.fit()
        plain = self.plain.fit()
        if not drafted or not self.drafted.known:
            return plain
        seen = np.asarray(self.drafted.counts) > 0
        fit = self.drafted.fit()
        # Where no tree was seen yet, trees cost what they cost elsewhere over plain rows.
        ratio = float(np.median(fit[seen] / plain[seen]))
        guess = np.where(seen, fit, plain * ratio)
        return np.maximum(np.maximum.accumulate(guess), plain)

    def _index(self, rows: int) -> int:
        if self._smooth:
            return self.plain.nearest(rows)
        at = int(np.searchsorted(self.plain.points, self.padded(rows)))
        return min(at, len(self.plain.points) - 1)


class DraftCosts:
    """ms from asking a lane until its answer, by the rows asked of the drafter (anchors included).
    While nothing is known a draft costs nothing, so that one is asked for."""

    def __init__(self) -> None:
        self._curve = Curve(GRID, 0.5)
        self._provisional = False  # all that is known comes from answers that were not clean

    @property
    def known(self) -> bool:
        """Whether an answer was measured."""
        return self._curve.known

    def observe(self, rows: int, ms: float, *, clean: bool = True) -> None:
        """An answer to `rows` rows took `ms`; ignored unless positive and finite. Not `clean`: the
        drafter took in whole contexts before, or had a step beside it; the first clean answer
        replaces what was learnt from such ones alone."""
        if not (math.isfinite(ms) and ms > 0 and rows > 0):
            return
        if self._provisional and clean:
            self._curve = Curve(GRID, 0.5)
        self._provisional = not clean and (self._provisional or not self._curve.known)
        self._curve.observe(self._curve.nearest(rows), ms)

    def ms(self, rows: float) -> float:
        """Expected ms of a draft of `rows` rows."""
        return float(np.interp(rows, self._curve.points, self._curve.fit())) if rows > 0 else 0.0
