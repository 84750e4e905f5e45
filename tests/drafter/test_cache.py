"""The pool of feature rows: nothing lost, nothing used twice, contents kept when extents move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drafter_service.cache import GRANULE, Context, ContextPool, NoRoom


def small_pool(rows: int = 16 * GRANULE) -> ContextPool:
    return ContextPool(
        layers=2, kv_heads=2, head_dim=4, rows=rows, dtype=torch.float32, device=torch.device("cpu")
    )


class PoolMachine(RuleBasedStateMachine):
    """Opens, grows, fills, crops and closes at random; each context knows what its rows should
    hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = small_pool()
        self.contents: dict[Context, list[float]] = {}
        self.stamp = 0.0

    @rule(rows=st.integers(0, 5 * GRANULE))
    def open(self, rows: int) -> None:
        wanted = max(GRANULE, -(-rows // GRANULE) * GRANULE)
        if wanted <= self.pool.free_rows:
            self.contents[self.pool.open(rows)] = []
            return
        free = self.pool.free_rows
        with pytest.raises(NoRoom) as caught:
            self.pool.open(rows)
        assert caught.value.free == free == self.pool.free_rows

    @precondition(lambda self: self.contents)
    @rule(pick=st.integers(0, 99), rows=st.integers(1, 4 * GRANULE))
    def grow(self, pick: int, rows: int) -> None:
        context = self._pick(pick)
        try:
            self.pool.reserve(context, context.length + rows)
        except NoRoom:
            return
        at = torch.arange(context.start + context.length, context.start + context.length + rows)
        stamps = [self.stamp + i for i in range(rows)]
        self.stamp += rows
        values = torch.tensor(stamps).view(1, -1, 1).expand(2, rows, 4)
        for layer in range(2):
            self.pool.write(layer, at, values + layer, -values - layer)
        context.length += rows
        self.contents[context].extend(stamps)

    @precondition(lambda self: self.contents)
    @rule(pick=st.integers(0, 99), share=st.floats(0, 1))
    def crop(self, pick: int, share: float) -> None:
        context = self._pick(pick)
        length = int(context.length * share)
        self.pool.crop(context, length)
        del self.contents[context][length:]

    @precondition(lambda self: self.contents)
    @rule(pick=st.integers(0, 99))
    def close(self, pick: int) -> None:
        context = self._pick(pick)
        self.pool.close(context)
        self.pool.close(context)
        del self.contents[context]

    @invariant()
    def rows_tile_the_pool(self) -> None:
        self.pool.check_integrity()

    @invariant()
    def contents_are_kept(self) -> None:
        for context, stamps in self.contents.items():
            assert context.length == len(stamps) <= context.capacity
            view = slice(context.start, context.start + context.length)
            want = torch.tensor(stamps).view(1, -1, 1).expand(2, len(stamps), 4)
            for layer in range(2):
                assert torch.equal(self.pool.keys[layer][:, view], want + layer)
                assert torch.equal(self.pool.values[layer][:, view], -want - layer)

    def teardown(self) -> None:
        for context in self.contents:
            self.pool.close(context)
        assert self.pool.free_rows == self.pool.total_rows
        self.pool.check_integrity()

    def _pick(self, number: int) -> Context:
        return list(self.contents)[number % len(self.contents)]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_scattered_free_rows_are_brought_together() -> None:
    pool = small_pool(4 * GRANULE)
    contexts = [pool.open(GRANULE) for _ in range(4)]
    pool.close(contexts[0])
    pool.close(contexts[2])
    wide = pool.open(2 * GRANULE)
    assert wide.capacity == 2 * GRANULE
    pool.check_integrity()


def test_the_check_notices_a_lost_row() -> None:
    pool = small_pool()
    context = pool.open(GRANULE)
    context.capacity -= 1
    with pytest.raises(RuntimeError, match="lost or used twice"):
        pool.check_integrity()
