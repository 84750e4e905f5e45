"""The draft network over a training batch: all blocks of all documents in one pass.

Uses the layers of `drafter_service.model.DraftModel` and nothing of its cache, so that what is
trained is what is served. Does not know losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from drafter_service.draft_config import DraftConfig, LayerAttention
from drafter_service.model import DraftModel, Layer
from drafter_service.rope import RotaryTable
from drafter_service.training import flex
from drafter_service.training.blocks import Batch, slot_positions, slot_tokens, visible


class BlockNetwork(nn.Module):
    """A draft model and the frozen embedding it is trained with. The parameters are the model's."""

    def __init__(
        self, model: DraftModel, embedding: torch.Tensor, *, use_flex: bool = False
    ) -> None:
        """embedding [rows, hidden]: the target's, frozen. `use_flex`: FlexAttention instead of a
        dense mask, in layers without sinks.
        """
        super().__init__()
        self.model, self.use_flex = model, use_flex
        self.embedding: torch.Tensor
        self.register_buffer("embedding", embedding, persistent=False)
        self._rotary: RotaryTable | None = None

    def forward(self, batch: Batch) -> torch.Tensor:
        """The normed hidden state of every slot, anchors included: [docs * blocks * size, hidden],
        contiguous.
        """
        config = self.model.config
        docs, longest = batch.tokens.shape
        x = F.embedding(slot_tokens(batch, config.mask_token_id), self.embedding)
        x = (x * config.input_scale).view(-1, config.hidden_size)
        # Only rows of documents go through the products; padding is put back for attention.
        used = torch.arange(longest, device=x.device)[None, :] < batch.lengths[:, None]
        context = self.model.fuse(batch.features[used].to(self.model.dtype))
        rotary = self._table(x.device)
        positions = torch.arange(longest, device=x.device).expand(docs, -1)[used]
        of_context = rotary.at(positions, x.dtype)
        of_slots = rotary.at(slot_positions(batch).reshape(-1), x.dtype)
        masks: dict[LayerAttention, torch.Tensor] = {}
        flex_masks: dict[LayerAttention, Any] = {}
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            rule = config.layers[index]
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            own_k, own_v = attention.keys_values(normed, *of_slots)
            past_k, past_v = attention.keys_values(context, *of_context)
            keys = torch.cat([_padded(past_k, used), _split(own_k, docs)], dim=2)
            values = torch.cat([_padded(past_v, used), _split(own_v, docs)], dim=2)
            queries = _split(attention.queries(normed, *of_slots).transpose(0, 1), docs)
            if self.use_flex and attention.sink is None:
                if rule not in flex_masks:
                    flex_masks[rule] = flex.block_mask(batch, rule)
                mixed = _joined(flex.attend(queries, keys, values, flex_masks[rule]))
            else:
                if rule not in masks:
                    masks[rule] = visible(batch, rule)[:, None]
                mixed = _joined(_attend(queries, keys, values, masks[rule], attention.sink))
            x = x + attention.o_proj(mixed)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        hidden: torch.Tensor = self.model.norm(x)
        return hidden.contiguous()

    def _table(self, device: torch.device) -> RotaryTable:
        if self._rotary is None or self._rotary.frequencies.device != device:
            config: DraftConfig = self.model.config
            self._rotary = RotaryTable(config.rope, config.head_dim, device)
        return self._rotary


def _split(x: torch.Tensor, docs: int) -> torch.Tensor:
    """[heads, docs * n, head_dim] -> [docs, heads, n, head_dim]."""
    return x.view(x.shape[0], docs, -1, x.shape[2]).transpose(0, 1)


def _padded(x: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """[heads, rows, head_dim] of the used places -> [docs, heads, longest, head_dim]."""
    out = x.new_zeros(used.shape[0], used.shape[1], x.shape[0], x.shape[2])
    out[used] = x.transpose(0, 1)
    return out.transpose(1, 2)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """queries [docs, heads, n, d]; keys, values [docs, kv_heads, m, d]; mask [docs, 1, n, m].
    Returns [docs, heads, n, d].
    """
    docs, heads, rows, width = queries.shape
    group = heads // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    if sink is None:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    scores = (queries @ keys.transpose(-1, -2)).float() * width**-0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    # A sink is one more column of the softmax that carries no value.
    column = sink.float().view(1, -1, 1, 1).expand(docs, -1, rows, 1)
    weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    return weights.to(values.dtype) @ values


def _joined(x: torch.Tensor) -> torch.Tensor:
    """[docs, heads, n, d] -> [docs * n, heads * d]."""
    docs, heads, rows, width = x.shape
    return x.transpose(1, 2).reshape(docs * rows, heads * width)
