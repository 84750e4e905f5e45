"""Linear layers whose weights are laid out once for oneDNN: what a CPU does with few rows.

Knows: fp32 weights on a CPU. A step of few rows is bound by reading the weights, and oneDNN reads
its own layout several times as fast as the ordinary one. Does not know: which layers, or whether
bits matter (the verifier compares them before it uses this).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Product = Callable[[torch.Tensor], torch.Tensor]
"""Rows [..., in] to rows [..., out] of one linear layer."""

_LAID_OUT_FOR = 16  # rows: what oneDNN is told to expect; it decides how weights are blocked


def available(weight: torch.Tensor) -> bool:
    """Whether oneDNN can take it: fp32 on a CPU. Other types go through oneDNN anyway."""
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and weight.device.type == "cpu" and weight.dtype is torch.float32


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """The weights [out, in] in oneDNN's layout, a copy; `to_dense` gives the same bits back."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _LAID_OUT_FOR)
    return packed


def onednn(packed: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
    """The layer of these weights (of `laid_out`) and bias [out]."""

    def product(rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")  # type: ignore[no-any-return]

    return product


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """All of `model`, itself included."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def pack(model: nn.Module, *, replaced: bool) -> None:
    """Lay the weights of every linear layer of `model` out for oneDNN, for good.

    `replaced`: the new ones take the place of the old ones (`is_mkldnn`; `to_dense` gives the old
    bits), so that no memory is used twice, unless they are another module's too, as those of a head
    tied to the embedding.
    """
    shared = {
        weight.data_ptr()
        for module in model.modules()
        if not isinstance(module, nn.Linear)
        for weight in module.parameters(recurse=False)
    }
    for layer in linear_layers(model):
        packed = laid_out(layer.weight)
        layer.forward = onednn(packed, layer.bias)  # type: ignore[assignment,method-assign]
        if replaced and layer.weight.data_ptr() not in shared:
            layer.weight = nn.Parameter(packed, requires_grad=False)
