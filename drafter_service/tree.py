"""Proposals as token trees: what one is, chains of tokens, and how several become one.

Paths that begin alike share nodes. A node's parent always comes before it, and no two children of a
node bear the same token. Each node carries the part that drafted it and the drafter's estimate, as
a natural logarithm, of the chance that the target draws that token once it has come to the parent.
Where the order uses the target's own noise, so does the estimate.

Nodes stand in the order of survival, the product of the chances along their paths: the first m
nodes are a tree too, and nearly the best one of m nodes. Who verifies may cut anywhere, and may
compare nodes of different proposals by their survival.

Knows tokens and chances. Does not know models, sessions or the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

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

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)

    def add(self, parent: int, token: int, log_prob: float, part: int, branch: int = 0) -> int:
        """Append a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.log_probs.append(log_prob)
        self.parts.append(int(part))
        self.branches.append(branch)
        return len(self.tokens) - 1

    def survivals(self) -> list[float]:
        """The log survival of each node."""
        found: list[float] = []
        for parent, chance in zip(self.parents, self.log_probs, strict=True):
            found.append(chance if parent < 0 else found[parent] + chance)
        return found

    def depths(self) -> list[int]:
        """The depth of each node, 1 for children of the anchor."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return found


def chain(tokens: Sequence[int], log_probs: Sequence[float], part: Part, branch: int = 0) -> Tree:
    """A tree of one path."""
    count = len(tokens)
    return Tree(
        list(tokens), list(range(-1, count - 1)), list(log_probs), [int(part)] * count,
        [branch] * count,
    )  # fmt: skip


def merged(wanted: Sequence[Tree], rest: Tree, max_nodes: int) -> Tree:
    """The trees `wanted`, whole if they fit, and the best of `rest` up to `max_nodes`, in the order
    of survival. A node of several trees is one node, credited to the first tree that has it, with
    the highest of its chances.
    """
    union = Tree()
    index: dict[tuple[int, int], int] = {}
    asked = 0
    for number, tree in enumerate((*wanted, rest)):
        if number == len(wanted):
            asked = len(union.tokens)
        places: list[int] = []
        for node, token in enumerate(tree.tokens):
            parent = tree.parents[node]
            key = (ANCHOR if parent < 0 else places[parent], token)
            found = index.get(key)
            if found is None:
                found = index[key] = union.add(
                    key[0], token, tree.log_probs[node], tree.parts[node], tree.branches[node]
                )
            union.log_probs[found] = max(union.log_probs[found], tree.log_probs[node])
            places.append(found)
    survivals, depths = union.survivals(), union.depths()
    order = sorted(range(len(survivals)), key=lambda n: (n >= asked, -survivals[n], depths[n]))
    kept = sorted(order[:max_nodes], key=lambda n: (-survivals[n], depths[n]))
    place = {node: number for number, node in enumerate(kept)} | {ANCHOR: ANCHOR}
    return Tree(
        [union.tokens[n] for n in kept],
        [place[union.parents[n]] for n in kept],
        [union.log_probs[n] for n in kept],
        [union.parts[n] for n in kept],
        [union.branches[n] for n in kept],
    )
