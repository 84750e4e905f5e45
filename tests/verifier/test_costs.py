"""Curves of cost: what is read never falls, follows what is measured, and is not led by noise."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_service.costs import DraftCosts, StepCosts, isotonic

BUCKETS = (4, 8, 12, 16, 24, 32, 48, 64)
observations = st.lists(
    st.tuples(st.integers(1, 80), st.floats(0.1, 500), st.booleans()), min_size=1, max_size=60
)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 9)), min_size=1, max_size=12))
def test_the_closest_rising_sequence(pairs: list[tuple[float, float]]) -> None:
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    fit = isotonic(values, weights)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(fit))
    total = sum(weights)
    mean = sum(v * w for v, w in pairs) / total
    assert sum(f * w for f, w in zip(fit, weights, strict=True)) / total == pytest.approx(mean)
    if values == sorted(values):
        assert fit == pytest.approx(values)


@settings(max_examples=60)
@given(observations, st.sampled_from([BUCKETS, (1,), (32,)]))
def test_more_rows_never_cost_less_and_trees_never_less_than_none(
    seen: list[tuple[int, float, bool]], buckets: tuple[int, ...]
) -> None:
    costs = StepCosts(buckets, 96)
    for rows, ms, drafted in seen:
        costs.observe(rows, ms, drafted=drafted)
    rows = np.arange(1, 130)
    plain, trees = (costs.curve(rows, drafted=drafted) for drafted in (False, True))
    for curve in (plain, trees):
        assert np.isfinite(curve).all()
        assert (curve > 0).all()
        assert (np.diff(curve) >= -1e-9 * curve[1:]).all()
    assert (trees >= plain * (1 - 1e-9)).all()


def test_rows_of_a_bucket_cost_the_same_and_the_next_bucket_its_own() -> None:
    costs = StepCosts(BUCKETS, 64)
    for rows in BUCKETS:
        costs.profile(rows, 10.0 + rows, drafted=False)
    assert costs.ms(5, drafted=False) == costs.ms(8, drafted=False) == 18.0
    assert costs.ms(9, drafted=False) == 22.0
    assert (costs.padded(9), costs.padded(4)) == (12, 4)


def test_figures_follow_a_machine_that_became_slower() -> None:
    costs = StepCosts(BUCKETS, 64)
    for rows in BUCKETS:
        costs.profile(rows, 10.0 + rows, drafted=False)
    for _ in range(40):
        costs.observe(4, 28.0, drafted=False)
    assert costs.ms(4, drafted=False) == pytest.approx(28.0, rel=0.05)
    assert costs.ms(64, drafted=False) > 1.15 * 74.0, "the others are believed to be slower too"


def test_one_stall_says_little() -> None:
    costs = StepCosts(BUCKETS, 64)
    for _ in range(20):
        costs.observe(4, 10.0, drafted=False)
    costs.observe(4, 5000.0, drafted=False)
    assert costs.ms(4, drafted=False) < 12.0


def test_a_profile_that_was_wrong_by_far_is_forgotten_after_a_few_steps() -> None:
    costs = StepCosts(BUCKETS, 64)
    for rows in BUCKETS:
        costs.profile(rows, 40 * (10.0 + rows), drafted=False)
    for _ in range(4):
        costs.observe(4, 14.0, drafted=False)
    assert costs.ms(4, drafted=False) == pytest.approx(14.0, rel=0.1)
    assert costs.ms(64, drafted=False) == pytest.approx(74.0, rel=0.1), "it had the shape right"


def test_a_stall_makes_what_is_known_no_surer() -> None:
    for stalled in (False, True):
        costs = StepCosts(BUCKETS, 64)
        costs.profile(4, 10.0, drafted=False)
        if stalled:
            costs.profile(4, 1000.0, drafted=False)
        costs.profile(4, 15.0, drafted=False)
        assert costs.ms(4, drafted=False) == pytest.approx(12.2, rel=0.03)


def test_sizes_that_were_not_seen_for_long_are_told_apart_by_a_few_steps_of_them() -> None:
    """While all steps are alike the scale takes up what is wrong about their size alone."""
    costs = StepCosts(BUCKETS, 64)
    for rows in BUCKETS:
        for _ in range(10):
            costs.profile(rows, 10.0 + rows, drafted=False)
            costs.profile(rows, 10.0 + rows, drafted=True)
    for look in range(4):
        for _ in range(30):
            costs.observe(16, 1.5 * 26.0, drafted=True)
        assert look or costs.ms(4, drafted=False) > 1.3 * 14.0, "believed to be slower too"
        costs.observe(4, 14.0, drafted=False)
    assert costs.ms(4, drafted=False) == pytest.approx(14.0, rel=0.1)
    assert costs.ms(16, drafted=True) == pytest.approx(39.0, rel=0.05)


def test_what_sessions_and_contexts_cost_is_not_laid_to_rows() -> None:
    costs = StepCosts(BUCKETS, 64)
    costs.per_session, costs.per_position = 2.0, 0.01
    for rows in BUCKETS:
        ms = 10.0 + rows + 2.0
        costs.profile(rows, ms, drafted=False, sessions=1, context=0)
    many = 10.0 + 16 + 16 * 2.0 + 16 * 300 * 0.01
    for _ in range(20):
        costs.observe(16, many, drafted=False, sessions=16, context=16 * 300)
    assert costs.beside(16, 16 * 300).ms(16, drafted=False) == pytest.approx(many, rel=0.02)
    # One session alone in a step of as many rows pays for the rows.
    assert costs.beside(1, 100).ms(16, drafted=False) == pytest.approx(29.0, rel=0.02)


def test_beyond_what_was_measured_rows_cost_on_even_if_the_last_two_looked_equal() -> None:
    costs = StepCosts(BUCKETS, 256)
    for rows, ms in ((4, 14.0), (16, 26.0), (32, 42.0), (48, 61.0), (64, 60.0)):
        costs.profile(rows, ms, drafted=False)
    assert costs.ms(256, drafted=False) > 150.0


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_time_is_not_taken(value: float) -> None:
    costs, drafts = StepCosts(BUCKETS, 64), DraftCosts()
    costs.observe(4, value, drafted=False)
    drafts.observe(4, value)
    assert not costs.known
    assert not drafts.known


def test_a_draft_costs_nothing_until_one_is_measured_then_more_for_more_rows() -> None:
    drafts = DraftCosts()
    assert drafts.ms(100) == 0.0
    for _ in range(30):
        drafts.observe(16, 10 * random.Random(1).uniform(0.8, 1.2))
    assert 8 < drafts.ms(16) < 12
    assert drafts.ms(4) < drafts.ms(16) < drafts.ms(64) < 4.01 * drafts.ms(16)


def test_an_answer_that_took_in_a_prompt_counts_only_until_there_is_another() -> None:
    drafts = DraftCosts()
    drafts.observe(16, 200.0, clean=False)
    assert drafts.ms(16) == pytest.approx(200.0)
    drafts.observe(8, 5.0)
    assert drafts.ms(16) < 10.0
