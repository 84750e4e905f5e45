"""Decoding replayed on stored answers: which proposals a drafter would make, and what the target
kept of them.

Under the `follow` rule the target's tokens do not depend on the drafter, so one stored answer tells
for every drafter and every way of drafting how its rounds would have gone. Proposals are built by
the very functions that serve. Does not know files or statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.model import DraftModel
from drafter_service.ngram import NgramIndex
from drafter_service.ranking import Floats, Ints, Ranked, RowDraws, rank
from drafter_service.training.blocks import candidates, collate
from drafter_service.training.features import Trajectory
from drafter_service.training.network import BlockNetwork
from drafter_service.tree import Part, Tree, build

CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of drafting: parts of the tree, nodes, and whether candidates are ordered with the
    target's noise.
    """

    name: str
    parts: frozenset[Part]
    nodes: int
    coupled: bool = False


def modes_for(depth: int, budgets: Sequence[int], *, greedy: bool, branches: int) -> list[Mode]:
    """All modes worth telling apart. At temperature 0 there is no noise to share."""
    argmax, tree, grams = Part.ARGMAX, Part.RANK_TREE, Part.NGRAM
    found = [
        Mode("argmax chain", frozenset({argmax}), depth),
        Mode("n-gram", frozenset({grams}), depth),
    ]
    for nodes in budgets:
        found.append(Mode("rank tree", frozenset({tree}), nodes))
        found.append(Mode("rank tree + n-gram", frozenset({tree, grams}), nodes))
        if not greedy:
            found.append(Mode("coupled rank tree", frozenset({tree}), nodes, True))
            found.append(Mode("coupled rank tree + n-gram", frozenset({tree, grams}), nodes, True))
        if branches > 1:
            found.append(Mode("branches", frozenset({Part.BRANCHES}), nodes, not greedy))
    return found


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the model says at every anchor of one answer: `ids` and `logits` [anchors, branches,
    slots, count], best first; `normaliser` [anchors, branches, slots]; `log_prior` [anchors,
    branches]. The first anchor is the answer's first token.
    """

    first: int
    ids: Ints
    logits: Floats
    normaliser: Floats
    log_prior: Floats


@torch.no_grad()
def drafts_of(
    network: BlockNetwork, trajectory: Trajectory, block_size: int, *, at_once: int = 32
) -> Drafts:
    """Draft at every position of the answer. The model must have its target attached."""
    model: DraftModel = network.model
    anchors = list(candidates(trajectory, prompts=False))
    branches, slots = model.config.branches, block_size - 1
    parts = []
    for begin in range(0, len(anchors), at_once):
        some = anchors[begin : begin + at_once]
        # Keys past the last anchor are never seen.
        batch = collate([_cut(trajectory, some[-1] + block_size)], [some], block_size)
        hidden = network(batch.to(model.device)).view(len(some), block_size, -1)
        prior = model.log_prior(hidden[:, 0]).float()
        rows = model.expand(hidden[:, 1:].reshape(len(some) * slots, -1))
        found = model.candidates(rows, CANDIDATES, normalise=True)
        shape = (len(some), slots, branches)
        assert found.normaliser is not None
        parts.append(
            (
                found.ids.view(*shape, -1).transpose(1, 2).cpu().numpy(),
                found.logits.view(*shape, -1).transpose(1, 2).cpu().numpy(),
                found.normaliser.view(shape).transpose(1, 2).cpu().numpy(),
                prior.cpu().numpy(),
            )
        )
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Drafts(anchors[0], *columns)


@dataclass(frozen=True, slots=True)
class Round:
    """One round: `accepted` drafted tokens of `drafted`; `anchor` is its position."""

    anchor: int
    accepted: int
    drafted: int


def replay(
    trajectory: Trajectory, drafts: Drafts, mode: Mode, ranked: Sequence[Sequence[Ranked]]
) -> Iterator[Round]:
    """The rounds that `mode` would have taken over the answer. `ranked`: of each anchor, one entry
    a branch, made by `rankings` with the mode's coupling.
    """
    tokens = trajectory.tokens.tolist()
    history = NgramIndex(tokens[: drafts.first])
    at = drafts.first
    while at < len(tokens) - 1:
        history.extend(tokens[len(history.tokens) : at + 1])
        index, depth = at - drafts.first, drafts.ids.shape[2]
        prior = drafts.log_prior[index].tolist()
        tree = build(
            ranked=ranked[index],
            log_prior=prior,
            argmax=drafts.ids[index, prior.index(max(prior)), :, 0].tolist(),
            ngram=history.lookup(depth) if Part.NGRAM in mode.parts else ([], 0),
            parts=mode.parts,
            max_nodes=mode.nodes,
            max_depth=depth,
        )
        accepted = walk(tree, tokens[at + 1 :])
        yield Round(at, accepted, len(tree.tokens))
        at += accepted + 1


def walk(tree: Tree, truth: Sequence[int]) -> int:
    """How many nodes of `tree` the tokens `truth` follow from the anchor. The last token of the
    answer can be accepted, but then nothing comes after it.
    """
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    node, accepted = -1, 0
    for token in truth[:-1]:
        found = children.get((node, token))
        if found is None:
            break
        node, accepted = found, accepted + 1
    return accepted


def rankings(trajectory: Trajectory, drafts: Drafts, *, coupled: bool) -> list[list[Ranked]]:
    """The ordered candidates of each anchor, one entry a branch."""
    anchors, branches, slots, count = drafts.ids.shape
    rows = anchors * branches * slots
    positions = (
        drafts.first
        + np.arange(anchors)[:, None, None]
        + 1
        + np.arange(slots)[None, None, :]
        + np.zeros((1, branches, 1), dtype=np.int64)
    )
    answer = trajectory.response
    draws = RowDraws(
        np.full(rows, answer.temperature, dtype=np.float32),
        np.full(rows, coupled),
        [answer.seed] * rows,
        positions.reshape(-1).tolist(),
    )
    normaliser = drafts.normaliser.reshape(rows) if answer.temperature <= 0 else None
    found = rank(
        drafts.ids.reshape(rows, count), drafts.logits.reshape(rows, count), normaliser, draws
    )
    ids = found.ids.reshape(anchors, branches, slots, count)
    chances = found.log_chances.reshape(anchors, branches, slots, count)
    return [[Ranked(ids[a, b], chances[a, b]) for b in range(branches)] for a in range(anchors)]


def _cut(trajectory: Trajectory, length: int) -> Trajectory:
    """The first `length` tokens of a trajectory."""
    answer = trajectory.response
    kept = max(0, min(length, len(trajectory.tokens)) - len(answer.prompt))
    return Trajectory(
        type(answer)(
            answer.key,
            answer.source,
            answer.prompt,
            answer.answer[:kept],
            answer.logprobs[:kept],
            answer.temperature,
            answer.top_k,
            answer.top_p,
            answer.seed,
            answer.finished,
        ),
        trajectory.tokens[:length],
        trajectory.features[:length],
        trajectory.top_ids[:length],
        trajectory.top_logprobs[:length],
    )
