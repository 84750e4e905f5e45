"""From candidates to proposals: the target's noise, chains of the likeliest tokens, and the parts
that a request asks for merged into one tree.

Knows candidate scores and parts. Does not know the model, sessions or the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from drafter_service.bed import Bed, Condition, Floats, Ints, log_softmax
from drafter_service.growth import Grower
from drafter_service.tree import Part, Tree, chain, merged
from draftwire_kernels.noise import gumbel_rows


def noise_at(ids: Ints, seeds: Sequence[int | None], first: Sequence[int], slots: Ints) -> Floats:
    """The noise with which the target will draw: float32 [n, slots, width].

    ids int64 [n, slots, width]: candidates; seeds: None gives 0 for the whole session; first: the
    absolute position of each session's first slot; slots [n]: how many of them are its own.
    """
    noise = np.zeros(ids.shape, dtype=np.float32)
    rows = [
        (session, slot)
        for session, seed in enumerate(seeds)
        if seed is not None
        for slot in range(int(slots[session]))
    ]
    if rows:
        at = tuple(np.array(rows, dtype=np.int64).T)
        row_seeds = [seeds[session] or 0 for session, _ in rows]
        positions = [first[session] + slot for session, slot in rows]
        noise[at] = gumbel_rows(row_seeds, positions, torch.from_numpy(ids[at])).numpy()
    return noise


def plant(
    bed: Bed, parts: Sequence[frozenset[Part]], condition: Condition | None = None
) -> list[Tree]:
    """The proposal of each session of a bed, of the parts it asks for.

    RANK_TREE: the slots' candidates, over all branches of the bed; NGRAM: repetition; both grow
    together. ARGMAX: the chain of the likeliest token of each slot, and BRANCHES without RANK_TREE:
    the best chain of each branch, whatever the path; these come whole. A bed has branches besides
    the first only for sessions that ask for them: the others have a prior of -inf there.
    """
    ranked = np.array([Part.RANK_TREE in asked for asked in parts])
    grown_from = replace(bed, slots=np.where(ranked, bed.slots, 0))
    grown = Grower(grown_from, condition).grow()
    trees = []
    for session, (asked, tree) in enumerate(zip(parts, grown, strict=True)):
        chains = _chains(bed, session, asked)
        trees.append(merged(chains, tree, int(bed.nodes[session])) if chains else tree)
    return trees


def _chains(bed: Bed, session: int, asked: frozenset[Part]) -> list[Tree]:
    count = min(int(bed.slots[session]), int(bed.depth[session]))
    wants_branches = Part.BRANCHES in asked and Part.RANK_TREE not in asked
    if not count or not (Part.ARGMAX in asked or wants_branches):
        return []
    ids, noise, regime = bed.ids[session], bed.noise[session, :count], bed.regimes[session]
    logits, prior = bed.logits[session, :, :count], bed.log_prior[session]
    spread = np.array([_slot(regime.spread, j) for j in range(count)])[:, None]
    reach = np.log([_slot(regime.reach, j) for j in range(count)])[:, None]
    found: list[Tree] = []

    def add(branch: int, picks: Ints, chances: Floats, part: Part, first: float) -> None:
        rows = np.arange(count)
        logs = np.minimum(chances[rows, picks], 0.0)
        logs[0] += first
        found.append(chain(ids[rows, picks].tolist(), logs.tolist(), part, branch))

    scores = log_softmax(logits / regime.scale()) + noise
    chances = log_softmax(scores / spread) + reach
    if Part.ARGMAX in asked:
        best = int(prior.argmax())
        add(best, logits[best].argmax(1), chances[best], Part.ARGMAX, 0.0)
    if wants_branches:
        for branch in np.flatnonzero(prior > -np.inf).tolist():
            add(branch, scores[branch].argmax(1), chances[branch], Part.BRANCHES, prior[branch])
    return found


def _slot(values: Sequence[float], slot: int) -> float:
    return values[min(slot, len(values) - 1)]
