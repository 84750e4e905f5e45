"""The block size predictor: a small network that is asked once a session which block size to use.

Knows its inputs, its layers and its files: predictor.safetensors and predictor.json in the folder
of the drafter it was made for. Does not know sessions, lanes or how it is trained.

The network is BlockPilot's: two layers with ReLU and dropout, the second one residual, and one
score a candidate. What differs by input is its first layer alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from drafter_service.config_fields import read_object
from drafter_service.draft_config import CheckpointError
from drafter_service.weights_file import weights_file

CONFIG_FILE = "predictor.json"
WEIGHTS_FILE = "predictor.safetensors"
FORMAT = "draftwire-predictor/1"
SMALLEST, LARGEST = 2, 1024


class InputKind(StrEnum):
    """What the network sees of the last prompt position."""

    LOGITS = "logits"
    """The target's log-probabilities over the whole vocabulary."""
    EXPECTED_EMBEDDING = "expected_embedding"
    """The target's embedding matrix averaged with its probabilities."""
    CONTEXT = "context"
    """The fused context feature that the drafter attends to."""

    @property
    def from_logits(self) -> bool:
        """Whether the verifier must send the position's logits."""
        return self is not InputKind.CONTEXT


@dataclass(frozen=True, slots=True)
class PredictorConfig:
    """Shapes of a predictor and the drafter it belongs to. `candidates` are block sizes, anchor
    included, rising. `takes_temperature`: the sampling temperature is one more input.
    """

    input: InputKind
    input_size: int
    candidates: tuple[int, ...]
    drafter_sha256: str
    hidden_size: int = 2048
    dropout: float = 0.2
    takes_temperature: bool = False
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = self.candidates
        if list(found) != sorted(set(found)) or len(found) < 2:
            raise CheckpointError("candidates", list(found), "two or more different sizes, rising")
        if found[0] < SMALLEST or found[-1] > LARGEST:
            raise CheckpointError("candidates", list(found), f"in [{SMALLEST}, {LARGEST}]")
        for name in ("input_size", "hidden_size"):
            if getattr(self, name) < 1:
                raise CheckpointError(name, getattr(self, name), "an integer of at least 1")
        if not 0 <= self.dropout < 1:
            raise CheckpointError("dropout", self.dropout, "in [0, 1)")


def around(block_size: int, reach: int) -> tuple[int, ...]:
    """The sizes from `reach` below to `reach` above the one the drafter was trained with."""
    return tuple(range(max(SMALLEST, block_size - reach), min(LARGEST, block_size + reach) + 1))


class BlockSizePredictor(nn.Module):
    """The network. Inputs are shifted and scaled first, by nothing unless training set it."""

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.first = nn.Linear(config.input_size + config.takes_temperature, width)
        self.second = nn.Linear(width, width)
        self.output = nn.Linear(width, len(config.candidates))
        self.shift: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("shift", torch.zeros(config.input_size))
        self.register_buffer("scale", torch.ones(config.input_size))

    def initialise(self, seed: int) -> None:
        """Kaiming-uniform hidden layers, a Xavier-uniform output, zero biases (BlockPilot's)."""
        generator = torch.Generator().manual_seed(seed)
        for layer in (self.first, self.second):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
        nn.init.xavier_uniform_(self.output.weight, generator=generator)
        for layer in (self.first, self.second, self.output):
            nn.init.zeros_(layer.bias)

    def forward(self, inputs: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        """inputs [n, input_size], temperatures [n] -> scores [n, candidates], float32."""
        weight = self.first.weight
        x = (inputs.to(weight.device, torch.float32) - self.shift.float()) * self.scale.float()
        if self.config.takes_temperature:
            x = torch.cat([x, temperatures.to(x)[:, None]], dim=-1)
        rate = self.config.dropout
        first = F.dropout(F.relu(self.first(x.to(weight.dtype))), rate, self.training)
        second = F.dropout(F.relu(self.second(first)), rate, self.training)
        scores: torch.Tensor = self.output(first + second).float()
        return scores

    def sizes(self, inputs: torch.Tensor, temperatures: Sequence[float]) -> list[int]:
        """The block size of each row; of equal scores the smaller size."""
        scores = self.forward(inputs, torch.tensor(temperatures, dtype=torch.float32))
        return [self.config.candidates[index] for index in scores.argmax(-1).tolist()]


def log_probabilities(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Logits [n, >= count] -> float32 log-probabilities [n, count]; what comes after is padding of
    the head.
    """
    return torch.log_softmax(logits[:, :count].float(), dim=-1)


def expected_embedding(logits: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocabulary] and the target's embedding [rows >= vocabulary, hidden] -> float32
    [n, hidden]: softmax(logits) times the matrix, which is what a linear first layer over the
    probabilities would see through weights that exist already.
    """
    chances = torch.softmax(logits.float(), dim=-1).to(embedding.dtype)
    return (chances @ embedding[: logits.shape[-1]]).float()


def present(folder: Path) -> bool:
    """Whether a folder holds a predictor."""
    return (folder / CONFIG_FILE).exists()


def read_config(folder: Path) -> PredictorConfig:
    """The content of predictor.json. Raises CheckpointError naming the field."""
    raw = read_object(folder, CONFIG_FILE)
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"{CONFIG_FILE}: format", raw.get("format"), FORMAT)
    kinds = [kind.value for kind in InputKind]
    if raw.get("input") not in kinds:
        raise CheckpointError(f"{CONFIG_FILE}: input", raw.get("input"), f"one of {kinds}")
    try:
        return PredictorConfig(
            input=InputKind(raw["input"]),
            input_size=int(raw["input_size"]),
            candidates=tuple(int(size) for size in raw["candidates"]),
            drafter_sha256=str(raw["drafter_sha256"]),
            hidden_size=int(raw["hidden_size"]),
            dropout=float(raw["dropout"]),
            takes_temperature=bool(raw["takes_temperature"]),
            training=dict(raw.get("training") or {}),
        )
    except KeyError as error:
        raise CheckpointError(f"{CONFIG_FILE}: {error.args[0]}", None, "given") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(CONFIG_FILE, error, "of the types that the format names") from None


def load(
    folder: Path,
    *,
    drafter_sha256: str,
    hidden_size: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> BlockSizePredictor:
    """The predictor in `folder`, for the drafter with that fingerprint and hidden size; `dtype`
    None keeps the file's. Raises CheckpointError naming what is wrong, the drafter included.
    """
    config = read_config(folder)
    if config.drafter_sha256 != drafter_sha256:
        raise CheckpointError(
            f"{CONFIG_FILE}: drafter_sha256",
            config.drafter_sha256,
            f"the drafter's {drafter_sha256}",
        )
    if config.input is not InputKind.LOGITS and config.input_size != hidden_size:
        limit = f"the drafter's hidden_size = {hidden_size}"
        raise CheckpointError(f"{CONFIG_FILE}: input_size", config.input_size, limit)
    path = folder / WEIGHTS_FILE
    if not path.exists():
        raise CheckpointError(WEIGHTS_FILE, "missing", f"in the folder {folder.name}")
    with weights_file(path) as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    with torch.device("meta"):
        model = BlockSizePredictor(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            limit = f"of shape {wanted[name]}" if name in wanted else "absent"
            shown = f"of shape {found[name]}" if name in found else "missing"
            raise CheckpointError(f"{WEIGHTS_FILE}: {name}", shown, limit)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.to(device, dtype or model.first.weight.dtype).eval().requires_grad_(False)


def save(folder: Path, model: BlockSizePredictor, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write both files beside the drafter's."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    content = {
        "format": FORMAT,
        "input": config.input.value,
        "input_size": config.input_size,
        "candidates": list(config.candidates),
        "hidden_size": config.hidden_size,
        "dropout": config.dropout,
        "takes_temperature": config.takes_temperature,
        "drafter_sha256": config.drafter_sha256,
        "training": dict(config.training),
    }
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    # safetensors makes the file for its owner alone; whoever may read the one may read the other.
    shutil.copymode(path, folder / WEIGHTS_FILE)
