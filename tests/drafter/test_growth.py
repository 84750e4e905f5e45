"""Trees grown level by level against all paths written out: the best ones, in order, alone or in a
batch, with noise, branches, repetition and the path-conditioned head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drafter.beds import FLAT, VOCAB, bed_of, check
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.bed import Bed, Floats, Ints
from drafter_service.growth import Grower
from drafter_service.ngram import NgramIndex
from drafter_service.ranking import plant
from drafter_service.tree import Part
from draftwire_kernels.tree import TokenTree


class Table:
    """A path-conditioned head of made-up logits that depend on slot and both tokens."""

    def __init__(self, bed: Bed) -> None:
        self.bed, self.asked = bed, 0

    def row(self, session: int, slot: int, parent: int, before: int) -> Floats:
        """Logits [branches, width] of one path."""
        draw = np.random.default_rng([slot, parent, before])
        own = self.bed.logits[session, :, slot]
        return (own + draw.normal(0, 1, own.shape)).astype(np.float32)

    def __call__(self, slot: int, sessions: Ints, parents: Ints, before: Ints) -> Floats:
        self.asked += 1
        assert (np.diff(sessions) >= 0).all(), "rows of a session lie together"
        rows = zip(sessions.tolist(), parents.tolist(), before.tolist(), strict=True)
        return np.stack([self.row(session, slot, p, b) for session, p, b in rows])


def log_softmax(x: Floats) -> Floats:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def best_paths(bed: Bed, table: Table | None, count: int, session: int = 0) -> list[float]:
    """Survivals of the `count` best paths of all, one branch."""
    found = []
    slots, width = int(bed.slots[session]), bed.ids.shape[2]
    for depth in range(1, slots + 1):
        for columns in itertools.product(range(width), repeat=depth):
            survival, tokens = 0.0, [int(bed.tokens[session, 1]), int(bed.tokens[session, 0])]
            for slot, column in enumerate(columns):
                logits = bed.logits[session, 0, slot]
                if table is not None:
                    logits = table.row(session, slot, tokens[-1], tokens[-2])[0]
                scores = log_softmax(logits) + bed.noise[session, slot]
                survival += float(log_softmax(scores)[column])
                tokens.append(int(bed.ids[session, slot, column]))
            found.append(survival)
    return sorted(found, reverse=True)[:count]


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("nodes", [1, 5, 20, 60])
def test_the_tree_holds_the_most_surviving_paths_of_all(nodes: int, conditioned: bool) -> None:
    draw = np.random.default_rng(9)
    noise = draw.gumbel(0, 1, (1, 3, 4)).astype(np.float32)
    bed = bed_of(5, 3, 4, nodes=nodes, noise=noise)
    table = Table(bed) if conditioned else None
    (tree,) = Grower(bed, table).grow()
    assert tree.survivals() == pytest.approx(best_paths(bed, table, nodes), abs=1e-5)
    if table is not None:
        assert table.asked <= 3, "asked once a level"


def test_every_prefix_is_the_tree_of_that_many_nodes() -> None:
    history = NgramIndex([3, 4, 5, 6, 9, 9, 3, 4])
    bed = bed_of(
        2, 5, 8, nodes=40, depth=9, grams=[history], regimes=[replace(FLAT, ngram=(0.3,) * 7)],
        tokens=np.array([[4, 3]]),
    )  # fmt: skip
    (whole,) = Grower(bed, Table(bed)).grow()
    assert len(whole.tokens) == 40
    for nodes in (1, 3, 10, 25):
        (small,) = Grower(replace(bed, nodes=np.array([nodes])), Table(bed)).grow()
        assert small.tokens == whole.tokens[:nodes]
        assert small.parents == whole.parents[:nodes]
        assert small.parts == whole.parts[:nodes]


def joined(beds: Sequence[Bed]) -> Bed:
    """Beds of one session each, side by side, padded."""
    slots = max(b.ids.shape[1] for b in beds)

    def padded(x: Any, axis: int, value: float) -> Any:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, slots - x.shape[axis])
        return np.pad(x, widths, constant_values=value)

    return Bed(
        ids=np.concatenate([padded(b.ids, 1, 0) for b in beds]),
        logits=np.concatenate([padded(b.logits, 2, -np.inf) for b in beds]),
        noise=np.concatenate([padded(b.noise, 1, 0) for b in beds]),
        **{
            name: np.concatenate([getattr(b, name) for b in beds])
            for name in ("log_prior", "slots", "depth", "nodes", "tokens")
        },
        regimes=[r for b in beds for r in b.regimes],
        grams=[g for b in beds for g in b.grams],
    )


def test_sessions_grown_together_get_the_trees_they_get_alone() -> None:
    history = NgramIndex([3, 4, 5, 6, 9, 9, 3, 4])
    repeating = replace(FLAT, ngram=(0.4,) * 7)
    beds = [
        bed_of(1, 4, 6, nodes=12),
        bed_of(2, 2, 6, nodes=30, depth=6, grams=[history], regimes=[repeating]),
        bed_of(3, 6, 6, nodes=3, depth=2),
        bed_of(4, 6, 6, nodes=9, depth=0, slots=0),
        bed_of(5, 1, 6, nodes=17),
    ]
    together = Grower(joined(beds), Table(joined(beds))).grow()
    for number, (bed, tree) in enumerate(zip(beds, together, strict=True)):
        table = Table(joined(beds))
        own = Bed(
            *(
                [getattr(joined(beds), name)[number]]
                if name in ("regimes", "grams")
                else getattr(joined(beds), name)[number : number + 1]
                for name in Bed.__slots__
            )
        )
        table.bed = own
        (alone,) = Grower(own, table).grow()
        assert (tree.tokens, tree.parents, tree.parts) == (
            alone.tokens, alone.parents, alone.parts,
        )  # fmt: skip
        assert len(tree.tokens) <= int(bed.nodes[0])
    assert together[3].tokens == []


def test_a_session_whose_numbers_are_not_finite_leaves_the_others_alone() -> None:
    beds = [bed_of(1, 3, 5, nodes=9), bed_of(2, 3, 5, nodes=9)]
    beds[0].logits[:] = np.nan
    broken, fine = Grower(joined(beds)).grow()
    (alone,) = Grower(beds[1]).grow()
    assert (fine.tokens, fine.parents) == (alone.tokens, alone.parents)
    assert broken.tokens == []


def test_repetition_takes_its_chance_off_the_model_and_adds_it_where_both_agree() -> None:
    bed = bed_of(7, 1, 5, nodes=9)
    known = int(bed.ids[0, 0, 3])
    strange = next(t for t in range(VOCAB) if t not in bed.ids[0, 0])
    model = np.exp(log_softmax(bed.logits[0, 0, 0]))
    for token in (known, strange):
        history = NgramIndex([8, 9, token, 0, 8, 9])
        own = replace(bed, grams=[history], regimes=[replace(FLAT, ngram=(0.5,) * 7)])
        (tree,) = Grower(own).grow()
        got = {t: math.exp(c) for t, c in zip(tree.tokens, tree.log_probs, strict=True)}
        want = {int(t): 0.5 * float(c) for t, c in zip(bed.ids[0, 0], model, strict=True)}
        want[token] = want.get(token, 0.0) + 0.5
        assert got == pytest.approx(want, rel=1e-5)
        assert tree.parts[tree.tokens.index(token)] == Part.NGRAM
        assert tree.parts.count(Part.NGRAM) == 1


def test_repetition_goes_on_past_the_slots_of_the_model() -> None:
    history = NgramIndex([5, 6, 7, 8, 9, 10, 11, 12, 0, 5, 6])
    regime = replace(FLAT, ngram=(0.9,) * 7)
    bed = bed_of(3, 2, 4, nodes=8, depth=6, grams=[history], regimes=[regime])
    (tree,) = Grower(bed).grow()
    paths = TokenTree(tuple(tree.tokens), tuple(tree.parents))
    found = {tuple(tree.tokens[n] for n in path) for path in paths.paths()}
    assert any(path[:6] == (7, 8, 9, 10, 11, 12) for path in found)
    assert max(tree.depths()) == 6


def test_a_path_ranks_its_children_within_the_branches_that_agree_with_it() -> None:
    """Branch 0 says 1 2, branch 1 says 3 4: after 3 comes 4, whatever branch 0 prefers."""
    ids = np.array([[[1, 3], [2, 4]]])
    logits = np.array([[[[5.0, 0], [5, 0]], [[0, 5], [0, 5]]]], dtype=np.float32)
    bed = bed_of(
        0, 2, 2, nodes=4, branches=2, ids=ids, logits=logits,
        log_prior=np.log(np.array([[0.6, 0.4]], dtype=np.float32)),
    )  # fmt: skip
    (tree,) = Grower(bed).grow()
    children = {
        (tree.tokens[p] if p >= 0 else None): t
        for t, p in reversed(list(zip(tree.tokens, tree.parents, strict=True)))
    }
    assert children == {None: 1, 1: 2, 3: 4}
    assert [tree.branches[tree.tokens.index(t)] for t in (1, 2, 3, 4)] == [0, 0, 1, 1]


@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 6),
    width=st.integers(1, 12),
    branches=st.integers(1, 3),
    parts=st.sets(st.sampled_from(list(Part)), min_size=1),
    history=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    nodes=st.integers(1, 40),
    depth=st.integers(0, 9),
    with_model=st.booleans(),
    conditioned=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_proposal_is_well_formed_and_within_its_limits(
    seed: int,
    slots: int,
    width: int,
    branches: int,
    parts: set[Part],
    history: list[int],
    nodes: int,
    depth: int,
    with_model: bool,
    conditioned: bool,
) -> None:
    bed = bed_of(
        seed, slots, width, nodes=nodes, branches=branches,
        depth=depth, slots=min(slots, depth) if with_model else 0,
        grams=[NgramIndex(history) if Part.NGRAM in parts else None],
        regimes=[replace(FLAT, ngram=(0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.95))],
    )  # fmt: skip
    (tree,) = plant(bed, [frozenset(parts)], Table(bed) if conditioned else None)
    check(tree, nodes, depth)
    assert {Part(part) for part in tree.parts} <= parts
    if with_model and depth and Part.RANK_TREE in parts:
        assert len(tree.tokens) >= min(nodes, width)
