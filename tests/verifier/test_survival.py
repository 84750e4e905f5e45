"""Claims against what came of them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.survival import (
    SessionTrust,
    Trust,
    claimed,
    nodes_of,
    reached_children,
    survival,
)


def chances(trust: Trust, session: SessionTrust, claim: float, temperature: float = 0.0) -> float:
    nodes = nodes_of([math.log(claim)], [1], [0], temperature)
    return float(trust.chances(nodes, session)[0])


def play(
    trust: Trust, session: SessionTrust, claim: float, truth: float, rounds: int, seed: int = 0
) -> None:
    rng = random.Random(seed)
    nodes = nodes_of([math.log(claim)], [1], [0], 0.0)
    for _ in range(rounds):
        trust.learn(nodes, session, [rng.random() < truth])


@pytest.mark.parametrize("truth", [0.02, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("claim", [0.1, 0.5, 0.98])
def test_claims_are_corrected_to_what_they_are_worth(claim: float, truth: float) -> None:
    trust, session = Trust(), SessionTrust()
    play(trust, session, claim, truth, 400)
    assert chances(trust, session, claim) == pytest.approx(truth, abs=0.15)


def test_an_honest_drafter_is_believed_from_the_start_and_later() -> None:
    trust, session = Trust(), SessionTrust()
    assert chances(trust, session, 0.6) == pytest.approx(0.6)
    play(trust, session, 0.6, 0.6, 300)
    assert chances(trust, session, 0.6) == pytest.approx(0.6, abs=0.12)


def test_one_rejection_is_no_verdict() -> None:
    trust, session = Trust(), SessionTrust()
    play(trust, session, 0.5, 0.0, 1)
    assert chances(trust, session, 0.5) > 0.35


def test_new_sessions_start_from_what_the_drafter_gave_others() -> None:
    trust = Trust()
    play(trust, SessionTrust(), 0.9, 0.0, 60)
    assert chances(trust, SessionTrust(), 0.9) < 0.15


def test_other_temperatures_are_judged_apart() -> None:
    trust, session = Trust(), SessionTrust()
    play(trust, session, 0.9, 0.0, 60)
    assert chances(trust, SessionTrust(), 0.9, temperature=1.0) == pytest.approx(0.9, abs=0.02)


def test_what_faded_is_soon_learnt_anew() -> None:
    trust, session = Trust(), SessionTrust()
    play(trust, session, 0.9, 0.0, 200)
    trust.fade(0.2)
    session.ratios.fade(0.2)
    play(trust, session, 0.9, 1.0, 15)
    assert chances(trust, session, 0.9) > 0.5


@given(st.lists(st.floats(), max_size=8))
def test_any_claim_becomes_a_chance(log_probs: list[float]) -> None:
    found = claimed(log_probs, len(log_probs))
    assert ((found > 0) & (found < 1)).all()


def test_without_claims_all_nodes_are_alike() -> None:
    assert len(set(claimed([], 5))) == 1


@given(st.lists(st.tuples(st.integers(-1, 9), st.floats(0.01, 0.98)), max_size=10))
def test_no_node_survives_more_often_than_its_parent(nodes: list[tuple[int, float]]) -> None:
    parents = [min(parent, index - 1) for index, (parent, _) in enumerate(nodes)]
    reached = survival(parents, np.asarray([c for _, c in nodes]))
    assert all(reached[n] <= reached[p] for n, p in enumerate(parents) if p >= 0)


def test_only_children_of_reached_nodes_are_judged() -> None:
    #        0     1
    #       2 3   4
    children, taken = reached_children([-1, -1, 0, 0, 1], [0, 3])
    assert children == [0, 1, 2, 3]
    assert taken == [True, False, False, True]
