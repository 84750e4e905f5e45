"""Times acceptance on the CPU: 16 rows of 49,152 tokens, all of them walked or the first 3.

Knows synthetic rows shaped like a language model's (a power law over shuffled ids) and flat ones.
Writes tests/bench/results/acceptance_cpu.json: milliseconds a round, with machine, versions and
seeds. Run it on a quiet machine; the load average at the start is part of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from draftwire_kernels.accept import Rule, accept
from draftwire_kernels.draft_probs import DraftProbs
from draftwire_kernels.sampling import History, Sampling
from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk import draw, follow, target_scores

RESULT = Path(__file__).parent / "results" / "acceptance_cpu.json"
VOCAB, ROWS, TYPICAL = 49_152, 16, 3
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "T=1": Sampling(),
    "T=0.7": Sampling(temperature=0.7),
    "T=1 top-p 0.9": Sampling(top_p=0.9),
    "T=1 top-k 40": Sampling(top_k=40),
    "T=1 min-p 0.05": Sampling(min_p=0.05),
    "T=0.7 top-k 20 top-p 0.8": Sampling(temperature=0.7, top_k=20, top_p=0.8),
    "T=1 penalties": Sampling(repetition_penalty=1.1, frequency_penalty=0.2),
}


def language_rows(generator: np.random.Generator, rows: int) -> torch.Tensor:
    """Logits of power laws with exponents from 1.2 (open) to 2.5 (nearly decided), bf16."""
    ranks = np.arange(1, VOCAB + 1)
    table = np.empty((rows, VOCAB), dtype=np.float32)
    for row in table:
        power = -generator.uniform(1.2, 2.5) * np.log(ranks) + generator.normal(0, 0.5, VOCAB)
        row[:] = generator.permutation(power)
    return torch.from_numpy(table).bfloat16()


def flat_rows(generator: np.random.Generator, rows: int) -> torch.Tensor:
    """Normal logits of spread 1: an untrained model, the worst case of top-p; bf16."""
    return torch.from_numpy(generator.normal(size=(rows, VOCAB)).astype(np.float32)).bfloat16()


def with_seed(sampling: Sampling, seed: int) -> Sampling:
    """The same parameters with a seed."""
    return Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=seed,
    )


def walked(rows: torch.Tensor, sampling: Sampling, history: History | None) -> list[int]:
    """The tokens the target draws along the rows: drafts that are all right."""
    tokens = []
    for i, row in enumerate(rows):
        scores = target_scores(row, sampling, position=100 + i, history=history)
        tokens.append(draw(scores, sampling, 100 + i))
        if history is not None:
            history.append(tokens[-1])
    for _ in rows if history is not None else ():
        assert history is not None
        history.pop()
    return tokens


def timed(rounds: list[Callable[[], object]]) -> dict[str, float]:
    """Milliseconds a round."""
    taken = []
    for one in [*rounds[:2], *rounds]:  # two to warm up
        start = time.perf_counter()
        one()
        taken.append(1000 * (time.perf_counter() - start))
    taken = sorted(taken[2:])
    return {
        "min_ms": round(taken[0], 3),
        "median_ms": round(statistics.median(taken), 3),
        "p90_ms": round(taken[int(0.9 * len(taken))], 3),
    }


def follow_rounds(
    rows: torch.Tensor, sampling: Sampling, accepted: int, repeats: int
) -> list[Callable[[], object]]:
    """Chains of 15 drafts, the first `accepted` of them right, each with a seed of its own."""
    rounds: list[Callable[[], object]] = []
    for seed in range(repeats):
        seeded = with_seed(sampling, seed)
        history = History(VOCAB, range(0, 20_000, 20)) if sampling.needs_history else None
        drafts = walked(rows[: accepted + 1], seeded, history)[:accepted]
        wrong = [(drafts[-1] if drafts else 0) ^ 1] * (ROWS - 1 - accepted)
        tree = TokenTree.chain([*drafts, *wrong])

        def one(
            tree: TokenTree = tree, seeded: Sampling = seeded, history: History | None = history
        ) -> object:
            return follow(rows, tree, seeded, position=100, history=history)

        rounds.append(one)
    return rounds


def accept_rounds(
    rows: torch.Tensor, rule: Rule, generator: np.random.Generator, repeats: int
) -> list[Callable[[], object]]:
    """15 drafts sampled from the 64 most likely tokens of a draft near the target, sparse."""
    rounds: list[Callable[[], object]] = []
    near = rows[:-1].float() + 0.5 * torch.from_numpy(
        generator.normal(size=(ROWS - 1, VOCAB)).astype(np.float32)
    )
    top = torch.topk(near, 64)
    probs = torch.softmax(top.values.double(), 1)
    for seed in range(repeats):
        tokens = [
            int(ids[generator.choice(64, p=row.numpy() / row.numpy().sum())])
            for ids, row in zip(top.indices, probs, strict=True)
        ]
        draft = DraftProbs.sparse(top.indices, probs)

        def one(tokens: list[int] = tokens, draft: DraftProbs = draft, seed: int = seed) -> object:
            return accept(rows, tokens, draft, Sampling(seed=seed), rule=rule, position=100)

        rounds.append(one)
    return rounds


def machine() -> dict[str, object]:
    """What ran this."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return {
        "cpu": ", ".join(sorted(models)) or platform.processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def main() -> None:
    """Time, write the result, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--seed", type=int, default=20260925)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record: dict[str, object] = {
        "what": f"one round of acceptance, chain of {ROWS - 1} drafts, {VOCAB} tokens, bf16 logits",
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "seed": arguments.seed,
        "repeats": arguments.repeats,
    }
    generator = np.random.default_rng(arguments.seed)
    makers = {"language": language_rows, "flat": flat_rows}
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for shape, make in makers.items():
        rows = make(generator, ROWS)
        for name, sampling in SAMPLINGS.items():
            for label, accepted in (("16 rows walked", ROWS - 1), ("3 rows walked", TYPICAL - 1)):
                rounds = follow_rounds(rows, sampling, accepted, arguments.repeats)
                figures.setdefault(f"follow, {label}, {shape}", {})[name] = timed(rounds)
        for rule in Rule:
            rounds = accept_rounds(rows, rule, generator, arguments.repeats)
            figures.setdefault(f"draft_probs top 64, {shape}", {})[rule.value] = timed(rounds)
    record["figures"] = figures
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    for group, entries in figures.items():
        for name, found in entries.items():
            sys.stdout.write(f"{group:40} {name:26} {found['median_ms']:8.3f} ms\n")


if __name__ == "__main__":
    main()
