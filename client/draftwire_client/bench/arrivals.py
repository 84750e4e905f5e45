"""When requests are sent: offsets in seconds from the start, all known before the run.

Knows renewal processes, ramps and the scaling of a trace. Does not know requests, clocks or the
server: what is late later cannot move an arrival.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from draftwire_client.errors import InvalidArgument

RAMPS = ("linear", "exponential")


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that moves from `start` to `end` (requests/s) over the run."""

    strategy: str
    start: float
    end: float

    def __post_init__(self) -> None:
        if self.strategy not in RAMPS:
            raise InvalidArgument("--ramp-up-strategy", self.strategy, f"one of {', '.join(RAMPS)}")
        least = 0.0 if self.strategy == "linear" else math.ulp(0.0)
        for name, value in (("start", self.start), ("end", self.end)):
            if not (math.isfinite(value) and value >= least):
                raise InvalidArgument(
                    f"--ramp-up-{name}-rps", value, "a finite rate, above 0 if exponential"
                )
        if max(self.start, self.end) <= 0:
            raise InvalidArgument("--ramp-up-end-rps", self.end, "above 0 where the start is 0")

    def rate(self, progress: float) -> float:
        """Requests/s when the share `progress` in [0, 1] of the requests has been sent."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)


def offsets(
    count: int,
    *,
    rate: float = math.inf,
    burstiness: float = 1.0,
    ramp: Ramp | None = None,
    seed: int = 0,
) -> tuple[float, ...]:
    """Seconds from the start at which `count` requests are sent, ascending.

    Gaps are gamma distributed with shape `burstiness` and mean 1/rate: 1 is a Poisson process, less
    is burstier, more is steadier, infinity is a fixed gap. A constant rate is met exactly over the
    run: the gaps are scaled so that they sum to count/rate. A rate of infinity sends all at once.
    With `ramp` each gap has the mean of the rate at that moment. Raises InvalidArgument.
    """
    if count < 0:
        raise InvalidArgument("--num-prompts", count, "at least 0")
    if not burstiness > 0:
        raise InvalidArgument("--burstiness", burstiness, "above 0")
    if ramp is None and not rate > 0:
        raise InvalidArgument("--request-rate", rate, "above 0, or inf")
    if ramp is None and math.isinf(rate):
        return (0.0,) * count
    rng = random.Random(f"arrivals {seed}")
    gaps = [_unit_gap(rng, burstiness) for _ in range(count)]
    if ramp is None:
        total = sum(gaps)
        scale = count / rate / total if total > 0 else 0.0
        gaps = [gap * scale for gap in gaps]
    else:
        # The rate in the middle of a request's share, so that a ramp from 0 has no infinite gap.
        gaps = [gap / ramp.rate((i + 0.5) / count) for i, gap in enumerate(gaps)]
    return _sums(gaps)


def replay(times: Sequence[float], *, rate: float | None, time_scale: float) -> tuple[float, ...]:
    """Offsets of a trace's times (seconds, ascending), the first at 0.

    Each gap is multiplied by `time_scale`; with `rate` instead, by what makes the mean rate that
    many requests/s. Raises InvalidArgument.
    """
    if not (math.isfinite(time_scale) and time_scale >= 0):
        raise InvalidArgument("--time-scale", time_scale, "a finite factor, at least 0")
    if rate is not None and not rate > 0:
        raise InvalidArgument("--request-rate", rate, "above 0")
    if not times:
        return ()
    moved = [time - times[0] for time in times]
    if rate is not None and math.isfinite(rate) and moved[-1] > 0:
        time_scale = (len(times) - 1) / rate / moved[-1]
    return tuple(time * time_scale for time in moved)


def _unit_gap(rng: random.Random, burstiness: float) -> float:
    return 1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / burstiness)


def _sums(gaps: Sequence[float]) -> tuple[float, ...]:
    total, found = 0.0, []
    for gap in gaps:
        total += gap
        found.append(total)
    return tuple(found)
