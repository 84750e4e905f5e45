"""Arms against the first one: the same tokens, and how much faster.

Knows pairs: what was asked with the same prompt and seed. Does not know how they were scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwire_client.bench.measure import Record
from draftwire_client.bench.stats import Interval, ratio_of_sums

# How long an answer is depends on time for these, so a shorter one is no different answer.
_CUT_BY_TIME = {"deadline", "shutdown"}


@dataclass(frozen=True, slots=True)
class Difference:
    """A pair whose tokens differ, and the first place where they do."""

    pair: int
    arm: str
    position: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm against the baseline over the pairs that both have completed."""

    arm: str
    compared: int
    same: int
    differences: tuple[Difference, ...] = ()
    speedups: Mapping[str, Interval | None] = field(default_factory=dict)

    def keys(self) -> dict[str, Any]:
        """As JSON."""
        found: dict[str, Any] = {
            "pairs": self.compared,
            "same_tokens": self.same,
            "different_tokens": self.compared - self.same,
        }
        for metric, interval in self.speedups.items():
            found[f"speedup_{metric}"] = None if interval is None else interval.value
            found[f"speedup_{metric}_low"] = None if interval is None else interval.low
            found[f"speedup_{metric}_high"] = None if interval is None else interval.high
        return found


def compare(records: Sequence[Record], arms: Sequence[str], *, seed: int) -> list[Comparison]:
    """Every arm but the first against the first.

    Speed-ups are ratios over all pairs, above 1 where the arm is faster: `decode`, tokens a second
    after the first token; `e2el` and `ttft`, total time. Intervals resample pairs.
    """
    by_pair: dict[int, dict[str, Record]] = {}
    for record in records:
        if record.ok:
            by_pair.setdefault(record.pair, {})[record.arm] = record
    base, *others = arms
    return [
        _against(
            arm,
            [(row[base], row[arm]) for row in by_pair.values() if base in row and arm in row],
            seed,
        )
        for arm in others
    ]


def _against(arm: str, pairs: Sequence[tuple[Record, Record]], seed: int) -> Comparison:
    different = []
    compared = 0
    for base, other in pairs:
        if {base.finish_reason, other.finish_reason} & _CUT_BY_TIME:
            continue
        compared += 1
        if (place := first_difference(base.token_ids, other.token_ids)) is not None:
            different.append(Difference(base.pair, arm, place))
    return Comparison(
        arm, compared, compared - len(different), tuple(different), _speedups(pairs, seed)
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first place where two answers differ; None if they are the same."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def _speedups(pairs: Sequence[tuple[Record, Record]], seed: int) -> Mapping[str, Interval | None]:
    decode = [
        (base.decode, base.output_len - 1.0, other.decode, other.output_len - 1.0)
        for base, other in pairs
        if base.output_len > 1 and other.output_len > 1
    ]
    e2el = [
        (base.e2el, other.e2el)
        for base, other in pairs
        if base.e2el is not None and other.e2el is not None
    ]
    ttft = [
        (base.ttft, other.ttft)
        for base, other in pairs
        if base.ttft is not None and other.ttft is not None
    ]
    return {
        "decode": ratio_of_sums(decode, _rate_ratio, seed=seed),
        "e2el": ratio_of_sums(e2el, _ratio, seed=seed),
        "ttft": ratio_of_sums(ttft, _ratio, seed=seed),
    }


def _rate_ratio(sums: Sequence[float]) -> float:
    base_time, base_tokens, time, tokens = sums
    return (tokens / time) / (base_tokens / base_time) if time > 0 and base_time > 0 else math.nan


def _ratio(sums: Sequence[float]) -> float:
    base, other = sums
    return base / other if other > 0 else math.nan
