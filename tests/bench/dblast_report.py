"""Tables of the branch comparison: macro means by benchmark, spreads over seeds, contrasts with
paired bootstrap intervals. Knows finished runs as JSON. Does not know models.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from drafter_service.training import rules

TREE = "tree of all branches, walk"
RULES = (rules.BEST_BRANCH, rules.MIXTURE, TREE)
TEMPERATURES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)


def macro(rows: Sequence[Any], column: str) -> float:
    """Mean over benchmarks of 1 + accepted / rounds."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        rounds, accepted = row[column]
        sums[row["source"]][0] += rounds
        sums[row["source"]][1] += accepted
    return 1.0 + sum(a / max(r, 1) for r, a in sums.values()) / max(len(sums), 1)


def best_temperature(rows: Sequence[Any], regime: str) -> float:
    """Z_T of a regime, on the answers to held-out training prompts."""
    own = [row for row in rows if row["regime"] == regime] or list(rows)
    return max(TEMPERATURES, key=lambda z: macro(own, f"{rules.MIXTURE} {z:g}"))


def column_of(rule: str, z: float) -> str:
    return f"{rules.MIXTURE} {z:g}" if rule == rules.MIXTURE else rule


def table(done: dict[str, Any], resamples: int) -> dict[str, Any]:
    """Means over seeds, spreads, and DBLAST (K=4, AL) against the independent K=1, NLL."""
    regimes = sorted({row["regime"] for result in done.values() for row in result["test"]})
    cells: list[Any] = []
    kinds = sorted({(r["branches"], r["loss"]) for r in done.values()})
    for branches, loss in kinds:
        for regime in regimes:
            for rule in RULES:
                values, zs = [], []
                for result in _of(done, branches, loss):
                    rows = [row for row in result["test"] if row["regime"] == regime]
                    z = result["z"].get(regime, 1.0)
                    values.append(macro(rows, column_of(rule, z)))
                    zs.append(z)
                cells.append({
                    "branches": branches, "loss": loss, "regime": regime, "rule": rule,
                    "acceptance_length": round(float(np.mean(values)), 4),
                    "seeds": [round(v, 4) for v in values],
                    **({"category_temperature": zs} if rule == rules.MIXTURE else {}),
                })  # fmt: skip
    contrasts = [
        _contrast(done, regime, rule, own, base, resamples)
        for regime in regimes
        for rule in RULES
        for own, base in (
            ((4, "AL"), (1, "NLL")),
            ((4, "NLL"), (1, "NLL")),
            ((1, "AL"), (1, "NLL")),
        )
        if _of(done, *own) and _of(done, *base)
    ]
    return {"cells": cells, "contrasts": contrasts}


def _of(done: dict[str, Any], branches: int, loss: str) -> list[Any]:
    return [r for r in done.values() if (r["branches"], r["loss"]) == (branches, loss)]


def _contrast(
    done: dict[str, Any], regime: str, rule: str, own: Any, base: Any, resamples: int
) -> dict[str, Any]:
    """Gain of `own` under `rule` over `base` under the one-hot rule; answers are drawn in pairs."""

    def pooled(kind: Any, which: str) -> dict[str, list[tuple[int, int]]]:
        sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        for result in _of(done, *kind):
            column = column_of(which, result["z"].get(regime, 1.0))
            for row in result["test"]:
                if row["regime"] == regime:
                    cell = sums[row["source"]][row["key"]]
                    cell[0] += row[column][0]
                    cell[1] += row[column][1]
        return {s: [(v[0], v[1]) for _, v in sorted(rows.items())] for s, rows in sums.items()}

    left, right = pooled(base, rules.BEST_BRANCH), pooled(own, rule)

    def length(rows: dict[str, list[tuple[int, int]]], draws: dict[str, list[int]] | None) -> float:
        total = 0.0
        for source, pairs in rows.items():
            some = pairs if draws is None else [pairs[i] for i in draws[source]]
            total += sum(a for _, a in some) / max(1, sum(r for r, _ in some))
        return 1.0 + total / max(1, len(rows))

    draw = random.Random(0)
    shares = []
    for _ in range(resamples):
        draws = {s: [draw.randrange(len(p)) for _ in p] for s, p in left.items()}
        shares.append(100 * (length(right, draws) / length(left, draws) - 1))
    shares.sort()
    one, two = length(left, None), length(right, None)
    return {
        "regime": regime, "rule": rule, "own": f"K={own[0]} {own[1]}",
        "over": f"K={base[0]} {base[1]}, {rules.BEST_BRANCH}",
        "base_length": round(one, 4), "own_length": round(two, 4),
        "gain_percent": round(100 * (two / one - 1), 2),
        "interval_95_percent": [
            round(shares[int(0.025 * len(shares))], 2), round(shares[int(0.975 * len(shares))], 2)
        ],
    }  # fmt: skip
