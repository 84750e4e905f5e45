"""What a run starts from: the frozen target's matrices, and a draft model of the wanted shape.

Knows how a drafter's config follows from a target, and where its first weights come from. Does not
know training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drafter_service.checkpoint import load as load_checkpoint
from drafter_service.draft_config import parse
from drafter_service.model import DraftModel
from drafter_service.random_weights import random_model, raw_config_for
from drafter_service.training.initial import take_base, take_layers
from drafter_service.training.run_config import TrainConfig
from drafter_service.training.target import load_target
from draftwire.config import ConfigError


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """The parts of the target that training uses. `embedding` [rows, hidden], `head` the same or
    None if tied; `layers` are the captured ones.
    """

    model: Any
    identity: dict[str, Any]
    layers: tuple[int, ...]
    embedding: torch.Tensor
    head: torch.Tensor | None
    vocab_size: int

    @classmethod
    def load(cls, name: str, manifest: dict[str, Any]) -> FrozenTarget:
        """The target named, which must be the one the features are of. Raises ConfigError."""
        target = load_target(name, invariant=False)
        wanted = manifest["target"]
        if target.identity["weights_sha256"] != wanted["weights_sha256"]:
            raise ConfigError("--target", name, f"the target of the features, {wanted['name']}")
        model: Any = target.host.model
        embedding = model.get_input_embeddings().weight.detach()
        head = model.get_output_embeddings().weight.detach()
        return cls(
            model,
            target.identity,
            tuple(manifest["layers"]),
            embedding,
            None if head.data_ptr() == embedding.data_ptr() else head,
            target.vocab_size,
        )


def begin(config: TrainConfig, target: FrozenTarget) -> tuple[dict[str, Any], DraftModel]:
    """config.json and the model, float32 on the CPU, before the first step."""
    if config.base is not None:
        return _from_base(config, target)
    raw = raw_config_for(
        target.model.config.get_text_config(),
        block_size=config.block_size,
        num_layers=config.layers,
        mask_token_id=None if config.mask_token < 0 else config.mask_token,
        target_layer_ids=target.layers,
        branches=config.branches,
        dtype=torch.bfloat16,
        trained=True,
    )
    raw["draftwire"] |= own_facts(target) | _split(config)
    model = random_model(parse(raw), config.seed)
    if config.init == "target":
        depth = target.identity["num_layers"]
        take_layers(model, target.model, range(depth - config.layers, depth))
    return raw, model


def _from_base(config: TrainConfig, target: FrozenTarget) -> tuple[dict[str, Any], DraftModel]:
    assert config.base is not None
    base = load_checkpoint(config.base, device=torch.device("cpu"), dtype=torch.float32)
    raw = dict(base.raw_config)
    if base.config.target_layer_ids != target.layers:
        raise ConfigError("--base", config.base, f"a drafter of target layers {target.layers}")
    kept = tuple(int(text) for text in config.keep_layers)
    if kept:
        depth = base.config.num_layers
        if max(kept) >= depth or len(set(kept)) < len(kept):
            raise ConfigError(
                "--keep-layers", config.keep_layers, f"different layers below {depth}"
            )
        raw["num_hidden_layers"] = len(kept)
        if raw.get("layer_types"):
            raw["layer_types"] = [raw["layer_types"][number] for number in kept]
    # What the base was trained on is not held out any more: its split stays.
    own = _split(config) | dict(raw.get("draftwire") or {}) | own_facts(target) | {"trained": True}
    if config.branches > 1:
        own["branches"] = config.branches
    raw["draftwire"] = own
    raw.pop("torch_dtype", None)
    raw["dtype"] = "bfloat16"
    model = random_model(parse(raw), config.seed)
    take_base(model, base.model, kept)
    return raw, model


def _split(config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint remembers of the prompts that it was not trained on."""
    if not config.validation:
        return {}
    return {"held_out": {"share": config.validation, "seed": config.seed}}


def own_facts(target: FrozenTarget) -> dict[str, Any]:
    """What a checkpoint remembers of its target, so that another one is refused."""
    return {
        "tokenizer_sha256": target.identity["tokenizer_sha256"],
        "vocabulary_sha256": target.identity["vocabulary_sha256"],
    }
