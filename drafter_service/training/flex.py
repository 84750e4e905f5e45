"""The block mask for FlexAttention: as `blocks.visible`, without a mask in memory.

Worth it on GPUs with long documents and many blocks, where a dense mask is gigabytes. Does not know
the network.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from drafter_service.draft_config import LayerAttention
from drafter_service.training.blocks import Batch

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mask_mod(batch: Batch, rule: LayerAttention) -> MaskMod:
    """Whether slot `q` of document `b` sees key `k`: context first, then all block slots."""
    size, longest = batch.size, batch.tokens.shape[1]
    anchors = batch.anchors

    def seen(
        b: torch.Tensor, _head: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        block, slot = q // size, q % size
        anchor = anchors[b, block]
        other, offset = (k - longest) // size, (k - longest) % size
        before = (k < longest) & (k < anchor)
        own = (k >= longest) & (other == block)
        if rule.causal:
            own = own & (offset <= slot)
        if rule.window is not None:
            before = before & (anchor + slot - k < rule.window)
            own = own & (slot - offset < rule.window) & (offset - slot < rule.window)
        return before | own

    return seen


def block_mask(batch: Batch, rule: LayerAttention) -> BlockMask:
    """The mask of a batch, to be shared by all layers with the same rule."""
    docs, blocks = batch.anchors.shape
    rows = blocks * batch.size
    keys = batch.tokens.shape[1] + rows
    device = str(batch.anchors.device)
    return create_block_mask(mask_mod(batch, rule), docs, None, rows, keys, device=device)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: BlockMask
) -> torch.Tensor:
    """queries [docs, heads, n, d]; keys, values [docs, kv_heads, m, d] -> [docs, heads, n, d]."""
    kernel = _compiled() if queries.is_cuda else flex_attention
    grouped = queries.shape[1] != keys.shape[1]
    mixed: torch.Tensor = kernel(queries, keys, values, block_mask=mask, enable_gqa=grouped)
    return mixed


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
