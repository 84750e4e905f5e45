"""Draws of the vectorised path are distributed as the specification says, with and without drafts.

Pearson's chi-square at a false-alarm rate of one in 10,000 a test: that share of seeds would fail a
correct program; the seeds are fixed. Cells that expect fewer than five draws are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats
import torch

from draftwire_kernels import reference
from draftwire_kernels.accept import Rule, accept
from draftwire_kernels.draft_probs import DraftProbs
from draftwire_kernels.sampling import History, Sampling
from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk import follow

ALARM = 1e-4
PROMPT = [1, 1, 3]
Counts = npt.NDArray[np.float64]
Law = npt.NDArray[np.float64]
Row = Callable[[Sequence[int]], torch.Tensor]

DRAFTS = ["none", "tree", "chain", "block", "one_hot", "mixture", "mixture_block"]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.6},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.8},
    "bias": {"logit_bias": ((0, 1.5), (2, -1.0))},
    "min_tokens": {"banned_ids": (2,), "banned_before": len(PROMPT) + 1},
    "several": {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "frequency_penalty": 0.5},
    "others": {
        "temperature": 1.3,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "logit_bias": ((4, 2.0),),
    },
    "all": {
        "temperature": 0.9,
        "top_k": 5,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.3,
        "logit_bias": ((3, 0.5),),
        "banned_ids": (0,),
        "banned_before": len(PROMPT) + 1,
    },
}


def p_value(counts: Counts, law: Law) -> float:
    """Of observed counts under a law; a draw of probability zero is certain alarm."""
    expected = law * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    small = (expected < 5) & (expected > 0)
    seen, hoped = list(counts[expected >= 5]), list(expected[expected >= 5])
    if small.any():
        seen.append(counts[small].sum())
        hoped.append(expected[small].sum())
    return float(scipy.stats.chisquare(seen, hoped).pvalue) if len(seen) > 1 else 1.0


def toy(vocab_size: int, seed: int) -> Row:
    """Logits of a first-order model."""
    generator = torch.Generator().manual_seed(seed)
    table = 1.2 * torch.randn(vocab_size, vocab_size, generator=generator)
    return lambda context: table[context[-1]]


def pair_law(row: Row, vocab_size: int, sampling: Sampling) -> Law:
    """Exact law of the first two tokens, [V * V], in fp64."""
    law = np.zeros((vocab_size, vocab_size))
    at = len(PROMPT)
    first = reference.target_probs(row(PROMPT).double(), sampling, position=at, prompt_ids=PROMPT)
    for token in range(vocab_size):
        if first[token] > 0:
            second = reference.target_probs(
                row([token]).double(),
                sampling,
                position=at + 1,
                prompt_ids=PROMPT,
                output_ids=[token],
            )
            law[token] = (first[token] * second).numpy()
    return law.reshape(-1)


def count_pairs(
    row: Row, vocab_size: int, make: Callable[[int], Sampling], trials: int, draft: str
) -> Counts:
    """First two tokens of many seeds, the second from a round of its own if the first ended one."""
    generator = np.random.default_rng(5)
    counts = np.zeros((vocab_size, vocab_size))
    for seed in range(trials):
        sampling = make(seed)
        history = History(vocab_size, PROMPT)
        tokens: list[int] = []
        while len(tokens) < 2:
            context = [*PROMPT, *tokens]
            for token in one_round(row, vocab_size, sampling, context, history, draft, generator):
                history.append(token)
                tokens.append(token)
        counts[tokens[0], tokens[1]] += 1
    return counts.reshape(-1)


def one_round(
    row: Row,
    vocab_size: int,
    sampling: Sampling,
    context: list[int],
    history: History,
    draft: str,
    generator: np.random.Generator,
) -> tuple[int, ...]:
    """What a round with drafts of some kind commits."""
    position = len(context)
    if draft in ("none", "tree"):
        count = 0 if draft == "none" else 3
        paths = generator.integers(0, vocab_size, (count, 2)).tolist()
        tree = TokenTree.from_paths(paths)
        walks = [[tree.tokens[i] for i in tree.path(node)] for node in range(-1, len(tree))]
        rows = torch.stack([row([*context, *walk]) for walk in walks])
        return follow(rows, tree, sampling, position=position, history=history).tokens
    if draft.startswith("mixture"):
        branches = generator.integers(0, vocab_size, (3, 2)).tolist()
        prior = [0.5, 0.3, 0.2]
        chosen = int(generator.choice(3, p=prior))
        tokens, probs = branches[chosen], DraftProbs.mixture(branches, prior, chosen)
    elif draft == "one_hot":
        tokens = generator.integers(0, vocab_size, 2).tolist()
        probs = DraftProbs.one_hot(tokens)
    else:
        # The draft half agrees with the target, so that refusals and acceptances are both common.
        tokens, dense = [], []
        for _ in range(2):
            rough = torch.softmax(0.6 * row([*context, *tokens]), 0).double().numpy()
            rough /= rough.sum()
            tokens.append(int(generator.choice(vocab_size, p=rough)))
            dense.append(torch.from_numpy(rough))
        probs = DraftProbs.dense(torch.stack(dense))
    rows = torch.stack([row([*context, *tokens[:i]]) for i in range(3)])
    rule = Rule.BLOCK if "block" in draft else Rule.CHAIN
    return accept(
        rows, tokens, probs, sampling, rule=rule, position=position, history=history
    ).tokens


def check(name: str, draft: str, trials: int, seed: int) -> None:
    """Raise unless the pairs of a rule look like the target's."""
    row, asked = toy(6, seed), SAMPLINGS[name]
    counts = count_pairs(row, 6, lambda seed: Sampling(seed=seed, **asked), trials, draft)
    assert p_value(counts, pair_law(row, 6, Sampling(**asked))) > ALARM


@pytest.mark.parametrize("name", SAMPLINGS)
def test_two_tokens_of_follow_over_random_trees_have_the_targets_law(name: str) -> None:
    check(name, "tree", 450, 1)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("draft", ["chain", "block", "one_hot", "mixture", "mixture_block", "none"])
def test_two_tokens_of_every_rule_have_the_targets_law(name: str, draft: str) -> None:
    check(name, draft, 350, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_many_draws_of_every_rule_and_parameter_have_the_targets_law(name: str, draft: str) -> None:
    check(name, draft, 6000, 3)


def random_parameters(generator: np.random.Generator) -> dict[str, Any]:
    """Each parameter on or off by a coin, with a random value."""
    uniform = generator.uniform
    ids = generator.permutation(6).tolist()
    choices: dict[str, Any] = {
        "temperature": uniform(0.4, 2.0),
        "top_k": int(generator.integers(2, 7)),
        "top_p": uniform(0.3, 1.0),
        "min_p": uniform(0.01, 0.4),
        "repetition_penalty": uniform(0.7, 1.6),
        "presence_penalty": uniform(-1.0, 1.0),
        "frequency_penalty": uniform(-1.0, 1.0),
        "logit_bias": tuple((token, uniform(-2.0, 2.0)) for token in ids[:2]),
        "banned_ids": tuple(ids[2:4]),
    }
    asked = {name: value for name, value in choices.items() if generator.random() < 0.5}
    if "banned_ids" in asked:
        asked["banned_before"] = len(PROMPT) + int(generator.integers(1, 3))
    return asked


COMBINATIONS = [
    (random_parameters(generator), DRAFTS[int(generator.integers(len(DRAFTS)))])
    for generator in np.random.default_rng(20260925).spawn(48)
]


def check_combination(case: int, trials: int) -> None:
    asked, draft = COMBINATIONS[case]
    row = toy(6, case)
    counts = count_pairs(row, 6, lambda seed: Sampling(seed=seed, **asked), trials, draft)
    assert p_value(counts, pair_law(row, 6, Sampling(**asked))) > ALARM, (asked, draft)


@pytest.mark.parametrize("case", range(10))
def test_random_combinations_of_parameters_and_drafts_have_the_targets_law(case: int) -> None:
    check_combination(case, 200)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(COMBINATIONS)))
def test_many_draws_of_random_combinations_have_the_targets_law(case: int) -> None:
    check_combination(case, 3000)


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_draws_from_a_row_of_many_groups_have_its_law(spread: float) -> None:
    logits = spread * torch.randn(1, 1000, generator=torch.Generator().manual_seed(3))
    law = torch.softmax(logits[0].double(), 0).numpy()
    counts = np.zeros(1000)
    for seed in range(1800):
        counts[follow(logits, TokenTree(), Sampling(seed=seed), position=4).tokens[0]] += 1
    assert p_value(counts, law) > ALARM


def test_one_seed_over_many_positions_has_the_law_too() -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(4))
    law = torch.softmax(logits[0].double(), 0).numpy()
    counts = np.zeros(200)
    for position in range(1, 1801):
        counts[follow(logits, TokenTree(), Sampling(seed=1), position=position).tokens[0]] += 1
    assert p_value(counts, law) > ALARM


def test_the_test_notices_a_temperature_that_is_off() -> None:
    row = toy(6, 1)
    counts = count_pairs(row, 6, lambda seed: Sampling(seed=seed, temperature=1.5), 600, "none")
    assert p_value(counts, pair_law(row, 6, Sampling())) < ALARM
