"""Attention of a round's few query rows over paged KV: a forward's plan and dispatch by device.

Knows where keys lie (pages, the round's rows, the paths of a tree) and which backend computes.
Knows nothing of models, sessions or sampling. The arithmetic is in attention_triton (CUDA),
attention_cpu (everything else) and flash (flash-attn, for chains, where bits need not repeat).

Words. A session's *row* i of this forward is written at physical position base + i; row 0 is the
anchor, row i + 1 is node i of the tree. Its *logical* position is base + depth. A query sees the
keys of logical positions 0 .. base + depth: the context, then its own path.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

import torch

from draftwire_kernels.checks import expect, expect_shape

Numerics = Literal["invariant", "fast"]

# Keys are summed in blocks of this many logical positions, and blocks in chunks of this many
# positions. Both are part of the arithmetic: another value gives other bits.
KEY_BLOCK = 64
KEY_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Where the rows of one forward lie; made once a step, used by every layer.

    All tensors are int32 on the device of the pools, except `slots`, which is int64.
    """

    page_size: int
    page_tables: torch.Tensor
    """[sessions, pages]: page numbers in order of position; entries past the end are not read."""
    base: torch.Tensor
    """[sessions]: keys committed before row 0."""
    row_start: torch.Tensor
    """[sessions + 1]: session s owns rows row_start[s] .. row_start[s + 1] - 1."""
    row_session: torch.Tensor
    """[rows]: the session of each row, -1 for padding rows (their output is zero)."""
    row_depth: torch.Tensor
    """[rows]: logical position minus base."""
    row_leaf: torch.Tensor
    """[rows]: the root-to-leaf path of the session that this row lies on."""
    leaves: torch.Tensor
    """[sessions]: paths of the session."""
    paths: torch.Tensor | None
    """[sessions, most leaves, longest path]: row of each depth along each path, -1 past its end;
    None when every session is a chain."""
    slots: torch.Tensor
    """[rows]: slot of the pool that each row's own key and value go to, -1 for padding rows."""
    max_rows: int
    """Most rows of one session."""
    max_keys: int
    """Largest base + depth + 1, or a bound on it."""
    padded: bool
    """Whether padding rows follow."""

    @property
    def is_chain(self) -> bool:
        """Whether every session's rows follow each other."""
        return self.paths is None


def _root_to_leaf(parents: Sequence[int]) -> tuple[list[int], list[list[int]], list[int]]:
    """Depth of each row, the paths to all leaves, and for each row the first path it lies on."""
    depths: list[int] = []
    inner: set[int] = set()
    for row, parent in enumerate(parents):
        ok = parent == -1 if row == 0 else 0 <= parent < row
        expect(ok, "parents", "-1 for row 0, then an earlier row", f"{parent} at row {row}")
        depths.append(0 if row == 0 else depths[parent] + 1)
        inner.add(parent)
    paths: list[list[int]] = []
    leaf_of = [-1] * len(parents)
    for leaf in (row for row in range(len(parents)) if row not in inner):
        path, row = [], leaf
        while row >= 0:
            path.append(row)
            if leaf_of[row] < 0:
                leaf_of[row] = len(paths)
            row = parents[row]
        paths.append(path[::-1])
    return depths, paths, leaf_of


def row_parents(parents: Sequence[int]) -> tuple[int, ...]:
    """Parents of rows (row 0 the anchor) from the parents of a TokenTree's nodes."""
    return (-1, *(parent + 1 for parent in parents))


def plan(
    page_tables: torch.Tensor,
    base: Sequence[int],
    rows: Sequence[int | Sequence[int]],
    page_size: int,
    *,
    pad_rows: int = 0,
    max_rows: int = 0,
    max_keys: int = 0,
) -> AttentionPlan:
    """Plan one forward; reads nothing back from the device.

    page_tables int32 [sessions, pages]; base[s] keys precede session s's rows; rows[s] is a number
    of rows in a chain or the parents of its rows (see `row_parents`). `pad_rows` rows without a
    session follow. `max_rows` and `max_keys` may be given larger than needed so that a captured
    graph can be replayed. Raises KernelArgumentError naming the argument.
    """
    expect(page_tables.dtype == torch.int32, "page_tables", "int32", page_tables.dtype)
    expect(page_size >= 1, "page_size", ">= 1", page_size)
    sessions = len(rows)
    expect_shape("page_tables", page_tables, (sessions, None))
    expect(len(base) == sessions, "base", f"{sessions} sessions", len(base))
    capacity = page_tables.shape[1] * page_size
    counts: list[int] = []
    depths: list[int] = []
    leaf_of: list[int] = []
    owner: list[int] = []
    physical: list[int] = []
    paths: list[list[list[int]]] = []
    needed_keys = 0
    for s, (start, shape) in enumerate(zip(base, rows, strict=True)):
        expect(start >= 0, f"base[{s}]", ">= 0", start)
        if isinstance(shape, int):
            expect(shape >= 0, f"rows[{s}]", ">= 0", shape)
            count, own, tree, leaf = shape, list(range(shape)), [list(range(shape))], [0] * shape
        else:
            count = len(shape)
            own, tree, leaf = _root_to_leaf(shape)
        expect(start + count <= capacity, f"base[{s}] + rows[{s}]", capacity, start + count)
        counts.append(count)
        depths += own
        leaf_of += leaf
        owner += [s] * count
        physical += range(start, start + count)
        paths.append(tree)
        needed_keys = max(needed_keys, start + max(own, default=-1) + 1)
    expect(max_keys in (0,) or max_keys >= needed_keys, "max_keys", f">= {needed_keys}", max_keys)
    most = max(counts, default=0)
    expect(max_rows in (0,) or max_rows >= most, "max_rows", f">= {most}", max_rows)
    device = page_tables.device

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

    table = None
    if any(len(tree) > 1 or path != list(range(len(path))) for tree in paths for path in tree):
        wide = max(len(tree) for tree in paths)
        long = max(len(path) for tree in paths for path in tree)
        flat = [
            path + [-1] * (long - len(path))
            for tree in paths
            for path in tree + [[]] * (wide - len(tree))
        ]
        table = ints(list(itertools.chain.from_iterable(flat))).view(sessions, wide, long)
    owners, where = ints(owner + [-1] * pad_rows), ints(physical + [0] * pad_rows).long()
    if sessions:
        page = page_tables[owners.clamp(min=0).long(), where // page_size].long()
        slots = torch.where(owners < 0, -1, page * page_size + where % page_size)
    else:
        slots = torch.full_like(where, -1)
    return AttentionPlan(
        page_size=page_size,
        page_tables=page_tables,
        base=ints(base),
        row_start=ints([0, *itertools.accumulate(counts)]),
        row_session=owners,
        row_depth=ints(depths + [0] * pad_rows),
        row_leaf=ints(leaf_of + [0] * pad_rows),
        leaves=ints([len(tree) for tree in paths]),
        paths=table,
        slots=slots,
        max_rows=max(most, max_rows),
        max_keys=max(needed_keys, max_keys),
        padded=pad_rows > 0,
    )


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    numerics: Numerics = "invariant",
    force_reference: bool = False,
) -> torch.Tensor:
    """Attention of every row over its context and its own path; the rows' own KV must be written.

    query [rows, heads, head_dim]; pools [num_slots, kv_heads, head_dim] of the same dtype, heads a
    multiple of kv_heads; scale defaults to head_dim ** -0.5. Returns [rows, heads, head_dim].
    `invariant`: a row's bits depend on its own keys alone, whatever tree, batch or split it is in.
    `fast` may use flash-attn (CUDA, chains) or one SDPA call (CPU), whose bits depend on the
    shapes. Moves each session's keys and values once a tile of 64 (row, head of group) pairs, the
    queries and the output. Raises KernelArgumentError.
    """
    rows, heads, head_dim = _expect_pools(query, key_pool, value_pool, plan)
    factor = head_dim**-0.5 if scale is None else scale
    if rows == 0 or heads == 0:
        return torch.empty_like(query)
    if query.device.type == "cuda" and not force_reference:
        from draftwire_kernels import flash

        if numerics == "fast" and flash.takes(query, plan):
            return flash.attend(query, key_pool, value_pool, plan, factor)
        from draftwire_kernels import attention_triton

        return attention_triton.attend(query, key_pool, value_pool, plan, factor)
    from draftwire_kernels import attention_cpu

    cpu = attention_cpu.attend if numerics == "invariant" else attention_cpu.attend_fast
    return cpu(query, key_pool, value_pool, plan, factor)


def _expect_pools(
    query: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, plan: AttentionPlan
) -> tuple[int, int, int]:
    rows, heads, head_dim = query.shape
    expect_shape("query", query, (plan.row_session.shape[0], None, None))
    expect_shape("key_pool", key_pool, (None, None, head_dim))
    expect_shape("value_pool", value_pool, tuple(key_pool.shape))
    kv_heads = key_pool.shape[1]
    expect(heads % max(kv_heads, 1) == 0, "query heads", f"a multiple of {kv_heads}", heads)
    for name, pool in (("key_pool", key_pool), ("value_pool", value_pool)):
        expect(pool.dtype == query.dtype, name, query.dtype, pool.dtype)
        expect(pool.stride(-1) == 1, f"{name} stride of head_dim", 1, pool.stride(-1))
    expect(query.stride(-1) == 1, "query stride of head_dim", 1, query.stride(-1))
    return rows, heads, head_dim
