"""`draftwire-train export`: a run's checkpoint as the folder that is served and shipped.

Knows the public format and its size limit. Does not know training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter_service import checkpoint
from draftwire.config import ConfigError, setting

MIB = 1024 * 1024


@dataclass(frozen=True)
class ExportConfig:
    """Settings of `draftwire-train export`."""

    run: Path = setting(help="folder of a training run")
    out: Path = setting(help="folder of the exported checkpoint")
    which: str = setting("best", help="best on validation, or last", choices=("best", "last"))
    dtype: str = setting(
        "bfloat16", help="type of the weights", choices=("bfloat16", "float16", "float32")
    )
    card: Path | None = setting(None, help="model card, copied beside the weights as README.md")
    max_mib: float = setting(0.0, help="refuse a larger file, MiB; 0: any size", minimum=0.0)


def export(config: ExportConfig, say: Callable[[str], None]) -> None:
    """Run the command."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    found = checkpoint.load(str(config.run / config.which), device=torch.device("cpu"))
    size = sum(t.numel() for t in found.model.state_dict().values()) * dtype.itemsize / MIB
    if config.max_mib and size > config.max_mib:
        raise ConfigError("--max-mib", f"{size:.1f} MiB of weights", f"at most {config.max_mib}")
    raw = dict(found.raw_config) | {"dtype": config.dtype}
    checkpoint.save(config.out, found.model, raw, dtype)
    if config.card is not None:
        (config.out / "README.md").write_text(
            config.card.read_text(encoding="utf-8"), encoding="utf-8"
        )
    again = checkpoint.load(str(config.out), device=torch.device("cpu"))
    say(f"{config.out}: {size:.1f} MiB, weights sha256 {again.sha256}")
