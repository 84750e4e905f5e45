"""Beds of made-up candidates, and what holds of every proposal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from drafter_service.bed import Bed
from drafter_service.calibration import NGRAM_LENGTHS, Regime
from drafter_service.tree import Tree
from draftwire_kernels.tree import TokenTree

VOCAB = 40
FLAT = Regime(1.0, False, True, 1.0, (1.0,), (1.0,), (0.0,) * len(NGRAM_LENGTHS))


def bed_of(seed: int, slots_: int, width: int, *, nodes: int, branches: int = 1, **own: Any) -> Bed:
    """One session with random candidates; `depth` and `slots` as plain numbers."""
    draw = np.random.default_rng(seed)
    ids = np.stack([draw.permutation(VOCAB)[:width] for _ in range(slots_)])[None]
    logits = np.sort(draw.normal(0, 2, (1, branches, slots_, width)))[..., ::-1]
    values: dict[str, Any] = {
        "ids": ids.astype(np.int64),
        "logits": np.ascontiguousarray(logits, dtype=np.float32),
        "noise": np.zeros((1, slots_, width), dtype=np.float32),
        "log_prior": np.log(np.full((1, branches), 1 / branches, dtype=np.float32)),
        "tokens": np.array([[1, 2]]),
        "regimes": [FLAT],
        "grams": [None],
    }
    limits = {"slots": slots_, "depth": slots_, "nodes": nodes}
    numbers = {name: np.array([own.pop(name, value)]) for name, value in limits.items()}
    return Bed(**values | numbers | own)


def check(tree: Tree, nodes: int, depth: int) -> None:
    """Assert that a tree is one, within its limits and in the order of survival."""
    TokenTree(tuple(tree.tokens), tuple(tree.parents)).validate(VOCAB, nodes, depth)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    pairs = list(zip(tree.parents, tree.tokens, strict=True))
    assert len(set(pairs)) == len(pairs), "siblings bear the same token"
    assert all(math.isfinite(value) and value <= 1e-5 for value in tree.log_probs)
    lengths = {len(tree.tokens), len(tree.log_probs), len(tree.parts), len(tree.branches)}
    assert len(lengths) == 1
    survivals = tree.survivals()
    assert survivals == sorted(survivals, reverse=True), "not in the order of survival"
