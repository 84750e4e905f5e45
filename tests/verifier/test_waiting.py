"""Step now, wait, or hold one out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from verifier_service.costs import StepCosts
from verifier_service.waiting import Awaited, Ready, decide


def costs(ms: float = 20.0) -> StepCosts:
    found = StepCosts((4, 8, 16, 32), 64)
    for rows in (4, 8, 16, 32):
        for drafted in (False, True):
            found.profile(rows, ms, drafted=drafted)
    return found


def coming(
    number: int, at: float, *, gain: float = 2.0, lane: int = 1, patient: bool = False
) -> Awaited:
    return Awaited(number, lane, at, at + 0.01, gain, 4, patient)


NOBODY = Ready(0.0, 0, False)


def test_a_proposal_that_is_soon_here_is_waited_for() -> None:
    assert decide(0.0, NOBODY, [coming(1, 0.005)], costs()).until == 0.005


def test_one_that_takes_longer_than_it_brings_is_not() -> None:
    decision = decide(0.0, NOBODY, [coming(1, 0.2)], costs())
    assert decision.until is None
    assert not decision.hold, "somebody has to be in the step"


def test_past_its_time_it_is_waited_for_until_overdue_and_then_no_more() -> None:
    late = coming(1, 0.005)
    assert decide(0.006, NOBODY, [late], costs()).until == late.overdue
    assert decide(late.overdue, NOBODY, [late], costs()).until is None


def test_a_slow_lane_does_not_keep_others_waiting() -> None:
    ready = Ready(3.0, 6, True)
    decision = decide(0.0, ready, [coming(1, 0.2, lane=2, gain=0.8)], costs())
    assert decision.until is None
    assert not decision.hold


def test_a_good_proposal_that_comes_during_the_step_keeps_its_session_out_of_it_once() -> None:
    ready = Ready(3.0, 6, True)
    late = [coming(1, 0.018, lane=2, gain=2.0)]
    assert decide(0.0, ready, late, costs()).hold == {1}
    assert decide(0.0, ready, late, costs(), held={1}).hold == frozenset()


def test_a_patient_session_sits_out_and_others_step() -> None:
    ready = Ready(3.0, 6, True)
    decision = decide(0.0, ready, [coming(1, 0.5, lane=2, patient=True)], costs())
    assert decision.until is None
    assert decision.hold == {1}


def test_the_quick_lane_is_waited_for_and_the_slow_one_is_not() -> None:
    awaited = [coming(1, 0.004), coming(2, 0.3, lane=2)]
    assert decide(0.0, NOBODY, awaited, costs()).until == 0.004


@given(
    st.lists(
        st.tuples(st.floats(0.001, 0.5), st.floats(0, 8), st.integers(1, 3), st.booleans()),
        max_size=6,
    ),
    st.integers(0, 4),
    st.floats(0, 0.6),
)
def test_no_wait_outlasts_what_is_overdue_and_no_step_is_empty(
    items: list[tuple[float, float, int, bool]], ready: int, now: float
) -> None:
    awaited = [
        coming(number, at, gain=gain, lane=lane, patient=patient)
        for number, (at, gain, lane, patient) in enumerate(items)
    ]
    decision = decide(now, Ready(float(ready), ready, False), awaited, costs())
    if decision.until is not None:
        assert now < decision.until <= max(a.overdue for a in awaited)
    else:
        assert ready + len(awaited) == 0 or ready + len(awaited) > len(decision.hold)


def test_rows_expected_of_several_sessions_are_not_rounded_up_one_by_one() -> None:
    """Five anchors and five times 2.2 nodes fill a step of 16 rows, and not one of 32."""
    found = StepCosts((4, 8, 16, 32), 64)
    for rows, ms in ((4, 19.0), (8, 20.0), (16, 22.0), (32, 60.0)):
        found.profile(rows, ms, drafted=False)
    awaited = [replace(coming(number, 0.004, gain=1.0), nodes=2.2) for number in range(1, 6)]
    assert decide(0.0, NOBODY, awaited, found.beside(5, 0)).until is not None
