"""The `follow` walk of a whole round on the device against walk.follow, session by session."""

import dataclasses
import random

import pytest
import torch

from draftwire_kernels.checks import KernelArgumentError
from draftwire_kernels.race import NonFiniteRow
from draftwire_kernels.race_triton import Draws
from draftwire_kernels.rounds import RoundTrees, round_trees, row_params
from draftwire_kernels.sampling import Sampling
from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk import draw, follow, target_scores
from draftwire_kernels.walk_triton import Walks, follow_rows, walk_trees

VOCAB = 150


def tree_of(rng: random.Random, nodes: int, tokens: int) -> TokenTree:
    """A random tree over few token ids."""
    parents = [rng.randrange(max(-1, node - 6), node) for node in range(nodes)]
    return TokenTree(tuple(rng.randrange(tokens) for _ in parents), tuple(parents))


def coupled(
    rng: random.Random, parents: list[int], logits: torch.Tensor, sampling: Sampling, position: int
) -> TokenTree:
    """A tree whose nodes often bear what their parent's row draws."""
    depths = TokenTree((0,) * len(parents), tuple(parents)).depths()
    tokens = []
    for parent, depth in zip(parents, depths, strict=True):
        here = position + depth - 1
        scores = target_scores(logits[parent + 1], sampling, position=here)
        token = draw(scores, sampling, here)
        tokens.append(token if rng.random() < 0.8 else rng.randrange(VOCAB))
    return TokenTree(tuple(tokens), tuple(parents))


def test_walks_of_chains_and_trees_up_to_64_nodes_are_those_of_a_plain_loop() -> None:
    rng = random.Random(5)
    trees = [tree_of(rng, nodes, 2) for nodes in (0, 1, 64, 15, 33, 2)]
    trees += [TokenTree.chain([1, 1, 1, 1]), TokenTree((1, 1, 1), (-1, -1, 0))]
    packed = round_trees(trees, "cpu", pad_rows=3, widest=100, deepest=40)
    rows = packed.token.shape[0]
    draws = Draws(
        torch.tensor([rng.randrange(2) for _ in range(rows)], dtype=torch.int32),
        torch.randn(rows),
        torch.zeros(rows, dtype=torch.int32),
    )
    draws.status[packed.row_start[6] + 2] = 1
    draws.token[packed.row_start[6] :] = 1
    got = walk_trees(packed, draws)
    for s, tree in enumerate(trees):
        first = int(packed.row_start[s])
        node: int | None = -1
        path: list[int] = []
        tokens: list[int] = []
        while node is not None and draws.status[first + node + 1] == 0:
            tokens.append(int(draws.token[first + node + 1]))
            node = tree.child(node, tokens[-1])
            if node is not None:
                path.append(node)
        assert got.token[s].tolist() == tokens + [-1] * (41 - len(tokens))
        assert got.path[s].tolist() == path + [-1] * (40 - len(path))
        assert got.count[s] == len(tokens)
        assert got.status[s] == (s == 6)
        assert got.row[s] == (path[-1] + 1 if path else 0)
    assert got.path[7, :3].tolist() == [0, 2, -1], (
        "of two siblings with one token the first is walked"
    )


@dataclasses.dataclass
class Round:
    """Sessions of every kind and what the device made of them."""

    logits: torch.Tensor
    trees: list[TokenTree]
    samplings: list[Sampling]
    positions: list[int]

    def rows(self, session: int) -> slice:
        """Rows of a session."""
        first = sum(len(tree) + 1 for tree in self.trees[:session])
        return slice(first, first + len(self.trees[session]) + 1)

    def walk(self, logits: torch.Tensor, sessions: list[int], pad_rows: int = 0) -> Walks:
        """Of some sessions, in this order."""
        picked = [logits[self.rows(s)] for s in sessions]
        picked.append(torch.full((pad_rows, VOCAB), torch.nan))
        packed: RoundTrees = round_trees(
            [self.trees[s] for s in sessions], "cpu", pad_rows=pad_rows, deepest=5
        )
        params = row_params(
            [self.samplings[s] for s in sessions],
            [self.positions[s] for s in sessions],
            packed.owner,
            packed.depth,
        )
        return follow_rows(torch.cat(picked), packed, params)


@pytest.fixture(scope="module")
def mixed() -> Round:
    rng = random.Random(11)
    shapes = [[], [-1, -1], [-1, 0, 1], [-1, -1, 0, 0, 2], [-1, 0]]
    samplings = [
        Sampling(seed=2**64 - 5),
        Sampling(temperature=0.0, top_k=3),
        Sampling(temperature=1.3, top_k=40, top_p=0.9, seed=7),
        Sampling(temperature=0.7, seed=8),
        Sampling(temperature=0.0),
    ]
    positions = [1, 900, 40, 2**33, 5]
    logits = torch.randn(
        sum(map(len, shapes)) + 5, VOCAB, generator=torch.Generator().manual_seed(1)
    )
    logits *= 4
    a_round = Round(
        logits, [TokenTree((0,) * len(p), tuple(p)) for p in shapes], samplings, positions
    )
    for s, parents in enumerate(shapes):
        rows = logits[a_round.rows(s)]
        a_round.trees[s] = coupled(rng, parents, rows, samplings[s], positions[s])
    return a_round


@pytest.fixture(scope="module")
def together(mixed: Round) -> Walks:
    return mixed.walk(mixed.logits, [0, 1, 2, 3, 4], pad_rows=2)


def test_a_mixed_round_commits_what_the_host_commits(mixed: Round, together: Walks) -> None:
    accepted = 0
    for s, tree in enumerate(mixed.trees):
        want = follow(
            mixed.logits[mixed.rows(s)],
            tree,
            mixed.samplings[s],
            position=mixed.positions[s],
            want_logprobs=True,
        )
        count = int(together.count[s])
        assert together.token[s, :count].tolist() == list(want.tokens)
        assert together.path[s, : count - 1].tolist() == list(want.path)
        assert (together.token[s, count:] == -1).all()
        assert (together.path[s, count - 1 :] == -1).all()
        assert together.logprob[s, :count].tolist() == pytest.approx(want.logprobs, abs=2e-5)
        accepted += len(want.path)
    assert not together.status.any()
    assert accepted >= 5, "the round should have something to walk"


def test_a_session_commits_the_same_bits_alone(mixed: Round, together: Walks) -> None:
    alone = mixed.walk(mixed.logits, [2])
    assert torch.equal(alone.token[0], together.token[2])
    assert torch.equal(alone.logprob[0], together.logprob[2])


def test_nan_on_the_path_fails_its_session_and_nan_beside_it_nobody(
    mixed: Round, together: Walks
) -> None:
    session = 3
    rows = mixed.rows(session)
    path = [0] + [int(node) + 1 for node in together.path[session] if node >= 0]
    beside = next(row for row in range(len(mixed.trees[session]) + 1) if row not in path)
    hurt = mixed.logits.clone()
    hurt[rows.start + beside, 5] = torch.nan
    assert torch.equal(mixed.walk(hurt, [session]).token[0], together.token[session])
    hurt[rows.start + path[-1], 5] = torch.nan
    got = mixed.walk(hurt, [4, session])
    assert got.status.tolist() == [0, 1]
    assert got.row[1] == path[-1]
    assert torch.equal(got.token[0], together.token[4])
    with pytest.raises(NonFiniteRow) as failure:
        follow(hurt[rows], mixed.trees[3], mixed.samplings[3], position=mixed.positions[3])
    assert failure.value.row == path[-1]


def test_bounds_smaller_than_the_round_are_refused_by_name() -> None:
    with pytest.raises(KernelArgumentError, match="widest"):
        round_trees([TokenTree.chain([1, 2, 3])], "cpu", widest=2)
    with pytest.raises(KernelArgumentError, match="deepest"):
        round_trees([TokenTree.chain([1, 2, 3])], "cpu", deepest=2)
