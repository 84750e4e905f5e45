"""The rules are exact: every draft, coin and token of toy vocabularies summed up, no sampling."""

from __future__ import annotations

import pytest
import torch
from bench.acceptance_enumeration import (
    branch_rounds,
    law,
    laws,
    mixed,
    random_table,
    sampled_chains,
    tree_round,
)

from draftwire_kernels.tree import TokenTree

EXACT = 1e-12


@pytest.mark.parametrize(
    ("vocab_size", "depth", "branches", "cases"),
    [
        (3, 1, 2, 30),
        (3, 2, 1, 20),
        (3, 2, 3, 20),
        (4, 2, 4, 15),
        (5, 2, 2, 8),
        (3, 3, 4, 8),
        (4, 3, 2, 3),
    ],
)
def test_every_rule_gives_the_targets_law_and_the_accepted_lengths_are_ordered(
    vocab_size: int, depth: int, branches: int, cases: int
) -> None:
    generator = torch.Generator().manual_seed(1000 * vocab_size + 10 * depth + branches)
    for _ in range(cases):
        share = float(torch.rand(1, generator=generator))
        found = laws(generator, vocab_size, depth, branches, share)
        for rule, outcome in found.items():
            assert outcome.error < EXACT, rule
        mean = {rule: outcome.mean_accepted for rule, outcome in found.items()}
        assert mean["chain"] <= mean["block"] + EXACT
        assert mean["one_hot"] <= mean["mixture"] + EXACT
        assert mean["mixture"] <= mean["mixture_block"] + EXACT
        assert mean["mixture_block"] <= mean["tree_follow"] + EXACT


def test_block_is_exact_for_four_drafted_tokens_and_accepts_more_than_chain() -> None:
    generator = torch.Generator().manual_seed(4)
    target = random_table(generator, 3, 5, 1.5)
    draft = random_table(generator, 3, 5, 1.5)
    chain = law(target, sampled_chains(target, draft, 4, "chain"))
    block = law(target, sampled_chains(target, draft, 4, "block"))
    assert max(chain.error, block.error) < EXACT
    assert block.mean_accepted > chain.mean_accepted + 1e-3


@pytest.mark.parametrize("rule", ["chain", "block"])
@pytest.mark.parametrize("share", [0.0, 1e-15, 1e-9, 1e-4, 1.0])
def test_drafts_equal_to_nearly_equal_to_and_far_from_the_target_are_exact(
    rule: str, share: float
) -> None:
    generator = torch.Generator().manual_seed(8)
    for _ in range(8):
        target = random_table(generator, 4, 3, 2.0, excluded=0.2)
        draft = mixed(target, random_table(generator, 4, 3, 2.0, excluded=0.4), share)
        found = law(target, sampled_chains(target, draft, 2, rule))
        assert found.error < EXACT
        if share == 0:
            assert found.mean_accepted == pytest.approx(2, abs=EXACT)


def test_follow_is_exact_over_random_trees_with_duplicate_siblings_and_excluded_tokens() -> None:
    generator = torch.Generator().manual_seed(15)
    for case in range(60):
        target = random_table(generator, 4, 4, 1.5, excluded=0.2 * (case % 2))
        tokens: list[int] = []
        parents: list[int] = []
        depths = [0]
        for node in range(int(torch.randint(0, 12, (1,), generator=generator))):
            parent = int(torch.randint(-1, node, (1,), generator=generator)) if node else -1
            if depths[parent + 1] < 3:
                parents.append(parent)
                tokens.append(int(torch.randint(0, 4, (1,), generator=generator)))
                depths.append(depths[parent + 1] + 1)
            else:  # hang it from the anchor instead: twice the same token among siblings is likely
                parents.append(-1)
                tokens.append(int(torch.randint(0, 4, (1,), generator=generator)))
                depths.append(1)
        tree = TokenTree(tuple(tokens), tuple(parents))
        assert law(target, tree_round(target, tree)).error < EXACT


def test_the_enumeration_notices_a_rule_that_is_not_exact() -> None:
    generator = torch.Generator().manual_seed(3)
    target = random_table(generator, 3, 3, 1.5)
    draft = random_table(generator, 3, 3, 1.5)
    rounds = sampled_chains(target, mixed(draft, target, 0.01), 2, "chain")
    wrong = ((draft.probability(tokens), tokens, outcomes) for _, tokens, outcomes in rounds)
    assert law(target, wrong).error > 1e-6


def test_one_branch_makes_mixture_and_block_equal_to_one_hot() -> None:
    generator = torch.Generator().manual_seed(5)
    target = random_table(generator, 4, 4, 1.5)
    prior = torch.ones(1, dtype=torch.float64)
    means = {
        rule: law(target, branch_rounds(target, [(1, 2, 3)], prior, rule)).mean_accepted
        for rule in ("one_hot", "mixture", "mixture_block")
    }
    assert means["one_hot"] == pytest.approx(means["mixture"], abs=EXACT)
    assert means["one_hot"] == pytest.approx(means["mixture_block"], abs=EXACT)
