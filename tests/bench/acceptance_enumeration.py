"""Exact enumeration of the acceptance rules on toy vocabularies: every draft, coin and token.

Knows how to sum the law of what a rule commits over everything that may be drafted, and writes the
table of mean accepted lengths. Knows nothing of speed or of real models. Its parts are what
tests/kernels/test_enumeration.py asserts; run as a program it makes
tests/bench/results/acceptance_enumeration.json and prints the table as Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftwire_kernels import reference
from draftwire_kernels.reference import Outcome
from draftwire_kernels.tree import TokenTree

Round = tuple[float, tuple[int, ...], list[Outcome]]
"""Probability of a proposal, the token of each node, and what may happen to it."""

RESULT = Path(__file__).parent / "results" / "acceptance_enumeration.json"


@dataclass(frozen=True)
class Table:
    """A distribution over sequences: next-token probabilities, fp64, after every prefix."""

    vocab_size: int
    levels: tuple[torch.Tensor, ...]
    """Level l is [V ** l, V]; a prefix is a number in base V."""

    def row(self, prefix: Sequence[int]) -> torch.Tensor:
        """Distribution after a prefix, [V]."""
        return self.levels[len(prefix)][self.index(prefix)]

    def rows(self, tokens: Sequence[int], count: int) -> torch.Tensor:
        """Distributions along a chain, [count, V]."""
        return torch.stack([self.row(tokens[:i]) for i in range(count)])

    def index(self, prefix: Sequence[int]) -> int:
        """Number of a prefix among those of its length."""
        number = 0
        for token in prefix:
            number = number * self.vocab_size + token
        return number

    def probability(self, tokens: Sequence[int]) -> float:
        """Of a sequence."""
        product = 1.0
        for i, token in enumerate(tokens):
            product *= float(self.row(tokens[:i])[token])
        return product


def random_table(
    generator: torch.Generator, vocab_size: int, depth: int, spread: float, excluded: float = 0.0
) -> Table:
    """Random rows for prefixes shorter than `depth`; a share of the tokens has probability zero."""
    levels = []
    for level in range(depth):
        shape = (vocab_size**level, vocab_size)
        logits = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
        out = torch.rand(shape, generator=generator) < excluded
        out[torch.arange(shape[0]), logits.argmax(1)] = False
        levels.append(torch.softmax(logits.masked_fill(out, -torch.inf), 1))
    return Table(vocab_size, tuple(levels))


def mixed(first: Table, second: Table, share: float) -> Table:
    """Rows of `first` with a share of `second`."""
    levels = zip(first.levels, second.levels, strict=True)
    return Table(first.vocab_size, tuple((1 - share) * a + share * b for a, b in levels))


def sampled_chains(target: Table, draft: Table, depth: int, rule: str) -> Iterable[Round]:
    """Rounds of `chain` or `block` with every chain that the draft distribution can give."""
    decide = {"chain": reference.chain, "block": reference.block}[rule]
    for tokens in itertools.product(range(target.vocab_size), repeat=depth):
        probability = draft.probability(tokens)
        if probability > 0:
            target_rows, draft_rows = target.rows(tokens, depth + 1), draft.rows(tokens, depth)
            yield probability, tokens, decide(target_rows, tokens, draft_rows)


def branch_rounds(
    target: Table, branches: Sequence[tuple[int, ...]], prior: torch.Tensor, rule: str
) -> Iterable[Round]:
    """Rounds of a drafter that draws one of K fixed branches: one-hot, mixture or mixture_block."""
    decide = reference.block if rule == "mixture_block" else reference.chain
    for branch, weight in zip(branches, prior, strict=True):
        if rule == "one_hot":
            draft_rows = torch.eye(target.vocab_size, dtype=torch.float64)[list(branch)]
        else:
            draft_rows = reference.mixture_rows(branches, prior, branch, target.vocab_size)
        target_rows = target.rows(branch, len(branch) + 1)
        yield float(weight), branch, decide(target_rows, branch, draft_rows)


def tree_round(target: Table, tree: TokenTree) -> Iterable[Round]:
    """The one round of `follow` over a tree."""
    prefixes = [[tree.tokens[i] for i in tree.path(node)] for node in range(-1, len(tree))]
    target_rows = torch.stack([target.row(prefix) for prefix in prefixes])
    yield 1.0, tree.tokens, reference.follow(target_rows, tree)


@dataclass(frozen=True)
class Law:
    """What a rule does to a target."""

    error: float
    """Largest difference between its law of committed tokens and the target's."""
    mean_accepted: float
    """Accepted tokens a round, without the recovered or bonus token."""


def law(target: Table, rounds: Iterable[Round]) -> Law:
    """Sum over everything that can happen; what is not committed yet is drawn from the target."""
    size, depth = target.vocab_size, len(target.levels)
    mass = [torch.zeros(size**level, dtype=torch.float64) for level in range(depth + 1)]
    accepted = 0.0
    for probability, tokens, outcomes in rounds:
        for outcome in outcomes:
            prefix = [tokens[node] for node in outcome.path]
            weight = probability * outcome.probability
            first = target.index(prefix) * size
            mass[len(prefix) + 1][first : first + size] += weight * outcome.next_probs
            accepted += weight * len(prefix)
    truth = torch.ones(1, dtype=torch.float64)
    for level in range(depth):
        mass[level + 1] += (mass[level][:, None] * target.levels[level]).reshape(-1)
        truth = (truth[:, None] * target.levels[level]).reshape(-1)
    return Law(float((mass[depth] - truth).abs().max()), accepted)


def sample_branch(generator: torch.Generator, table: Table, depth: int) -> tuple[int, ...]:
    """One sequence drawn from a table."""
    tokens: list[int] = []
    for _ in range(depth):
        tokens.append(int(torch.multinomial(table.row(tokens), 1, generator=generator)))
    return tuple(tokens)


def laws(
    generator: torch.Generator, vocab_size: int, depth: int, branch_count: int, share: float
) -> dict[str, Law]:
    """Every rule on one random target; the draft is the target with a share of something else."""
    target = random_table(generator, vocab_size, depth + 1, 1.5, excluded=0.1)
    draft = mixed(target, random_table(generator, vocab_size, depth + 1, 1.5, 0.3), share)
    branches = [sample_branch(generator, target, depth) for _ in range(branch_count)]
    prior = torch.rand(branch_count, generator=generator, dtype=torch.float64) + 0.05
    prior = reference.tempered(prior / prior.sum(), 0.5 + float(torch.rand(1, generator=generator)))
    tree = TokenTree.from_paths(branches)
    return {
        "chain": law(target, sampled_chains(target, draft, depth, "chain")),
        "block": law(target, sampled_chains(target, draft, depth, "block")),
        "one_hot": law(target, branch_rounds(target, branches, prior, "one_hot")),
        "mixture": law(target, branch_rounds(target, branches, prior, "mixture")),
        "mixture_block": law(target, branch_rounds(target, branches, prior, "mixture_block")),
        "tree_follow": law(target, tree_round(target, tree)),
    }


def main() -> None:
    """Enumerate, write the result, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=60, help="random targets a cell")
    parser.add_argument("--seed", type=int, default=20260925)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(arguments.seed)
    cells = [(3, 2, 1), (3, 3, 2), (4, 3, 1), (4, 3, 2), (4, 3, 4), (3, 4, 4), (5, 2, 4), (5, 4, 4)]
    table = []
    for vocab_size, depth, branch_count in cells:
        # The largest cell enumerates 625 chains a case: a tenth of the cases take as long.
        cases = arguments.cases if vocab_size**depth < 500 else max(1, arguments.cases // 10)
        found = [laws(generator, vocab_size, depth, branch_count, 0.4) for _ in range(cases)]
        table.append(
            {
                "vocabulary": vocab_size,
                "depth": depth,
                "branches": branch_count,
                "cases": cases,
                "largest_error": max(one.error for case in found for one in case.values()),
                "mean_accepted": {
                    rule: sum(case[rule].mean_accepted for case in found) / cases
                    for rule in found[0]
                },
            }
        )
    record = {
        "what": "mean accepted drafted tokens a round by exact enumeration, without the bonus",
        "draft": "0.6 target + 0.4 random; branches sampled from the target, random tempered prior",
        "seed": arguments.seed,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "table": table,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(markdown(record) + "\n")


def markdown(record: dict[str, object]) -> str:
    """The table of a result, as in kernels/README.md."""
    rules = ["chain", "block", "one_hot", "mixture", "mixture_block", "tree_follow"]
    lines = [
        "| V | depth | K | cases | " + " | ".join(rules) + " | largest error |",
        "|" + "---|" * (len(rules) + 5),
    ]
    table = record["table"]
    assert isinstance(table, list)
    for row in table:
        means = [f"{row['mean_accepted'][rule]:.3f}" for rule in rules]
        cells = [row["vocabulary"], row["depth"], row["branches"], row["cases"], *means]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['largest_error']:.1e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
