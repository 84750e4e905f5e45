"""Proposals as token trees: which candidates become nodes, in what order, within a budget of nodes and depth.

The parts merge into one tree; paths that begin alike share nodes. A node's parent always comes before it, and no two children
of a node bear the same token. Each node carries the part that drafted it and the drafter's estimate, as a natural logarithm,
of the chance that the target draws that token once it has come to the parent. Where the order uses the target's own noise,
so does the estimate.

Knows tokens, scores and the target's noise. Does not know models, sessions or the wire.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from draftwire_kernels.noise import gumbel_rows

# The draft distribution is sharper than the target's temperature asks for: best ranking was measured at 0.6 to 0.8 of it.
DRAFT_TEMPERATURE = 0.8
# softmax(score / 1.5) of coupled scores comes closest to the rates at which the target takes each rank.
COUPLED_SPREAD = 1.5
# Share of rounds in which the next token of an n-gram match is the target's, by length of the match.
NGRAM_CHANCE = {4: 0.75, 3: 0.6, 2: 0.45}
NGRAM_NODES = 7
ANCHOR = -1

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Part(IntEnum):
    """How a node was drafted; numbered as on the wire."""

    ARGMAX = 1
    RANK_TREE = 2
    BRANCHES = 3
    NGRAM = 4


@dataclass(frozen=True, slots=True)
class Ranked:
    """Candidates of each slot of one branch, best first, [slots, count], and the log of the estimated chance of each, float32."""

    ids: Ints
    log_chances: Floats


@dataclass(slots=True)
class Tree:
    """A tree as parallel lists, the way it travels."""

    max_nodes: int
    max_depth: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    _index: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether the budget is spent."""
        return len(self.tokens) >= self.max_nodes

    def add(self, parent: int, token: int, log_prob: float, part: Part, branch: int = 0) -> int:
        """The node of `token` below `parent`, made if it is not there; -2 if the budget is spent. A node that only an n-gram
        had given is credited to the model part that gives it too."""
        found = self._index.get((parent, token))
        if found is not None:
            if self.parts[found] == Part.NGRAM:
                self.parts[found], self.branches[found] = part, branch
                self.log_probs[found] = max(self.log_probs[found], log_prob)
            return found
        if self.full:
            return -2
        node = len(self.tokens)
        self._index[parent, token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.log_probs.append(log_prob)
        self.parts.append(part)
        self.branches.append(branch)
        return node


@dataclass(frozen=True, slots=True)
class RowDraws:
    """How each candidate row will be drawn from: `temperatures` [rows]; `coupled` bool [rows], whether the order uses the
    target's noise; `seeds` and `positions` of the noise, one a row (looked at in coupled rows only)."""

    temperatures: Floats
    coupled: npt.NDArray[np.bool_]
    seeds: Sequence[int]
    positions: Sequence[int]


def rank(ids: Ints, logits: Floats, normaliser: Floats | None, draws: RowDraws) -> Ranked:
    """Order the candidates of all rows at once. ids, logits [rows, count], best first; normaliser [rows] or None.

    The order is log draft_probs at the draft temperature (up to a constant a row), plus, in coupled rows, the noise with which
    the target will draw at that position; at temperature 0 it is draft_probs.
    """
    greedy = draws.temperatures <= 0
    coupled = draws.coupled & ~greedy
    scale = 1 / np.where(greedy, np.float32(1), np.float32(DRAFT_TEMPERATURE) * draws.temperatures)
    scores: Floats = logits * scale.astype(np.float32)[:, None]
    rows = np.flatnonzero(coupled)
    if rows.size:
        seeds, positions = (
            [draws.seeds[row] for row in rows],
            [draws.positions[row] for row in rows],
        )
        scores[rows] += gumbel_rows(seeds, positions, torch.from_numpy(ids[rows])).numpy()
    spread = scores / np.where(coupled, np.float32(COUPLED_SPREAD), np.float32(1))[:, None]
    total = _logsumexp(spread)
    if normaliser is not None:
        total = np.where(greedy, normaliser, total)
    order = np.argsort(-scores, axis=1, kind="stable")
    return Ranked(
        np.take_along_axis(ids, order, 1), np.take_along_axis(spread - total[:, None], order, 1)
    )


def build(
    *,
    ranked: Sequence[Ranked],
    log_prior: Sequence[float],
    argmax: Sequence[int],
    ngram: tuple[Sequence[int], int],
    parts: frozenset[Part],
    max_nodes: int,
    max_depth: int,
) -> Tree:
    """Merge the parts into one tree: the chain of argmax tokens first, then the n-gram path within its share, then the
    branches or the rank tree until the budget is spent.

    `ranked`: one per branch, empty without a model. `log_prior`: of each branch. `argmax`: the likeliest token of every slot,
    noise or not. `ngram`: path and length of the match.
    """
    tree = Tree(max_nodes=max_nodes, max_depth=max_depth)
    has_model = bool(ranked) and max_depth > 0
    if has_model and Part.ARGMAX in parts:
        _add_argmax(tree, argmax[:max_depth], ranked[0])
    if Part.NGRAM in parts:
        path, matched = ngram
        others = has_model and len(parts) > 1
        share = min(NGRAM_NODES, max(1, max_nodes * 7 // 16)) if others else max_nodes
        _add_ngram(tree, path[: min(share, max_depth)], matched)
    if has_model and Part.RANK_TREE in parts:
        ranker = Single(ranked[0], max_nodes) if len(ranked) == 1 else Mixture(ranked, log_prior)
        _grow(tree, ranker)
    elif has_model and Part.BRANCHES in parts:
        _add_branches(tree, ranked, log_prior)
    return tree


def _add_argmax(tree: Tree, tokens: Sequence[int], ranked: Ranked) -> None:
    parent = ANCHOR
    for slot, token in enumerate(tokens):
        where = np.flatnonzero(ranked.ids[slot] == token)
        chance = float(ranked.log_chances[slot, where[0]]) if where.size else math.log(1e-3)
        parent = tree.add(parent, token, chance, Part.ARGMAX)
        if parent < ANCHOR:
            return


def _add_ngram(tree: Tree, path: Sequence[int], matched: int) -> None:
    parent, chance = ANCHOR, math.log(NGRAM_CHANCE.get(matched, 0.5))
    for token in path:
        parent = tree.add(parent, token, chance, Part.NGRAM)
        if parent < ANCHOR:
            return


def _add_branches(tree: Tree, ranked: Sequence[Ranked], log_prior: Sequence[float]) -> None:
    """The best chain of every branch, likeliest prefixes first."""
    nodes = []
    for branch, candidates in enumerate(ranked):
        reached = log_prior[branch]
        for depth in range(min(tree.max_depth, candidates.ids.shape[0])):
            reached += float(candidates.log_chances[depth, 0])
            nodes.append((-reached, branch, depth))
    last = [ANCHOR] * len(ranked)
    for _, branch, depth in sorted(nodes, key=lambda n: (n[0], n[2], n[1])):
        if last[branch] >= ANCHOR:
            token, chance = (
                int(ranked[branch].ids[depth, 0]),
                float(ranked[branch].log_chances[depth, 0]),
            )
            last[branch] = tree.add(last[branch], token, chance, Part.BRANCHES, branch)


class Ranker(Protocol):
    """Gives the ordered children of a path."""

    slots: int

    def root(self) -> object:
        """The state of the empty path."""

    def children(self, state: object, depth: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens, log chances and branches of the children at slot `depth`, best first."""

    def advance(self, state: object, depth: int, token: int) -> object:
        """The state after taking `token` at slot `depth`."""


class Single:
    """One branch: slots are independent, so all nodes of a depth share one list."""

    def __init__(self, ranked: Ranked, width: int) -> None:
        self.slots = ranked.ids.shape[0]
        # The child at rank r has r better siblings, so a tree of `width` nodes never looks past that rank.
        self._ids: list[list[int]] = ranked.ids[:, :width].tolist()
        self._chances: list[list[float]] = ranked.log_chances[:, :width].tolist()
        self._branches = [0] * width

    def root(self) -> object:
        """No state."""
        return None

    def children(self, state: object, depth: int) -> tuple[list[int], list[float], list[int]]:
        """The slot's list."""
        return self._ids[depth], self._chances[depth], self._branches

    def advance(self, state: object, depth: int, token: int) -> object:
        """No state."""
        return None


class Mixture:
    """Several branches: a path weighs each branch by its prior and by how likely that branch finds the path so far, and
    ranks the children by the weighted mixture."""

    def __init__(self, ranked: Sequence[Ranked], log_prior: Sequence[float]) -> None:
        self.slots = ranked[0].ids.shape[0]
        self._prior = np.exp(np.asarray(log_prior, dtype=np.float64))
        self._ids: list[Ints] = []
        self._chances: list[npt.NDArray[np.float64]] = []
        self._columns: list[dict[int, int]] = []
        for slot in range(self.slots):
            ids = np.unique(np.concatenate([branch.ids[slot] for branch in ranked]))
            table = np.zeros((len(ranked), ids.size))
            for row, branch in enumerate(ranked):
                table[row, np.searchsorted(ids, branch.ids[slot])] = np.exp(
                    branch.log_chances[slot]
                )
            self._ids.append(ids)
            self._chances.append(table)
            self._columns.append({token: column for column, token in enumerate(ids.tolist())})

    def root(self) -> object:
        """The prior over the branches."""
        return self._prior

    def children(self, state: object, depth: int) -> tuple[list[int], list[float], list[int]]:
        """Children of the weighted mixture; the branch that contributes most is named."""
        assert isinstance(state, np.ndarray)
        shares = state[:, None] * self._chances[depth]
        chances = shares.sum(0) / max(float(state.sum()), 1e-300)
        order = np.argsort(-chances, kind="stable")
        order = order[chances[order] > 0]
        logs: list[float] = np.log(chances[order]).tolist()
        return self._ids[depth][order].tolist(), logs, shares.argmax(0)[order].tolist()

    def advance(self, state: object, depth: int, token: int) -> object:
        """Each branch's weight times its chance of the token."""
        assert isinstance(state, np.ndarray)
        return state * self._chances[depth][:, self._columns[depth][token]]


def _grow(tree: Tree, ranker: Ranker) -> None:
    """Best-first by the product of chances along the path, until the budget is spent.

    The heap holds, for each node's list of children, only its best not yet taken: taking one offers its next sibling and
    its own best child, so a tree of n nodes costs about 2n heap operations however many candidates there are.
    """
    depth_limit = min(tree.max_depth, ranker.slots)
    if depth_limit <= 0:
        return
    ties = 0
    lists = ranker.children(ranker.root(), 0)
    heap = [(-lists[1][0], ties, 0.0, ANCHOR, 0, 0, lists, ranker.root())] if lists[0] else []
    while heap:
        _, _, reached, parent, depth, place, lists, state = heapq.heappop(heap)
        tokens, chances, branches = lists
        token, chance = tokens[place], chances[place]
        node = tree.add(parent, token, chance, Part.RANK_TREE, branches[place])
        if node < ANCHOR:
            return
        if place + 1 < len(tokens) and chances[place + 1] > -math.inf:
            ties += 1
            sibling = (
                -(reached + chances[place + 1]),
                ties,
                reached,
                parent,
                depth,
                place + 1,
                lists,
                state,
            )
            heapq.heappush(heap, sibling)
        if depth + 1 < depth_limit:
            ahead = ranker.advance(state, depth, token)
            below = ranker.children(ahead, depth + 1)
            if below[0] and below[1][0] > -math.inf:
                ties += 1
                total = reached + chance
                heapq.heappush(
                    heap, (-(total + below[1][0]), ties, total, node, depth + 1, 0, below, ahead)
                )


def _logsumexp(scores: Floats) -> Floats:
    best = scores.max(axis=1)
    total: Floats = best + np.log(np.exp(scores - best[:, None]).sum(axis=1))
    return total
