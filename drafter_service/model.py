"""DFlash in plain torch: fuses target features, keeps their keys and values, drafts blocks in one
pass.

The parameters bear the published tensor names, so `state_dict()` is the public format. Embedding
and LM head are the target's and are given, not owned. Rows of all sessions lie one after another in
flat [rows, hidden] tensors; only attention looks at sessions apart. Does not know sessions' states,
sampling, trees or the wire.

Slot j of a block whose anchor is at position p predicts the token AT p + j (same position, not the
next one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from drafter_service import attention
from drafter_service.cache import Context, ContextPool
from drafter_service.draft_config import DraftConfig
from drafter_service.pathhead import PathHead
from drafter_service.rope import RotaryTable
from drafter_service.sublayers import Attention, Mlp, Norm
from draftwire_kernels import products
from draftwire_kernels.products import Product

HEAD_ROWS = 256  # rows of logits made at a time, which bounds memory: 256 x 151,936 fp32 are 156 MB


class Layer(nn.Module):
    """One draft layer; the context enters attention as keys and values only."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class Block:
    """One session's block: anchor token, its context (all positions before the anchor) and size,
    anchor included.
    """

    anchor: int
    context: Context
    size: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of each slot: ids int64 [slots, count], best first, and the logits each
    branch gives them, float32 [slots, branches, count].
    """

    ids: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Added to the logits of some ids in slots `first` .. `end`."""

    first: int
    end: int
    ids: torch.Tensor
    values: torch.Tensor


class DraftModel(nn.Module):
    """The drafter's network. Call `attach_target` before drafting."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.raw_feature_size, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in config.layers)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        if config.branches > 1:
            size, count = config.hidden_size, config.branches
            self.branch_expander = nn.Linear(size, count * size, bias=False)
            self.branch_prior = nn.Linear(size, count, bias=False)
        self.path_head: PathHead | None = None
        if config.path_rank:
            self.path_head = PathHead(config.hidden_size, config.path_rank, config.rms_norm_eps)
        self._embedding: torch.Tensor | None = None
        self._head: torch.Tensor | None = None
        self._full_head: torch.Tensor | None = None
        self._head_product: Product | None = None  # with `_head`, once it is laid out
        self._laid_out = False
        self._mask_embedding: torch.Tensor | None = None
        self._rotary: RotaryTable | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the cache."""
        return self.norm.weight.dtype

    @property
    def has_target(self) -> bool:
        """Whether embedding and head were given."""
        return self._head is not None

    @property
    def embedding(self) -> torch.Tensor | None:
        """The target's embedding [rows, hidden], if it was given."""
        return self._embedding

    def attach_target(
        self,
        embedding: torch.Tensor,
        head: torch.Tensor | None,
        *,
        vocab_size: int,
        mask_embedding: torch.Tensor | None = None,
    ) -> None:
        """Give the target's matrices, each [rows, hidden]; head None: tied. Rows of the head from
        `vocab_size` on are padding and never proposed.
        """
        same = embedding if head is None else head
        self._embedding = embedding.to(self.device, self.dtype)
        self._full_head = self._embedding if same is embedding else same.to(self.device, self.dtype)
        self._head_product = None
        self.limit_vocabulary(vocab_size)
        if mask_embedding is not None:
            self._mask_embedding = mask_embedding.to(self.device, self.dtype)

    def limit_vocabulary(self, vocab_size: int) -> None:
        """Never propose ids from `vocab_size` on."""
        if self._full_head is None:
            return
        before, self._head = self.vocabulary, self._full_head[:vocab_size]
        if self._laid_out and (self._head_product is None or before != self.vocabulary):
            self._head_product = products.onednn(products.laid_out(self._head))

    def lay_out(self) -> None:
        """Lay all weights out for drafting on a CPU, where that is quicker: those there are, for
        good, and a target's head whenever one is attached. Nothing can be trained after it.
        """
        if self._laid_out or not products.available(self.norm.weight):
            return
        products.pack(self, replaced=False)
        self._laid_out = True
        if self._head is not None:
            self._head_product = products.onednn(products.laid_out(self._head))

    @property
    def vocabulary(self) -> int:
        """Ids that may be proposed; 0 without a target."""
        return 0 if self._head is None else self._head.shape[0]

    def rotary(self) -> RotaryTable:
        """The rope table on the model's device."""
        if self._rotary is None or self._rotary.frequencies.device != self.device:
            self._rotary = RotaryTable(self.config.rope, self.config.head_dim, self.device)
        return self._rotary

    def fuse(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw features [rows, layers * target hidden] -> context features [rows, hidden]."""
        fused: torch.Tensor = self.hidden_norm(self.fc(raw))
        return fused

    def extend(self, pool: ContextPool, parts: Sequence[tuple[Context, torch.Tensor]]) -> None:
        """Append features [rows, hidden] to each context: keys and values of every layer, computed
        once for ever. The contexts must have room.
        """
        parts = [(context, rows) for context, rows in parts if rows.shape[0]]
        if not parts:
            return
        features = parts[0][1] if len(parts) == 1 else torch.cat([rows for _, rows in parts])
        features = features.to(self.device, self.dtype)
        positions = _ranges([(c.length, rows.shape[0]) for c, rows in parts], self.device)
        pool_rows = _ranges([(c.start + c.length, rows.shape[0]) for c, rows in parts], self.device)
        cos, sin = self.rotary().at(positions, self.dtype)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            pool.write(index, pool_rows, *layer.self_attn.keys_values(features, cos, sin))
        for context, rows in parts:
            context.length += rows.shape[0]

    def draft(self, pool: ContextPool, blocks: Sequence[Block]) -> torch.Tensor:
        """One pass over the blocks of all sessions. Returns the normed hidden state of every slot,
        anchors included, [sum of sizes, hidden]. The contexts must have room for their blocks;
        their lengths stay as they are.
        """
        device, dtype = self.device, self.dtype
        spans, first = [], 0
        for block in blocks:
            spans.append(
                attention.Span(first, block.size, block.context.start, block.context.length)
            )
            first += block.size
        positions = _ranges([(s.context, s.size) for s in spans], device)
        pool_rows = _ranges([(s.start + s.context, s.size) for s in spans], device)
        cos, sin = self.rotary().at(positions, dtype)
        plan = (
            attention.PaddedPlan(spans, device)
            if device.type == "cuda" and len(spans) > 1
            else None
        )
        x = self._embed(blocks)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            attn, rule = layer.self_attn, self.config.layers[index]
            normed = layer.input_layernorm(x)
            pool.write(index, pool_rows, *attn.keys_values(normed, cos, sin))
            q, keys, values = attn.queries(normed, cos, sin), pool.keys[index], pool.values[index]
            sink = attn.sink
            if plan is None:
                mixed = attention.by_views(q, keys, values, spans, rule, sink)
            else:
                mixed = attention.padded(q, keys, values, plan, rule, sink)
            x = x + attn.o_proj(mixed)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out: torch.Tensor = self.norm(x)
        return out

    def expand(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows * branches, hidden]: each row once per branch, branches of a row
        side by side.
        """
        if self.config.branches == 1:
            return hidden
        offsets = self.branch_expander(hidden).view(hidden.shape[0], self.config.branches, -1)
        expanded: torch.Tensor = (hidden[:, None] + offsets).reshape(-1, hidden.shape[-1])
        return expanded

    def log_prior(
        self, anchors: torch.Tensor, temperature: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states of anchor slots [n, hidden] -> log prior over the branches, float32 [n,
        branches], tempered by the config and by `temperature` [n], if given.
        """
        if self.config.branches == 1:
            return torch.zeros(anchors.shape[0], 1, device=anchors.device)
        logits = self.branch_prior(anchors).float() / self.config.prior_temperature
        if temperature is not None:
            logits = logits / temperature[:, None]
        return torch.log_softmax(logits, dim=-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary], in the model's type. The rows must be contiguous: a
        strided input makes this matmul many times slower on CPU.
        """
        if self._head is None:
            raise RuntimeError("no target is attached")
        hidden = hidden.contiguous()
        if self._head_product is None:
            return self.shaped(F.linear(hidden, self._head))
        return self.shaped(self._head_product(hidden))

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """Products with the head as logits: the target's scale and soft cap applied."""
        if self.config.output_scale != 1.0:
            logits = logits * self.config.output_scale
        if self.config.softcap is not None:
            logits = torch.tanh(logits / self.config.softcap) * self.config.softcap
        return logits

    def candidates(
        self,
        hidden: torch.Tensor,
        count: int,
        log_prior: torch.Tensor | None = None,
        biases: Sequence[LogitBias] = (),
    ) -> Candidates:
        """The `count` likeliest tokens of each slot. hidden [slots * branches, hidden], branches of
        a slot side by side; log_prior float32 [slots, branches], None for one branch. With several,
        those are chosen that some branch, weighed by its prior, finds likely.
        """
        branches = 1 if log_prior is None else log_prior.shape[1]
        step = max(1, HEAD_ROWS // branches)
        parts = []
        for first in range(0, hidden.shape[0] // branches, step):
            logits = self.logits(hidden[first * branches : (first + step) * branches])
            logits = logits.view(-1, branches, logits.shape[1])
            for bias in biases:
                low, high = max(bias.first, first), min(bias.end, first + logits.shape[0])
                if low < high:
                    logits[low - first : high - first, :, bias.ids] += bias.values.to(logits.dtype)
            pooled = logits[:, 0]
            if log_prior is not None:
                weights = log_prior[first : first + step].to(logits.dtype)
                pooled = (logits + weights[:, :, None]).amax(dim=1)
            values, ids = torch.topk(pooled, min(count, logits.shape[2]), dim=-1)
            if log_prior is None:
                parts.append((ids, values[:, None].float()))
            else:
                wanted = ids[:, None].expand(-1, branches, -1)
                parts.append((ids, logits.gather(2, wanted).float()))
        if len(parts) == 1:
            return Candidates(*parts[0])
        return Candidates(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings of token ids int64 [rows]: [rows, hidden]."""
        if self._embedding is None:
            raise RuntimeError("no target is attached")
        return F.embedding(tokens, self._embedding)

    def head_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the head of token ids int64 [rows]: [rows, hidden]."""
        if self._head is None:
            raise RuntimeError("no target is attached")
        return F.embedding(tokens, self._head)

    def _embed(self, blocks: Sequence[Block]) -> torch.Tensor:
        if self._embedding is None:
            raise RuntimeError("no target is attached")
        mask = self.config.mask_token_id
        ids = [token for block in blocks for token in (block.anchor, *([mask] * (block.size - 1)))]
        x = F.embedding(torch.tensor(ids, device=self.device), self._embedding)
        if self._mask_embedding is not None:
            masked = torch.tensor([token == mask for token in ids], device=self.device)
            x = torch.where(masked[:, None], self._mask_embedding, x)
        return x * self.config.input_scale if self.config.input_scale != 1.0 else x


def _ranges(parts: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """(first, count) pairs -> int64 of all the numbers, one range after another."""
    if len(parts) == 1:
        first, count = parts[0]
        return torch.arange(first, first + count, device=device)
    return torch.cat([torch.arange(first, first + count) for first, count in parts]).to(device)
