"""The target's embedding and head, read from its files without loading the rest of it.

Knows safetensors folders and hub ids. Does not know the draft model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafter_service.config_fields import object_in, read_object
from drafter_service.draft_config import CheckpointError
from drafter_service.weights_file import weights_file
from draftwire.models import ModelSource, resolve, unpacked

_EMBEDDING = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
)
_HEAD = ("lm_head.weight", "model.lm_head.weight")


@dataclass(frozen=True, slots=True)
class TargetMatrices:
    """Each [rows, hidden]; head None: tied to the embedding."""

    embedding: torch.Tensor
    head: torch.Tensor | None


def read_matrices(name: str) -> TargetMatrices:
    """Embedding and head of a target. Raises CheckpointError, or InvalidArgument for a name that
    leads nowhere.
    """
    source = unpacked(resolve(name))
    folder = Path(source.location) if source.is_local else _fetched(source.location)
    where = _index(folder)
    embedding = _tensor(folder, where, _EMBEDDING)
    if embedding is None:
        raise CheckpointError("target", source.name, f"a model with one of {', '.join(_EMBEDDING)}")
    config = read_object(folder, "config.json")
    tied = bool(config.get("tie_word_embeddings", False))
    head = None if tied else _tensor(folder, where, _HEAD)
    if head is None and not tied:
        raise CheckpointError(
            "target", source.name, f"a model with tied embeddings or one of {', '.join(_HEAD)}"
        )
    return TargetMatrices(embedding, head)


def read_config(name: str) -> Any:
    """The target's configuration, as transformers has it."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(unpacked(resolve(name)).location)


def display_name(name: str) -> str:
    """The target's name without the machine's folders."""
    source: ModelSource = resolve(name)
    return source.name


def _fetched(repo: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(
                repo, allow_patterns=["config.json", "*.safetensors", "*.safetensors.index.json"]
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError("target", repo, f"a hub id that can be fetched ({error})") from None


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    listed = sorted(folder.glob("*.safetensors.index.json"))
    if listed:
        found = object_in(read_object(folder, listed[0].name), "weight_map")
        return {str(tensor): str(file) for tensor, file in found.items()}
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with weights_file(path) as opened:
            names.update(dict.fromkeys(opened.keys(), path.name))
    return names


def _tensor(folder: Path, where: dict[str, str], names: tuple[str, ...]) -> torch.Tensor | None:
    for name in names:
        if name in where:
            with weights_file(folder / where[name]) as opened:
                tensor: torch.Tensor = opened.get_tensor(name)
                return tensor
    return None
