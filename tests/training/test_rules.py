"""Verification rules read from the target's side against the rules themselves, enumerated."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from drafter_service.training import rules
from drafter_service.training.features import Trajectory
from drafter_service.training.statistics import Tally, paired


def toy(seed: int, branches: int, slots: int = 3, size: int = 3):  # type: ignore[no-untyped-def]
    """A target over `size` tokens that knows its whole past, chains of each branch, a prior."""
    draw = np.random.default_rng(seed)
    target = {
        past: draw.dirichlet(np.ones(size) * 0.7)
        for length in range(slots)
        for past in itertools.product(range(size), repeat=length)
    }
    chains = draw.integers(0, size, (branches, slots))
    return target, chains, draw.dirichlet(np.ones(branches))


def drafted_side(target, chains, prior, mixture: bool) -> float:  # type: ignore[no-untyped-def]
    """Expected accepted tokens, by what the rule does: a branch is drawn, then each token of it is
    accepted with min(1, p / q), or with p.
    """
    total = 0.0
    for chain, weight in zip(chains, prior, strict=True):
        reached = 1.0
        for j in range(len(chain)):
            past = tuple(chain[:j])
            alike = (chains[:, :j] == chain[:j]).all(axis=1)
            same = alike & (chains[:, j] == chain[j])
            q = prior[same].sum() / prior[alike].sum()
            p = target[past][chain[j]]
            reached *= min(1.0, p / q) if mixture else p
            total += weight * reached
    return total


def target_side(target, chains, prior, mixture: bool) -> float:  # type: ignore[no-untyped-def]
    """The same from stored answers: every answer, weighed by the target's chance of it."""
    slots, size = chains.shape[1], len(target[()])
    total = 0.0
    for answer in itertools.product(range(size), repeat=slots):
        p = np.array([target[answer[:j]][answer[j]] for j in range(slots)])
        hits = (chains == np.array(answer)).T[None]
        rule = rules.MIXTURE if mixture else rules.DRAWN_BRANCH
        q = rules.branch_chances(hits, np.log(prior)[None], rule)[0]
        chances = np.minimum(1.0, q / p) if mixture else q
        total += p.prod() * np.cumprod(chances).sum()
    return total


@pytest.mark.parametrize("mixture", [False, True], ids=["one-hot", "mixture"])
@pytest.mark.parametrize("branches", [1, 2, 4])
def test_stored_answers_give_the_expected_acceptance_of_the_rule(
    mixture: bool, branches: int
) -> None:
    for seed in range(5):
        case = toy(seed, branches)
        assert target_side(*case, mixture) == pytest.approx(drafted_side(*case, mixture))


def test_the_mixture_rule_accepts_no_less_than_the_one_hot_rule() -> None:
    for seed in range(20):
        case = toy(seed, 4)
        assert target_side(*case, True) >= target_side(*case, False) - 1e-12


def drafts(trajectory: Trajectory, right: bool):  # type: ignore[no-untyped-def]
    """Two branches: the first says 0 everywhere, the second the truth (or 1 everywhere)."""
    tokens = trajectory.tokens.numpy()
    first, slots = trajectory.prompt_length, 3
    anchors = len(tokens) - 1 - first
    ids = np.zeros((anchors, slots, 3), dtype=np.int64)
    for a in range(anchors):
        for s in range(slots):
            place = min(first + 1 + a + s, len(tokens) - 1)
            ids[a, s] = (255, tokens[place] if right else 254, 253)
    logits = np.zeros((anchors, slots, 2, 3), dtype=np.float32)
    logits[:, :, 0, 0] = logits[:, :, 1, 1] = 50.0
    return first, ids, logits


def test_the_likeliest_branch_counts_alone_under_the_one_hot_rule(
    trajectories: list[Trajectory],
) -> None:
    trajectory = trajectories[0]
    first, ids, logits = drafts(trajectory, right=True)
    for knows, prior in ((True, [0.1, 0.9]), (False, [0.9, 0.1])):
        log_prior = np.log(np.tile(np.array(prior, dtype=np.float32), (len(ids), 1)))
        chances = rules.accept_chances(trajectory, first, ids, logits, log_prior, rules.BEST_BRANCH)
        rounds = rules.accepted(chances, first, len(trajectory.tokens), 1)
        left = len(trajectory.tokens) - 1 - first
        for _, count in rounds:
            assert count == (min(3, left - 1) if knows else 0)
            left -= count + 1
        assert left == 0


def test_a_drawn_branch_is_accepted_as_often_as_the_prior_says(
    trajectories: list[Trajectory],
) -> None:
    certain = replace(
        trajectories[0],
        response=replace(
            trajectories[0].response, logprobs=(0.0,) * len(trajectories[0].response.logprobs)
        ),
    )
    first, ids, logits = drafts(certain, right=True)
    log_prior = np.log(np.tile(np.array([0.75, 0.25], dtype=np.float32), (len(ids), 1)))
    for rule in (rules.DRAWN_BRANCH, rules.MIXTURE):
        chances = rules.accept_chances(certain, first, ids, logits, log_prior, rule)
        # The branch that was right once is right to the end.
        assert chances[0].tolist() == pytest.approx([0.25, 1.0, 1.0])


def test_drawn_tokens_are_accepted_by_the_marginal_over_the_target(
    trajectories: list[Trajectory],
) -> None:
    trajectory = trajectories[0]
    first, ids, logits = drafts(trajectory, right=True)
    logits[:, :, 0] = np.log(np.array([0.2, 0.3, 0.5], dtype=np.float32))
    log_prior = np.array([[0.0, -np.inf]] * len(ids), dtype=np.float32)
    chances = rules.accept_chances(trajectory, first, ids, logits, log_prior, rules.MARGINALS)
    place = first + 1
    p = np.exp(trajectory.response.logprobs[place - first])
    assert chances[0, 0] == pytest.approx(min(1.0, 0.3 / p), rel=1e-5)


def test_a_paired_gain_of_like_answers_has_no_spread() -> None:
    base, own = Tally(), Tally()
    base.answers = [(10, 5), (20, 10), (4, 2)]
    own.answers = [(10, 10), (20, 20), (4, 4)]
    gain = paired({"a": base}, {"a": own}, 200, 0)
    assert gain["gain"] == pytest.approx(0.5)
    assert gain["interval_95"] == pytest.approx([0.5, 0.5])
    assert gain["gain_percent"] == pytest.approx(100 / 3, abs=0.01)
