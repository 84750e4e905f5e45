"""The whole run before it begins: every request with its time, arm, seed and options.

Knows pairing: request p of every arm has the same prompt, length and seed, and the arms take turns
at being first. Does not know clocks or the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from draftwire_client.bench.arms import Arm
from draftwire_client.bench.arrivals import Ramp, offsets, replay
from draftwire_client.bench.datasets import Prompt, Sample
from draftwire_client.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. `at` is its offset from the start in seconds; None: when a slot is free."""

    index: int
    pair: int
    arm: str
    at: float | None
    prompt: Prompt
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """How requests are spread over time.

    Closed loop: `rate` is infinite and `max_concurrency` is given. Else open loop, where
    `max_concurrency` makes requests wait at the client, which counts as their latency.
    """

    rate: float = float("inf")
    burstiness: float = 1.0
    ramp: Ramp | None = None
    max_concurrency: int | None = None
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise InvalidArgument("--max-concurrency", self.max_concurrency, "at least 1")
        if self.ramp is not None and self.rate != float("inf"):
            raise InvalidArgument("--request-rate", self.rate, "inf with --ramp-up-strategy")

    @property
    def closed(self) -> bool:
        """Whether a request is sent when another has ended."""
        return self.rate == float("inf") and self.ramp is None and self.max_concurrency is not None


def make_plan(
    samples: Sequence[Sample],
    arms: Sequence[Arm],
    timing: Timing,
    *,
    options: Mapping[str, Any],
    seed: int,
) -> list[Planned]:
    """len(samples) requests for each arm, in the order of sending.

    Pair p of a trace is its row p; the arms' requests are spread evenly until the next row. With
    one sampling seed a pair, arms must give the same tokens. Raises InvalidArgument.
    """
    count = len(samples) * len(arms)
    traced = [sample.at for sample in samples if sample.at is not None]
    if traced:
        _check_order(traced)
    at = _times(traced, count, len(arms), timing, seed)
    found: list[Planned] = []
    for pair, sample in enumerate(samples):
        turn = pair % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            asked = {**options, "seed": seed * 1_000_003 + pair, **arm.options}
            if sample.max_tokens is not None:
                asked["max_tokens"] = sample.max_tokens
            index = len(found)
            found.append(Planned(index, pair, arm.name, at[index], sample.prompt, asked))
    return found


def _times(
    traced: Sequence[float], count: int, arms: int, timing: Timing, seed: int
) -> Sequence[float | None]:
    if timing.closed:
        return [None] * count
    if traced:
        # Between two rows of the trace the other arms' requests are spread evenly, so that every
        # arm meets the same bursts.
        rate = None if timing.rate == float("inf") else timing.rate / arms
        rows = replay(traced, rate=rate, time_scale=timing.time_scale)
        ends = [*rows[1:], rows[-1] + (rows[-1] / max(1, len(rows) - 1))]
        return [
            begin + (end - begin) * k / arms
            for begin, end in zip(rows, ends, strict=True)
            for k in range(arms)
        ]
    return offsets(
        count, rate=timing.rate, burstiness=timing.burstiness, ramp=timing.ramp, seed=seed
    )


def _check_order(times: Sequence[float]) -> None:
    """Raise InvalidArgument if a trace's times go backwards."""
    for number, (a, b) in enumerate(pairwise(times), 2):
        if b < a:
            raise InvalidArgument("--dataset-path", f"row {number}", "rows in order of TIMESTAMP")
