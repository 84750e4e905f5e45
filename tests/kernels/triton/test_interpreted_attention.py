"""Paged attention against a dense fp64 twin, and its promise: bits that depend on a query's own
keys alone."""

import dataclasses

import numpy as np
import pytest
import torch

from draftwire_kernels import attention_cpu, attention_triton
from draftwire_kernels.attention import AttentionPlan, paged_attention, plan, row_parents
from draftwire_kernels.checks import KernelArgumentError
from draftwire_kernels.pages import write_rows

BACKENDS = {
    "cpu": attention_cpu.attend,
    "cpu fast": attention_cpu.attend_fast,
    "one program a tile": lambda *a: attention_triton.attend(*a, whole=True),
    "one program a chunk": lambda *a: attention_triton.attend(*a, whole=False),
}
INVARIANT = [name for name in BACKENDS if name != "cpu fast"]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TREE = row_parents([-1, 0, 0, 1, 1, 2, -1, 6])


@dataclasses.dataclass
class Pool:
    """Pools of random keys and values and a table for each session."""

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    page: int


def pool(
    sessions: int,
    keys: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> Pool:
    generator = torch.Generator().manual_seed(seed)
    pages = -(-keys // page)
    shape = (sessions * pages * page, kv_heads, head_dim)
    return Pool(
        torch.randn(shape, generator=generator).to(dtype),
        torch.randn(shape, generator=generator).to(dtype),
        torch.randperm(sessions * pages, generator=generator).view(sessions, pages).int(),
        page,
    )


def dense(
    query: torch.Tensor, at: Pool, planned: AttentionPlan, rows: list[object]
) -> torch.Tensor:
    """Each row over its own keys, gathered one by one, in fp64."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // at.keys.shape[1]
    for row in range(query.shape[0]):
        session = int(planned.row_session[row])
        if session < 0:
            continue
        base, here = int(planned.base[session]), row - int(planned.row_start[session])
        path = []
        while here >= 0:
            path.append(here)
            shape = rows[session]
            here = here - 1 if isinstance(shape, int) else shape[here]  # type: ignore[index]
        physical = torch.tensor([*range(base), *(base + i for i in path[::-1])])
        slots = at.tables[session].long()[physical // at.page] * at.page + physical % at.page
        k = at.keys[slots].double().repeat_interleave(group, 1)
        v = at.values[slots].double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,lhd->hl", query[row].double(), k) * query.shape[2] ** -0.5
        out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "page"),
    [
        (torch.float32, 2, 1, 16, 16),
        (torch.float32, 9, 3, 40, 20),
        (torch.float16, 2, 2, 64, 64),
        (torch.bfloat16, 8, 2, 24, 16),
    ],
)
def test_rows_equal_a_dense_softmax_over_their_own_keys(
    backend: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page: int
) -> None:
    torch.manual_seed(heads)
    rows = [TREE, 5, 0, row_parents([])]
    base = [515, 0, 7, 63] if head_dim == 16 else [70, 0, 7, 63]
    at = pool(len(rows), 560, kv_heads, head_dim, page, dtype)
    planned = plan(at.tables, base, rows, page, pad_rows=2)
    query = torch.randn(planned.row_session.shape[0], heads, head_dim).to(dtype)
    got = BACKENDS[backend](query, at.keys, at.values, planned, head_dim**-0.5)
    assert got.dtype == dtype
    error = (got.double() - dense(query, at, planned, rows)).abs().max()
    assert error < TOLERANCE[dtype]


@pytest.fixture
def _row_by_row_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose rows do not depend on their place in the tile, as on tensor cores.

    numpy's fp32 product rounds row 4 of a tile otherwise than row 0; in fp64, rounded once, it
    cannot show.
    """

    def product(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", product)


@pytest.mark.usefixtures("_row_by_row_products")
@pytest.mark.parametrize(("base", "dtype"), [(62, torch.float32), (509, torch.bfloat16)])
def test_a_querys_bits_do_not_depend_on_tree_batch_or_split(base: int, dtype: torch.dtype) -> None:
    """One path of 5 rows: as a chain, inside a tree, row by row as plain decoding, and in a
    batch."""
    kv_heads, group, head_dim, page, path = 1, 3, 16, 16, 5
    at = pool(3, base + 32, kv_heads, head_dim, page, dtype)
    query = torch.randn(path, kv_heads * group, head_dim).to(dtype)
    own = torch.arange(base, base + path)
    slots = at.tables[0].long()[own // page] * page + own % page
    keys, values = at.keys[slots].clone(), at.values[slots].clone()

    def place(positions: list[int]) -> None:
        where = torch.tensor(positions)
        there = at.tables[0].long()[where // page] * page + where % page
        at.keys[there], at.values[there] = keys, values

    for name in INVARIANT:
        attend, scale = BACKENDS[name], head_dim**-0.5
        place([base + i for i in range(path)])
        chain = attend(query, at.keys, at.values, plan(at.tables[:1], [base], [path], page), scale)
        for i in (0, 3):
            alone = attend(
                query[i : i + 1],
                at.keys,
                at.values,
                plan(at.tables[:1], [base + i], [1], page),
                scale,
            )
            assert torch.equal(alone[0], chain[i]), f"{name}: row {i} alone"
        batch = plan(at.tables[[1, 0, 2]], [40, base, 3], [2, path, 4], page)
        mixed = torch.randn(2 + path + 4, kv_heads * group, head_dim).to(dtype)
        mixed[2 : 2 + path] = query
        got = attend(mixed, at.keys, at.values, batch, scale)
        assert torch.equal(got[2 : 2 + path], chain), f"{name}: in a batch"
        # The same path through a tree: rows 0, 2, 3, 6, 9 of ten, siblings between them.
        tree, on_path = (-1, 0, 0, 2, 2, 1, 3, 4, 6, 6), [0, 2, 3, 6, 9]
        place([base + row for row in on_path])
        wide = torch.randn(len(tree), kv_heads * group, head_dim).to(dtype)
        wide[on_path] = query
        branched = plan(at.tables[:1], [base], [tree], page)
        got = attend(wide, at.keys, at.values, branched, scale)
        assert torch.equal(got[on_path], chain), f"{name}: in a tree"


def test_one_program_a_tile_and_one_a_chunk_give_the_same_bits() -> None:
    at = pool(2, 1100, 1, 16, 16, torch.float32)
    planned = plan(at.tables, [1030, 511], [TREE, 3], 16)
    query = torch.randn(planned.row_session.shape[0], 2, 16)
    whole = BACKENDS["one program a tile"](query, at.keys, at.values, planned, 0.25)
    split = BACKENDS["one program a chunk"](query, at.keys, at.values, planned, 0.25)
    assert torch.equal(whole, split)


@pytest.mark.parametrize("backend", INVARIANT)
def test_a_branch_with_nan_reaches_only_rows_below_it(backend: str) -> None:
    at = pool(1, 64, 1, 16, 16, torch.float32)
    planned = plan(at.tables, [20], [TREE], 16)
    rows = len(TREE)
    keys, values = torch.randn(rows, 1, 16), torch.randn(rows, 1, 16)
    query = torch.randn(rows, 2, 16)
    write_rows(keys, values, at.keys, at.values, planned.slots)
    clean = BACKENDS[backend](query, at.keys, at.values, planned, 0.25)
    values[2, 0, 3] = torch.nan  # row 2 and what is below it: rows 4 and 5
    write_rows(keys, values, at.keys, at.values, planned.slots)
    got = BACKENDS[backend](query, at.keys, at.values, planned, 0.25)
    struck = got.isnan().any(-1).any(-1)
    assert struck.tolist() == [row in (2, 4, 5) for row in range(rows)]
    assert torch.equal(got[~struck], clean[~struck])


def test_a_tree_of_64_nodes_at_the_start_of_a_session_has_every_path_right() -> None:
    parents = [max(-1, (i - 1) // 2 if i % 3 else i - 1) for i in range(63)]
    rows: list[object] = [row_parents(parents)]
    at = pool(1, 64, 1, 16, 16, torch.float32)
    planned = plan(at.tables, [0], rows, 16)  # type: ignore[arg-type]
    query = torch.randn(64, 1, 16)
    want = dense(query, at, planned, rows)
    for name in ("cpu", "one program a tile"):
        got = BACKENDS[name](query, at.keys, at.values, planned, 0.25)
        assert (got.double() - want).abs().max() < 3e-6


def test_strided_queries_and_pools_of_one_layer_of_many_are_read_in_place() -> None:
    at = pool(1, 64, 2, 16, 16, torch.float32)
    planned = plan(at.tables, [30], [3], 16)
    fused = torch.randn(3, 8, 16)
    layers = torch.stack([torch.zeros_like(at.keys), at.keys, at.values], 1)
    got = attention_triton.attend(fused[:, 2:6], layers[:, 1], layers[:, 2], planned, 0.25)
    want = attention_triton.attend(fused[:, 2:6].clone(), at.keys, at.values, planned, 0.25)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("base", "rows", "field"),
    [([0, 0], [1], "base"), ([-1], [1], r"base\[0\]"), ([60], [5], r"base\[0\] \+ rows\[0\]")],
)
def test_a_plan_that_cannot_be_names_the_argument(
    base: list[int], rows: list[int], field: str
) -> None:
    tables = torch.arange(4, dtype=torch.int32).view(1, 4)
    with pytest.raises(KernelArgumentError, match=field):
        plan(tables, base, rows, 16)


def test_parents_after_their_children_are_refused() -> None:
    tables = torch.arange(4, dtype=torch.int32).view(1, 4)
    with pytest.raises(KernelArgumentError, match="parents"):
        plan(tables, [0], [(-1, 2, 0)], 16)


def test_pools_of_another_dtype_are_refused_by_name() -> None:
    at = pool(1, 64, 2, 16, 16, torch.float32)
    planned = plan(at.tables, [30], [3], 16)
    with pytest.raises(KernelArgumentError, match="key_pool"):
        paged_attention(torch.zeros(3, 4, 16), at.keys.half(), at.values, planned)
