"""Token trees: what a drafter proposes below the anchor. A chain is a tree with one path.

Knows tokens and parents. Knows neither probabilities nor how a tree was grown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


class TreeError(ValueError):
    """A tree breaks a rule. Carries field, limit and value."""

    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field} must be {limit}, got {value!r}")
        self.field = field
        self.limit = limit
        self.value = value


@dataclass(frozen=True)
class TokenTree:
    """Nodes in an order in which parents come before children.

    Two siblings may bear the same token: the one with the lower index is walked, the other is only
    wasted work, so a careless drafter cannot change what is drawn.
    """

    tokens: tuple[int, ...] = ()
    """Token id of each node."""
    parents: tuple[int, ...] = ()
    """Index of each node's parent, less than the node's own; -1 for children of the anchor."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise TreeError("parents", f"as many as tokens ({len(self.tokens)})", len(self.parents))
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise TreeError(f"parents[{node}]", f"in [-1, {node})", parent)

    def __len__(self) -> int:
        """Number of nodes; the anchor is not one."""
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> TokenTree:
        """One path."""
        path = tuple(tokens)
        return cls(path, tuple(range(-1, len(path) - 1)))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> TokenTree:
        """The prefix tree of several token paths; common prefixes are shared."""
        tokens: list[int] = []
        parents: list[int] = []
        index: dict[tuple[int, int], int] = {}
        for path in paths:
            node = -1
            for token in path:
                child = index.get((node, token))
                if child is None:
                    child = index[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child
        return cls(tuple(tokens), tuple(parents))

    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 1 for children of the anchor."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def children(self, node: int) -> tuple[int, ...]:
        """Children of a node, or of the anchor (-1), by index."""
        return self._children.get(node, ())

    def child(self, node: int, token: int) -> int | None:
        """The child of a node (or of the anchor, -1) that bears the token; the first of several."""
        return self._by_token.get((node, token))

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from below the anchor down to the node, itself included; () for the anchor."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Node paths from below the anchor to every leaf, by leaf index."""
        inner = set(self.parents)
        return tuple(self.path(node) for node in range(len(self)) if node not in inner)

    def validate(self, vocab_size: int, max_nodes: int, max_depth: int) -> None:
        """Check the limits of a verifier. Raises TreeError naming field, limit and value."""
        if len(self) > max_nodes:
            raise TreeError("nodes", f"at most {max_nodes}", len(self))
        for node, token in enumerate(self.tokens):
            if not 0 <= token < vocab_size:
                raise TreeError(f"tokens[{node}]", f"in [0, {vocab_size})", token)
        depth = max(self.depths(), default=0)
        if depth > max_depth:
            raise TreeError("depth", f"at most {max_depth}", depth)

    @cached_property
    def _children(self) -> dict[int, tuple[int, ...]]:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return {parent: tuple(nodes) for parent, nodes in children.items()}

    @cached_property
    def _by_token(self) -> dict[tuple[int, int], int]:
        index: dict[tuple[int, int], int] = {}
        for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True)):
            index.setdefault((parent, token), node)
        return index
