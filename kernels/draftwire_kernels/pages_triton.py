"""Scatter of new keys and values to their slots and compaction of accepted paths, in Triton.

Knows pools, slots and page tables as `pages` lays them out, and nothing of models.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import torch
import triton
import triton.language as tl

from draftwire_kernels.attention import AttentionPlan
from draftwire_kernels.checks import expect, next_power_of_two


@triton.jit
def _write_kernel(
    K_ptr,
    V_ptr,
    KeyPool_ptr,
    ValuePool_ptr,
    Slot_ptr,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(Slot_ptr + row)
    if slot >= 0:
        head = tl.arange(0, BLOCK_H)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        mask = (head < HEADS) & (d < HEAD_DIM)
        k = tl.load(K_ptr + row * k_row_stride + head * k_head_stride + d, mask=mask, other=0.0)
        v = tl.load(V_ptr + row * v_row_stride + head * v_head_stride + d, mask=mask, other=0.0)
        bad = ~(tl.abs(k.to(tl.float32)) < float("inf")) | ~(
            tl.abs(v.to(tl.float32)) < float("inf")
        )
        sound = tl.max(tl.max(bad.to(tl.int32), axis=1), axis=0) == 0
        if not sound:
            k = tl.full([BLOCK_H, BLOCK_D], float("nan"), tl.float32).to(K_ptr.dtype.element_ty)
            v = tl.zeros([BLOCK_H, BLOCK_D], tl.float32).to(V_ptr.dtype.element_ty)
        at = slot * (HEADS * HEAD_DIM) + head * HEAD_DIM + d
        tl.store(KeyPool_ptr + at, k, mask=mask)
        tl.store(ValuePool_ptr + at, v, mask=mask)


@triton.jit
def _compact_kernel(
    Pool_ptr,
    Table_ptr,
    Base_ptr,
    Path_ptr,
    table_stride,
    stack_stride,
    deep,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    session = tl.program_id(0).to(tl.int64)
    Pool_ptr += tl.program_id(1).to(tl.int64) * stack_stride
    lane = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(Base_ptr + session) + 1
    Table_ptr += session * table_stride
    step = 0
    node = tl.load(Path_ptr + session * deep)
    # In order: a row is read before any later row is written over it, by the same thread.
    while node >= 0:
        if node > step:
            source = first + node
            target = first + step
            page = tl.load(Table_ptr + source // PAGE).to(tl.int64)
            x = tl.load(Pool_ptr + (page * PAGE + source % PAGE) * WIDTH + lane, mask=lane < WIDTH)
            page = tl.load(Table_ptr + target // PAGE).to(tl.int64)
            tl.store(Pool_ptr + (page * PAGE + target % PAGE) * WIDTH + lane, x, mask=lane < WIDTH)
        step += 1
        node = tl.load(Path_ptr + session * deep + step, mask=step < deep, other=-1)


def write_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Launch of pages.write_rows: one program a row."""
    rows, heads, head_dim = keys.shape
    if rows:
        _write_kernel[(rows,)](
            keys,
            values,
            key_pool,
            value_pool,
            slots,
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_H=next_power_of_two(heads),
            BLOCK_D=next_power_of_two(head_dim),
            num_warps=4,
            enable_fp_fusion=False,
        )


def compact_path(pools: torch.Tensor, plan: AttentionPlan, path: torch.Tensor) -> None:
    """Launch of pages.compact_path: one program a session, stack and slice of a slot."""
    expect(pools[0].is_contiguous(), "pools", "contiguous slots", pools.stride())
    expect(path.stride(1) == 1, "path stride", 1, path.stride(1))
    sessions, deep = path.shape
    width = pools.shape[2] * pools.shape[3]
    block = min(1024, next_power_of_two(width))
    if sessions and deep:
        _compact_kernel[(sessions, pools.shape[0], -(-width // block))](
            pools,
            plan.page_tables,
            plan.base,
            path,
            plan.page_tables.stride(0),
            pools.stride(0),
            deep,
            PAGE=plan.page_size,
            WIDTH=width,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,
        )
