"""The predictor's inputs of a prompt: what the target says of its last position.

Knows the three kinds and where each comes from. Does not know sweeps or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drafter_service.model import DraftModel
from drafter_service.predictor import InputKind, expected_embedding, log_probabilities


class PromptReader:
    """Runs the target over prompts."""

    def __init__(self, model: Any, layers: Sequence[int], vocab_size: int) -> None:
        """`model`: the target as transformers has it; `layers`: the drafter's feature layers."""
        self._model, self._layers, self._vocab_size = model, tuple(layers), vocab_size
        self._body = model.get_decoder()
        self._head = model.get_output_embeddings()

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [n] -> raw features [layers * hidden] and logits float32 [vocabulary], both of the
        last position.
        """
        caught: dict[int, torch.Tensor] = {}
        hooks = [
            self._body.layers[layer].register_forward_hook(_keeper(caught, layer))
            for layer in self._layers
        ]
        before = self._model.config._attn_implementation
        self._model.set_attn_implementation("sdpa")
        try:
            ids = torch.tensor([list(tokens)], device=self._model.device)
            hidden = self._body(input_ids=ids, use_cache=False).last_hidden_state[0, -1:]
        finally:
            self._model.set_attn_implementation(before)  # the engine's attention reads pages
            for hook in hooks:
                hook.remove()
        logits = self._head(hidden)[0, : self._vocab_size].float()
        rows = [caught[layer][0, -1] for layer in self._layers]
        return torch.cat(rows) if rows else logits.new_empty(0), logits


@torch.no_grad()
def inputs_of(
    drafter: DraftModel,
    raw_features: torch.Tensor,
    logits: torch.Tensor | None,
    kinds: Sequence[InputKind],
) -> dict[str, torch.Tensor]:
    """One row of each kind. `raw_features` [layers * hidden] of the last prompt position; `logits`
    [vocabulary], needed for the kinds made of them. Log-probabilities are kept in float16: they
    are many, and 0.01 of a nat decides nothing.
    """
    found: dict[str, torch.Tensor] = {}
    for kind in kinds:
        if kind is InputKind.CONTEXT:
            row = raw_features.to(drafter.device, drafter.dtype)
            found[kind.value] = drafter.fuse(row[None])[0].float().cpu()
            continue
        assert logits is not None
        if kind is InputKind.LOGITS:
            row = log_probabilities(logits[None], logits.shape[0])[0]
            found[kind.value] = row.clamp(min=-6e4).to("cpu", torch.float16)
        else:
            assert drafter.embedding is not None
            row = expected_embedding(logits[None].to(drafter.device), drafter.embedding)[0]
            found[kind.value] = row.float().cpu()
    return found


def _keeper(caught: dict[int, torch.Tensor], layer: int) -> Any:
    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        caught[layer] = output[0] if isinstance(output, tuple) else output

    return keep
