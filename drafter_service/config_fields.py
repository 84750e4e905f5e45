"""Fields of a checkpoint's JSON, each of the type it must have or refused by name.

Knows types and bounds. Does not know what the fields mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafter_service.refusal import CheckpointError


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of `folder`. Raises CheckpointError."""
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(name, "missing", f"in the folder {folder.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(name, error, "a JSON object") from None
    if not isinstance(content, dict):
        raise CheckpointError(name, type(content).__name__, "a JSON object")
    return content


def object_in(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object; an empty one where it is absent or empty in whatever way."""
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(name, value, "an object")
    return value


def both(raw: Mapping[str, Any], inner: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A field that may sit in dflash_config or beside it."""
    value = inner.get(name)
    if value is None:
        value = raw.get(name)
    return default if value is None else value


def positive(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """An integer of at least 1."""
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
        raise CheckpointError(name, value, "an integer of at least 1")
    return value


def number(name: str, value: object, *, at_least: float = -math.inf) -> float:
    """A finite number of at least `at_least`."""
    bound = "a finite number" if at_least == -math.inf else f"a number of at least {at_least:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(name, value, bound)
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found) or found < at_least:
        raise CheckpointError(name, value, bound)
    return found
