"""The command `draftwire-train`: picks the subcommand, loads its settings, runs it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from drafter_service.draft_config import CheckpointError
from drafter_service.training.errors import TrainingError
from draftwire.config import ConfigError, load
from draftwire.errors import DraftwireError

PROG = "draftwire-train"
GROUP = "block-size"  # its commands are two words


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; 0 if all went well, 1 if it failed, 2 for settings that cannot be used."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == [GROUP] and len(words) > 1:
        words[:2] = [f"{GROUP} {words[1]}"]
    if not words or words[0] not in COMMANDS:
        text = "".join(f"  {name:20s} {help}\n" for name, (_, help) in COMMANDS.items())
        asked = bool(words) and words[0] in ("-h", "--help")
        (sys.stdout if asked else sys.stderr).write(
            f"usage: {PROG} COMMAND [--help | settings]\n\n{text}"
        )
        return 0 if asked else 2
    start, _ = COMMANDS[words[0]]
    config_cls, run = start()
    try:
        config = load(config_cls, words[1:], os.environ, f"{PROG} {words[0]}")
        run(config)
    except ConfigError as error:
        sys.stderr.write(f"{PROG} {words[0]}: {error}\n")
        return 2
    except (CheckpointError, TrainingError, DraftwireError) as error:
        sys.stderr.write(f"{PROG} {words[0]}: {error}\n")
        return 1
    return 0


Command = tuple[type[Any], Callable[[Any], object]]


def _generate() -> Command:
    from drafter_service.training import generate

    return generate.GenerateConfig, lambda c: generate.generate(c, generate.say_to_stderr)


def _features() -> Command:
    from drafter_service.training import features, generate

    return features.FeaturesConfig, lambda c: features.features(c, generate.say_to_stderr)


def _train() -> Command:
    from drafter_service.training import generate, train
    from drafter_service.training.run_config import TrainConfig

    return TrainConfig, lambda c: train.train(c, generate.say_to_stderr)


def _path_head() -> Command:
    from drafter_service.training import generate, pathhead

    return pathhead.PathHeadConfig, lambda c: pathhead.path_head(c, generate.say_to_stderr)


def _calibrate() -> Command:
    from drafter_service.training import calibrate, generate

    return calibrate.CalibrateConfig, lambda c: calibrate.calibrate(c, generate.say_to_stderr)


def _evaluate() -> Command:
    from drafter_service.training import evaluate, generate

    return evaluate.EvaluateConfig, lambda c: evaluate.evaluate(c, generate.say_to_stderr)


def _export() -> Command:
    from drafter_service.training import export, generate

    return export.ExportConfig, lambda c: export.export(c, generate.say_to_stderr)


def _demo() -> Command:
    from drafter_service.training import generate, recipe

    return recipe.DemoConfig, lambda c: recipe.demo(c, generate.say_to_stderr)


def _block_size(name: str) -> Callable[[], Command]:
    def start() -> Command:
        from drafter_service.training import (
            block_size_costs,
            block_size_evaluate,
            block_size_fit,
            block_size_sweep,
            generate,
        )

        commands: dict[str, tuple[type[Any], Callable[[Any, Callable[[str], None]], object]]] = {
            "costs": (block_size_costs.CostsConfig, block_size_costs.costs),
            "sweep": (block_size_sweep.SweepConfig, block_size_sweep.sweep),
            "fit": (block_size_fit.FitConfig, block_size_fit.fit),
            "evaluate": (block_size_evaluate.EvaluateConfig, block_size_evaluate.evaluate),
        }
        config_cls, run = commands[name]
        return config_cls, lambda c: run(c, generate.say_to_stderr)

    return start


COMMANDS: dict[str, tuple[Callable[[], Command], str]] = {
    "generate": (_generate, "have the target answer prompts"),
    "features": (_features, "keep the target's features and likeliest tokens along its answers"),
    "train": (_train, "train a drafter"),
    "path-head": (_path_head, "train the path-conditioned head of a finished drafter"),
    "calibrate": (_calibrate, "measure how scores become chances, into the checkpoint"),
    "evaluate": (_evaluate, "replay stored answers: acceptance lengths"),
    "export": (_export, "write a run's checkpoint in the public format"),
    "demo": (_demo, "all of these for the demo drafter"),
    f"{GROUP} costs": (_block_size("costs"), "measure what rounds cost, by size and rows"),
    f"{GROUP} sweep": (_block_size("sweep"), "try every block size on every prompt"),
    f"{GROUP} fit": (_block_size("fit"), "train the block size predictor"),
    f"{GROUP} evaluate": (_block_size("evaluate"), "say whether predicting the size pays"),
}

if __name__ == "__main__":
    sys.exit(main())
