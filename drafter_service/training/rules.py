"""Verification rules other than the token walk, replayed on stored answers.

A chain of drafted tokens is accepted token by token. Whatever rule does that, the target's tokens
keep their distribution, so the stored answer can stand for what the target would have said: its
token x_j is accepted with chance

    one-hot: q_j(x_j)               mixture: min(1, q_j(x_j) / p_j(x_j))

given that the ones before it were. q_j is the proposal's own chance of x_j once it has proposed the
tokens before, p_j the target's under its sampling settings. For the mixture this is the coupling of
draft and target that rejection sampling makes, read from the target's side; the first formula is
the second with a proposal that is compared as if it were certain. The coins are drawn from a seed.

Proposals: the likeliest branch; one branch drawn by the prior; each slot's token drawn from the
slot's marginal. Knows arrays and stored answers. Does not know the model or trees.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt

from drafter_service.bed import Floats, Ints, log_softmax
from drafter_service.training.features import Trajectory

Array = npt.NDArray[Any]

BEST_BRANCH = "best branch, one-hot"
DRAWN_BRANCH = "drawn branch, one-hot"
MIXTURE = "drawn branch, mixture rule"
MARGINALS = "drawn tokens, mixture rule"


def accept_chances(
    trajectory: Trajectory,
    first: int,
    ids: Ints,
    logits: Floats,
    log_prior: Floats,
    rule: str,
    *,
    scale: float = 1.0,
) -> Floats:
    """float32 [anchors, slots]: the chance that the answer's own token of a slot is accepted, given
    that those of the slots before were; 0 past the answer's last token but one.

    first: position of the first anchor; ids [anchors, slots, count]; logits [anchors, slots,
    branches, count]; log_prior [anchors, branches], tempered; scale: what logits are divided by
    when tokens are drawn.
    """
    anchors, slots, _, _ = logits.shape
    where = first + 1 + np.arange(anchors)[:, None] + np.arange(slots)[None, :]
    tokens = trajectory.tokens.numpy()
    # The last token may be accepted, but then nothing comes after it.
    inside = where < len(tokens) - 1
    truth = tokens[np.minimum(where, len(tokens) - 1)]
    if rule == MARGINALS:
        # The proposal is drawn from the candidates alone, so they make up its whole distribution.
        best = log_prior.argmax(1)
        own = logits[np.arange(anchors), :, best]
        chances = np.exp(log_softmax(own / scale))
        q = np.where(ids == truth[:, :, None], chances, 0.0).sum(2)
    else:
        picks = np.take_along_axis(
            np.broadcast_to(ids[:, :, None], logits.shape), logits.argmax(3)[..., None], 3
        )[..., 0]
        q = branch_chances(picks == truth[:, :, None], log_prior, rule)
    if rule in (MIXTURE, MARGINALS):
        q = np.minimum(1.0, q / np.maximum(_target(trajectory, where), 1e-9))
    found: Floats = np.where(inside, q, 0.0).astype(np.float32)
    return found


def branch_chances(hits: Array, log_prior: Array, rule: str) -> Array:
    """The proposal's chance of each token of the answer once it has proposed those before:
    [anchors, slots]. hits bool [anchors, slots, branches]: whether the branch's pick is that token;
    log_prior [anchors, branches], tempered.
    """
    if rule == BEST_BRANCH:
        prior = np.eye(hits.shape[2])[log_prior.argmax(1)]
    else:
        prior = np.exp(log_softmax(log_prior))
    left = np.concatenate([np.ones_like(hits[:, :1]), np.cumprod(hits, 1).astype(bool)], axis=1)
    mass = (prior[:, None] * left).sum(2)
    found: Array = np.where(mass[:, :-1] > 0, mass[:, 1:] / np.maximum(mass[:, :-1], 1e-12), 0.0)
    return found


def accepted(chances: Floats, first: int, length: int, seed: int) -> list[tuple[int, int]]:
    """The rounds over an answer that ends at `length`: (anchor, accepted tokens) of each."""
    draw = random.Random(seed)
    rounds, at = [], first
    while at < length - 1:
        count = 0
        for chance in chances[at - first].tolist():
            if draw.random() >= chance:
                break
            count += 1
        rounds.append((at, count))
        at += count + 1
    return rounds


def _target(trajectory: Trajectory, where: Ints) -> Array:
    """The target's chance of its own token at each position; 1 at temperature 0."""
    answer = trajectory.response
    chances = np.ones(len(trajectory.tokens))
    if answer.temperature > 0:
        chances[trajectory.prompt_length :] = np.exp(answer.logprobs)
    found: Array = chances[np.minimum(where, len(chances) - 1)]
    return found
