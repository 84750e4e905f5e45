"""What is measured before the first request, in a world whose steps cost what they are said to."""

from __future__ import annotations

import itertools

import pytest
from verifier.world import BUCKETS, World

from verifier_service.warmup import _far_apart, profile


def world(*, session_ms: float = 0.0, position_ms: float = 0.0) -> World:
    found = World(lambda rows: 10 + 2.0 * rows, profiled=False)
    found.session_ms, found.position_ms = session_ms, position_ms
    return found


def measure(found: World, seconds: float) -> None:
    profile(found.engine, seconds, lambda: found.now)


def test_rows_sessions_and_contexts_are_told_apart() -> None:
    found = world(session_ms=1.5, position_ms=0.02)
    measure(found, 60.0)
    costs = found.engine.policy.costs
    assert costs.per_session == pytest.approx(1.5)
    assert costs.per_position == pytest.approx(0.02)
    for rows, drafted in itertools.product((4, 16, 24, 64, 128), (False, True)):
        expected = 10 + 2.0 * rows + 3 * 1.5 + 900 * 0.02
        assert costs.beside(3, 900).ms(rows, drafted=drafted) == pytest.approx(expected)
    assert found.engine.pool.free_pages == found.engine.pool.num_pages - 1


def test_little_time_gives_the_shape_and_a_slow_beginning_does_not_spoil_it() -> None:
    found = world()
    usual = found.step_ms
    slow = iter([50.0, 30.0, 8.0])
    found.step_ms = lambda rows: next(slow, 1.0) * usual(rows)
    measure(found, 0.0)
    costs = found.engine.policy.costs
    assert costs.ms(4, drafted=False) == pytest.approx(usual(4))
    assert costs.ms(128, drafted=True) == pytest.approx(usual(128))
    assert usual(24) < costs.ms(32, drafted=True) < usual(48)


def test_a_hiccup_in_the_steps_with_trees_does_not_rule_drafts_out() -> None:
    found = world()
    usual, count = found.step_ms, itertools.count()
    # Of the steps made in no time at all, the last is the largest one with a tree.
    found.step_ms = lambda rows: usual(rows) * (30 if next(count) >= 8 else 1)
    measure(found, 0.0)
    costs = found.engine.policy.costs
    assert costs.ms(128, drafted=True) <= 2.01 * costs.ms(128, drafted=False)


def test_the_time_is_kept() -> None:
    found = world()
    measure(found, 2.0)
    assert found.now < 2.0 + 4 * 0.3


def test_any_first_few_lie_far_apart() -> None:
    points = list(BUCKETS)
    order = _far_apart(points)
    assert sorted(order) == points
    assert order[:3] == [4, 256, 32]
    assert _far_apart([]) == []
    assert _far_apart([7]) == [7]
