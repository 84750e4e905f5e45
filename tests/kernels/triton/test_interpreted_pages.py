"""Writing rows to slots and closing the gaps of a tree, against plain loops."""

import random

import pytest
import torch

from draftwire_kernels import pages, pages_triton
from draftwire_kernels.attention import plan, row_parents

WRITERS = {"cpu": pages.write_rows, "triton": pages_triton.write_rows}


def compact_cpu(pools: torch.Tensor, *rest: object) -> None:
    pages.compact_path(pools, *rest, force_reference=True)  # type: ignore[arg-type]


COMPACTERS = {"cpu": compact_cpu, "triton": pages_triton.compact_path}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_land_in_their_slots_and_padding_rows_nowhere(writer: str, dtype: torch.dtype) -> None:
    fused = torch.randn(4, 9, 20).to(dtype)
    keys, values = fused[:, 3:6], fused[:, 6:]
    key_pool, value_pool = torch.zeros(2, 50, 3, 20, dtype=dtype)
    slots = torch.tensor([49, -1, 0, 17])
    WRITERS[writer](keys, values, key_pool, value_pool, slots)
    for pool, rows in ((key_pool, keys), (value_pool, values)):
        want = torch.zeros_like(pool)
        for row in (0, 2, 3):
            want[slots[row]] = rows[row]
        assert torch.equal(pool, want)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_row_that_is_not_finite_is_written_as_nan_keys_and_zero_values(
    writer: str, poison: float, side: str
) -> None:
    rows = {"keys": torch.randn(3, 2, 8), "values": torch.randn(3, 2, 8)}
    rows[side][1, 1, 5] = poison
    key_pool, value_pool = torch.zeros(2, 3, 2, 8)
    WRITERS[writer](rows["keys"], rows["values"], key_pool, value_pool, torch.arange(3))
    assert key_pool.isnan().all(-1).all(-1).tolist() == [False, True, False]
    assert torch.equal(value_pool[[0, 2]], rows["values"][[0, 2]])
    assert not value_pool[1].any()


@pytest.mark.parametrize("compacter", COMPACTERS)
@pytest.mark.parametrize("seed", range(4))
def test_accepted_rows_follow_the_anchor_without_gaps(compacter: str, seed: int) -> None:
    rng = random.Random(seed)
    stacks, page, width = 3, rng.choice([4, 5, 16]), (2, 3)
    parents = [[rng.randrange(-1, i) for i in range(rng.randrange(24))] for _ in range(4)]
    base = [rng.randrange(40) for _ in parents]
    pages_each = -(-64 // page)
    tables = torch.randperm(len(parents) * pages_each).view(len(parents), -1).int()
    planned = plan(tables, base, [row_parents(p) for p in parents], page)
    pools = torch.randn(stacks, tables.numel() * page, *width)
    paths = []
    for tree in parents:
        node = rng.randrange(-1, len(tree))
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = tree[node]
        paths.append(path)
    deep = max(1, *map(len, paths))
    table = torch.tensor([path + [-1] * (deep - len(path)) for path in paths], dtype=torch.int32)

    def slot(session: int, position: int) -> int:
        return int(tables[session, position // page]) * page + position % page

    want = pools.clone()
    for session, path in enumerate(paths):
        for step, node in enumerate(path):
            target = slot(session, base[session] + 1 + step)
            want[:, target] = pools[:, slot(session, base[session] + 1 + node)]
    COMPACTERS[compacter](pools, planned, table)
    for session, path in enumerate(paths):
        kept = [slot(session, p) for p in range(base[session] + 1 + len(path))]
        assert torch.equal(pools[:, kept], want[:, kept])


def test_slots_of_a_plan_are_the_rows_physical_positions() -> None:
    tables = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    planned = plan(tables, [3, 6], [row_parents([-1, -1]), 2], 4, pad_rows=1)
    assert planned.slots.tolist() == [15, 4, 5, 10, 11, -1]
