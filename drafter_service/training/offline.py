"""Decoding replayed on stored answers: which proposals a drafter would make, and what the target
kept of them.

Under the `follow` rule the target's tokens do not depend on the drafter, so one stored answer tells
for every drafter and every way of drafting how its rounds would have gone. Proposals are built by
the very functions that serve, answers side by side as sessions are there. Does not know files or
statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drafter_service.bed import Bed, Floats, Ints, last_two, log_softmax
from drafter_service.calibration import Calibration
from drafter_service.calibration import candidates as likeliest
from drafter_service.conditioned import PathCondition
from drafter_service.model import DraftModel
from drafter_service.ngram import NgramIndex
from drafter_service.ranking import noise_at, plant
from drafter_service.training import rules
from drafter_service.training.blocks import candidates, collate
from drafter_service.training.features import Trajectory
from drafter_service.training.network import BlockNetwork
from drafter_service.tree import Part, Tree


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of drafting: parts of the tree, nodes, whether candidates are ordered with the target's
    noise, whether the path-conditioned head is used, and the deepest node (0: the block's). `rule`:
    one of `rules`, None: the token walk.
    """

    name: str
    parts: frozenset[Part]
    nodes: int
    coupled: bool = False
    path_head: bool = False
    depth: int = 0
    rule: str | None = None


def modes_for(
    depth: int,
    budgets: Sequence[int],
    *,
    greedy: bool,
    branches: int,
    path_head: bool = False,
    deepest: int = 0,
) -> list[Mode]:
    """All modes worth telling apart. At temperature 0 there is no noise to share. `deepest`: how
    far repetition goes on where it has the tree to itself or shares it.
    """
    argmax, tree, grams = Part.ARGMAX, Part.RANK_TREE, Part.NGRAM
    deep = max(deepest, depth)
    found = [
        Mode("argmax chain", frozenset({argmax}), depth),
        Mode("n-gram", frozenset({grams}), deep, depth=deep),
    ]
    named = [] if greedy else [rules.MARGINALS]
    if branches > 1:
        named += [rules.BEST_BRANCH, rules.DRAWN_BRANCH, rules.MIXTURE]
    found += [Mode(rule, frozenset(), depth, rule=rule) for rule in named]
    for nodes in budgets:
        for path in (False, True) if path_head else (False,):
            kind = "path tree" if path else "rank tree"
            for coupled in (False,) if greedy else (False, True):
                name = f"coupled {kind}" if coupled else kind
                found.append(Mode(name, frozenset({tree}), nodes, coupled, path))
                both = frozenset({tree, grams})
                found.append(Mode(f"{name} + n-gram", both, nodes, coupled, path, deep))
                if branches > 1:
                    every = both | {Part.BRANCHES}
                    name = f"{name} over branches + n-gram"
                    found.append(Mode(name, every, nodes, coupled, path, deep))
        if branches > 1:
            found.append(Mode("branches", frozenset({Part.BRANCHES}), nodes, not greedy))
    return found


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the model says at every anchor of one answer: `hidden` float32 [anchors, slots,
    branches, hidden]; `ids` [anchors, slots, count], best first; `logits` [anchors, slots,
    branches, count]; `log_prior` [anchors, branches]. The first anchor is the answer's first token.
    """

    first: int
    hidden: torch.Tensor
    ids: Ints
    logits: Floats
    log_prior: Floats


@torch.no_grad()
def drafts_of(
    network: BlockNetwork, trajectory: Trajectory, block_size: int, *, at_once: int = 32
) -> Drafts:
    """Draft at every position of the answer. The model must have its target attached."""
    model: DraftModel = network.model
    anchors = list(candidates(trajectory, prompts=False))
    branches, slots = model.config.branches, block_size - 1
    width = likeliest(trajectory.response.temperature)
    parts = []
    for begin in range(0, len(anchors), at_once):
        some = anchors[begin : begin + at_once]
        # Keys past the last anchor are never seen.
        batch = collate([_cut(trajectory, some[-1] + block_size)], [some], block_size)
        hidden = network(batch.to(model.device)).view(len(some), block_size, -1)
        prior = model.log_prior(hidden[:, 0]).float()
        rows = model.expand(hidden[:, 1:].reshape(len(some) * slots, -1))
        weights = prior.repeat_interleave(slots, dim=0) if branches > 1 else None
        found = model.candidates(rows, width, weights)
        parts.append(
            (
                rows.view(len(some), slots, branches, -1).cpu().numpy(),
                found.ids.view(len(some), slots, -1).cpu().numpy(),
                found.logits.view(len(some), slots, branches, -1).cpu().numpy(),
                prior.cpu().numpy(),
            )
        )
    hidden_, ids, logits, log_prior = [np.concatenate(part) for part in zip(*parts, strict=True)]
    return Drafts(anchors[0], torch.from_numpy(hidden_), ids, logits, log_prior)


@dataclass(frozen=True, slots=True)
class Round:
    """One round: `accepted` drafted tokens of `drafted`; `anchor` is its position."""

    anchor: int
    accepted: int
    drafted: int


@dataclass(slots=True)
class _Course:
    """One answer under way; `at` is the anchor's position."""

    trajectory: Trajectory
    drafts: Drafts
    tokens: list[int]
    history: NgramIndex
    at: int
    rounds: list[Round]


def replay(
    model: DraftModel,
    answers: Sequence[tuple[Trajectory, Drafts]],
    mode: Mode,
    calibration: Calibration | None = None,
) -> list[list[Round]]:
    """The rounds that `mode` would have taken over each answer. The answers go side by side, one
    round of each that is not over at a time. `calibration` None: the model's.
    """
    courses = []
    for trajectory, drafts in answers:
        tokens = trajectory.tokens.tolist()
        history = NgramIndex(tokens[: drafts.first])
        courses.append(_Course(trajectory, drafts, tokens, history, drafts.first, []))
    known = model.config.calibration if calibration is None else calibration
    if mode.rule is not None:
        return [_by_rule(course, mode, known) for course in courses]
    while under_way := [course for course in courses if course.at < len(course.tokens) - 1]:
        for course in under_way:
            course.history.extend(course.tokens[len(course.history.tokens) : course.at + 1])
        for course, tree in zip(under_way, _trees(model, under_way, mode, known), strict=True):
            accepted = walk(tree, course.tokens[course.at + 1 :])
            course.rounds.append(Round(course.at, accepted, len(tree.tokens)))
            course.at += accepted + 1
    return [course.rounds for course in courses]


def _by_rule(course: _Course, mode: Mode, calibration: Calibration) -> list[Round]:
    """The rounds of one answer under a rule that is no walk."""
    assert mode.rule is not None
    drafts, answer = course.drafts, course.trajectory.response
    regime = calibration.regime(
        answer.temperature, filtered=answer.top_k > 0 or answer.top_p < 1, coupled=False
    )
    chances = rules.accept_chances(
        course.trajectory,
        drafts.first,
        drafts.ids,
        drafts.logits,
        drafts.log_prior / regime.category,
        mode.rule,
        scale=regime.scale(),
    )
    rounds = rules.accepted(chances, drafts.first, len(course.tokens), answer.seed)
    slots = drafts.ids.shape[1]
    return [Round(at, count, slots) for at, count in rounds]


def _trees(
    model: DraftModel, courses: Sequence[_Course], mode: Mode, calibration: Calibration
) -> list[Tree]:
    """The proposals of one round."""
    at = [course.at - course.drafts.first for course in courses]
    width = max(course.drafts.ids.shape[2] for course in courses)
    ids = np.stack([_wide(c.drafts.ids[i], width, 0) for c, i in zip(courses, at, strict=True)])
    logits = np.stack(
        [_wide(c.drafts.logits[i], width, -np.inf) for c, i in zip(courses, at, strict=True)]
    )
    prior = np.stack([course.drafts.log_prior[i] for course, i in zip(courses, at, strict=True)])
    hidden = torch.stack([course.drafts.hidden[i] for course, i in zip(courses, at, strict=True)])
    n, slots, branches, _ = logits.shape
    if branches > 1 and Part.BRANCHES not in mode.parts:
        best = prior.argmax(1)
        hidden = hidden[torch.arange(n), :, torch.from_numpy(best)][:, :, None]
        logits = logits[np.arange(n), :, best][:, :, None]
        prior, branches = np.zeros((n, 1), dtype=np.float32), 1
    counts = np.full(n, slots)
    answers = [course.trajectory.response for course in courses]
    seeds = [a.seed if mode.coupled and a.temperature > 0 else None for a in answers]
    regimes = [
        calibration.regime(
            a.temperature, filtered=a.top_k > 0 or a.top_p < 1, coupled=seed is not None
        )
        for a, seed in zip(answers, seeds, strict=True)
    ]
    tempers = np.array([[regime.category] for regime in regimes])
    bed = Bed(
        ids=ids,
        logits=np.ascontiguousarray(logits.transpose(0, 2, 1, 3)),
        noise=noise_at(ids, seeds, [course.at + 1 for course in courses], counts),
        log_prior=log_softmax(prior / tempers).astype(np.float32),
        slots=counts,
        depth=np.full(n, max(slots, mode.depth)),
        nodes=np.full(n, mode.nodes),
        tokens=np.array([last_two(course.history.tokens) for course in courses], dtype=np.int64),
        regimes=regimes,
        grams=[course.history if Part.NGRAM in mode.parts else None for course in courses],
    )
    condition = None
    if mode.path_head and model.path_head is not None and Part.RANK_TREE in mode.parts:
        rows = hidden.reshape(n * slots * branches, -1).to(model.device)
        flat = torch.from_numpy(ids.reshape(n * slots, -1)).to(model.device)
        condition = PathCondition(model, rows, flat, np.arange(n) * slots)
    return plant(bed, [mode.parts] * n, condition)


def _wide(values: np.ndarray[Any, Any], width: int, filling: float) -> np.ndarray[Any, Any]:
    """Padded along the last axis."""
    missing = [(0, 0)] * (values.ndim - 1) + [(0, width - values.shape[-1])]
    return np.pad(values, missing, constant_values=filling) if missing[-1][1] else values


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
