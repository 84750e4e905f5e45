"""Paged attention of a round's rows in Triton: the chunk kernel, the fold of chunks, the launch.

Knows the plan of a forward (attention.AttentionPlan) and nothing of models. Bits: a query's keys
are taken in logical order, in blocks of KEY_BLOCK positions counted from position 0; a chunk of
KEY_CHUNK positions is an online softmax from scratch, and chunks are folded left to right. One
program may take one chunk (small batches; partials go through memory) or all of them (large
batches): the operations on a row are the same ones in the same order, so the split is free to
follow the load.

A tile holds 64 (row, head of the group) pairs whatever the number of rows, so that plain decoding
and verification issue the same matrix instructions. Blocks that reach past `base` are taken once
for each leaf of the tree, with the keys of that leaf's path; a row listens only to its own leaf.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import torch
import triton
import triton.language as tl

from draftwire_kernels.attention import KEY_BLOCK, KEY_CHUNK, AttentionPlan
from draftwire_kernels.checks import expect, next_power_of_two

TILE = 64
LOG2E = 1.4426950408889634
# Whole sessions a program once this many programs exist: two for each of an H100's 132 SMs would
# leave partial traffic at batch 16; one each already fills the memory system.
WHOLE_FROM_PROGRAMS = 132


@triton.jit
def _fold(m, total, acc, m_next, total_next, acc_next):
    """Append a chunk's softmax state; the explicit fma keeps both kernels at the same rounding."""
    top = tl.maximum(m, m_next)
    safe = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(m - safe), tl.exp2(m_next - safe)
    total = tl.fma(total_next, new, total * old)
    acc = tl.fma(acc_next, tl.broadcast_to(new[:, None], acc_next.shape), acc * old[:, None])
    return top, total, acc


@triton.jit
def _attend_kernel(
    Q_ptr,
    K_ptr,
    V_ptr,
    Out_ptr,
    Acc_ptr,
    ML_ptr,
    Table_ptr,
    Base_ptr,
    Start_ptr,
    Depth_ptr,
    Leaf_ptr,
    Paths_ptr,
    scale_log2,
    n_rows,
    tiles,
    table_stride,
    leaf_stride,
    path_stride,
    q_row_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    TREE: tl.constexpr,
    WHOLE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    session = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(1).to(tl.int64)
    first_row = tl.load(Start_ptr + session)
    end_row = tl.load(Start_ptr + session + 1)
    base = tl.load(Base_ptr + session)

    lane = tl.arange(0, M)
    row = first_row + tile * (M // GROUP_PAD) + lane // GROUP_PAD
    member = lane % GROUP_PAD
    live = (row < end_row) & (member < GROUP)
    depth = tl.load(Depth_ptr + row, mask=live, other=0)
    position = tl.where(live, base + depth, -1)
    keys = tl.max(position, axis=0) + 1
    leaf = tl.zeros([M], tl.int32)
    low_leaf = 0
    n_leaves = 1
    if TREE:
        leaf = tl.load(Leaf_ptr + row, mask=live, other=0)
        low_leaf = tl.min(tl.where(live, leaf, 1 << 30), axis=0)
        n_leaves = tl.max(leaf, axis=0) - low_leaf + 1

    chunk = tl.program_id(2)
    chunks = tl.cdiv(keys, CHUNK)
    if chunk < chunks:
        d = tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + member
        q_at = row.to(tl.int64) * q_row_stride + head * q_head_stride
        q = tl.load(
            Q_ptr + q_at[:, None] + d[None, :],
            mask=live[:, None] & (d[None, :] < HEAD_DIM),
            other=0.0,
        )
        if UPCAST:
            q = q.to(tl.float32)
        m_all = tl.full([M], float("-inf"), tl.float32)
        total_all = tl.zeros([M], tl.float32)
        acc_all = tl.zeros([M, BLOCK_D], tl.float32)
        last_chunk = chunk + 1
        if WHOLE:
            last_chunk = chunks
        for c in range(chunk, last_chunk):
            first = c * (CHUNK // N)
            last = tl.minimum(first + CHUNK // N, tl.cdiv(keys, N))
            # Blocks below `tail` hold context only: one item serves every leaf.
            tail = tl.minimum(tl.maximum(base // N, first), last)
            shared = tail - first
            m = tl.full([M], float("-inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, BLOCK_D], tl.float32)
            for item in range(shared + (last - tail) * n_leaves):
                late = item - shared
                block = tl.where(late < 0, first + item, tail + late // n_leaves)
                branch = tl.where(late < 0, -1, low_leaf + late % n_leaves)
                at = block * N + tl.arange(0, N)
                here = at < keys
                if TREE:
                    down = at - base
                    node = tl.load(
                        Paths_ptr + session * leaf_stride + branch * path_stride + down,
                        mask=(down >= 0) & (down < tl.where(branch < 0, 0, path_stride)),
                        other=-1,
                    )
                    here = here & ((down < 0) | (node >= 0))
                    physical = tl.where(down < 0, at, base + node)
                else:
                    physical = at
                page = tl.load(
                    Table_ptr + session * table_stride + physical // PAGE, mask=here, other=0
                )
                slot = page.to(tl.int64) * PAGE + physical % PAGE
                k = tl.load(
                    K_ptr + kv_head * k_head_stride + (slot * k_slot_stride)[:, None] + d[None, :],
                    mask=here[:, None] & (d[None, :] < HEAD_DIM),
                    other=0.0,
                )
                if UPCAST:
                    k = k.to(tl.float32)
                s = tl.dot(q, tl.trans(k), input_precision="ieee")
                seen = (at[None, :] <= position[:, None]) & here[None, :]
                if TREE:
                    # Blocks, not scalars: the interpreter loses the dtype of a scalar condition.
                    shown = tl.zeros([M], tl.int32) + branch
                    seen = seen & ((shown < 0) | (leaf == shown))[:, None]
                s = tl.where(seen, s * scale_log2, float("-inf"))
                top = tl.maximum(m, tl.max(s, axis=1))
                safe = tl.where(top == float("-inf"), 0.0, top)
                p = tl.exp2(s - safe[:, None])
                shrink = tl.exp2(m - safe)
                total = tl.fma(total, shrink, tl.sum(p, axis=1))
                acc = acc * shrink[:, None]
                m = top
                v = tl.load(
                    V_ptr + kv_head * v_head_stride + (slot * v_slot_stride)[:, None] + d[None, :],
                    mask=here[:, None] & (d[None, :] < HEAD_DIM),
                    other=0.0,
                )
                p = p.to(v.dtype)
                if UPCAST:
                    p, v = p.to(tl.float32), v.to(tl.float32)
                acc = tl.dot(p, v, acc, input_precision="ieee")
            if WHOLE:
                m_all, total_all, acc_all = _fold(m_all, total_all, acc_all, m, total, acc)
            else:
                m_all, total_all, acc_all = m, total, acc
        out_at = row.to(tl.int64) * HEADS + head
        if WHOLE:
            out = acc_all / tl.where(live, total_all, 1.0)[:, None]
            tl.store(
                Out_ptr + (out_at * HEAD_DIM)[:, None] + d[None, :],
                out.to(Out_ptr.dtype.element_ty),
                mask=live[:, None] & (d[None, :] < HEAD_DIM),
            )
        else:
            part = chunk.to(tl.int64) * n_rows * HEADS + out_at
            tl.store(ML_ptr + part * 2, m_all, mask=live)
            tl.store(ML_ptr + part * 2 + 1, total_all, mask=live)
            tl.store(Acc_ptr + (part * BLOCK_D)[:, None] + d[None, :], acc_all, mask=live[:, None])


@triton.jit
def _fold_kernel(
    Acc_ptr,
    ML_ptr,
    Out_ptr,
    Session_ptr,
    Base_ptr,
    Depth_ptr,
    n_rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = head < HEADS
    d = tl.arange(0, BLOCK_D)
    session = tl.load(Session_ptr + row)
    chunks = 0
    if session >= 0:
        chunks = (tl.load(Base_ptr + session) + tl.load(Depth_ptr + row)) // CHUNK + 1
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for chunk in range(chunks):
        part = (tl.full([], chunk, tl.int64) * n_rows + row) * HEADS + head
        m_next = tl.load(ML_ptr + part * 2, mask=live, other=float("-inf"))
        total_next = tl.load(ML_ptr + part * 2 + 1, mask=live, other=0.0)
        acc_next = tl.load(
            Acc_ptr + (part * BLOCK_D)[:, None] + d[None, :], mask=live[:, None], other=0.0
        )
        m, total, acc = _fold(m, total, acc, m_next, total_next, acc_next)
    out = acc / tl.where(live & (total > 0.0), total, 1.0)[:, None]
    tl.store(
        Out_ptr + ((row * HEADS + head) * HEAD_DIM)[:, None] + d[None, :],
        out.to(Out_ptr.dtype.element_ty),
        mask=live[:, None] & (d[None, :] < HEAD_DIM),
    )


def attend(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    whole: bool | None = None,
) -> torch.Tensor:
    """Launch: arguments as attention.paged_attention; `whole` forces or forbids one program a tile.

    Split mode also moves the partials: (head_dim + 2) fp32 written and read for each row, head and
    chunk of KEY_CHUNK keys.
    """
    rows, heads, head_dim = query.shape
    kv_heads = key_pool.shape[1]
    group = heads // kv_heads
    group_pad = next_power_of_two(group)
    expect(group_pad <= TILE, "heads / kv_heads", f"<= {TILE}", group)
    block_d = max(16, next_power_of_two(head_dim))
    sessions = plan.base.shape[0]
    tiles = max(1, -(-plan.max_rows * group_pad // TILE))
    chunks = max(1, -(-plan.max_keys // KEY_CHUNK))
    out = torch.zeros_like(query) if sessions == 0 else torch.empty_like(query)
    if sessions == 0:
        return out
    if whole is None:
        whole = chunks == 1 or sessions * tiles * kv_heads >= WHOLE_FROM_PROGRAMS
    padded = rows if whole else 0
    if whole:
        # Padding rows have no program of their own in this mode.
        out = torch.zeros_like(query) if padded else out
        acc = ml = query.new_empty(0, dtype=torch.float32)
    else:
        acc = query.new_empty((chunks, rows, heads, block_d), dtype=torch.float32)
        ml = query.new_empty((chunks, rows, heads, 2), dtype=torch.float32)
    paths = plan.paths if plan.paths is not None else plan.base
    _attend_kernel[(sessions * tiles, kv_heads, 1 if whole else chunks)](
        query,
        key_pool,
        value_pool,
        out,
        acc,
        ml,
        plan.page_tables,
        plan.base,
        plan.row_start,
        plan.row_depth,
        plan.row_leaf,
        paths,
        scale * LOG2E,
        rows,
        tiles,
        plan.page_tables.stride(0),
        paths.stride(0),
        paths.stride(1) if plan.paths is not None else 0,
        query.stride(0),
        query.stride(1),
        key_pool.stride(0),
        key_pool.stride(1),
        value_pool.stride(0),
        value_pool.stride(1),
        HEADS=heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        PAGE=plan.page_size,
        M=TILE,
        N=KEY_BLOCK,
        CHUNK=KEY_CHUNK,
        TREE=plan.paths is not None,
        WHOLE=whole,
        # The interpreter multiplies bf16 as the integers it stores them in.
        UPCAST=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
        num_warps=8,
        num_stages=3,
        enable_fp_fusion=False,
    )
    if not whole:
        block_h = min(8, next_power_of_two(heads))
        _fold_kernel[(rows, -(-heads // block_h))](
            acc,
            ml,
            out,
            plan.row_session,
            plan.base,
            plan.row_depth,
            rows,
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_H=block_h,
            CHUNK=KEY_CHUNK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
