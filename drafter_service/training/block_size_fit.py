"""`draftwire-train block-size fit`: a predictor from sweeps.

Knows the settings, the loop and what the predictor's file remembers of its training. Labels and
splits are in `block_size_cases`. Does not know how sweeps are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from drafter_service import predictor as predictors
from drafter_service.predictor import BlockSizePredictor, InputKind, PredictorConfig
from drafter_service.training.block_size_cases import (
    OBJECTIVES,
    Case,
    best_fixed,
    cases_of,
    enough_seeds,
    entropy,
    is_validation,
    label,
    majority,
    relative,
)
from drafter_service.training.block_size_costs import measured_only, read_costs
from drafter_service.training.block_size_table import Run, read_sweep, short_hash
from drafter_service.training.errors import TrainingError
from draftwire.config import ConfigError, setting


@dataclass(frozen=True)
class FitConfig:
    """Settings of `draftwire-train block-size fit`."""

    sweep: tuple[str, ...] = setting(help="folders of sweeps to learn from")
    out: Path = setting(help="folder of the predictor: the drafter's own, to be served with it")
    held_out: tuple[str, ...] = setting(
        (), help="folders of sweeps for evaluation: their prompts and benchmarks are refused here"
    )
    input: str = setting(
        "context",
        help="what the network sees",
        choices=tuple(kind.value for kind in InputKind),
    )
    labels: str = setting(
        "cost",
        help="cost: least time a token; acceptance: largest mean acceptance length (the paper's)",
        choices=OBJECTIVES,
    )
    costs: Path | None = setting(None, help="table of costs (block-size costs), for replayed runs")
    soft: float = setting(
        0.0, help="soft labels: softmax of relative losses over this; 0: hard ones", minimum=0.0
    )
    min_seeds: int = setting(
        4, help="answers a prompt needs above temperature 0 for a hard label", minimum=1
    )
    hidden: int = setting(2048, help="width of both layers", minimum=1, maximum=16384)
    dropout: float = setting(0.2, help="dropout in training", minimum=0.0, maximum=0.9)
    temperature: bool = setting(True, help="the sampling temperature is one more input")
    standardise: bool = setting(True, help="inputs to mean 0 and deviation 1; false is the paper's")
    epochs: int = setting(100, help="passes over the cases", minimum=1)
    batch: int = setting(64, help="cases a step", minimum=1)
    lr: float = setting(1e-5, help="learning rate of Adam", minimum=0.0)
    weight_decay: float = setting(0.0, help="weight decay", minimum=0.0)
    patience: int = setting(0, help="epochs without a better validation; 0: all epochs", minimum=0)
    validation: float = setting(
        0.2, help="share of the prompts set aside", minimum=0.0, maximum=0.9
    )
    restarts: int = setting(1, help="trainings from different seeds; the best is kept", minimum=1)
    seed: int = setting(0, help="split, first weights, order and dropout", minimum=0)
    dtype: str = setting("bfloat16", help="type on disk", choices=("bfloat16", "float32"))
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)


@dataclass(frozen=True, slots=True)
class Fitted:
    """One training: the network at its best epoch and the validation losses that led there."""

    model: BlockSizePredictor
    epoch: int
    validation: float
    curve: tuple[float, ...]


def fit(config: FitConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the command: trains, writes the predictor, returns what its file says of the training."""
    if config.threads:
        torch.set_num_threads(config.threads)
    sweeps = [read_sweep(Path(name)) for name in config.sweep]
    kind = InputKind(config.input)
    per_token: Callable[[Run], float] = measured_only
    if config.costs is not None:
        per_token = read_costs(config.costs).per_token
    elif config.labels == "acceptance" and any(run.seconds is None for run in sweeps[0].runs):
        per_token = _unknown
    cases = cases_of(sweeps, kind, per_token)
    refuse_overlap(cases, config.held_out)
    usable = [c for c in cases if config.soft or enough_seeds(c, config.min_seeds)]
    if len(usable) < len(cases):
        say(f"{len(cases) - len(usable)} cases left out: under {config.min_seeds} seeds")
    learn = [c for c in usable if not is_validation(c.prompt, config.validation, config.seed)]
    check = [c for c in usable if is_validation(c.prompt, config.validation, config.seed)]
    if not learn or (config.validation and not check):
        raise TrainingError(
            f"{len(learn)} cases to learn from and {len(check)} for validation: too few"
        )
    facts = sweeps[0].facts
    shape = PredictorConfig(
        input=kind,
        input_size=learn[0].inputs.shape[0],
        candidates=sweeps[0].candidates,
        drafter_sha256=str(facts["drafter_sha256"]),
        hidden_size=config.hidden,
        dropout=config.dropout,
        takes_temperature=config.temperature,
    )
    judged = check or learn
    tries = [train(shape, config, learn, judged, config.seed + n) for n in range(config.restarts)]
    best = min(tries, key=lambda one: one.validation)
    notes = _notes(config, facts, learn, check, best, [one.validation for one in tries])
    best.model.config = replace(shape, training=notes)
    predictors.save(config.out, best.model, getattr(torch, config.dtype))
    gain = 100 * (notes["fixed_validation_loss"] - notes["validation_loss"])
    say(
        f"{len(learn)} cases, {len(check)} for validation; epoch {best.epoch}: on validation "
        f"{gain:+.2f} % of the mean over all sizes against the best fixed one"
    )
    return notes


def refuse_overlap(cases: Sequence[Case], held_out: Sequence[str]) -> None:
    """Raises ConfigError if a prompt or a benchmark is in a held-out sweep too."""
    prompts, sources = {case.prompt for case in cases}, {case.source for case in cases}
    for name in held_out:
        for run in read_sweep(Path(name)).runs:
            if run.prompt in prompts:
                raise ConfigError("--held-out", run.prompt, "a prompt that is not trained on")
            if run.source in sources:
                raise ConfigError("--held-out", run.source, "a benchmark that is not trained on")


def train(
    shape: PredictorConfig,
    config: FitConfig,
    learn: Sequence[Case],
    judged: Sequence[Case],
    seed: int,
) -> Fitted:
    """One training. The epoch with the least validation loss is kept: mean time a token of the
    sizes chosen, or mean acceptance length turned, each relative to the case's mean over the sizes.
    """
    inputs, temperatures = torch.stack([c.inputs for c in learn]), _temperatures(learn)
    labels = torch.stack([label(c, config.labels, config.soft) for c in learn])
    model = BlockSizePredictor(shape)
    model.initialise(seed)
    if config.standardise:
        deviation = inputs.std(0, correction=0)
        model.shift.copy_(inputs.mean(0))
        model.scale.copy_(1 / deviation.clamp(min=1e-3 * float(deviation.max()) + 1e-12))
    optimiser = torch.optim.Adam(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    order = torch.Generator().manual_seed(seed)
    curve: list[float] = []
    kept: tuple[float, int, dict[str, torch.Tensor]] = (math.inf, 0, {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # dropout draws from the global generator
        for epoch in range(config.epochs + 1):
            if epoch:
                model.train()
                for rows in torch.split(torch.randperm(len(learn), generator=order), config.batch):
                    loss = F.cross_entropy(model(inputs[rows], temperatures[rows]), labels[rows])
                    optimiser.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
            model.eval()
            curve.append(relative(judged, choices(model, judged), config.labels))
            if curve[-1] < kept[0] - 1e-9:
                state = {name: t.detach().clone() for name, t in model.state_dict().items()}
                kept = (curve[-1], epoch, state)
            if config.patience and epoch - kept[1] >= config.patience:
                break
    model.load_state_dict(kept[2])
    return Fitted(model, kept[1], kept[0], tuple(curve))


@torch.no_grad()
def choices(model: BlockSizePredictor, cases: Sequence[Case]) -> list[int]:
    """The size that the network picks for each case."""
    if not cases:
        return []
    temperatures = [case.regime.temperature for case in cases]
    return model.sizes(torch.stack([case.inputs for case in cases]), temperatures)


def _temperatures(cases: Sequence[Case]) -> torch.Tensor:
    return torch.tensor([case.regime.temperature for case in cases])


def _notes(
    config: FitConfig,
    facts: Any,
    learn: Sequence[Case],
    check: Sequence[Case],
    best: Fitted,
    tries: Sequence[float],
) -> dict[str, Any]:
    judged = check or learn
    labels = [label(c, config.labels, config.soft) for c in learn]
    fixed = {name: best_fixed(judged, name) for name in OBJECTIVES if _known(judged, name)}
    size = fixed[config.labels]["all"]
    right = [
        picked == case.sizes[int(label(case, config.labels).argmax())]
        for case, picked in zip(judged, choices(best.model, judged), strict=True)
    ]
    return {
        "labels": config.labels,
        "soft": config.soft,
        "drafter": facts["drafter"],
        "block_size": facts["block_size"],
        "parts": facts["parts"],
        "max_nodes": facts["max_nodes"],
        "cases": len(learn),
        "validation_cases": len(check),
        "regimes": sorted({case.regime.name for case in learn}),
        "sources": sorted({case.source for case in (*learn, *check)}),
        "epoch": best.epoch,
        "validation_loss": round(best.validation, 6),
        "fixed_validation_loss": round(relative(judged, [size] * len(judged), config.labels), 6),
        "validation_accuracy": round(sum(right) / len(right), 4),
        "label_entropy": round(entropy(torch.stack(labels)), 4),
        "restarts": [round(value, 6) for value in tries],
        "best_fixed": fixed,
        "majority": majority(labels, learn[0].sizes),
        "epochs": config.epochs,
        "batch": config.batch,
        "lr": config.lr,
        "seed": config.seed,
        "standardise": config.standardise,
        "prompts": sorted({short_hash(case.prompt) for case in (*learn, *check)}),
    }


def _known(cases: Sequence[Case], objective: str) -> bool:
    return objective != "cost" or not any(math.isnan(case.times.sum()) for case in cases)


def _unknown(run: Run) -> float:
    """No times are known: only acceptance is looked at."""
    return math.nan
