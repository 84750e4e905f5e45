"""What is remembered of proposals: summaries keep their means, and bad luck is no verdict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.minds import DrafterMind, Memory, Mind, remember, single, summary

proposals = st.lists(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 6)), min_size=1, max_size=15),
    min_size=1,
    max_size=12,
)


def memory(nodes: list[tuple[float, int]]) -> Memory:
    return single(np.asarray([s for s, _ in nodes]), np.asarray([d for _, d in nodes]))


def drafter(gains: list[float]) -> DrafterMind:
    """One whose proposals were of one node each, with these chances."""
    mind = DrafterMind()
    for gain in gains:
        mind.add(0, single(np.asarray([gain]), np.asarray([1])))
    return mind


@given(proposals)
def test_a_summary_has_the_means_of_what_it_is_made_of_at_every_depth(
    nodes: list[list[tuple[float, int]]],
) -> None:
    memories = [memory(one) for one in nodes]
    found = summary(memories)
    assert found.nodes == pytest.approx(np.mean([len(one) for one in nodes]))
    for depth in range(1, 7):
        true = sum(s for one in nodes for s, d in one if d == depth) / len(nodes)
        near = found.depths == depth
        assert float(found.survivals[near] @ found.weights[near]) == pytest.approx(true)
        assert near.sum() <= 4


def test_a_few_bad_proposals_do_not_condemn_and_many_do() -> None:
    few, many = Mind(drafter=drafter([0.01] * 3)), Mind(drafter=drafter([0.01] * 300))
    assert few.outlook(0, 7).gain > 0.5
    assert many.outlook(0, 7).gain < 0.05


def test_a_session_is_judged_by_its_own_proposals_and_by_what_others_got() -> None:
    rich, poor = Mind(drafter=drafter([0.5] * 100)), Mind(drafter=drafter([0.5] * 100))
    for _ in range(8):
        rich.late.append(single(np.asarray([0.9]), np.asarray([1])))
        poor.late.append(single(np.asarray([0.1]), np.asarray([1])))
    assert poor.outlook(0, 1).gain < 0.4 < 0.6 < rich.outlook(0, 1).gain


def test_another_temperature_is_better_than_nothing_and_the_newest_outlive_a_doubt() -> None:
    mind = drafter([0.1] * 10 + [0.9] * 10)
    usual = mind.usual(2)
    assert usual is not None
    assert usual.gain == pytest.approx(0.5)
    mind.forget(0, 0.5)
    usual = mind.usual(0)
    assert usual is not None
    assert usual.gain == pytest.approx(0.9)
    mind.forget(0, 0.0)
    assert mind.usual(0) is None


def test_a_path_cut_where_it_was_asked_to_end_is_imagined_to_go_on() -> None:
    chain = np.asarray([0.8, 0.64])
    assert remember(chain, [1, 2], 2).survivals[2] == pytest.approx(0.512)
    assert len(remember(chain, [1, 2], 3).survivals) == 2
