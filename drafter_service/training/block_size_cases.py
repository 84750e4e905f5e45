"""Sweeps as cases: what each block size gave on each prompt, over its seeds.

A case is a prompt in one regime with the same answers at every size. Knows acceptance length, time
per token, labels and splits. Does not know networks or files.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from drafter_service.predictor import InputKind
from drafter_service.training.block_size_table import Regime, Run, Sweep, short_hash
from draftwire.config import ConfigError

Floats = npt.NDArray[np.float64]
OBJECTIVES = ("cost", "acceptance")


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt in one regime. `runs[size]` has one run a seed, in the same order at every size."""

    prompt: str
    source: str
    regime: Regime
    sizes: tuple[int, ...]
    runs: dict[int, tuple[Run, ...]]
    inputs: torch.Tensor
    lengths: Floats
    """[sizes, seeds] mean acceptance length of each run."""
    times: Floats
    """[sizes, seeds] milliseconds a token of each run."""

    @property
    def seeds(self) -> int:
        """Answers of the prompt."""
        return int(self.lengths.shape[1])

    def loss(self, objective: str) -> Floats:
        """[sizes] what is to be small: mean time a token, or the mean length with its sign
        turned.
        """
        loss: Floats = self.times.mean(1) if objective == "cost" else -self.lengths.mean(1)
        return loss


def cases_of(
    sweeps: Sequence[Sweep], kind: InputKind | None, per_token: Callable[[Run], float]
) -> list[Case]:
    """All cases; answers that lack a size are left out. `kind` None: without inputs. Raises
    ConfigError for sweeps that do not belong together.
    """
    first = sweeps[0].facts
    same = ("drafter_sha256", "candidates", "parts", "max_nodes", "vocab_size", "hidden_size")
    for sweep in sweeps[1:]:
        for name in same:
            if sweep.facts[name] != first[name]:
                raise ConfigError("--sweep", sweep.folder, f"of {name} = {first[name]}")
    sizes = sweeps[0].candidates
    found: dict[tuple[str, str, Regime], dict[str, dict[int, Run]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    where: dict[str, Sweep] = {}
    for sweep in sweeps:
        for run in sweep.runs:
            if run.tokens > 0:
                found[run.source, run.prompt, run.regime][run.key][run.size] = run
                where[run.prompt] = sweep
    cases = []
    for (source, prompt, regime), by_key in sorted(
        found.items(), key=lambda item: (short_hash(item[0][1]), item[0][2].name)
    ):
        whole = [by_size for _, by_size in sorted(by_key.items()) if by_size.keys() >= set(sizes)]
        if not whole:
            continue
        runs = {size: tuple(by_size[size] for by_size in whole) for size in sizes}
        cases.append(
            Case(
                prompt,
                source,
                regime,
                sizes,
                runs,
                torch.empty(0) if kind is None else where[prompt].inputs(prompt, kind.value),
                np.array([[run.acceptance_length for run in runs[size]] for size in sizes]),
                np.array([[per_token(run) for run in runs[size]] for size in sizes]),
            )
        )
    return cases


def label(case: Case, objective: str, soft: float = 0.0) -> torch.Tensor:
    """float32 [sizes], summing to one. Hard (soft = 0): all on the size with the least time a
    token, or the largest mean acceptance length; of equal ones the smallest size. Soft: the softmax
    of how much each size is worse than the best, relative to it, over `soft`.
    """
    loss = torch.from_numpy(case.loss(objective)).float()
    if soft > 0:
        worse = (loss - loss.min()) / loss.min().abs().clamp(min=1e-9)
        return torch.softmax(-worse / soft, dim=0)
    best = int((loss <= loss.min() + 1e-9).nonzero()[0])
    hard = torch.zeros(len(loss))
    hard[best] = 1.0
    return hard


def enough_seeds(case: Case, minimum: int) -> bool:
    """At temperature 0 every answer to a prompt is the same one; above, one answer mostly labels
    its own luck.
    """
    return case.regime.temperature <= 0 or case.seeds >= minimum


def is_validation(prompt: str, share: float, seed: int) -> bool:
    """Whether a prompt is set aside; by its key alone, so that all its answers go the same way."""
    return int(short_hash(f"{seed}|{prompt}"), 16) < share * 16**8


def best_fixed(cases: Sequence[Case], objective: str) -> dict[str, int]:
    """The one size that is best over the cases of each regime, and under "all" over all of them;
    of equal ones the smallest.
    """
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups["all"].append(case)
        groups[case.regime.name].append(case)
    found = {}
    for name, some in groups.items():
        # Relative to each case's own mean, so that slow prompts do not decide alone.
        mean = np.mean([c.loss(objective) / abs(c.loss(objective).mean()) for c in some], axis=0)
        found[name] = some[0].sizes[int(np.flatnonzero(mean <= mean.min() + 1e-12)[0])]
    return found


def majority(labels: Sequence[torch.Tensor], sizes: Sequence[int]) -> int:
    """The size that most labels name; of equal counts the smaller."""
    counts = Counter(int(one.argmax()) for one in labels)
    return sizes[min(counts, key=lambda index: (-counts[index], index))]


def entropy(labels: torch.Tensor) -> float:
    """Mean entropy of label rows, nats: the cross-entropy that no network gets below."""
    return float(-(labels * labels.clamp(min=1e-12).log()).sum(-1).mean()) if len(labels) else 0.0


def relative(cases: Sequence[Case], chosen: Sequence[int], objective: str) -> float:
    """Mean loss of the chosen sizes over each case's own mean; the smaller the better, for both
    objectives.
    """
    if not cases:
        return math.nan
    ratios = []
    for case, size in zip(cases, chosen, strict=True):
        loss = case.loss(objective)
        ratios.append(loss[case.sizes.index(size)] / abs(loss.mean()))
    return float(np.mean(ratios))
