"""Proposal trees: well-formed within their budget, ordered as promised, coupled to the target's
noise.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.ranking import COUPLED_SPREAD, DRAFT_TEMPERATURE, Ranked, RowDraws, rank
from drafter_service.tree import Part, Tree, build
from draftwire_kernels.noise import gumbel
from draftwire_kernels.tree import TokenTree

VOCAB = 40


def random_ranked(seed: int, slots: int, count: int) -> Ranked:
    generator = np.random.default_rng(seed)
    ids = np.stack([generator.permutation(VOCAB)[:count] for _ in range(slots)])
    logits = np.sort(generator.normal(0, 2, (slots, count)))[:, ::-1]
    chances = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return Ranked(ids.astype(np.int64), chances.astype(np.float32))


def depths(tree: Tree) -> list[int]:
    out: list[int] = []
    for parent in tree.parents:
        out.append(1 if parent < 0 else out[parent] + 1)
    return out


@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 7),
    count=st.integers(1, 12),
    branches=st.integers(1, 3),
    parts=st.sets(st.sampled_from(list(Part)), min_size=1),
    ngram=st.lists(st.integers(0, VOCAB - 1), max_size=9),
    matched=st.sampled_from([0, 2, 3, 4]),
    max_nodes=st.integers(1, 40),
    max_depth=st.integers(0, 8),
    with_model=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_every_tree_is_well_formed_and_within_its_budget(
    seed: int,
    slots: int,
    count: int,
    branches: int,
    parts: set[Part],
    ngram: list[int],
    matched: int,
    max_nodes: int,
    max_depth: int,
    with_model: bool,
) -> None:
    ranked = [random_ranked(seed + z, slots, count) for z in range(branches)] if with_model else []
    prior = np.log(np.full(branches, 1 / branches)).tolist()
    argmax = ranked[0].ids[:, 0].tolist() if ranked else []
    tree = build(
        ranked=ranked,
        log_prior=prior,
        argmax=argmax,
        ngram=(ngram, matched),
        parts=frozenset(parts),
        max_nodes=max_nodes,
        max_depth=max_depth,
    )
    TokenTree(tuple(tree.tokens), tuple(tree.parents)).validate(VOCAB, max_nodes, max_depth)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    pairs = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(pairs)) == len(pairs), "siblings bear the same token"
    assert all(math.isfinite(value) and value <= 1e-5 for value in tree.log_probs)
    assert {Part(part) for part in tree.parts} <= parts
    lengths = {len(tree.tokens), len(tree.log_probs), len(tree.parts), len(tree.branches)}
    assert len(lengths) == 1
    if not with_model:
        assert tree.tokens == (ngram[: min(max_nodes, max_depth)] if Part.NGRAM in parts else [])


def grown(ranked: Ranked, nodes: int, depth: int, parts: set[Part] | None = None) -> Tree:
    return build(
        ranked=[ranked],
        log_prior=[0.0],
        argmax=ranked.ids[:, 0].tolist(),
        ngram=([], 0),
        parts=frozenset(parts or {Part.RANK_TREE}),
        max_nodes=nodes,
        max_depth=depth,
    )


def path_chances(tree: Tree) -> list[float]:
    out: list[float] = []
    for parent, value in zip(tree.parents, tree.log_probs, strict=True):
        out.append(value + (out[parent] if parent >= 0 else 0.0))
    return out


def test_the_rank_tree_holds_the_likeliest_paths_of_all() -> None:
    ranked = random_ranked(5, slots=3, count=4)
    every = []
    for depth in (1, 2, 3):
        for ranks in itertools.product(range(4), repeat=depth):
            every.append(sum(float(ranked.log_chances[j, r]) for j, r in enumerate(ranks)))
    tree = grown(ranked, nodes=20, depth=3)
    want = sorted(every, reverse=True)[:20]
    assert sorted(path_chances(tree), reverse=True) == pytest.approx(want)
    assert path_chances(tree) == sorted(path_chances(tree), reverse=True), "not best first"


def test_argmax_alone_is_the_chain_of_the_likeliest_tokens() -> None:
    ranked = random_ranked(1, slots=5, count=6)
    tree = grown(ranked, nodes=32, depth=4, parts={Part.ARGMAX})
    assert tree.tokens == ranked.ids[:4, 0].tolist()
    assert tree.parents == [-1, 0, 1, 2]


def test_the_argmax_chain_comes_first_and_the_rank_tree_fills_the_rest() -> None:
    ranked = random_ranked(1, slots=5, count=6)
    tree = grown(ranked, nodes=16, depth=5, parts={Part.ARGMAX, Part.RANK_TREE})
    assert tree.tokens[:5] == ranked.ids[:, 0].tolist()
    assert tree.parents[:5] == [-1, 0, 1, 2, 3]
    assert len(tree.tokens) == 16
    assert set(tree.parts[5:]) == {Part.RANK_TREE}


def test_an_ngram_path_shares_the_nodes_that_the_model_finds_too() -> None:
    ranked = random_ranked(2, slots=4, count=6)
    likeliest = ranked.ids[:, 0].tolist()
    strange = next(t for t in range(VOCAB) if t not in ranked.ids[1])
    tree = build(
        ranked=[ranked],
        log_prior=[0.0],
        argmax=likeliest,
        ngram=([likeliest[0], strange, strange], 4),
        parts=frozenset({Part.RANK_TREE, Part.NGRAM}),
        max_nodes=16,
        max_depth=4,
    )
    assert tree.tokens[:3] == [likeliest[0], strange, strange]
    assert tree.parts[:3] == [Part.RANK_TREE, Part.NGRAM, Part.NGRAM]
    assert len(tree.tokens) == 16
    assert tree.tokens.count(strange) == 2


def test_ngrams_take_their_share_of_the_budget_and_no_more() -> None:
    ranked = random_ranked(3, slots=8, count=20)
    for nodes, share in ((7, 3), (16, 7), (32, 7)):
        tree = build(
            ranked=[ranked],
            log_prior=[0.0],
            argmax=[],
            ngram=([39] * 8, 2),
            parts=frozenset({Part.RANK_TREE, Part.NGRAM}),
            max_nodes=nodes,
            max_depth=8,
        )
        assert max(depths(tree)[:share]) == share
        assert tree.parts.count(Part.NGRAM) <= share
        assert len(tree.tokens) == nodes


def test_branches_alone_merge_their_chains_into_a_prefix_tree() -> None:
    ids = [[[1], [2], [3]], [[1], [5], [6]], [[9], [2], [3]]]
    chances = [[[-0.1]] * 3, [[-0.2]] * 3, [[-0.3]] * 3]
    ranked = [
        Ranked(np.array(i, dtype=np.int64), np.array(c, dtype=np.float32))
        for i, c in zip(ids, chances, strict=True)
    ]
    tree = build(
        ranked=ranked,
        log_prior=np.log([0.5, 0.3, 0.2]).tolist(),
        argmax=[1, 2, 3],
        ngram=([], 0),
        parts=frozenset({Part.BRANCHES}),
        max_nodes=32,
        max_depth=3,
    )
    paths = TokenTree(tuple(tree.tokens), tuple(tree.parents))
    found = {tuple(tree.tokens[n] for n in path) for path in paths.paths()}
    assert found == {(1, 2, 3), (1, 5, 6), (9, 2, 3)}
    assert len(tree.tokens) == 8, "the first token of two branches is one node"


def test_a_path_ranks_its_children_within_the_branches_that_agree_with_it() -> None:
    """Branch 0 says 1 2, branch 1 says 3 4: after 3 the next token is 4, whatever branch 0
    prefers.
    """
    sure = math.log(0.99)
    other = math.log(0.01)
    first = Ranked(np.array([[1, 3], [2, 4]]), np.array([[sure, other]] * 2, dtype=np.float32))
    second = Ranked(np.array([[3, 1], [4, 2]]), np.array([[sure, other]] * 2, dtype=np.float32))
    tree = build(
        ranked=[first, second],
        log_prior=np.log([0.6, 0.4]).tolist(),
        argmax=[1, 2],
        ngram=([], 0),
        parts=frozenset({Part.RANK_TREE, Part.BRANCHES}),
        max_nodes=4,
        max_depth=2,
    )
    edges = {
        (tree.tokens[p] if p >= 0 else None, t)
        for p, t in zip(tree.parents, tree.tokens, strict=True)
    }
    assert edges == {(None, 1), (1, 2), (None, 3), (3, 4)}
    assert [tree.branches[tree.tokens.index(t)] for t in (1, 2, 3, 4)] == [0, 0, 1, 1]


def draws(rows: int, temperature: float, coupled: bool = True, seed: int = 11) -> RowDraws:
    return RowDraws(
        np.full(rows, temperature, dtype=np.float32),
        np.full(rows, coupled),
        [seed] * rows,
        [100 + row for row in range(rows)],
    )


def rows_of_logits(rows: int = 6, count: int = 20) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    ids = np.stack([generator.permutation(VOCAB)[:count] for _ in range(rows)]).astype(np.int64)
    logits = np.sort(generator.normal(0, 1.5, (rows, count)))[:, ::-1].astype(np.float32)
    return ids, np.ascontiguousarray(logits)


def test_coupled_order_is_by_probability_plus_the_targets_own_noise() -> None:
    ids, logits = rows_of_logits()
    found = rank(ids, logits, None, draws(6, temperature=1.5))
    for row in range(6):
        noise = gumbel(11, 100 + row, VOCAB).numpy()[ids[row]]
        score = logits[row] / (DRAFT_TEMPERATURE * 1.5) + noise
        order = np.argsort(-score)
        assert found.ids[row].tolist() == ids[row][order].tolist()
        spread = score[order] / COUPLED_SPREAD
        want = spread - np.log(np.exp(spread).sum())
        np.testing.assert_allclose(found.log_chances[row], want, atol=1e-4)


def test_other_seeds_and_positions_order_otherwise() -> None:
    ids, logits = rows_of_logits()
    one = rank(ids, logits, None, draws(6, 1.0, seed=1)).ids
    two = rank(ids, logits, None, draws(6, 1.0, seed=2)).ids
    assert not np.array_equal(one, two)


def test_greedy_and_uncoupled_rows_keep_the_order_of_the_logits() -> None:
    ids, logits = rows_of_logits()
    normaliser = np.full(6, 7.0, dtype=np.float32)
    greedy = rank(ids, logits, normaliser, draws(6, 0.0))
    assert np.array_equal(greedy.ids, ids)
    np.testing.assert_allclose(greedy.log_chances, logits - 7.0, rtol=1e-6)
    plain = rank(ids, logits, None, draws(6, 1.0, coupled=False))
    assert np.array_equal(plain.ids, ids)


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
        row = RowDraws(np.ones(1, dtype=np.float32), np.ones(1, dtype=bool), [5], [position])
        found = rank(order[None].astype(np.int64), draft[order][None].astype(np.float32), None, row)
        hits["coupled"] += int(found.ids[0, 0]) == token
        hits["argmax"] += int(order[0]) == token
    assert hits["coupled"] > hits["argmax"] + 60, hits


def test_noise_is_looked_up_for_the_candidates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(seeds: list[int], positions: list[int], token_ids: torch.Tensor) -> torch.Tensor:
        asked.append((list(seeds), list(positions), tuple(token_ids.shape)))
        return torch.zeros(token_ids.shape)

    monkeypatch.setattr("drafter_service.ranking.gumbel_rows", spy)
    ids, logits = rows_of_logits()
    mixed = RowDraws(
        np.array([0, 1, 1, 0, 1, 1], dtype=np.float32),
        np.array([True, True, False, False, True, True]),
        [1, 2, 3, 4, 5, 6],
        [10, 20, 30, 40, 50, 60],
    )
    rank(ids, logits, None, mixed)
    assert asked == [([2, 5, 6], [20, 50, 60], (3, 20))], "one call, coupled rows only"
