"""Ways to choose a block size, judged on held-out cases: what each gives a case, and what a bare
maximum over noisy runs would.

Values are one a case and policy: milliseconds a token, or mean acceptance length. Knows cases and
costs. Does not know reports or intervals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from drafter_service.training.block_size_cases import Case, Floats
from drafter_service.training.block_size_table import Run, Step

MOST_SPLITS = 20
DRAWS = 200


def values(case: Case, objective: str) -> Floats:
    """[sizes, seeds] of one case."""
    return case.times if objective == "cost" else case.lengths


def best(found: Floats, objective: str, axis: int = 0) -> Floats:
    """The best along an axis: the least time, or the greatest length."""
    out: Floats = found.min(axis) if objective == "cost" else found.max(axis)
    return out


def best_index(found: Floats, objective: str) -> int:
    """Of values [sizes] the best; of equal ones the smallest size."""
    return int(found.argmin() if objective == "cost" else found.argmax())


def of_size(case: Case, size: int, objective: str) -> float:
    """The mean over the seeds at one size."""
    return float(values(case, objective)[case.sizes.index(size)].mean())


def random_size(case: Case, objective: str) -> float:
    """The mean over all sizes: what a size drawn blindly gives."""
    return float(values(case, objective).mean())


def oracle_same_runs(case: Case, objective: str) -> float:
    """The best size, picked on the very runs that it is measured on."""
    return float(best(values(case, objective).mean(1), objective))


def oracle_independent_runs(case: Case, objective: str, draw: np.random.Generator) -> float:
    """The best of one run a size, each with luck of its own and measured on itself: what is
    reported if every size is run once with other draws of the target. NaN for a single seed.
    """
    found = values(case, objective)
    sizes, seeds = found.shape
    if seeds < 2:
        return math.nan
    picks = draw.integers(0, seeds, size=(DRAWS, sizes))
    if seeds >= sizes:
        picks = np.argsort(draw.random((DRAWS, seeds)), axis=1)[:, :sizes]
    return float(best(found[np.arange(sizes), picks], objective, 1).mean())


def oracle_other_half(
    case: Case, objective: str, fixed: int, per_token: Callable[[Run], float]
) -> tuple[float, float]:
    """The best size picked on one half of the runs and measured on the other, and the fixed size
    measured on the same; means over the splits and both directions. The halves are seeds; of a
    single replayed answer they are its first and second half. NaN where neither is possible.
    """
    found = values(case, objective)
    seeds = found.shape[1]
    if seeds < 2:
        halves = _halves(case, objective, per_token)
        if halves is None:
            return math.nan, math.nan
        found, seeds = halves, 2
    at = case.sizes.index(fixed)
    picked, constant = [], []
    for half in _splits(seeds):
        rest = [seed for seed in range(seeds) if seed not in half]
        for choose, measure in ((list(half), rest), (rest, list(half))):
            size = best_index(found[:, choose].mean(1), objective)
            picked.append(found[size, measure].mean())
            constant.append(found[at, measure].mean())
    return float(np.mean(picked)), float(np.mean(constant))


def oracle_per_round(
    case: Case,
    objective: str,
    fixed: int,
    per_token: Callable[[Run], float],
    round_ms: Callable[[int, int], float],
) -> tuple[float, float]:
    """The best size at every round with hindsight, by the shortest way through the answer: least
    time, or fewest rounds; and the fixed size on the same answers. NaN without answers that have
    drafts at every position.
    """
    found, constant = [], []
    for seed in range(case.seeds):
        tables = {size: case.runs[size][seed].everywhere for size in case.sizes}
        if not all(tables.values()):
            continue
        length = len(tables[case.sizes[0]])
        cost = np.zeros(length + 1)
        for at in range(length - 1, -1, -1):
            cost[at] = min(
                (round_ms(size, table[at][1]) if objective == "cost" else 1.0)
                + cost[at + table[at][0] + 1]
                for size, table in tables.items()
            )
        found.append(cost[0] / length if objective == "cost" else length / cost[0])
        run = case.runs[fixed][seed]
        constant.append(per_token(run) if objective == "cost" else run.acceptance_length)
    return (float(np.mean(found)), float(np.mean(constant))) if found else (math.nan, math.nan)


def _splits(seeds: int) -> Sequence[tuple[int, ...]]:
    """Halves of the seeds, each pair of halves once."""
    every = [
        half
        for half in itertools.islice(itertools.combinations(range(seeds), seeds // 2), 4000)
        if seeds % 2 or 0 in half
    ]
    step = max(1, len(every) // MOST_SPLITS)
    return every[::step]


def _halves(case: Case, objective: str, per_token: Callable[[Run], float]) -> Floats | None:
    """[sizes, 2] of the two halves of the case's only answer."""
    rows = []
    for size in case.sizes:
        (run,) = case.runs[size]
        if len(run.steps) < 4:
            return None
        made, cut = 0, 0
        while made < run.tokens / 2:
            made += run.steps[cut][0] + 1
            cut += 1
        parts = [_part(run, run.steps[:cut]), _part(run, run.steps[cut:])]
        if not parts[1].steps:
            return None
        rows.append([per_token(p) if objective == "cost" else p.acceptance_length for p in parts])
    return np.array(rows)


def _part(run: Run, steps: Sequence[Step]) -> Run:
    accepted = sum(one for one, _ in steps)
    return replace(
        run,
        steps=tuple(steps),
        rounds=len(steps),
        accepted=accepted,
        tokens=accepted + len(steps),
        drafted=sum(drafted for _, drafted in steps),
    )
