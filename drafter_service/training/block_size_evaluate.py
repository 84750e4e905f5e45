"""`draftwire-train block-size evaluate`: whether predicting the block size pays, on prompts that
were held out.

Compares the predictor with the best fixed size (chosen on validation data), the trained size, the
majority class, a random size and oracles, with bootstrap intervals over prompts, and says in
sentences what the intervals allow. Policies are in `block_size_policies`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafter_service import predictor as predictors
from drafter_service.predictor import BlockSizePredictor
from drafter_service.training import block_size_policies as policies
from drafter_service.training.block_size_cases import OBJECTIVES, Case, Floats, cases_of
from drafter_service.training.block_size_costs import CostTable, measured_only, read_costs
from drafter_service.training.block_size_fit import choices
from drafter_service.training.block_size_table import Run, read_sweep, short_hash
from drafter_service.training.errors import TrainingError
from draftwire.config import ConfigError, setting

UNITS = {"cost": "milliseconds a token", "acceptance": "mean acceptance length"}
WORDS = {"cost": "time per token", "acceptance": "acceptance length"}
# A policy that hits the oracle's choice this often has seen the answers.
SUSPICIOUS = 0.9


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of `draftwire-train block-size evaluate`."""

    sweep: tuple[str, ...] = setting(help="folders of held-out sweeps")
    predictor: Path = setting(help="folder of the predictor")
    out: Path = setting(help="JSON file of the results")
    costs: Path | None = setting(None, help="table of costs (block-size costs), for replayed runs")
    predictor_ms: float = setting(
        0.0, help="milliseconds of one call of the predictor, added to its answers", minimum=0.0
    )
    resamples: int = setting(2000, help="bootstrap samples of the prompts", minimum=100)
    seed: int = setting(0, help="seed of the bootstrap", minimum=0)
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)


def evaluate(config: EvaluateConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the command; the report is written to `out` and returned."""
    if config.threads:
        torch.set_num_threads(config.threads)
    sweeps = [read_sweep(Path(name)) for name in config.sweep]
    facts = sweeps[0].facts
    model = predictors.load(
        config.predictor,
        drafter_sha256=str(facts["drafter_sha256"]),
        hidden_size=int(facts["hidden_size"]),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    table = None if config.costs is None else read_costs(config.costs)
    cases = cases_of(sweeps, model.config.input, _per_token(table, sweeps[0].runs))
    _refuse_seen(cases, model)
    if not cases:
        raise TrainingError("no prompt of the sweeps has answers at every size")
    rows = []
    for objective in OBJECTIVES:
        if objective == "cost" and any(math.isnan(case.times.sum()) for case in cases):
            say("no costs: time per token is left out (--costs)")
            continue
        for regime, some in _by_regime(cases).items():
            rows.append(_row(config, model, objective, regime, some, table))
    report = {
        "drafter": facts["drafter"],
        "drafter_sha256": facts["drafter_sha256"],
        "block_size": facts["block_size"],
        "candidates": list(model.config.candidates),
        "input": model.config.input.value,
        "parts": facts["parts"],
        "max_nodes": facts["max_nodes"],
        "costs": None if table is None else {**table.facts, "overhead_ms": table.overhead_ms},
        "predictor_ms": config.predictor_ms,
        "resamples": config.resamples,
        "results": rows,
        "verdicts": [sentence for row in rows for sentence in row["verdicts"]],
    }
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for line in _table(rows):
        say(line)
    for sentence in report["verdicts"]:
        say(sentence)
    return report


def _per_token(table: CostTable | None, runs: Sequence[Run]) -> Callable[[Run], float]:
    if table is not None:
        return table.per_token
    if all(run.seconds is not None for run in runs):
        return measured_only
    return lambda run: math.nan


def _refuse_seen(cases: Sequence[Case], model: BlockSizePredictor) -> None:
    """Raises ConfigError for a prompt or a benchmark that the predictor was fitted to."""
    training = model.config.training
    seen, sources = set(training.get("prompts", ())), set(training.get("sources", ()))
    for case in cases:
        if short_hash(case.prompt) in seen:
            raise ConfigError("--sweep", case.prompt, "a prompt that the predictor never saw")
        if case.source in sources:
            raise ConfigError("--sweep", case.source, "a benchmark that the predictor never saw")


def _by_regime(cases: Sequence[Case]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.regime.name, []).append(case)
    ordered = dict(sorted(found.items()))
    return ordered | {"all": list(cases)} if len(ordered) > 1 else ordered


def _row(
    config: EvaluateConfig,
    model: BlockSizePredictor,
    objective: str,
    regime: str,
    cases: Sequence[Case],
    table: CostTable | None,
) -> dict[str, Any]:
    """All policies on the cases of one regime."""
    training = model.config.training
    picked = choices(model, cases)
    # The rival is the best size of the case's own regime, where validation had that regime.
    known = training.get("best_fixed", {}).get(objective, {})
    trained = _nearest(cases[0].sizes, int(training["block_size"]))
    fixed = [int(known.get(c.regime.name, known.get("all", trained))) for c in cases]
    major = int(training.get("majority", trained))
    draw = np.random.default_rng(config.seed)
    per_token = _per_token(table, cases[0].runs[cases[0].sizes[0]])
    round_ms = None if table is None else table.round

    def each(function: Callable[[Case], float]) -> Floats:
        return np.array([function(case) for case in cases])

    found: dict[str, Floats] = {
        "predictor": np.array(
            [
                policies.of_size(c, s, objective) + _own_cost(c, objective, config.predictor_ms)
                for c, s in zip(cases, picked, strict=True)
            ]
        ),
        "best fixed": np.array(
            [policies.of_size(c, s, objective) for c, s in zip(cases, fixed, strict=True)]
        ),
        "trained size": each(lambda c: policies.of_size(c, trained, objective)),
        "majority class": each(lambda c: policies.of_size(c, major, objective)),
        "random": each(lambda c: policies.random_size(c, objective)),
        "oracle, same runs": each(lambda c: policies.oracle_same_runs(c, objective)),
        "oracle, independent runs": each(
            lambda c: policies.oracle_independent_runs(c, objective, draw)
        ),
    }
    halves = np.array(
        [
            policies.oracle_other_half(c, objective, s, per_token)
            for c, s in zip(cases, fixed, strict=True)
        ]
    )
    # Without costs no case has times, and only acceptance is judged.
    each_round = np.array(
        [
            policies.oracle_per_round(c, objective, s, per_token, round_ms or _no_cost)
            if objective == "acceptance" or round_ms is not None
            else (math.nan, math.nan)
            for c, s in zip(cases, fixed, strict=True)
        ]
    )
    boot = draw.integers(0, len(cases), size=(config.resamples, len(cases)))
    rows = {
        name: _judged(got, found["best fixed"], boot, objective)
        for name, got in found.items()
        if not np.isnan(got).all()
    }
    for name, pairs in (("oracle, other half", halves), ("oracle per round", each_round)):
        if not np.isnan(pairs).all():
            rows[name] = _judged(pairs[:, 0], pairs[:, 1], boot, objective)
    same = [
        s == c.sizes[policies.best_index(policies.values(c, objective).mean(1), objective)]
        for c, s in zip(cases, picked, strict=True)
    ]
    row = {
        "objective": objective,
        "unit": UNITS[objective],
        "regime": regime,
        "cases": len(cases),
        "seeds": [min(c.seeds for c in cases), max(c.seeds for c in cases)],
        "fixed_sizes": sorted(set(fixed)),
        "trained_size": trained,
        "by_size": {
            str(s): round(float(each(lambda c, s=s: policies.of_size(c, s, objective)).mean()), 4)  # type: ignore[misc]
            for s in cases[0].sizes
        },
        "predicted_sizes": {str(s): picked.count(s) for s in cases[0].sizes},
        "equals_oracle": round(sum(same) / len(same), 4),
        "policies": rows,
    }
    return row | {"verdicts": verdicts(row)}


def _own_cost(case: Case, objective: str, predictor_ms: float) -> float:
    if objective != "cost":
        return 0.0
    tokens = float(np.mean([run.tokens for run in case.runs[case.sizes[0]]]))
    return predictor_ms / max(tokens, 1.0)


def _judged(got: Floats, base: Floats, boot: Any, objective: str) -> dict[str, Any]:
    """Mean, and gain over the fixed size in percent (positive is better), with 95 % intervals; the
    same prompts are drawn for both. Cases without a value are left out of both.
    """
    there = ~(np.isnan(got) | np.isnan(base))
    got, base = np.where(there, got, 0.0), np.where(there, base, 0.0)
    counts = there[boot].sum(1)
    use = counts > 0
    mine, theirs = got[boot].sum(1)[use] / counts[use], base[boot].sum(1)[use] / counts[use]
    turn = -1 if objective == "cost" else 1
    # Plus zero: a gain of none is not to be shown with a minus.
    gains = 100 * turn * (mine / theirs - 1) + 0.0
    gain = 100 * turn * (got.sum() / base.sum() - 1) + 0.0
    return {
        "cases": int(there.sum()),
        "mean": round(float(got.sum() / there.sum()), 4),
        "interval_95": _interval(mine, 4),
        "gain_percent": round(float(gain), 3),
        "gain_interval_95": _interval(gains, 3),
    }


def _interval(samples: Floats, digits: int) -> list[float]:
    low, high = np.percentile(samples, [2.5, 97.5])
    return [round(float(low), digits), round(float(high), digits)]


def verdicts(row: Mapping[str, Any]) -> list[str]:
    """What the intervals of one row allow to say."""
    where = f"{row['regime']}, {WORDS[row['objective']]}"
    found = row["policies"]
    sizes = " or ".join(str(size) for size in row["fixed_sizes"])
    mine = found["predictor"]
    low, high = mine["gain_interval_95"]
    word = "excludes zero" if low > 0 or high < 0 else "does not exclude zero"
    said = [
        f"{where}: the predictor's gain over the best fixed size ({sizes}, chosen on validation) "
        f"is {_signed(mine)} over {row['cases']} prompts: it {word}"
        + (", and is a loss." if high < 0 else ".")
    ]
    if row["equals_oracle"] >= SUSPICIOUS and row["cases"] >= 10:
        share = 100 * row["equals_oracle"]
        said.append(f"{where}: it picks the oracle's size in {share:.0f} %: suspect leakage.")
    same, other = found["oracle, same runs"], found.get("oracle, other half")
    if other is not None:
        text = (
            f"{where}: an oracle picked and measured on the same runs gains {_signed(same)}, one "
            f"picked on one half and measured on the other {_signed(other)}: "
        )
        if other["gain_interval_95"][0] > 0:
            share = 100 * min(1.0, other["gain_percent"] / max(same["gain_percent"], 1e-9))
            text += f"prompts do differ, and {share:.0f} % of the oracle's gain is real."
        else:
            text += "the same-run oracle is just the best of several noisy runs."
        said.append(text)
    alone = found.get("oracle, independent runs")
    if alone is not None:
        said.append(
            f"{where}: with one run a size, each of its own luck, and the best one reported, the "
            f"gain would read {_signed(alone)}."
        )
    return said


def _signed(found: Mapping[str, Any]) -> str:
    low, high = found["gain_interval_95"]
    return f"{found['gain_percent']:+.2f} % [{low:+.2f}, {high:+.2f}]"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        lines.append(f"{row['regime']}, {row['unit']}; {row['cases']} prompts")
        for name, found in row["policies"].items():
            low, high = found["interval_95"]
            lines.append(
                f"  {name:25s} {found['mean']:8.3f} [{low:.3f}, {high:.3f}]  {_signed(found)}"
            )
    return lines


def _nearest(sizes: Sequence[int], wanted: int) -> int:
    return min(sizes, key=lambda size: (abs(size - wanted), size))


def _no_cost(size: int, drafted: int) -> float:
    return 0.0
