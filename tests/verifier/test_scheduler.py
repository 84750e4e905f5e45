"""Who gets rows and pages in a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draftwire.errors import ResourceExhausted
from draftwire_kernels.sampling import Sampling
from draftwire_kernels.tree import TokenTree
from verifier_service.cache import PagePool
from verifier_service.scheduler import Budgets, Scheduler
from verifier_service.session import Proposal, Request, Session, Speculation

VOCAB = 32
PAGE = 4


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "x" * len(token_ids)


def make(number: int, prompt: int = 4) -> Session:
    request = Request(
        str(number),
        tuple((number + i) % VOCAB for i in range(prompt)),
        Sampling(),
        1000,
        Speculation(True, 16, 16),
        arrival=float(number),
    )
    return Session(number, request, VOCAB, Letters())


def draft(session: Session, nodes: int) -> None:
    session.proposal = Proposal(session.base, TokenTree.chain([1] * nodes), (), nodes + 1, 1)


def play(scheduler: Scheduler, nodes: int = 0) -> list[int]:
    """One step in which each who draws makes one token; the sessions that had rows."""
    work = scheduler.plan()
    for item in work:
        session = item.session
        session.computed = item.feed.base + (1 if item.proposal else len(item.feed.tokens))
        session.proposal = None
        if item.draws:
            session.commit((1,), 1000)
            if nodes:
                draft(session, nodes)
    return [item.session.session_id for item in work]


def scheduler(pages: int, **budgets: int) -> Scheduler:
    defaults = {"max_sessions": 8, "max_step_rows": 64, "prefill_rows": 16, "max_waiting": 8}
    return Scheduler(PagePool(pages + 1, PAGE), Budgets(**{**defaults, **budgets}))


def test_drafted_tokens_take_free_pages_only_and_preempt_nobody() -> None:
    s = scheduler(pages=4)
    first, second = make(1), make(2)
    s.add(first)
    s.add(second)
    play(s)
    for session in (first, second):
        draft(session, 8)
    work = s.plan()
    assert s.preempted == []
    assert [item.session for item in work] == [first, second]
    assert sum(len(item.proposal.tree) for item in work if item.proposal) <= 8


def test_a_session_alone_with_few_pages_left_goes_on_plainly_instead_of_starting_again() -> None:
    s = scheduler(pages=2)
    session = make(1, prompt=6)
    s.add(session)
    play(s)
    draft(session, 8)
    (item,) = s.plan()
    assert s.preempted == []
    assert item.proposal is not None
    assert len(item.proposal.tree) == 1


def test_full_trees_leave_rows_to_prompts() -> None:
    s = scheduler(pages=400, max_step_rows=32)
    for number in range(4):
        s.add(make(number))
    play(s, nodes=16)
    s.add(make(9, prompt=40))
    for _ in range(12):
        assert {0, 1, 2, 3} <= set(play(s, nodes=16)), "anchors always have their row"
    assert s.running[-1].made > 0, "the prompt was fed beside trees that would fill every step"


def test_who_finds_a_free_seat_does_not_count_as_waiting() -> None:
    s = scheduler(pages=40, max_sessions=2, max_waiting=0)
    s.add(make(1))
    s.add(make(2))
    with pytest.raises(ResourceExhausted):
        s.add(make(3))
    play(s)
    assert len(s.running) == 2
    with pytest.raises(ResourceExhausted):
        s.add(make(4))


def test_who_sits_a_step_out_keeps_pages_and_proposal() -> None:
    s = scheduler(pages=40)
    first, second = make(1), make(2)
    s.add(first)
    s.add(second)
    play(s, nodes=3)
    pages = list(second.pages)
    work = s.plan(hold={2})
    assert [item.session for item in work] == [first]
    assert second.pages == pages
    assert second.proposal is not None
    assert [item.session for item in s.plan()] == [first, second]
