"""Writing keys and values to their slots, and closing the gaps a tree leaves: dispatch by device.

Knows pools, slots and page tables. Knows nothing of models or of who owns a page. A round's rows
are written at physical positions base + row; of a tree only the accepted path stays, and
`compact_path` moves its rows up to base + 1, base + 2, … so that position and place agree again.

A row whose key or value holds a number that is not finite is quarantined as it is written: its key
becomes NaN and its value 0. Attention masks keys exactly, but multiplies masked values by 0, and 0
times NaN would reach rows that never saw it.
"""

import torch

from draftwire_kernels.attention import AttentionPlan
from draftwire_kernels.checks import expect, expect_shape


def write_rows(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    force_reference: bool = False,
) -> None:
    """Scatter rows [rows, kv_heads, head_dim] to slots int64 [rows] of pools [num_slots, kv_heads,
    head_dim].

    Rows with slot -1 are left out. Moves each row once in and once out. Raises KernelArgumentError.
    """
    expect_shape("slots", slots, (keys.shape[0],))
    expect(slots.dtype == torch.int64, "slots", "int64", slots.dtype)
    _expect_rows("keys", keys, key_pool)
    _expect_rows("values", values, value_pool)
    if keys.device.type == "cuda" and not force_reference:
        from draftwire_kernels import pages_triton

        pages_triton.write_rows(keys, values, key_pool, value_pool, slots)
        return
    wanted = slots >= 0
    keys, values, slots = keys[wanted], values[wanted], slots[wanted]
    sound = (keys.isfinite() & values.isfinite()).all(-1).all(-1)[:, None, None]
    key_pool[slots] = keys.masked_fill(~sound, torch.nan)
    value_pool[slots] = values.masked_fill(~sound, 0.0)


def compact_path(
    pools: torch.Tensor,
    plan: AttentionPlan,
    path: torch.Tensor,
    *,
    force_reference: bool = False,
) -> None:
    """Move the rows of each session's accepted path to the places after the anchor, in all pools.

    pools [stacks, num_slots, kv_heads, head_dim]: keys and values of every layer, e.g. a view of
    [layers, 2, …]. path int32 [sessions, D]: accepted nodes in order, then -1 (Walks.path); node i
    is row i + 1, and a path's nodes ascend, so that no move overwrites a row still to be moved.
    Moves only rows that are out of place. Raises KernelArgumentError.
    """
    sessions = plan.base.shape[0]
    expect_shape("path", path, (sessions, None))
    expect(path.dtype == torch.int32, "path", "int32", path.dtype)
    expect_shape("pools", pools, (None, None, None, None))
    if plan.is_chain or path.numel() == 0:
        return  # a chain's accepted rows are in place
    if pools.device.type == "cuda" and not force_reference:
        from draftwire_kernels import pages_triton

        pages_triton.compact_path(pools, plan, path)
        return
    accepted = path >= 0
    session = torch.arange(sessions, device=path.device)[:, None].expand_as(path)[accepted]
    step = torch.arange(path.shape[1], device=path.device).expand_as(path)[accepted]
    first = plan.base[session].long() + 1
    pools[:, _slots(plan, session, first + step)] = pools[
        :, _slots(plan, session, first + path[accepted].long())
    ]


def _slots(plan: AttentionPlan, session: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    page = plan.page_tables[session, position // plan.page_size].long()
    return page * plan.page_size + position % plan.page_size


def _expect_rows(name: str, rows: torch.Tensor, pool: torch.Tensor) -> None:
    expect_shape(name, rows, (None, pool.shape[1], pool.shape[2]))
    expect(rows.dtype == pool.dtype, name, pool.dtype, rows.dtype)
    expect(pool.is_contiguous(), f"{name} pool", "contiguous", pool.stride())
    expect(rows.stride(2) == 1, f"{name} stride of head_dim", 1, rows.stride(2))
