"""From ready sessions to proposals: one pass of the model for all of them, then their trees, grown
together.

Knows model, cache, candidates and trees. Does not know lanes, threads or messages that come in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafter_service.bed import Bed, Ints, last_two
from drafter_service.block_size import BlockSize
from drafter_service.cache import Context, ContextPool
from drafter_service.calibration import Regime, candidates
from drafter_service.conditioned import PathCondition
from drafter_service.messages import Proposal, Reason
from drafter_service.model import Block, Candidates, DraftModel, LogitBias
from drafter_service.ranking import noise_at, plant
from drafter_service.session import Session
from drafter_service.tree import Part, Tree


@dataclass(frozen=True, slots=True)
class Job:
    """One session to draft for. `context` None: no model for it (no room or no target), n-gram
    only. `max_depth`: deepest node, 0: the block's; only repetition goes deeper than the block.
    """

    session: Session
    context: Context | None
    block: BlockSize
    max_nodes: int
    parts: frozenset[Part]
    max_depth: int = 0

    @property
    def slots(self) -> int:
        """Slots that the model fills."""
        return 0 if self.context is None else self.block.size - 1

    @property
    def depth(self) -> int:
        """The deepest node that there may be."""
        return max(self.max_depth, self.block.size - 1) if self.block.size > 1 else 0


@dataclass(frozen=True, slots=True)
class Drafted:
    """Proposals in the order of the jobs; None where the model gave no finite numbers. `model_ns`:
    time in the model.
    """

    proposals: list[Proposal | None]
    model_ns: int


@dataclass(frozen=True, slots=True)
class _Found:
    """What the model says of the slots of the jobs that ask it, one job after another: hidden
    states [slots * branches, hidden], candidates, biases, log prior [jobs, branches] of branches.
    """

    hidden: torch.Tensor
    candidates: Candidates
    biases: list[LogitBias]
    log_prior: torch.Tensor


def draft(
    model: DraftModel, pool: ContextPool, jobs: Sequence[Job], *, path_head: bool = True
) -> Drafted:
    """Draft for all jobs. Contexts must hold all positions before the anchor and have room for the
    block. `path_head`: use the model's, if it has one.
    """
    started = time.perf_counter_ns()
    asked = [job for job in jobs if job.slots]
    found = _run(model, pool, asked) if asked else None
    model_ns = time.perf_counter_ns() - started if asked else 0
    bed = _bed(model, jobs, found)
    condition = None
    if found is not None and path_head and model.path_head is not None:
        ids = found.candidates.ids
        condition = PathCondition(model, found.hidden, ids, _firsts(jobs), found.biases)
    trees = plant(bed, [job.parts for job in jobs], condition)
    proposals: list[Proposal | None] = []
    for session, (job, tree) in enumerate(zip(jobs, trees, strict=True)):
        best = bed.logits[session, :, : job.slots, 0]
        finite = bool(np.isfinite(best).all()) and np.isfinite(tree.log_probs).all()
        proposals.append(_proposal(job, tree) if finite else None)
    return Drafted(proposals, model_ns)


def _run(model: DraftModel, pool: ContextPool, jobs: Sequence[Job]) -> _Found:
    """The model's part: blocks -> hidden states -> candidates."""
    blocks = [
        Block(job.session.tokens[-1], job.context, job.block.size)
        for job in jobs
        if job.context is not None
    ]
    hidden = model.draft(pool, blocks)
    device, count = hidden.device, torch.tensor([job.slots for job in jobs])
    anchors = torch.cumsum(count + 1, 0) - (count + 1)
    is_slot = torch.ones(hidden.shape[0], dtype=torch.bool)
    is_slot[anchors] = False
    slots, prior = hidden[is_slot.to(device)], torch.zeros(len(jobs), 1, device=device)
    weights = None
    if model.config.branches > 1:
        wants = torch.tensor([Part.BRANCHES in job.parts for job in jobs], device=device)
        tempers = torch.tensor([_regime(model, job).category for job in jobs], device=device)
        prior = model.log_prior(hidden[anchors.to(device)], tempers)
        best = prior.argmax(1, keepdim=True)
        if wants.any():
            # Who does not ask for branches has all of the prior on the likeliest one.
            alone = torch.full_like(prior, -torch.inf).scatter(1, best, 0.0)
            prior = torch.where(wants[:, None], prior, alone)
            slots = model.expand(slots)
            weights = prior.repeat_interleave(count.to(device), dim=0)
        else:
            prior = torch.zeros(len(jobs), 1, device=device)
            chosen = best[:, 0].repeat_interleave(count.to(device))
            slots = model.expand(slots).view(len(chosen), model.config.branches, -1)
            slots = slots[torch.arange(len(chosen), device=device), chosen]
    biases, first = [], 0
    for job in jobs:
        if job.session.sampling.logit_bias:
            biases.append(_bias(job, first, first + job.slots, model))
        first += job.slots
    width = max(candidates(job.session.sampling.temperature) for job in jobs)
    return _Found(slots, model.candidates(slots, width, weights, biases), biases, prior)


def _bias(job: Job, first: int, end: int, model: DraftModel) -> LogitBias:
    """Ids that are not proposed anyway, such as those of another lane's larger target, are left
    out: one session's must not break the step of all.
    """
    bias = [entry for entry in job.session.sampling.logit_bias.items() if _usable(entry, model)]
    return LogitBias(
        first,
        end,
        torch.tensor([token for token, _ in bias], dtype=torch.int64, device=model.device),
        torch.tensor([value for _, value in bias], dtype=torch.float32, device=model.device),
    )


def _usable(entry: tuple[int, float], model: DraftModel) -> bool:
    token, value = entry
    return token < model.vocabulary and math.isfinite(value)


def _firsts(jobs: Sequence[Job]) -> Ints:
    """Where the slots of each job begin among those of all."""
    counts = np.array([job.slots for job in jobs], dtype=np.int64)
    first: Ints = np.cumsum(counts) - counts
    return first


def _bed(model: DraftModel, jobs: Sequence[Job], found: _Found | None) -> Bed:
    """Candidates of all jobs side by side, with the noise of those whose order uses it."""
    n, slots = len(jobs), np.array([job.slots for job in jobs], dtype=np.int64)
    branches, width = 1, 1
    if found is not None:
        _, branches, width = found.candidates.logits.shape
    shape = (n, int(slots.max(initial=0)))
    ids = np.zeros((*shape, width), dtype=np.int64)
    logits = np.full((*shape, branches, width), -np.inf, dtype=np.float32)
    log_prior = np.zeros((n, branches), dtype=np.float32)
    log_prior[:, 1:] = -np.inf
    if found is not None:
        used = np.arange(shape[1])[None, :] < slots[:, None]
        ids[used] = found.candidates.ids.cpu().numpy()
        logits[used] = found.candidates.logits.cpu().numpy()
        log_prior[slots > 0] = found.log_prior.float().cpu().numpy()
    for row, job in enumerate(jobs):
        # There may be more of them, for another session of the batch.
        logits[row, ..., candidates(job.session.sampling.temperature) :] = -np.inf
    return Bed(
        ids=ids,
        logits=np.ascontiguousarray(logits.transpose(0, 2, 1, 3)),
        # Slot j of a block is drawn at base + j; the first slot is j = 1.
        noise=noise_at(
            ids, [_shared_seed(job) for job in jobs], [job.session.base + 1 for job in jobs], slots
        ),
        log_prior=log_prior,
        slots=slots,
        depth=np.array([job.depth for job in jobs], dtype=np.int64),
        nodes=np.array([job.max_nodes for job in jobs], dtype=np.int64),
        tokens=np.array([last_two(job.session.tokens) for job in jobs], dtype=np.int64),
        regimes=[_regime(model, job) for job in jobs],
        grams=[job.session.history if Part.NGRAM in job.parts else None for job in jobs],
    )


def _shared_seed(job: Job) -> int | None:
    """The seed of the target's noise, if the order of the job's candidates uses it."""
    sampling = job.session.sampling
    ordered = bool(job.parts & {Part.RANK_TREE, Part.BRANCHES})
    return sampling.seed if ordered and sampling.temperature > 0 else None


def _regime(model: DraftModel, job: Job) -> Regime:
    """How the job's scores become chances."""
    sampling = job.session.sampling
    return model.config.calibration.regime(
        sampling.temperature,
        filtered=sampling.filtered,
        coupled=_shared_seed(job) is not None,
    )


def _proposal(job: Job, tree: Tree) -> Proposal:
    reason = job.block.reason
    if job.context is None and reason not in (Reason.OFF, Reason.CONTEXT):
        reason = Reason.NO_MODEL
    session = job.session
    size = job.block.size if tree.tokens else 1
    return Proposal(session.session_id, session.epoch, session.base, tree, size, reason)
