"""Opens files of tensors; a damaged one is a CheckpointError that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from drafter_service.refusal import CheckpointError


@contextmanager
def weights_file(path: Path) -> Iterator[Any]:
    """The open file. Raises CheckpointError for one that is cut off, or no such file at all."""
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path.name, error, "a whole safetensors file") from error
