"""A run on disk: its settings, the state it resumes from, and checkpoints in the public format.

Knows file names and that every file is whole or absent. Does not know training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drafter_service.checkpoint import save
from drafter_service.model import DraftModel

STATE_FILE = "state.pt"
SETTINGS_FILE = "settings.json"


def save_state(
    folder: Path,
    model: DraftModel,
    optimiser: torch.optim.Optimizer,
    progress: Any,
    average: Sequence[torch.Tensor] = (),
) -> None:
    """Write everything the next step depends on. `average`: the running mean of the weights, in the
    order of the model's parameters, if there is one.
    """
    temporary = folder / (STATE_FILE + ".partial")
    state = {
        "average": list(average),
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "progress": asdict(progress),
    }
    torch.save(state, temporary)
    temporary.replace(folder / STATE_FILE)


def load_state(
    folder: Path,
    model: DraftModel,
    optimiser: torch.optim.Optimizer,
    progress: Any,
    average: Sequence[torch.Tensor] = (),
) -> bool:
    """Put back what save_state wrote, if it is there."""
    path = folder / STATE_FILE
    if not path.exists():
        return False
    state = torch.load(path, map_location=model.device, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    if average:
        # A run that kept no mean so far begins one with the weights it has.
        kept = state.get("average") or [p.detach() for p in model.parameters()]
        for own, value in zip(average, kept, strict=True):
            own.copy_(value)
    for name, value in state["progress"].items():
        setattr(progress, name, value)
    return True


def save_public(folder: Path, model: DraftModel, raw_config: Mapping[str, Any]) -> None:
    """A checkpoint as published, weights in the type that its config names."""
    save(folder, model, raw_config, getattr(torch, str(raw_config["dtype"])))


def write_settings(folder: Path, settings: Mapping[str, str]) -> None:
    """Keep the settings of the run's latest start."""
    text = json.dumps(dict(settings), indent=1, sort_keys=True) + "\n"
    (folder / SETTINGS_FILE).write_text(text, encoding="utf-8")
