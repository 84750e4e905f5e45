"""Chains, merged trees, the parts of a proposal, and the noise that orders candidates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from drafter.beds import FLAT, VOCAB, bed_of, check

from drafter_service.bed import log_softmax
from drafter_service.calibration import Regime
from drafter_service.ngram import NgramIndex
from drafter_service.ranking import noise_at, plant
from drafter_service.tree import Part, Tree, chain, merged
from draftwire_kernels.noise import gumbel
from draftwire_kernels.tree import TokenTree


def test_merged_trees_share_nodes_keep_the_first_credit_and_the_highest_chance() -> None:
    wanted = chain([5, 6, 7], [-0.5, -0.5, -3.0], Part.ARGMAX)
    rest = Tree()
    five = rest.add(-1, 5, -0.2, Part.RANK_TREE)
    rest.add(-1, 9, -0.9, Part.RANK_TREE)
    rest.add(five, 8, -0.1, Part.NGRAM)
    tree = merged([wanted], rest, 10)
    assert tree.tokens == [5, 8, 6, 9, 7]
    assert tree.parents == [-1, 0, 0, -1, 2]
    assert tree.log_probs == pytest.approx([-0.2, -0.1, -0.5, -0.9, -3.0])
    assert tree.parts == [Part.ARGMAX, Part.NGRAM, Part.ARGMAX, Part.RANK_TREE, Part.ARGMAX]


def test_a_wanted_tree_is_whole_and_the_rest_fills_up() -> None:
    wanted = chain([1, 2, 3], [-4.0, -4.0, -4.0], Part.ARGMAX)
    rest = Tree()
    for token in range(10, 20):
        rest.add(-1, token, -0.1 * token, Part.RANK_TREE)
    tree = merged([wanted], rest, 5)
    assert set(tree.tokens) == {1, 2, 3, 10, 11}
    check(tree, 5, 3)
    assert merged([wanted], rest, 2).tokens == [1, 2]


def test_argmax_alone_is_the_chain_of_the_likeliest_tokens() -> None:
    bed = bed_of(1, 5, 6, nodes=32)
    (tree,) = plant(bed, [frozenset({Part.ARGMAX})])
    assert tree.tokens == bed.ids[0, :, 0].tolist()
    assert tree.parents == [-1, 0, 1, 2, 3]
    assert set(tree.parts) == {Part.ARGMAX}
    (cut,) = plant(replace(bed, depth=np.array([2])), [frozenset({Part.ARGMAX})])
    assert cut.tokens == tree.tokens[:2]


def test_the_argmax_chain_is_whole_inside_the_rank_tree() -> None:
    noise = np.random.default_rng(4).gumbel(0, 1, (1, 5, 6)).astype(np.float32)
    bed = bed_of(1, 5, 6, nodes=16, noise=noise)
    (tree,) = plant(bed, [frozenset({Part.ARGMAX, Part.RANK_TREE})])
    check(tree, 16, 5)
    assert len(tree.tokens) == 16
    assert tree.parts.count(Part.ARGMAX) == 5
    paths = TokenTree(tuple(tree.tokens), tuple(tree.parents)).paths()
    assert bed.ids[0, :, 0].tolist() in [[tree.tokens[n] for n in path] for path in paths]


def test_branches_alone_merge_their_chains_into_a_prefix_tree() -> None:
    ids = np.array([[[1, 9], [2, 5], [3, 6]]])
    logits = np.array(
        [[[[9.0, 0], [9, 0], [9, 0]], [[9, 0], [0, 9], [0, 9]], [[0, 9], [9, 0], [9, 0]]]],
        dtype=np.float32,
    )
    prior = np.log(np.array([[0.5, 0.3, 0.2]], dtype=np.float32))
    bed = bed_of(0, 3, 2, nodes=32, branches=3, ids=ids, logits=logits, log_prior=prior)
    (tree,) = plant(bed, [frozenset({Part.BRANCHES})])
    paths = TokenTree(tuple(tree.tokens), tuple(tree.parents)).paths()
    found = {tuple(tree.tokens[n] for n in path) for path in paths}
    assert found == {(1, 2, 3), (1, 5, 6), (9, 2, 3)}
    assert len(tree.tokens) == 8, "the first token of two branches is one node"
    check(tree, 32, 3)


def test_each_session_gets_the_parts_it_asks_for() -> None:
    history = NgramIndex([7, 8, 9, 7, 8])
    one = bed_of(1, 3, 5, nodes=9, grams=[history])
    bed = replace(
        one,
        **{
            name: np.concatenate([getattr(one, name)] * 3)
            for name in ("ids", "logits", "noise", "log_prior", "slots", "depth", "nodes", "tokens")
        },
        regimes=[replace(FLAT, ngram=(0.5,) * 7)] * 3,
        grams=[None, history, history],
    )
    asked = [{Part.RANK_TREE}, {Part.NGRAM}, {Part.ARGMAX, Part.NGRAM}]
    trees = plant(bed, [frozenset(parts) for parts in asked])
    assert [set(tree.parts) for tree in trees] == asked
    assert trees[1].tokens == [9, 7, 8]
    assert trees[2].tokens[0] == 9, "repetition is the likelier here"


def coupled_bed(temperature: float, seed: int | None, ratio: float) -> tuple[object, np.ndarray]:
    regime = Regime(temperature, False, seed is not None, ratio, (1.5,), (1.0,), (0.0,) * 7)
    bed = bed_of(3, 4, 12, nodes=12, regimes=[regime])
    noise = noise_at(bed.ids, [seed], [100], bed.slots)
    return replace(bed, noise=noise), noise


def test_coupled_order_is_by_probability_plus_the_targets_own_noise() -> None:
    bed, noise = coupled_bed(1.5, 11, 0.8)
    for slot in range(4):
        want = gumbel(11, 100 + slot, VOCAB).numpy()[bed.ids[0, slot]]
        np.testing.assert_allclose(noise[0, slot], want, rtol=1e-6)
    (tree,) = plant(replace(bed, depth=np.array([1])), [frozenset({Part.RANK_TREE})])
    scores = log_softmax(bed.logits[0, 0, 0] / (0.8 * 1.5)) + noise[0, 0]
    order = np.argsort(-scores)
    assert tree.tokens == bed.ids[0, 0][order].tolist()
    np.testing.assert_allclose(tree.log_probs, log_softmax(scores / 1.5)[order], atol=1e-5)


def test_other_seeds_and_positions_order_otherwise_and_no_seed_is_no_noise() -> None:
    ids = bed_of(3, 4, 12, nodes=12).ids
    slots = np.array([4])
    one, two = noise_at(ids, [1], [100], slots), noise_at(ids, [2], [100], slots)
    assert not np.array_equal(one, two)
    np.testing.assert_allclose(
        noise_at(ids[:, 1:], [1], [101], slots - 1)[0], one[0, 1:], rtol=1e-6
    )
    assert not noise_at(ids, [None], [100], slots).any()


def test_coupled_drafts_match_the_targets_draw_more_often_than_argmax() -> None:
    """The target draws argmax(log target_probs + noise); a drafter with a similar distribution and
    the same noise finds that token first far more often.
    """
    generator = np.random.default_rng(3)
    hits = {"coupled": 0, "argmax": 0}
    for position in range(400):
        target = generator.normal(0, 1.5, VOCAB)
        draft = target + generator.normal(0, 0.7, VOCAB)
        noise = gumbel(5, position, VOCAB).numpy()
        token = int(np.argmax(target - np.log(np.exp(target).sum()) + noise))
        order = np.argsort(-draft)[:20]
        near = noise_at(order[None, None].astype(np.int64), [5], [position], np.array([1]))
        hits["coupled"] += int(order[np.argmax(draft[order] + near[0, 0])]) == token
        hits["argmax"] += int(order[0]) == token
    assert hits["coupled"] > hits["argmax"] + 60, hits


def test_noise_is_looked_up_for_the_slots_of_coupled_sessions_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def spy(seeds: list[int], positions: list[int], token_ids: torch.Tensor) -> torch.Tensor:
        asked.append((list(seeds), list(positions), tuple(token_ids.shape)))
        return torch.ones(token_ids.shape)

    monkeypatch.setattr("drafter_service.ranking.gumbel_rows", spy)
    ids = np.zeros((3, 3, 5), dtype=np.int64)
    noise = noise_at(ids, [7, None, 9], [10, 20, 30], np.array([2, 3, 1]))
    assert asked == [([7, 7, 9], [10, 11, 30], (3, 5))], "one call"
    assert noise[:, :, 0].tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 0]]
