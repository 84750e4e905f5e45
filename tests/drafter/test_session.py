"""The session machine: what joins on moves it, what is old is dropped and counted, the rest is a
fault.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.messages import (
    Budget,
    End,
    FaultKind,
    Features,
    Malformed,
    Open,
    Outcome,
)
from drafter_service.session import MAX_TOMBSTONES, Session, SessionTable

Message = Open | Features | Outcome | End | Malformed


def table() -> SessionTable:
    return SessionTable(vocab_size=100, max_tokens=1000)


def opening(tokens: int = 5, *, session_id: int = 1, epoch: int = 1, want: bool = True) -> Open:
    ids = [(7 * i) % 100 for i in range(tokens)]
    return Open(session_id, epoch, tokens - 1, ids, prompt_tokens=2, budget=Budget(want))


def rows(first: int, count: int, *, session_id: int = 1, epoch: int = 1) -> Features:
    return Features(session_id, epoch, first, torch.zeros(count, 1))


def outcome(
    previous: int, count: int, *, session_id: int = 1, epoch: int = 1, features: int | None = -1
) -> Outcome:
    given = None if features is None else torch.zeros(count if features < 0 else features, 1)
    tokens = [(7 * (previous + 1 + i)) % 100 for i in range(count)]
    return Outcome(session_id, epoch, previous + count, previous, tokens, given)


def apply(sessions: SessionTable, message: Message) -> None:
    if isinstance(message, Open):
        sessions.open(message)
    elif isinstance(message, Outcome):
        sessions.outcome(message)
    elif isinstance(message, End):
        sessions.end(message)
    else:
        sessions.features(message)


def one(sessions: SessionTable) -> Session:
    (session,) = sessions.sessions.values()
    return session


def test_a_session_is_ready_once_all_features_before_the_anchor_are_here() -> None:
    sessions = table()
    apply(sessions, opening(5))
    assert not one(sessions).ready
    apply(sessions, rows(0, 3))
    assert not one(sessions).ready
    apply(sessions, rows(3, 1))
    assert one(sessions).ready
    assert sessions.settle() == [one(sessions)]
    assert not sessions.faults


def test_an_outcome_moves_the_base_and_brings_the_features_of_what_was_the_anchor() -> None:
    sessions = table()
    for message in (opening(5), rows(0, 4), outcome(4, 3)):
        apply(sessions, message)
    session = one(sessions)
    assert (session.base, session.rows, session.ready) == (7, 7, True)
    assert session.tokens == [(7 * i) % 100 for i in range(8)]


def test_a_session_kept_plain_is_not_ready_and_stays_in_step() -> None:
    sessions = table()
    apply(sessions, opening(3, want=False))
    apply(sessions, rows(0, 2))
    assert not one(sessions).ready
    apply(sessions, replace(outcome(2, 2), budget=Budget(want_proposal=False)))
    assert not one(sessions).ready
    apply(sessions, outcome(4, 1))
    assert one(sessions).ready


def test_features_may_come_before_their_outcome_within_a_step_but_never_reach_the_anchor() -> None:
    sessions = table()
    for message in (opening(3), rows(0, 2), rows(2, 2), outcome(2, 2, features=None)):
        apply(sessions, message)
    assert sessions.settle() == [one(sessions)]
    assert one(sessions).ready
    apply(sessions, rows(4, 1))
    assert sessions.settle() == []
    assert [fault.kind for fault in sessions.take_faults()] == [FaultKind.OUT_OF_SYNC]


WRONG: dict[str, tuple[list[Message], FaultKind]] = {
    "features with a gap": ([opening(9), rows(0, 2), rows(3, 1)], FaultKind.OUT_OF_SYNC),
    "features that overlap by half": ([opening(9), rows(0, 4), rows(2, 4)], FaultKind.OUT_OF_SYNC),
    "features before position 0": ([opening(9), rows(-1, 1)], FaultKind.OUT_OF_SYNC),
    "an outcome from another base": (
        [opening(5), rows(0, 4), outcome(6, 1)],
        FaultKind.OUT_OF_SYNC,
    ),
    "an outcome that overlaps": ([opening(5), rows(0, 4), outcome(3, 4)], FaultKind.OUT_OF_SYNC),
    "more tokens than positions": (
        [opening(5), rows(0, 4), replace(outcome(4, 2), base=5)],
        FaultKind.OUT_OF_SYNC,
    ),
    "an outcome before the prompt's features": ([opening(5), outcome(4, 1)], FaultKind.OUT_OF_SYNC),
    "fewer features than tokens": (
        [opening(5), rows(0, 4), outcome(4, 3, features=2)],
        FaultKind.BAD_TENSOR,
    ),
    "features given twice": (
        [opening(5), rows(0, 5), outcome(4, 1)],
        FaultKind.OUT_OF_SYNC,
    ),
    "a token past the vocabulary": (
        [opening(5), rows(0, 4), replace(outcome(4, 1), token_ids=[100])],
        FaultKind.OUT_OF_SYNC,
    ),
    "a tensor that cannot be read": ([opening(5), Malformed(1, 1, "shape")], FaultKind.BAD_TENSOR),
    "an epoch from the future": ([opening(5), rows(0, 4, epoch=2)], FaultKind.OUT_OF_SYNC),
    "no such session": ([rows(0, 1)], FaultKind.UNKNOWN_SESSION),
    "tokens that do not fill the positions": (
        [replace(opening(5), base=7)],
        FaultKind.OUT_OF_SYNC,
    ),
    "no tokens": ([replace(opening(5), base=-1, token_ids=[])], FaultKind.OUT_OF_SYNC),
    "an opening token past the vocabulary": (
        [replace(opening(2), token_ids=[1, 200])],
        FaultKind.OUT_OF_SYNC,
    ),
    "a longer prompt than tokens": ([replace(opening(5), prompt_tokens=6)], FaultKind.OUT_OF_SYNC),
    "more tokens than are taken": ([opening(1001)], FaultKind.NO_ROOM),
}


@pytest.mark.parametrize(("messages", "kind"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_join_on_ends_the_session_with_one_fault(
    messages: list[Message], kind: FaultKind
) -> None:
    sessions = table()
    for message in messages:
        apply(sessions, message)
    sessions.settle()
    assert [fault.kind for fault in sessions.faults] == [kind]
    assert not sessions.sessions
    last = messages[-1]
    assert sessions.faults[0].session_id == 1
    assert sessions.faults[0].epoch == last.epoch
    # The verifier has not heard of it yet: what it still sends is dropped without another fault.
    apply(sessions, rows(0, 1, epoch=last.epoch))
    assert len(sessions.faults) == 1
    # A new epoch starts afresh.
    apply(sessions, opening(4, epoch=last.epoch + 1))
    apply(sessions, rows(0, 3, epoch=last.epoch + 1))
    assert one(sessions).ready


STALE: dict[str, list[Message]] = {
    "an outcome twice": [outcome(4, 2), outcome(4, 2)],
    "features twice": [rows(0, 4)],
    "a part of the features twice": [rows(1, 2)],
    "an opening twice": [opening(5)],
    "an opening of an older epoch": [opening(9, epoch=0)],
    "features of an older epoch": [rows(4, 1, epoch=0)],
    "an outcome of an older epoch": [outcome(4, 1, epoch=0)],
    "an end of an older epoch": [End(1, 0)],
}


@pytest.mark.parametrize("messages", STALE.values(), ids=STALE.keys())
def test_what_is_old_is_dropped_and_counted(messages: list[Message]) -> None:
    sessions = table()
    apply(sessions, opening(5))
    apply(sessions, rows(0, 4))
    for message in messages:
        apply(sessions, message)
    assert sessions.stale == 1
    assert not sessions.faults
    assert not sessions.released
    assert one(sessions).ready


def test_an_opening_of_a_later_epoch_takes_the_place_and_releases_the_old() -> None:
    sessions = table()
    apply(sessions, opening(5))
    old = one(sessions)
    apply(sessions, opening(8, epoch=2))
    assert sessions.take_released() == [old]
    assert (one(sessions).base, one(sessions).rows) == (7, 0)


def test_an_end_frees_the_session_and_its_number() -> None:
    sessions = table()
    apply(sessions, opening(5))
    ended = one(sessions)
    apply(sessions, End(1, 1))
    assert sessions.take_released() == [ended]
    assert not sessions.sessions
    apply(sessions, opening(5))
    assert one(sessions) is not ended


def test_memory_of_lost_sessions_is_bounded() -> None:
    sessions = table()
    for number in range(MAX_TOMBSTONES + 50):
        apply(sessions, rows(0, 1, session_id=number))
        sessions.take_faults()
    assert len(sessions._tombstones) == MAX_TOMBSTONES


def truthful(commits: list[int], split: int) -> list[Message]:
    """What a correct verifier sends for one session: open, features in two parts, outcomes."""
    messages: list[Message] = [opening(6), rows(0, split), rows(split, 5 - split)]
    base = 5
    for count in commits:
        messages.append(outcome(base, count))
        base += count
    return messages


@given(
    commits=st.lists(st.integers(1, 4), max_size=6),
    split=st.integers(0, 5),
    disorder=st.lists(
        st.tuples(
            st.sampled_from(["copy", "drop", "swap"]), st.integers(0, 20), st.integers(0, 20)
        ),
        max_size=4,
    ),
)
@settings(max_examples=400, deadline=None)
def test_no_disorder_makes_a_session_draft_from_a_wrong_state(
    commits: list[int], split: int, disorder: list[tuple[str, int, int]]
) -> None:
    """Whatever is copied, lost or swapped on the way, a session that is ready has exactly the
    tokens and rows that the verifier committed up to its base; otherwise it is told as a fault or
    still waits.
    """
    messages = truthful(commits, split)
    truth = [(7 * i) % 100 for i in range(6 + sum(commits))]
    for kind, a, b in disorder:
        a, b = a % max(1, len(messages)), b % max(1, len(messages))
        if kind == "copy" and messages:
            messages.insert(b, messages[a])
        elif kind == "drop" and messages:
            del messages[a]
        elif messages:
            messages[a], messages[b] = messages[b], messages[a]
    sessions = table()
    for message in messages:
        apply(sessions, message)
        sessions.settle()
        for session in sessions.sessions.values():
            assert session.tokens == truth[: session.base + 1]
            assert session.rows <= session.base
            assert session.ready == (session.rows == session.base)
    alive, lost = len(sessions.sessions), len(sessions.faults)
    assert alive + lost >= 1 or not any(isinstance(m, Open) for m in messages)
    if not disorder:
        assert (alive, lost, sessions.stale) == (1, 0, 0)
