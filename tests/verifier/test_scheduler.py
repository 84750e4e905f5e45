"""Who runs in whose pages: budgets, order and preemption, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwire.errors import ResourceExhausted
from draftwire_kernels.sampling import Sampling
from draftwire_kernels.tree import TokenTree
from verifier_service.cache import PagePool
from verifier_service.scheduler import Budgets, Scheduler, Work
from verifier_service.session import Proposal, Request, Session, Speculation

PAGE = 4


class Letters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "x" * len(token_ids)


def scheduler(pages: int = 64, **budgets: int) -> Scheduler:
    limits = {"max_sessions": 8, "max_step_rows": 64, "prefill_rows": 16, "max_waiting": 100}
    return Scheduler(PagePool(pages + 1, PAGE), Budgets(**{**limits, **budgets}))


def session(number: int, prompt: int, *, max_tokens: int = 20, priority: int = 0) -> Session:
    request = Request(
        request_id=str(number),
        prompt=tuple((number * 31 + i) % 97 for i in range(prompt)),
        sampling=Sampling(),
        max_tokens=max_tokens,
        speculation=Speculation(True, 8, 16),
        priority=priority,
        arrival=float(number),
    )
    return Session(number, request, 97, Letters())


def finish_step(work: Sequence[Work], accepted: int = 0) -> list[Session]:
    """What the engine does after a step, with `accepted` nodes of each chain kept; the sessions
    that ended."""
    ended = []
    for item in work:
        s = item.session
        if not item.draws:
            s.computed += len(item.feed.tokens)
            continue
        kept = min(accepted, len(item.proposal.tree)) if item.proposal else 0
        s.commit([1] * (kept + 1), 1000)
        s.computed = s.base
        s.proposal = None
        if s.ending is not None:
            ended.append(s)
    return ended


def propose(s: Session, nodes: int) -> None:
    tree = TokenTree.chain([2] * nodes)
    s.proposal = Proposal(s.base, tree, (), nodes + 1, 1)


def test_prompts_are_fed_in_pieces_beside_sessions_that_decode() -> None:
    sched = scheduler()
    first, second = session(1, 5), session(2, 40)
    sched.add(first)
    finish_step(sched.plan())
    sched.add(second)
    sizes = []
    for _ in range(3):
        work = sched.plan()
        assert work[0].session is first
        assert len(work[0].feed.tokens) == 1
        sizes.append(len(work[1].feed.tokens))
        finish_step(work)
    assert sizes == [16, 16, 8]
    assert second.made == 1


def test_logits_are_wanted_only_where_a_token_is_drawn() -> None:
    sched = scheduler()
    sched.add(session(1, 20))
    (part,) = sched.plan()
    assert (part.draws, part.feed.logit_rows) == (False, ())
    finish_step([part])
    (rest,) = sched.plan()
    assert (rest.draws, rest.feed.logit_rows) == (True, (3,))


def test_trees_are_trimmed_so_that_every_session_gets_its_own_row() -> None:
    sched = scheduler(max_step_rows=10)
    sessions = [session(i, 3) for i in range(4)]
    for s in sessions:
        sched.add(s)
    while any(s.made == 0 for s in sessions):
        finish_step(sched.plan())
    for s in sessions:
        propose(s, 8)
    work = sched.plan()
    assert len(work) == 4
    assert sum(len(item.feed.tokens) for item in work) <= 10
    assert all(len(item.feed.tokens) >= 1 for item in work)


def test_a_higher_priority_goes_first_and_the_youngest_of_the_lowest_is_preempted() -> None:
    sched = scheduler(pages=6, max_sessions=2)
    low, high = session(1, 8), session(2, 8, priority=1)
    sched.add(low)
    sched.add(high)
    assert [item.session for item in sched.plan()] == [high, low]
    finish_step(sched.plan())
    while not sched.preempted:
        finish_step(sched.plan())
    assert sched.preempted == [low]
    assert low.computed == 0
    assert low.pages == []
    assert low.tokens[:8] == list(low.request.prompt)


def test_a_full_queue_names_its_limit() -> None:
    sched = scheduler(max_waiting=1)
    sched.add(session(1, 3))
    with pytest.raises(ResourceExhausted) as caught:
        sched.add(session(2, 3))
    assert caught.value.metadata["limit"] == "1"


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    pages=st.integers(14, 40),
    nodes=st.integers(0, 7),
    accepted=st.integers(0, 7),
    rows=st.integers(8, 40),
)
def test_everybody_finishes_and_every_page_comes_back(
    prompts: list[int], pages: int, nodes: int, accepted: int, rows: int
) -> None:
    sched = scheduler(pages=pages, max_step_rows=rows)
    waiting = {i: session(i, length) for i, length in enumerate(prompts)}
    for s in waiting.values():
        sched.add(s)
    for _ in range(4000):
        if not waiting:
            break
        for s in sched.running:
            depth = min(nodes, s.drafts_allowed(1000))
            if s.at_anchor and depth:
                propose(s, depth)
        work = sched.plan()
        assert work, "nobody can go on"
        assert sum(len(item.feed.tokens) for item in work) <= rows
        fed = [
            set(item.feed.slots[item.feed.base : item.feed.base + len(item.feed.tokens)])
            for item in work
        ]
        assert len(set().union(*fed)) == sum(map(len, fed)), "two sessions write the same slot"
        for s in finish_step(work, accepted):
            sched.remove(s)
            del waiting[s.session_id]
        sched.preempted.clear()
        sched.pool.check()
    assert not waiting
    assert sched.pool.free_pages == pages
