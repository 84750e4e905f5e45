"""Statistics of acceptance lengths: macro means over benchmarks, bootstrap intervals, differences
of modes over the same answers.

Knows tallies of rounds. Does not know models, files or how rounds are replayed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafter_service.training.offline import Mode

BASELINE = "argmax chain"


@dataclass(slots=True)
class Tally:
    """Rounds of one mode over the answers of one benchmark: per answer (rounds, accepted)."""

    answers: list[tuple[int, int]] = field(default_factory=list)
    drafted: int = 0
    reached: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    early: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def length(self, chosen: Sequence[int] | None = None) -> float:
        """Mean acceptance length, bonus included, over the answers (or those chosen)."""
        picked = self.answers if chosen is None else [self.answers[i] for i in chosen]
        rounds = sum(r for r, _ in picked)
        return 1.0 + sum(a for _, a in picked) / max(rounds, 1)


Key = tuple[str, str, Mode]


def rows(tallies: dict[Key, Tally], resamples: int, seed: int) -> list[dict[str, Any]]:
    """One row a regime and mode: the macro mean over benchmarks and what it is made of."""
    grouped = _grouped(tallies)
    found = []
    for (regime, mode), by_source in sorted(
        grouped.items(), key=lambda item: (item[0][0], item[0][1].nodes, item[0][1].name)
    ):
        lengths = {source: tally.length() for source, tally in by_source.items()}
        rounds = sum(r for t in by_source.values() for r, _ in t.answers)
        reached: dict[int, int] = defaultdict(int)
        early: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for tally in by_source.values():
            for depth, count in tally.reached.items():
                reached[depth] += count
            for name, (some, accepted) in tally.early.items():
                early[name][0] += some
                early[name][1] += accepted
        deepest = max(reached, default=0)
        found.append(
            {
                "regime": regime,
                "mode": mode.name,
                "nodes": mode.nodes,
                "acceptance_length": rounded(sum(lengths.values()) / len(lengths)),
                "interval_95": interval(list(by_source.values()), resamples, seed),
                "accepted_drafts": rounded(sum(lengths.values()) / len(lengths) - 1),
                "rounds": rounds,
                "drafted_per_round": rounded(
                    sum(t.drafted for t in by_source.values()) / max(rounds, 1)
                ),
                "by_source": {source: rounded(value) for source, value in sorted(lengths.items())},
                "reached_depth": [
                    rounded(sum(c for d, c in reached.items() if d >= k) / max(rounds, 1))
                    for k in range(1, deepest + 1)
                ],
                "by_early_determinism": {
                    name: {"rounds": some, "acceptance_length": rounded(1 + hit / max(some, 1))}
                    for name, (some, hit) in sorted(early.items())
                },
            }
        )
    return found


def differences(tallies: Mapping[Key, Tally], resamples: int, seed: int) -> list[dict[str, Any]]:
    """What each mode gains over the argmax chain, and over the mode it adds one thing to, in
    tokens a round and in per cent, with paired bootstrap intervals: every resample draws the same
    answers for both.
    """
    grouped = _grouped(tallies)
    found = []
    for (regime, mode), own in sorted(
        grouped.items(), key=lambda item: (item[0][0], item[0][1].nodes, item[0][1].name)
    ):
        for other in _compared(mode, [m for r, m in grouped if r == regime]):
            gain = paired(grouped[regime, other], own, resamples, seed)
            found.append(
                {
                    "regime": regime,
                    "mode": mode.name,
                    "nodes": mode.nodes,
                    "over": other.name,
                    "over_nodes": other.nodes,
                    **gain,
                }
            )
    return found


def paired(
    base: Mapping[str, Tally], own: Mapping[str, Tally], resamples: int, seed: int
) -> dict[str, Any]:
    """Gain of `own` over `base`, both by benchmark over the same answers."""
    sources = sorted(base)
    left, right = [base[s] for s in sources], [own[s] for s in sources]

    def means(draws: Sequence[Sequence[int]] | None) -> tuple[float, float]:
        picks = [None] * len(sources) if draws is None else draws
        one = [t.length(p) for t, p in zip(left, picks, strict=True)]
        two = [t.length(p) for t, p in zip(right, picks, strict=True)]
        return sum(one) / len(one), sum(two) / len(two)

    draw = random.Random(seed)
    gains, shares = [], []
    for _ in range(resamples):
        one, two = means([[draw.randrange(len(t.answers)) for _ in t.answers] for t in left])
        gains.append(two - one)
        shares.append(100 * (two / one - 1))
    one, two = means(None)
    return {
        "gain": rounded(two - one),
        "interval_95": _middle(gains),
        "gain_percent": rounded(100 * (two / one - 1)),
        "interval_95_percent": _middle(shares),
    }


def _compared(mode: Mode, modes: Sequence[Mode]) -> list[Mode]:
    """The argmax chain, and the mode of the same budget that lacks the last thing this one adds:
    repetition, branches, the path head or the noise.
    """
    found = [m for m in modes if m.name == BASELINE and m != mode]
    name = mode.name
    for without in (
        name.removesuffix(" + n-gram"),
        name.replace(" over branches", ""),
        name.replace("path tree", "rank tree"),
        name.removeprefix("coupled "),
    ):
        if without != name:
            found += [m for m in modes if m.name == without and m.nodes == mode.nodes]
            break
    return found


def early_bin(chance: float) -> str:
    """The bin of a round by early determinism: the product of the target's highest chances at the
    first 3 positions of the block.
    """
    return "below 0.1" if chance < 0.1 else "0.1 to 0.5" if chance < 0.5 else "0.5 and more"


def _grouped(tallies: Mapping[Key, Tally]) -> dict[tuple[str, Mode], dict[str, Tally]]:
    grouped: dict[tuple[str, Mode], dict[str, Tally]] = defaultdict(dict)
    for (source, regime, mode), tally in tallies.items():
        grouped[regime, mode][source] = tally
    return grouped


def interval(tallies: Sequence[Tally], resamples: int, seed: int) -> list[float]:
    """95 % bootstrap interval of the macro mean; answers are drawn within each benchmark. The same
    seed draws the same answers for every mode, so differences may be compared in pairs.
    """
    draw = random.Random(seed)
    means = []
    for _ in range(resamples):
        lengths = [t.length([draw.randrange(len(t.answers)) for _ in t.answers]) for t in tallies]
        means.append(sum(lengths) / len(lengths))
    return _middle(means)


def _middle(values: Sequence[float]) -> list[float]:
    """The middle 95 %."""
    ordered = sorted(values)
    return [
        rounded(ordered[int(0.025 * len(ordered))]),
        rounded(ordered[int(0.975 * len(ordered))]),
    ]


def rounded(value: float) -> float:
    """Four digits are more than the data can tell."""
    return round(value, 4)
