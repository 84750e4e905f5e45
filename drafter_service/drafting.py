"""From ready sessions to proposals: one pass of the model for all of them, then a tree for each.

Knows model, cache, candidates and trees. Does not know lanes, threads or messages that come in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.block_size import BlockSize
from drafter_service.cache import Context, ContextPool
from drafter_service.messages import Proposal, Reason
from drafter_service.model import Block, Candidates, DraftModel, LogitBias
from drafter_service.ranking import Ints, Ranked, RowDraws, rank
from drafter_service.session import Session
from drafter_service.tree import Part, Tree, build

# Candidates looked at in each slot: the token that the target draws is among 64 in nearly every
# round.
CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Job:
    """One session to draft for. `context` None: no model for it (no room or no target), n-gram
    only.
    """

    session: Session
    context: Context | None
    block: BlockSize
    max_nodes: int
    parts: frozenset[Part]


@dataclass(frozen=True, slots=True)
class Drafted:
    """Proposals in the order of the jobs; None where the model gave no finite numbers. `model_ns`:
    time in the model.
    """

    proposals: list[Proposal | None]
    model_ns: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a job's candidate rows lie: `branches` rows a slot, from `first` on."""

    first: int
    slots: int
    branches: int
    log_prior: list[float]

    @property
    def end(self) -> int:
        return self.first + self.slots * self.branches


def draft(model: DraftModel, pool: ContextPool, jobs: Sequence[Job]) -> Drafted:
    """Draft for all jobs. Contexts must hold all positions before the anchor and have room for the
    block.
    """
    asked = [job for job in jobs if job.context is not None and job.block.size > 1]
    if not asked:
        return Drafted([_proposal(job, _tree(job)) for job in jobs], 0)
    started = time.perf_counter_ns()
    found, places = _run(model, pool, asked)
    ids, logits = found.ids.cpu().numpy(), found.logits.cpu().numpy()
    normaliser = None if found.normaliser is None else found.normaliser.cpu().numpy()
    model_ns = time.perf_counter_ns() - started
    finite = np.isfinite(logits[:, 0])
    ranked = rank(ids, logits, normaliser, _draws(asked, places))
    proposals: list[Proposal | None] = []
    remaining = iter(places)
    for job in jobs:
        if job.context is None or job.block.size <= 1:
            proposals.append(_proposal(job, _tree(job)))
            continue
        place = next(remaining)
        if not finite[place.first : place.end].all():
            proposals.append(None)
            continue
        proposals.append(_proposal(job, _tree(job, place, ranked, ids)))
    return Drafted(proposals, model_ns)


def _run(
    model: DraftModel, pool: ContextPool, jobs: Sequence[Job]
) -> tuple[Candidates, list[_Place]]:
    """The model's part: blocks -> hidden states -> candidate rows."""
    blocks = [
        Block(job.session.tokens[-1], job.context, job.block.size)
        for job in jobs
        if job.context is not None
    ]
    hidden = model.draft(pool, blocks)
    count, device = model.config.branches, hidden.device
    firsts: list[int] = np.cumsum([0, *(block.size for block in blocks[:-1])]).tolist()
    priors: list[list[float]] = [[0.0]] * len(jobs)
    if count > 1:
        priors = model.log_prior(hidden[torch.tensor(firsts, device=device)]).tolist()
    wanted: list[int] = []
    places: list[_Place] = []
    biases: list[LogitBias] = []
    for job, first, prior in zip(jobs, firsts, priors, strict=True):
        # Branch z of hidden row r is row r * count + z of the expanded states; without the part
        # only the likeliest one.
        all_branches = Part.BRANCHES in job.parts and count > 1
        chosen = range(count) if all_branches else (prior.index(max(prior)),)
        at, slots = len(wanted), range(first + 1, first + job.block.size)
        wanted.extend(row * count + branch for row in slots for branch in chosen)
        places.append(_Place(at, len(slots), len(chosen), prior if all_branches else [0.0]))
        if job.session.sampling.logit_bias:
            biases.append(_bias(job, at, len(wanted), device))
    picked = model.expand(hidden)[torch.tensor(wanted, device=device)]
    greedy = any(job.session.sampling.temperature <= 0 for job in jobs)
    return model.candidates(picked, CANDIDATES, normalise=greedy, biases=biases), places


def _bias(job: Job, first: int, end: int, device: torch.device) -> LogitBias:
    bias = job.session.sampling.logit_bias
    return LogitBias(
        first,
        end,
        torch.tensor(list(bias), device=device),
        torch.tensor(list(bias.values()), device=device),
    )


def _draws(jobs: Sequence[Job], places: Sequence[_Place]) -> RowDraws:
    """Temperature, seed and absolute position of every candidate row: slot j is drawn at base +
    j.
    """
    temperatures: list[float] = []
    coupled: list[bool] = []
    seeds: list[int] = []
    positions: list[int] = []
    for job, place in zip(jobs, places, strict=True):
        count, sampling = place.end - place.first, job.session.sampling
        temperatures.extend([sampling.temperature] * count)
        uses_order = bool(job.parts & {Part.RANK_TREE, Part.BRANCHES})
        coupled.extend([uses_order and sampling.seed is not None] * count)
        seeds.extend([sampling.seed or 0] * count)
        first = job.session.base + 1
        positions.extend(first + slot for slot in range(place.slots) for _ in range(place.branches))
    return RowDraws(np.array(temperatures, dtype=np.float32), np.array(coupled), seeds, positions)


def _tree(
    job: Job, place: _Place | None = None, found: Ranked | None = None, by_logit: Ints | None = None
) -> Tree:
    depth = job.block.size - 1
    ranked: list[Ranked] = []
    argmax: list[int] = []
    if place is not None and found is not None and by_logit is not None:
        rows = [
            slice(place.first + branch, place.end, place.branches)
            for branch in range(place.branches)
        ]
        ranked = [Ranked(found.ids[window], found.log_chances[window]) for window in rows]
        best = place.log_prior.index(max(place.log_prior))
        argmax = by_logit[rows[best], 0].tolist()
    ngram: tuple[list[int], int] = ([], 0)
    if Part.NGRAM in job.parts and depth > 0:
        ngram = job.session.history.lookup(depth)
    return build(
        ranked=ranked,
        log_prior=place.log_prior if place is not None else [0.0],
        argmax=argmax,
        ngram=ngram,
        parts=job.parts,
        max_nodes=job.max_nodes,
        max_depth=depth,
    )


def _proposal(job: Job, tree: Tree) -> Proposal:
    reason = job.block.reason
    if job.context is None and reason not in (Reason.OFF, Reason.CONTEXT):
        reason = Reason.NO_MODEL
    session = job.session
    size = job.block.size if tree.tokens else 1
    return Proposal(session.session_id, session.epoch, session.base, tree, size, reason)
