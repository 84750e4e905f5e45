"""What is chosen, given what tokens and rows are worth: the pure part of the length policy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_service.budget import (
    Floats,
    Hope,
    Ints,
    PlainLook,
    Plan,
    Prober,
    choose,
    plan,
)
from verifier_service.survival import survival

chances = st.floats(0.02, 0.98)
chains = st.lists(chances, min_size=1, max_size=15)


class Table:
    """ms by rows: a list, the last of which goes on for ever."""

    def __init__(self, ms: list[float]) -> None:
        self.ms = np.asarray(ms)

    def curve(self, rows: Ints | Floats, *, drafted: bool) -> Floats:
        index = np.minimum(np.asarray(rows, dtype=np.int64), len(self.ms) - 1)
        return self.ms[index]


def tables(most: int = 80) -> st.SearchStrategy[Table]:
    """Costs that never fall, with cliffs."""
    steps = st.lists(
        st.one_of(st.just(0.0), st.floats(0, 1), st.floats(5, 50)), min_size=most, max_size=most
    )
    return steps.map(lambda found: Table(list(10 + np.cumsum(found))))


def chain(rates: list[float]) -> Floats:
    return np.cumprod(rates)


def hope(number: int, survivals: Floats, *, drafting: bool = False, most_nodes: int = 15) -> Hope:
    return Hope(
        number,
        1,
        survivals,
        np.arange(1, len(survivals) + 1),
        np.ones(len(survivals)),
        most_nodes,
        15,
        drafting,
    )


def planned(hopes: list[Hope], table: Table, wait_ms: float = 0.0, row_limit: int = 1000) -> Plan:
    n = len(hopes)
    return plan(hopes, table, lambda _, rows: wait_ms, anchors=n, rows=n, row_limit=row_limit)


@settings(max_examples=60)
@given(st.lists(chains, min_size=1, max_size=5), tables(), st.floats(0, 30))
def test_no_other_number_of_nodes_is_better(
    rates: list[list[float]], table: Table, wait: float
) -> None:
    offers = [chain(r) for r in rates]
    n = len(offers)
    choice = choose(offers, table, anchors=n, rows=n, wait_ms=wait)
    ranked = sorted(np.concatenate(offers), reverse=True)
    best = max(
        (n + sum(ranked[:m])) / (table.curve(np.asarray([n + m]), drafted=m > 0)[0] + wait)
        for m in range(len(ranked) + 1)
    )
    assert choice.tokens / choice.ms == pytest.approx(best)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(-1, 14), chances), min_size=1, max_size=15),
    tables(),
    st.integers(0, 15),
)
def test_what_is_kept_of_a_tree_is_a_tree_within_the_bound(
    nodes: list[tuple[int, float]], table: Table, bound: int
) -> None:
    parents = [min(parent, index - 1) for index, (parent, _) in enumerate(nodes)]
    reached = survival(parents, np.asarray([c for _, c in nodes]))
    (keep,) = choose([reached], table, anchors=1, rows=1, most_nodes=bound).keep
    kept = set(keep.tolist())
    assert len(kept) <= bound
    assert all(parents[node] in kept | {-1} for node in kept)


@settings(max_examples=60)
@given(st.floats(0.02, 0.9), st.floats(0.0, 0.08), st.integers(1, 8), tables())
def test_more_acceptance_never_drafts_less(
    rate: float, more: float, sessions: int, table: Table
) -> None:
    def nodes(each: float) -> int:
        offers = [chain([each] * 15)] * sessions
        return sum(len(k) for k in choose(offers, table, anchors=sessions, rows=sessions).keep)

    assert nodes(rate + more) >= nodes(rate)


@settings(max_examples=40)
@given(st.lists(chains, min_size=1, max_size=6), tables(), st.floats(0, 30), st.integers(1, 40))
def test_a_plan_is_never_slower_than_plain_and_keeps_all_bounds(
    rates: list[list[float]], table: Table, wait: float, row_limit: int
) -> None:
    hopes = [hope(i, chain(r), most_nodes=1 + i) for i, r in enumerate(rates)]
    found = planned(hopes, table, wait, row_limit)
    assert found.tokens / found.ms >= len(hopes) / found.plain_ms * (1 - 1e-9)
    for number, wish in found.wishes.items():
        assert 1 <= wish.nodes <= 1 + number
        assert 1 <= wish.depth <= 15


def test_sure_drafts_that_cost_nothing_are_asked_for_to_the_limit() -> None:
    found = planned([hope(0, chain([0.98] * 15))], Table([20.0]))
    assert found.wishes[0].nodes == 15
    assert found.wishes[0].depth == 15


def test_hopeless_drafts_are_not_asked_for() -> None:
    table = Table([10.0 + row for row in range(40)])
    assert not planned([hope(0, chain([0.05] * 15))], table, 3.0).wishes


def test_a_cliff_is_approached_and_not_crossed() -> None:
    table = Table([20.0] * 9 + [500.0])
    choice = choose([chain([0.9] * 15)], table, anchors=1, rows=1)
    assert len(choice.keep[0]) == 7, "eight rows with the anchor, the last before the cliff"


def test_a_quantum_is_crossed_when_what_lies_beyond_pays_for_it() -> None:
    """Rows 5 to 16 cost the same; the first of them alone would not pay."""
    table = Table([20.0] * 5 + [30.0] * 20)
    choice = choose([chain([0.95] * 15)], table, anchors=1, rows=1)
    assert len(choice.keep[0]) == 15


def test_a_short_look_is_paid_for_by_plain_rounds_and_ever_rarer() -> None:
    prober, at = Prober(), []
    for step in range(40_000):
        prober.earn(20.0)
        if prober.due(50.0):
            at.append(step)
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert gaps == sorted(gaps)
    assert 50.0 * len(at) <= 0.01 * 20.0 * 40_000
    prober.paid()
    for _ in range(math.ceil(50.0 / 0.01 / 20.0) + 1):
        prober.earn(20.0)
    assert prober.due(50.0)


@pytest.mark.parametrize("drafting", [False, True])
def test_noise_about_break_even_does_not_turn_the_decision(drafting: bool) -> None:
    """Between the cost at which drafting begins and that at which it ends lies a gap."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        wait = 10.0 * (1.5 - 1) * 0.98 * rng.uniform(0.98, 1.02)
        found = planned([hope(0, np.asarray([0.5]), drafting=drafting)], Table([10.0]), wait)
        assert bool(found.wishes) == drafting


def test_plain_steps_are_looked_at_ever_more_rarely_while_drafts_pay() -> None:
    look, at = PlainLook(), []
    for step in range(400):
        if look.now:
            at.append(step)
        look.stepped(drafted=not look.now, measured=True)
    assert [b - a for a, b in itertools.pairwise([-1, *at])] == [25, 49, 97, 97, 97]


def test_a_look_that_no_step_can_answer_ends() -> None:
    look = PlainLook()
    for _ in range(24):
        look.stepped(drafted=True, measured=True)
    assert look.now
    for _ in range(3):
        look.stepped(drafted=True, measured=True)
    assert not look.now
