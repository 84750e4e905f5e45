"""Draft checkpoints on disk, in the published DFlash format: config.json and safetensors, nothing
else. A path-conditioned head lies beside them in path_head.safetensors, which public loaders do not
read.

Knows folders, hub ids, tensor names and their variants; every tensor must be known and of the right
shape, and none may be missing. Does not know how the model drafts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drafter_service import predictor
from drafter_service.config_fields import read_object
from drafter_service.draft_config import CheckpointError, DraftConfig, parse
from drafter_service.model import DraftModel
from drafter_service.pathhead import PREFIX
from drafter_service.random_weights import random_model, raw_config_for
from drafter_service.weights_file import weights_file
from draftwire.models import PACKAGE_PREFIX

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PATH_HEAD_FILE = "path_head.safetensors"
# Tensors of the target that some files carry along, and a mask embedding of their own that others
# have.
_TARGET_NAMES = ("embed_tokens.weight", "lm_head.weight", "mask_embedding")
_RENAMED = (
    (re.compile(r"^(model|draft_model)\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
)
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A draft model in memory. `embedding`, `head`, `mask_embedding`: only if the file brings
    them. `base_sha256` is of the weights without a path head, which may come later and be left out.
    """

    name: str
    config: DraftConfig
    raw_config: Mapping[str, Any]
    model: DraftModel
    sha256: str
    embedding: torch.Tensor | None = None
    head: torch.Tensor | None = None
    mask_embedding: torch.Tensor | None = None
    folder: Path | None = None
    base_sha256: str = ""


def load(
    source: str,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    random_seed: int | None = None,
    revision: str | None = None,
) -> Checkpoint:
    """Load a folder, hub id (at `revision`) or package:NAME/FOLDER; `dtype` None keeps the file's.

    With `random_seed` only config.json is read and the weights are drawn. Raises CheckpointError
    naming field, tensor or file.
    """
    folder = _folder(source, weights=random_seed is None, revision=revision)
    raw = read_config(folder)
    config = parse(raw)
    wanted = dtype or _file_dtype(raw)
    if random_seed is not None:
        model = random_model(config, random_seed).to(device, wanted)
        return Checkpoint(folder.name, _untrained(config), raw, _frozen(model), sha256_of(model))
    tensors = _read_tensors(folder)
    extra = {name: tensors.pop(name) for name in _TARGET_NAMES if name in tensors}
    with torch.device("meta"):
        model = DraftModel(config)
    _check_tensors(config, model, tensors, extra)
    model.load_state_dict(tensors, strict=True, assign=True)
    digest = sha256_of(model)
    headed = any(name.startswith(PREFIX) for name in tensors)
    base = sha256_of(model, head=False) if headed else digest
    return Checkpoint(
        folder.name,
        config,
        raw,
        _frozen(model.to(device, wanted)),
        digest,
        embedding=extra.get("embed_tokens.weight"),
        head=extra.get("lm_head.weight"),
        mask_embedding=extra.get("mask_embedding"),
        folder=folder,
        base_sha256=base,
    )


def save(
    folder: Path, model: DraftModel, raw_config: Mapping[str, Any], dtype: torch.dtype | None = None
) -> None:
    """Write `model` in the public format; `raw_config` is the content of config.json and must
    describe it.
    """
    if parse(raw_config) != model.config:
        raise CheckpointError("config.json", "another model's", "that of the model to be saved")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    head = {name: tensors.pop(name) for name in list(tensors) if name.startswith(PREFIX)}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if head:
        save_file(head, folder / PATH_HEAD_FILE, metadata={"format": "pt"})
    else:
        (folder / PATH_HEAD_FILE).unlink(missing_ok=True)
    text = json.dumps(dict(raw_config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    # safetensors makes the file for its owner alone; whoever may read the one may read the other.
    for name in (WEIGHTS_FILE, *([PATH_HEAD_FILE] if head else [])):
        shutil.copymode(folder / CONFIG_FILE, folder / name)


def write_random(
    folder: Path,
    target_config: Any,
    *,
    seed: int,
    block_size: int = 8,
    num_layers: int = 2,
    mask_token_id: int | None = None,
    target_layer_ids: tuple[int, ...] | None = None,
    branches: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a drafter with random weights for a target, marked as untrained. `target_config` is the
    target's config, an object or a mapping with the usual Hugging Face fields; the mask token
    defaults to its last embedding row.
    """
    raw = raw_config_for(
        target_config,
        block_size=block_size,
        num_layers=num_layers,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
        branches=branches,
        dtype=dtype,
    )
    save(folder, random_model(parse(raw), seed), raw, dtype)
    return folder


def sha256_of(model: DraftModel, *, head: bool = True) -> str:
    """SHA-256 over names, shapes, types and bytes of all weights, a path head's only if wanted."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if name.startswith(PREFIX) and not head:
            continue
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """The JSON object in `folder`/config.json. Raises CheckpointError."""
    return read_object(folder, CONFIG_FILE)


def _folder(source: str, *, weights: bool, revision: str | None = None) -> Path:
    if source.startswith(PACKAGE_PREFIX):
        return _in_package(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if source.startswith(("/", ".", "~")) or not source:
        raise CheckpointError("checkpoint", source, "an existing folder or a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    weight_files = ["*.safetensors", "*.safetensors.index.json", predictor.CONFIG_FILE]
    patterns = [CONFIG_FILE, *(weight_files if weights else [])]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            "checkpoint", source, f"an existing folder or a hub id that can be fetched ({error})"
        ) from None


def _in_package(source: str) -> Path:
    """The folder inside an installed package, which is found and not imported."""
    package, _, inside = source.removeprefix(PACKAGE_PREFIX).partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        if inside and (folder := Path(root, inside)).is_dir():
            return folder
    raise CheckpointError("checkpoint", source, "package:NAME/FOLDER of an installed package")


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(set(folder.glob("*.safetensors")) - {folder / predictor.WEIGHTS_FILE})
    if not files:
        raise CheckpointError("weights", folder.name, "a folder with .safetensors files")
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        with weights_file(path) as opened:
            for original in opened.keys():  # noqa: SIM118 - not a mapping
                name = _public_name(original)
                if _IGNORED.search(name):
                    continue
                if name in tensors:
                    raise CheckpointError(original, "there twice", "in the checkpoint once")
                tensors[name] = opened.get_tensor(original)
    return tensors


def _public_name(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def _check_tensors(
    config: DraftConfig,
    model: DraftModel,
    tensors: dict[str, torch.Tensor],
    extra: Mapping[str, torch.Tensor],
) -> None:
    _split_fused(config, tensors)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(tensors.keys() - wanted.keys()):
        raise CheckpointError(
            name, "in the checkpoint", "a tensor of this model; no such tensor is known"
        )
    for name in sorted(wanted.keys() - tensors.keys()):
        raise CheckpointError(name, "missing", f"there with shape {wanted[name]}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            hint = " (layers x target hidden size)" if name == "fc.weight" else ""
            raise CheckpointError(
                name, f"of shape {tuple(tensors[name].shape)}", f"of shape {shape}{hint}"
            )
        if not tensors[name].is_floating_point():
            raise CheckpointError(name, f"of type {tensors[name].dtype}", "of a floating type")
    if config.target_hidden_size != config.hidden_size and "embed_tokens.weight" not in extra:
        raise CheckpointError(
            "target_hidden_size",
            config.target_hidden_size,
            f"hidden_size = {config.hidden_size}, unless embed_tokens.weight and lm_head.weight "
            "are in the checkpoint",
        )


def _split_fused(config: DraftConfig, tensors: dict[str, torch.Tensor]) -> None:
    """qkv_proj and gate_up_proj, as some files have them, into the public tensors."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    fused = {
        "qkv_proj": (("q_proj", "k_proj", "v_proj"), (q, kv, kv)),
        "gate_up_proj": (("gate_proj", "up_proj"), (inner, inner)),
    }
    for name in list(tensors):
        for joined, (parts, sizes) in fused.items():
            if f".{joined}." not in name:
                continue
            tensor = tensors.pop(name)
            if tensor.shape[0] != sum(sizes):
                raise CheckpointError(name, f"of {tensor.shape[0]} rows", f"of {sum(sizes)} rows")
            for part, piece in zip(parts, torch.split(tensor, list(sizes)), strict=True):
                tensors[name.replace(joined, part)] = piece.contiguous()


def _frozen(model: DraftModel) -> DraftModel:
    return model.eval().requires_grad_(False)


def _untrained(config: DraftConfig) -> DraftConfig:
    from dataclasses import replace

    return replace(config, trained=False)


def _file_dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise CheckpointError("dtype", name, f"one of {', '.join(known)}")
    return known[name]
