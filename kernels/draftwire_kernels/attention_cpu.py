"""Paged attention of a round's rows in plain torch: the specification of the kernel, and for CPUs.

Knows the plan of a forward and nothing of models. `attend` keeps a row's bits whatever tree, batch
or split it is in, by the same means as the kernel: every product has one fixed shape (QUERY_TILE
query rows by KEY_BLOCK keys), keys stand in logical order in blocks counted from position 0, and
blocks are added in order. `attend_fast` is one SDPA call a session.
"""

import torch

from draftwire_kernels.attention import KEY_BLOCK, AttentionPlan

QUERY_TILE = 64
"""(row, head of group) pairs of one product, short tiles padded with zeros."""


def attend(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """Arguments and result as attention.paged_attention, numerics "invariant"; sums in fp32."""
    out = torch.zeros_like(query)
    for session in range(plan.base.shape[0]):
        first, end = _rows(plan, session)
        if first < end:
            out[first:end] = _attend_session(
                query[first:end], key_pool, value_pool, plan, session, first, scale
            )
    return out


def _attend_session(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    session: int,
    first: int,
    scale: float,
) -> torch.Tensor:
    rows, heads, head_dim = query.shape
    kv_heads = key_pool.shape[1]
    group = heads // kv_heads
    base = int(plan.base[session])
    depth = plan.row_depth[first : first + rows].long()
    leaf = plan.row_leaf[first : first + rows].long()
    slots, positions, branch = _items(plan, session, base, int(depth.max()))
    items = slots.shape[0]
    # [items, kv_heads, KEY_BLOCK, head_dim]; keys of no one are slot 0, and masked below.
    keys = key_pool[slots].transpose(1, 2).float()
    values = value_pool[slots].transpose(1, 2).float()
    hidden = (slots < 0)[:, None, :, None]
    keys, values = keys.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0)

    per_tile = max(1, QUERY_TILE // group)
    out = torch.empty(rows, heads, head_dim, dtype=torch.float32, device=query.device)
    for low in range(0, rows, per_tile):
        part = query[low : low + per_tile].float()
        n = part.shape[0]
        tile = query.new_zeros((kv_heads, per_tile * group, head_dim), dtype=torch.float32)
        tile[:, : n * group] = (
            part.view(n, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
        )
        scores = torch.matmul(tile.expand(items, -1, -1, -1), keys.transpose(2, 3)) * scale
        own = leaf[low : low + n, None, None], depth[low : low + n, None, None]
        seen = (positions <= base + own[1]) & (slots >= 0)
        seen &= (branch[:, None] < 0) | (branch[:, None] == own[0])
        mask = torch.zeros(items, per_tile, KEY_BLOCK, dtype=torch.bool, device=query.device)
        mask[:, :n] = seen.transpose(0, 1)
        mask = mask.repeat_interleave(group, dim=1)[:, None]
        scores.masked_fill_(~mask, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0.0))
        peak = top.amax(0, keepdim=True)
        factor = torch.exp(top - peak.masked_fill(peak == -torch.inf, 0.0))
        # cumsum adds strictly in order, and adding the zeros of other rows' blocks changes no bit.
        total = (weights.sum(-1, keepdim=True) * factor).cumsum(0)[-1]
        mixed = (torch.matmul(weights, values) * factor).cumsum(0)[-1]
        mixed = (mixed / total)[:, : n * group]
        out[low : low + n] = (
            mixed.view(kv_heads, n, group, head_dim).transpose(0, 1).reshape(n, heads, head_dim)
        )
    return out.to(query.dtype)


def _items(
    plan: AttentionPlan, session: int, base: int, deepest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks of keys in order: slots, positions [items, KEY_BLOCK], branch [items]; -1 is no key,
    and every branch."""
    keys = base + deepest + 1
    blocks = -(-keys // KEY_BLOCK)
    shared = min(base // KEY_BLOCK, blocks)
    leaves = int(plan.leaves[session])
    device = plan.base.device
    block = torch.arange(shared, blocks, device=device).repeat_interleave(leaves)
    block = torch.cat([torch.arange(shared, device=device), block])
    branch = torch.arange(leaves, device=device).repeat(blocks - shared)
    branch = torch.cat([torch.full((shared,), -1, device=device), branch])
    positions = block[:, None] * KEY_BLOCK + torch.arange(KEY_BLOCK, device=device)
    physical = positions
    there = positions < keys
    if plan.paths is not None:
        path = plan.paths[session].long()
        down = (positions - base).clamp(0, path.shape[1] - 1)
        node = path[branch.clamp(min=0)[:, None], down]
        physical = torch.where(positions < base, positions, base + node)
        there &= (positions < base) | (node >= 0)
    physical = physical.masked_fill(~there, 0)
    page = plan.page_tables[session].long()[physical // plan.page_size]
    slots = page * plan.page_size + physical % plan.page_size
    return slots.masked_fill(~there, -1), positions, branch


def attend_fast(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """As attention.paged_attention with numerics "fast": one SDPA call a session."""
    out = torch.zeros_like(query)
    device = query.device
    for session in range(plan.base.shape[0]):
        first, end = _rows(plan, session)
        if first == end:
            continue
        base = int(plan.base[session])
        physical = torch.arange(base + end - first, device=device)
        page = plan.page_tables[session].long()[physical // plan.page_size]
        slots = page * plan.page_size + physical % plan.page_size
        seen = torch.ones(end - first, base + end - first, dtype=torch.bool, device=device)
        seen[:, base:] = _ancestors(plan, session, first, end)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query[first:end].transpose(0, 1)[None],
            key_pool[slots].transpose(0, 1)[None],
            value_pool[slots].transpose(0, 1)[None],
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )
        out[first:end] = mixed[0].transpose(0, 1)
    return out


def _ancestors(plan: AttentionPlan, session: int, first: int, end: int) -> torch.Tensor:
    """Which rows of a session each row sees, itself included: bool [rows, rows]."""
    rows = end - first
    index = torch.arange(rows, device=plan.base.device)
    if plan.paths is None:
        return index[None, :] <= index[:, None]
    path = plan.paths[session].long()[plan.row_leaf[first:end].long()]
    steps = torch.arange(path.shape[1], device=path.device)
    own = (steps <= plan.row_depth[first:end, None]) & (path >= 0)
    return (own[:, :, None] & (path[:, :, None] == index)).any(1)


def _rows(plan: AttentionPlan, session: int) -> tuple[int, int]:
    return int(plan.row_start[session]), int(plan.row_start[session + 1])
