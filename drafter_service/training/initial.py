"""Where training starts: random weights, a checkpoint, or layers taken over from the target.

Knows the names of an ordinary decoder layer's weights. Does not know data or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from drafter_service.model import DraftModel, Layer
from drafter_service.training.errors import TrainingError


class NotAlike(TrainingError):
    """The target's layers have other shapes than the drafter's; says which weight."""


def take_layers(model: DraftModel, target: nn.Module, layers: Sequence[int]) -> None:
    """Start the draft layers as copies of the target's layers `layers`, one each.

    The layers' input gains are folded into their projections, so that fused features, which do not
    pass the layers' own norms, give the keys and values that the target's layers would see; the
    fuse starts by passing on the last captured layer. Head norms, which the target may lack, start
    at the size that queries and keys have for white input. Raises NotAlike.
    """
    decoder: Any = target.get_decoder()  # type: ignore[operator]
    config = model.config
    with torch.no_grad():
        for own, number in zip(model.layers, layers, strict=True):
            assert isinstance(own, Layer)
            theirs = decoder.layers[number]
            gain = theirs.input_layernorm.weight.float()
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = getattr(theirs.self_attn, name).weight.float() * gain
                _copy(getattr(own.self_attn, name).weight, weight, f"{number}.{name}")
            _copy(own.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight, f"{number}.o_proj")
            for name in ("gate_proj", "up_proj", "down_proj"):
                _copy(
                    getattr(own.mlp, name).weight,
                    getattr(theirs.mlp, name).weight,
                    f"{number}.{name}",
                )
            _copy(
                own.post_attention_layernorm.weight,
                theirs.post_attention_layernorm.weight,
                f"{number}.post_attention_layernorm",
            )
            own.input_layernorm.weight.fill_(1.0)
            for name in ("q", "k"):
                norm = getattr(own.self_attn, f"{name}_norm").weight
                given = getattr(theirs.self_attn, f"{name}_norm", None)
                if given is not None:
                    _copy(norm, given.weight, f"{number}.{name}_norm")
                else:
                    size = getattr(own.self_attn, f"{name}_proj").weight.pow(2).sum(1).mean().sqrt()
                    norm.fill_(float(size))
        if config.target_hidden_size == config.hidden_size:
            model.fc.weight.mul_(0.1)
            last = model.fc.weight[:, -config.hidden_size :]
            last.add_(torch.eye(config.hidden_size, dtype=last.dtype))
        _copy(model.norm.weight, decoder.norm.weight, "norm")


def take_base(model: DraftModel, base: DraftModel, layers: Sequence[int] = ()) -> None:
    """Start from a trained drafter of the same shapes, of all its layers or of those named, in
    their order. Branches and a path head that it lacks keep their own start. Raises NotAlike.
    """
    kept = list(layers) or range(base.config.num_layers)
    weights = {}
    for name, tensor in base.state_dict().items():
        stem, _, rest = name.removeprefix("layers.").partition(".")
        if not name.startswith("layers."):
            weights[name] = tensor
        elif int(stem) in kept:
            weights[f"layers.{list(kept).index(int(stem))}.{rest}"] = tensor
    missing, surplus = model.load_state_dict(weights, strict=False)
    left = [name for name in missing if not name.startswith(("branch_", "path_head"))]
    if left or surplus:
        raise NotAlike(f"the base checkpoint differs in {', '.join([*left, *surplus])}")


def _copy(own: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    if own.shape != theirs.shape:
        raise NotAlike(
            f"target layer {name} is {tuple(theirs.shape)}, the drafter's is {tuple(own.shape)}"
        )
    own.copy_(theirs)
