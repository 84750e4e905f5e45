"""A draft model that nobody has trained: its config shaped after a target, its weights drawn.

Where training starts from, and what demo and tests use without a trained one. Does not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drafter_service.draft_config import DraftConfig, default_target_layers
from drafter_service.model import DraftModel


def raw_config_for(
    target_config: Any,
    *,
    block_size: int,
    num_layers: int,
    mask_token_id: int | None = None,
    target_layer_ids: tuple[int, ...] | None = None,
    branches: int = 1,
    dtype: torch.dtype = torch.float32,
    trained: bool = False,
) -> dict[str, Any]:
    """config.json, as published, of a drafter shaped after its target."""
    get = _getter(target_config)
    hidden, heads = int(get("hidden_size")), int(get("num_attention_heads"))
    depth, vocab = int(get("num_hidden_layers")), int(get("vocab_size"))
    if target_layer_ids is None:
        count = num_layers if depth >= num_layers + 4 else 1
        target_layer_ids = default_target_layers(count, depth)
    rope = get("rope_parameters") or {}
    own: dict[str, Any] = {"trained": trained}
    if branches > 1:
        own["branches"] = branches
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": block_size,
        "num_target_layers": depth,
        "dflash_config": {
            "mask_token_id": vocab - 1 if mask_token_id is None else mask_token_id,
            "target_layer_ids": list(target_layer_ids),
        },
        "hidden_size": hidden,
        "intermediate_size": int(get("intermediate_size")),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("num_key_value_heads") or heads),
        "head_dim": int(get("head_dim") or hidden // heads),
        "rms_norm_eps": float(get("rms_norm_eps") or 1e-6),
        "rope_theta": float(get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "rope_scaling": None,
        "max_position_embeddings": int(get("max_position_embeddings") or 32768),
        "vocab_size": vocab,
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * num_layers,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "draftwire": own,
    }


def random_model(config: DraftConfig, seed: int) -> DraftModel:
    """Weights N(0, 0.02), norms 1: the initialisation that training starts from. float32 on CPU."""
    model = DraftModel(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight") or "layernorm" in name:
                tensor.fill_(1.0)
            elif name.endswith(("branch_prior.weight", "path_head.out.weight", "sink_bias")):
                tensor.zero_()
            else:
                tensor.normal_(0.0, 0.02, generator=generator)
    return model


def _getter(config: Any) -> Any:
    if isinstance(config, Mapping):
        return config.get
    return lambda name: getattr(config, name, None)
