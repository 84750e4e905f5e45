"""The books of the page pool balance whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from draftwire.errors import ResourceExhausted
from verifier_service.cache import PagePool

PAGE = 4


class Pages(RuleBasedStateMachine):
    """Sessions that take, extend, share and give back pages, against a model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(13, PAGE)
        self.holders: list[tuple[list[int], list[int]]] = []  # tokens, pages

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def begin(self, tokens: list[int]) -> None:
        known = self.pool.find_prefix(tokens)
        missing = self.pool.pages_for(len(tokens)) - len(known)
        try:
            fresh = self.pool.allocate(missing)
        except ResourceExhausted:
            assert missing > self.pool.free_pages
            self.pool.release(known)
            return
        pages = known + fresh
        assert len(set(pages)) == len(pages)
        shared = {page for _, held in self.holders for page in held}
        assert not shared & set(fresh), "a fresh page is somebody else's"
        self.pool.keep_prefix(tokens, pages)
        self.holders.append((tokens, pages))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.holders:
            _, pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
            self.pool.release(pages)

    @rule()
    def forget(self) -> None:
        self.pool.forget_cached()

    @invariant()
    def balance(self) -> None:
        self.pool.check()
        held = {page for _, pages in self.holders for page in pages}
        assert self.pool.free_pages == self.pool.num_pages - 1 - len(held)

    @invariant()
    def same_prefix_same_pages(self) -> None:
        for tokens, pages in self.holders:
            for other, others in self.holders:
                for index, (a, b) in enumerate(zip(pages, others, strict=False)):
                    if a == b:
                        end = (index + 1) * PAGE
                        assert tokens[:end] == other[:end], (
                            "a shared page holds two different prefixes"
                        )


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_page_released_twice_is_an_error() -> None:
    pool = PagePool(4, PAGE)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(RuntimeError):
        pool.release(pages)


def test_the_scratch_page_is_never_handed_out() -> None:
    pool = PagePool(4, PAGE)
    assert 0 not in pool.allocate(3)
    with pytest.raises(ResourceExhausted):
        pool.allocate(1)


def test_the_head_of_a_cached_prefix_outlives_its_tail() -> None:
    """A tail without its head could not be found again, so it goes first."""
    pool = PagePool(5, PAGE)
    tokens = list(range(4 * PAGE))
    pages = pool.allocate(4)
    pool.keep_prefix(tokens, pages)
    pool.release(pages)
    fresh = pool.allocate(2)
    found = pool.find_prefix(tokens)
    assert found == pages[:2]
    pool.release(found)
    pool.release(fresh)
    pool.check()
