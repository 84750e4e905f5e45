"""Proposals as token trees: which candidates become nodes, in what order, within a budget of nodes
and depth.

The parts merge into one tree; paths that begin alike share nodes. A node's parent always comes
before it, and no two children of a node bear the same token. Each node carries the part that
drafted it and the drafter's estimate, as a natural logarithm, of the chance that the target draws
that token once it has come to the parent. Where the order uses the target's own noise, so does the
estimate.

Knows tokens, scores and the target's noise. Does not know models, sessions or the wire.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from drafter_service.ranking import Mixture, Ranked, Ranker, Single

# Share of rounds in which the next token of an n-gram match is the target's, by length of the
# match.
NGRAM_CHANCE = {4: 0.75, 3: 0.6, 2: 0.45}
NGRAM_NODES = 7
ANCHOR = -1


class Part(IntEnum):
    """How a node was drafted; numbered as on the wire."""

    ARGMAX = 1
    RANK_TREE = 2
    BRANCHES = 3
    NGRAM = 4


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
        """The node of `token` below `parent`, made if it is not there; -2 if the budget is spent. A
        node that only an n-gram had given is credited to the model part that gives it too.
        """
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
    """Merge the parts into one tree: the chain of argmax tokens first, then the n-gram path within
    its share, then the branches or the rank tree until the budget is spent.

    `ranked`: one per branch, empty without a model. `log_prior`: of each branch. `argmax`: the
    likeliest token of every slot, noise or not. `ngram`: path and length of the match.
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


def _grow(tree: Tree, ranker: Ranker) -> None:
    """Best-first by the product of chances along the path, until the budget is spent.

    The heap holds, for each node's list of children, only its best not yet taken: taking one offers
    its next sibling and its own best child, so a tree of n nodes costs about 2n heap operations
    however many candidates there are.
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
