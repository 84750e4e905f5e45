"""Small drafters for tests, and DFlash written out once more, naively, to compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from drafter_service.cache import Context, ContextPool
from drafter_service.draft_config import DraftConfig, parse
from drafter_service.model import Block, DraftModel
from drafter_service.random_weights import random_model, raw_config_for

VOCAB = 97
HIDDEN = 32
MASK = VOCAB - 1


def raw_config(**changes: Any) -> dict[str, Any]:
    """config.json of a drafter with two layers for a target of six; `None` removes a field."""
    target = {
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
    }
    raw = raw_config_for(target, block_size=6, num_layers=2, target_layer_ids=(1, 3, 4))
    raw.update(changes)
    return {name: value for name, value in raw.items() if value is not None}


def lively_model(raw: dict[str, Any], seed: int = 3) -> DraftModel:
    """Random weights large enough that attention and norms matter, with a target attached."""
    config = parse(raw)
    model = random_model(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):
                tensor.copy_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
            else:
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    model.eval().requires_grad_(False)
    embedding, head = target_matrices(config, seed)
    model.attach_target(embedding, head, vocab_size=config.vocab_size)
    return model


def target_matrices(config: DraftConfig, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and head of a target that goes with `config`."""
    generator = torch.Generator().manual_seed(seed + 1000)
    shape = (config.vocab_size, config.hidden_size)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def pool_for(model: DraftModel, rows: int = 1024) -> ContextPool:
    """A cache for `model`."""
    config = model.config
    return ContextPool(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rows=rows,
        dtype=model.dtype,
        device=model.device,
    )


def features(count: int, width: int = HIDDEN, seed: int = 0) -> torch.Tensor:
    """Feature rows [count, width]."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def open_context(
    model: DraftModel, pool: ContextPool, rows: torch.Tensor, pieces: Sequence[int] = ()
) -> Context:
    """A context with `rows` in it, added in pieces of the given sizes and then the rest."""
    context = pool.open(rows.shape[0] + 64)
    at = 0
    for size in [*pieces, rows.shape[0] - sum(pieces)]:
        model.extend(pool, [(context, rows[at : at + size])])
        at += size
    return context


def draft_logits(model: DraftModel, rows: torch.Tensor, anchor: int, size: int) -> torch.Tensor:
    """Logits of all slots of one block, [size, vocabulary]."""
    pool = pool_for(model)
    context = open_context(model, pool, rows)
    return model.logits(model.draft(pool, [Block(anchor, context, size)]))


def naive_logits(
    model: DraftModel, context: torch.Tensor, anchor: int, size: int, matrices: Any = None
) -> torch.Tensor:
    """Logits [size, vocabulary] of a block after context features [n, hidden], in float64.

    Written from the method's description: one sequence of context and block, a mask that says who
    sees whom, one head at a time. Shares no code with the model.
    """
    config = model.config
    w = {name: tensor.double() for name, tensor in model.state_dict().items()}
    embedding, head = (m.double() for m in matrices or target_matrices(config))
    n = context.shape[0]
    position = torch.arange(n + size, dtype=torch.float64)
    x = embedding[torch.tensor([anchor] + [config.mask_token_id] * (size - 1))] * config.input_scale
    c = context.double()
    group = config.num_heads // config.num_kv_heads
    for i, rule in enumerate(config.layers):
        p = f"layers.{i}.self_attn."
        normed = _norm(x, w[f"layers.{i}.input_layernorm.weight"], config)
        source = torch.cat([c, normed])  # the context is not normed
        q, k, v = (
            _linear(s, w, p + name) for s, name in zip((normed, source, source), _QKV, strict=True)
        )
        heads = []
        for h in range(config.num_heads):
            part = slice(h * config.head_dim, (h + 1) * config.head_dim)
            kv = slice((h // group) * config.head_dim, (h // group + 1) * config.head_dim)
            qh = _rope(_norm(q[:, part], w[p + "q_norm.weight"], config), position[n:], config)
            kh = _rope(_norm(k[:, kv], w[p + "k_norm.weight"], config), position, config)
            scores = qh @ kh.T / math.sqrt(config.head_dim)
            for a in range(size):
                for b in range(n + size):
                    distance = (n + a) - b
                    hidden = rule.causal and distance < 0
                    hidden |= rule.window is not None and abs(distance) >= rule.window
                    if hidden:
                        scores[a, b] = -torch.inf
            if config.attention_sink:
                sink = w[p + "attention_sink_bias"][h].expand(size, 1)
                scores = torch.cat([scores, sink], 1).softmax(-1)[:, :-1]
            else:
                scores = scores.softmax(-1)
            heads.append(scores @ v[:, kv])
        x = x + _linear(torch.cat(heads, 1), w, p + "o_proj")
        normed = _norm(x, w[f"layers.{i}.post_attention_layernorm.weight"], config)
        gate = _linear(normed, w, f"layers.{i}.mlp.gate_proj")
        up = _linear(normed, w, f"layers.{i}.mlp.up_proj")
        x = x + _linear(gate / (1 + torch.exp(-gate)) * up, w, f"layers.{i}.mlp.down_proj")
    logits = _norm(x, w["norm.weight"], config) @ head.T * config.output_scale
    if config.softcap is not None:
        logits = torch.tanh(logits / config.softcap) * config.softcap
    return logits


def _linear(x: torch.Tensor, w: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    out = x @ w[name + ".weight"].T
    return out + w[name + ".bias"] if name + ".bias" in w else out


def _norm(x: torch.Tensor, weight: torch.Tensor, config: DraftConfig) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight


def _rope(x: torch.Tensor, position: torch.Tensor, config: DraftConfig) -> torch.Tensor:
    half = config.head_dim // 2
    out = x.clone()
    for j in range(half):
        angle = position / config.rope.theta ** (2 * j / config.head_dim)
        a, b = x[:, j], x[:, j + half]
        out[:, j] = a * torch.cos(angle) - b * torch.sin(angle)
        out[:, j + half] = b * torch.cos(angle) + a * torch.sin(angle)
    return out
