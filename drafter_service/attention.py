"""Attention of drafted blocks over `[context | block]`, for many sessions of unequal length at
once.

Two ways with one result: `by_views` reads each session's extent in place (best on CPU: nothing is
copied), `padded` gathers all sessions into one call (best on GPU: one launch a layer). Query heads
that share a key head are folded into query rows, so grouped heads cost no copy of keys. Does not
know projections, rope or sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from drafter_service.draft_config import LayerAttention


@dataclass(frozen=True, slots=True)
class Span:
    """One session's part of the batch: `size` block rows from `first` on; its keys are pool rows
    `start` .. `start + context + size`, positions 0 first."""

    first: int
    size: int
    start: int
    context: int


def visible(
    size: int, keys: int, first_key: int, rule: LayerAttention, device: torch.device
) -> torch.Tensor:
    """bool [size, keys]: what the last `size` of `first_key + keys` positions see among the last
    `keys` of them.
    """
    query = (first_key + keys - size + torch.arange(size, device=device))[:, None]
    key = (first_key + torch.arange(keys, device=device))[None, :]
    seen = torch.ones(size, keys, dtype=torch.bool, device=device)
    if rule.causal:
        seen &= key <= query
    if rule.window is not None:
        seen &= query - key < rule.window
        seen &= key - query < rule.window
    return seen


def by_views(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: Sequence[Span],
    rule: LayerAttention,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [rows, heads, head_dim]; keys, values [kv_heads, pool rows, head_dim]; sink [heads] or
    None. Returns [rows, heads * head_dim].
    """
    _, heads, head_dim = q.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    out = q.new_empty(q.shape[0], heads * head_dim)
    for span in spans:
        total = span.context + span.size
        skipped = 0
        if rule.window is not None:
            skipped = max(0, span.context - rule.window + 1)
        view = slice(span.start + skipped, span.start + total)
        mask = None
        if not rule.sees_everything:
            mask = visible(span.size, total - skipped, skipped, rule, q.device).repeat(group, 1)
        rows = slice(span.first, span.first + span.size)
        queries = q[rows].view(span.size, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        queries = queries.reshape(kv_heads, group * span.size, head_dim)
        mixed = _attend(
            queries, keys[:, view], values[:, view], mask, _folded_sink(sink, kv_heads, span.size)
        )
        mixed = mixed.view(kv_heads, group, span.size, head_dim).permute(2, 0, 1, 3)
        out[rows] = mixed.reshape(span.size, heads * head_dim)
    return out


class PaddedPlan:
    """Indices and masks that all layers of one step share."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.size = max(span.size for span in spans)
        self.keys = max(span.context + span.size for span in spans)
        sizes = torch.tensor([span.size for span in spans], device=device)[:, None]
        firsts = torch.tensor([span.first for span in spans], device=device)[:, None]
        contexts = torch.tensor([span.context for span in spans], device=device)[:, None]
        starts = torch.tensor([span.start for span in spans], device=device)[:, None]
        slot = torch.arange(self.size, device=device)[None, :]
        self.key = torch.arange(self.keys, device=device)[None, :]
        self.slot_used = slot < sizes
        # Unused slots and keys repeat row 0 and are masked or dropped.
        self.query_rows = (firsts + slot) * self.slot_used
        self.key_used = self.key < contexts + sizes
        self.key_rows = starts + self.key * self.key_used
        self.query_position = contexts + slot
        self._masks: dict[LayerAttention, torch.Tensor] = {}

    def mask(self, rule: LayerAttention) -> torch.Tensor:
        """bool [sessions, 1, size, keys]; a padded query sees what is there, so that no row is
        empty.
        """
        if rule not in self._masks:
            seen = self.key_used[:, None, :].expand(-1, self.size, -1)
            query, key = self.query_position[:, :, None], self.key[:, None, :]
            if rule.causal:
                seen = seen & (key <= query)
            if rule.window is not None:
                seen = seen & (query - key < rule.window) & (key - query < rule.window)
            seen = seen | (~self.slot_used[:, :, None] & self.key_used[:, None, :])
            self._masks[rule] = seen[:, None]
        return self._masks[rule]


def padded(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: PaddedPlan,
    rule: LayerAttention,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `by_views`, in one call."""
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    sessions = plan.query_rows.shape[0]
    queries = q[plan.query_rows].view(sessions, plan.size, kv_heads, group, head_dim)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(
        sessions, kv_heads, group * plan.size, head_dim
    )
    gathered_k = keys[:, plan.key_rows].transpose(0, 1)
    gathered_v = values[:, plan.key_rows].transpose(0, 1)
    mask = plan.mask(rule).repeat(1, 1, group, 1)
    mixed = _attend(queries, gathered_k, gathered_v, mask, _folded_sink(sink, kv_heads, plan.size))
    mixed = mixed.view(sessions, kv_heads, group, plan.size, head_dim).permute(0, 3, 1, 2, 4)
    mixed = mixed.reshape(sessions, plan.size, heads * head_dim)
    out = q.new_empty(rows, heads * head_dim)
    out[plan.query_rows[plan.slot_used]] = mixed[plan.slot_used]
    return out


def _folded_sink(sink: torch.Tensor | None, kv_heads: int, size: int) -> torch.Tensor | None:
    """[heads] -> [kv_heads, group * size, 1], as query heads are folded."""
    if sink is None:
        return None
    return sink.view(kv_heads, -1, 1).expand(-1, -1, size).reshape(kv_heads, -1, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    if sink is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    # A sink is one more column of the softmax that carries no value.
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    column = sink.float().expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    return weights.to(v.dtype) @ v
