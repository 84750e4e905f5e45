"""Attention over paged KV, registered with transformers' attention interface.

Knows: how to write this step's keys and values and how each query sums its keys. Does not know:
models, sessions, sampling.

Invariant mode (the default): a query's scores, its softmax and its weighted sum are taken in
logical order over blocks of BLOCK positions, in fp32, in matrix products whose shapes were shown at
start-up to give the same bits for a row whatever stands beside it (`numerics`). The maximum is
exact in any order; sums over blocks are added one after the other; masked keys add exact zeros.
Fast mode: one call of scaled_dot_product_attention over the gathered keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from verifier_service.cache import PagedStore
from verifier_service.packing import BLOCK, AttentionGroup, OwnTail, Packed, Tail

IMPLEMENTATION = "draftwire_paged"
Part = tuple[torch.Tensor, torch.Tensor]
"""Of one block: sum of weights [S, H_kv, R, G, 1], weighted values [S, H_kv, R, G, d]."""
_MIN_OWN_ROWS = 4  # query heads per KV head are padded to this in the rows' own products


@dataclass(slots=True)
class AttentionContext:
    """What the registered function needs besides what transformers passes: travels as a keyword
    argument of the forward."""

    store: PagedStore
    packed: Packed
    invariant: bool


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    draftwire: AttentionContext | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, N, d], key and value [1, H_kv, N, d] -> [1,
    N, H, d]."""
    if draftwire is None:
        raise RuntimeError(
            "draftwire_paged attention needs the keyword argument `draftwire` of the forward call"
        )
    if getattr(module, "sliding_window", None):
        raise RuntimeError("sliding-window attention layers are not served by draftwire_paged")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    store, packed = draftwire.store, draftwire.packed
    if packed.plan is not None:
        return _paged_kernels(query, key, value, scaling, layer, draftwire), None
    store.write_kv(layer, packed.write_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)  # [N, H, d]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    attend = attend_invariant if draftwire.invariant else attend_fast
    for group in packed.groups:
        result = attend(rows, store.keys[layer], store.values[layer], group, scale)
        out.index_copy_(0, group.targets, result.to(out.dtype))
    return out.unsqueeze(0), None


def _paged_kernels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    layer: int,
    context: AttentionContext,
) -> torch.Tensor:
    """The same on the device's kernels: new keys and values to their pages, then attention over
    them; flash-attn for chains where bits may differ."""
    from draftwire_kernels import attention_triton, flash, pages_triton

    plan = context.packed.plan
    assert plan is not None
    keys, values = context.store.keys[layer], context.store.values[layer]
    pages_triton.write_rows(
        key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, plan.slots
    )
    rows = query[0].transpose(0, 1)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    fast = not context.invariant and query.is_cuda and flash.takes(rows, plan)
    attend = flash.attend if fast else attention_triton.attend
    return attend(rows, keys, values, plan, scale).unsqueeze(0)


def attend_invariant(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: AttentionGroup,
    scale: float,
) -> torch.Tensor:
    """Attention of one group; query [N, H, d], keys and values [slots, H_kv, d] -> fp32 [real rows,
    H, d]."""
    count, rows = group.rows.shape
    heads, dim = query.shape[1:]
    kv_heads = keys.shape[1]
    per_kv = heads // kv_heads
    # [S, H_kv, R, G, d]: the query heads of a KV head side by side, so that they share one product.
    q = query.index_select(0, group.rows.reshape(-1)).float() * scale
    q = q.view(count, rows, kv_heads, per_kv, dim).permute(0, 2, 1, 3, 4).contiguous()
    shared = own = None
    if group.shared_slots.shape[1]:
        shared = _scores(q, keys, group.shared_slots, group.shared_hidden)
    if isinstance(group.tail, Tail):
        own = _scores(q, keys, group.tail.slots, group.tail.hidden)
    elif group.tail is not None:
        own = _own_scores(q, keys, group.tail)
    peak = shared.amax(-1, keepdim=True) if shared is not None else None  # [S, H_kv, R, G, 1]
    if own is not None:
        own_peak = own.amax(-1, keepdim=True)
        peak = own_peak if peak is None else torch.maximum(peak, own_peak)
    assert peak is not None
    peak = peak.clamp_min(torch.finfo(torch.float32).min)  # a padding row sees no key at all
    parts: list[Part] = []
    if shared is not None:
        parts += _shared_sums(shared.sub_(peak).exp_(), values, group.shared_slots)
    if own is not None:
        own = own.sub_(peak).exp_()
        if isinstance(group.tail, Tail):
            parts += _tail_sums(own, values, group.tail)
        elif group.tail is not None:
            parts += _own_sums(own, values, group.tail)
    total, mixed = parts[0]
    for part_total, part in parts[1:]:
        total, mixed = total + part_total, mixed + part
    out = (mixed / total).permute(0, 2, 1, 3, 4).reshape(count * rows, heads, dim)
    return out.index_select(0, group.real_rows)


def _scores(
    q: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Scores [S, H_kv, R, G, L] against the keys [S, L] that all rows of a session share; -inf
    where a row must not look."""
    count, kv_heads, rows, per_kv, dim = q.shape
    length = slots.shape[1]
    k = keys.index_select(0, slots.reshape(-1)).float().view(count, length, kv_heads, dim)
    k = k.permute(0, 2, 3, 1).reshape(count * kv_heads, dim, length)
    scores = torch.bmm(q.view(count * kv_heads, rows * per_kv, dim), k).view(
        count, kv_heads, rows, per_kv, length
    )
    return scores.masked_fill_(hidden[:, None, :, None, :], float("-inf"))


def _own_scores(q: torch.Tensor, keys: torch.Tensor, tail: OwnTail) -> torch.Tensor:
    """Scores [S, H_kv, R, G, T] against each row's own keys, in logical order."""
    count, kv_heads, rows, per_kv, dim = q.shape
    width = tail.slots.shape[2]
    k = keys.index_select(0, tail.slots.reshape(-1)).float().view(count, rows, width, kv_heads, dim)
    k = k.permute(0, 3, 1, 4, 2).reshape(count * kv_heads * rows, dim, width)
    scores = torch.bmm(_pad_heads(q.view(count * kv_heads * rows, per_kv, dim)), k)[:, :per_kv]
    return scores.reshape(count, kv_heads, rows, per_kv, width).masked_fill(
        tail.hidden[:, None, :, None, :], float("-inf")
    )


def _shared_sums(weights: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> list[Part]:
    """One part a block."""
    count, kv_heads, rows, per_kv, length = weights.shape
    blocks = length // BLOCK
    v = values.index_select(0, slots.reshape(-1)).float().view(count, blocks, BLOCK, kv_heads, -1)
    v = v.permute(0, 3, 1, 2, 4).reshape(count * kv_heads * blocks, BLOCK, -1)
    w = weights.view(count, kv_heads, rows * per_kv, blocks, BLOCK).transpose(2, 3).contiguous()
    parts = torch.bmm(w.view(count * kv_heads * blocks, rows * per_kv, BLOCK), v)
    parts = parts.view(count, kv_heads, blocks, rows, per_kv, -1)
    totals = w.view(count, kv_heads, blocks, rows, per_kv, BLOCK).sum(-1, keepdim=True)
    return [(totals[:, :, b], parts[:, :, b]) for b in range(blocks)]


def _tail_sums(weights: torch.Tensor, values: torch.Tensor, tail: Tail) -> list[Part]:
    """One part a logical block. Keys off a row's path have the weight 0, which leaves the bits of a
    weighted sum alone (shown at start-up); the sums of weights are taken in logical order."""
    count, kv_heads, rows, per_kv, width = weights.shape
    blocks = tail.order.shape[2] // BLOCK
    v = values.index_select(0, tail.slots.reshape(-1)).float().view(count, width, kv_heads, -1)
    v = v.transpose(1, 2).reshape(count * kv_heads, width, -1)
    order = tail.order[:, None, :, None, :].expand(count, kv_heads, rows, per_kv, -1)
    logical = weights.gather(-1, order).masked_fill_(tail.beyond[:, None, :, None, :], 0)
    totals = logical.view(count, kv_heads, rows, per_kv, blocks, BLOCK).sum(-1, keepdim=True)
    parts: list[Part] = []
    for block in range(blocks):
        w = weights
        if blocks > 1:
            w = w.masked_fill(tail.blocks[:, None, None, None, :] != block, 0)
        mixed = torch.bmm(w.view(count * kv_heads, rows * per_kv, width), v)
        parts.append((totals[..., block, :], mixed.view(count, kv_heads, rows, per_kv, -1)))
    return parts


def _own_sums(weights: torch.Tensor, values: torch.Tensor, tail: OwnTail) -> list[Part]:
    count, kv_heads, rows, per_kv, width = weights.shape
    blocks = width // BLOCK
    v = (
        values.index_select(0, tail.slots.reshape(-1))
        .float()
        .view(count, rows, blocks, BLOCK, kv_heads, -1)
    )
    v = v.permute(0, 4, 1, 2, 3, 5).reshape(count * kv_heads * rows * blocks, BLOCK, -1)
    w = weights.view(count, kv_heads, rows, per_kv, blocks, BLOCK).transpose(3, 4).contiguous()
    parts = torch.bmm(_pad_heads(w.view(count * kv_heads * rows * blocks, per_kv, BLOCK)), v)[
        :, :per_kv
    ]
    parts = parts.reshape(count, kv_heads, rows, blocks, per_kv, -1)
    totals = w.sum(-1, keepdim=True)
    return [(totals[:, :, :, b], parts[:, :, :, b]) for b in range(blocks)]


def _pad_heads(rows: torch.Tensor) -> torch.Tensor:
    """Pad [B, G, n] to a multiple of _MIN_OWN_ROWS rows: products of fewer rows take another code
    path on some processors."""
    missing = -rows.shape[1] % _MIN_OWN_ROWS
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def attend_fast(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: AttentionGroup,
    scale: float,
) -> torch.Tensor:
    """As attend_invariant, by scaled_dot_product_attention; bits depend on the batch."""
    count, rows = group.rows.shape
    heads, dim = query.shape[1:]
    q = query.index_select(0, group.rows.reshape(-1)).view(count, rows, heads, dim)
    slots = group.shared_slots.reshape(-1)
    k = keys.index_select(0, slots).view(count, -1, *keys.shape[1:])
    v = values.index_select(0, slots).view(count, -1, *values.shape[1:])
    seen = group.visible
    if seen is None:
        # Padding rows see key 0, so that their softmax is finite; they are dropped below.
        last = group.positions.clamp_min(0)
        seen = torch.arange(k.shape[1], device=q.device) <= last[:, :, None]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2).reshape(count * rows, heads, dim).index_select(0, group.real_rows)


def register() -> None:
    """Make `attn_implementation="draftwire_paged"` known to transformers; no mask is made for
    it."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, paged_attention)
