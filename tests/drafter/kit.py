"""Small drafters for tests, and DFlash written out once more, naively, to compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from drafter_service.cache import Context, ContextPool
from drafter_service.draft_config import DraftConfig, parse
from drafter_service.engine import Engine, EngineSettings, Lane, LaneLimits
from drafter_service.messages import DraftSampling, Features, Open, Outcome, Step, StepResult
from drafter_service.model import Block, DraftModel
from drafter_service.random_weights import random_model, raw_config_for
from drafter_service.tree import Part

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
        q = _linear(normed, w, p + "q_proj")
        k, v = _linear(source, w, p + "k_proj"), _linear(source, w, p + "v_proj")
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


def settings_for(model: DraftModel, **changes: Any) -> EngineSettings:
    """Engine settings for small tests."""
    values: dict[str, Any] = {
        "block_size": model.config.block_size,
        "max_nodes": 16,
        "parts": frozenset({Part.RANK_TREE, Part.NGRAM}),
        "cache_rows": 4096,
        "max_sessions": 32,
        "max_context": model.config.max_position_embeddings,
        "max_tokens": 4096,
    }
    return EngineSettings(**values | changes)


class Bench:
    """An engine stepped by hand, with lanes whose answers are collected."""

    def __init__(self, model: DraftModel, **changes: Any) -> None:
        self.engine = Engine(model, settings_for(model, **changes))
        self.free = self.engine.pool.free_rows

    def lane(self, **limits: Any) -> Lane:
        """A new lane."""
        values: dict[str, Any] = {"embedding_rows": VOCAB} | limits
        return self.engine.add_lane(LaneLimits(**values), lambda result: None)

    def step(self, *said: tuple[Lane, Step]) -> dict[Lane, StepResult]:
        """One step over what the lanes said; at most one answer a lane."""
        with torch.inference_mode():
            answers = self.engine.step(said)
        found = dict(answers)
        assert len(found) == len(answers)
        self.engine.pool.check_integrity()
        return found

    def assert_all_free(self) -> None:
        """Nothing is held any more."""
        assert self.engine.session_count == 0
        assert self.engine.pool.free_rows == self.free
        assert self.engine.pool.open_contexts == 0


def opened(
    session_id: int,
    length: int,
    *,
    sequence: int = 1,
    sampling: DraftSampling | None = None,
    width: int = HIDDEN,
    **changes: Any,
) -> Step:
    """A step that opens a session of `length` tokens with all its features."""
    tokens = torch.randint(
        0, VOCAB - 1, (length,), generator=torch.Generator().manual_seed(session_id)
    )
    message = Open(
        session_id=session_id,
        epoch=1,
        base=length - 1,
        token_ids=tokens.tolist(),
        prompt_tokens=length,
        sampling=sampling or DraftSampling(temperature=0.0),
        **changes,
    )
    rows = Features(session_id, 1, 0, features(length - 1, width, seed=session_id))
    return Step(sequence, opens=[message], features=[rows])


def told(
    session_id: int, previous: int, tokens: Sequence[int], *, sequence: int = 2, **changes: Any
) -> Step:
    """A step that reports an outcome with its features."""
    rows = features(len(tokens), seed=1000 + previous)
    base = previous + len(tokens)
    message = Outcome(session_id, 1, base, previous, list(tokens), rows, **changes)
    return Step(sequence, outcomes=[message])
