"""Where a model's files are.

Knows: how a name given by a user (folder, Hugging Face id, GGUF file, Python package that carries a GGUF) becomes a folder
and a file name that `transformers` can load. Does not know: torch, transformers, or what is inside the files.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from draftwire.errors import InvalidArgument

PACKAGE_PREFIX = "package:"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as `from_pretrained` wants it: `location` is a folder or a hub id, `gguf_file` a name inside the folder."""

    name: str
    location: str
    gguf_file: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether the files lie on this machine, so that nothing needs to be fetched."""
        return Path(self.location).is_dir()


def resolve(name: str) -> ModelSource:
    """Turn `name` into a ModelSource.

    Accepts a folder, a path to a `.gguf` file, `package:NAME` (a Python package that carries one GGUF file; it is found
    without importing it, since importing may pull in libraries that are not wanted), or else a Hugging Face id.
    Raises InvalidArgument naming the field `model` if a path or package does not exist.
    """
    if name.startswith(PACKAGE_PREFIX):
        return _in_package(name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InvalidArgument("model", name, "an existing .gguf file")
        return ModelSource(path.stem, str(path.parent), path.name)
    if path.is_dir():
        return ModelSource(path.name, str(path))
    if name.startswith(("/", ".", "~")) or not name:
        raise InvalidArgument(
            "model", name, "an existing folder, a .gguf file, package:NAME or a hub id"
        )
    return ModelSource(name, name)


def _in_package(name: str) -> ModelSource:
    package = name.removeprefix(PACKAGE_PREFIX)
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise InvalidArgument(
            "model", name, "an installed Python package that carries a .gguf file"
        )
    folder = Path(spec.origin).parent
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise InvalidArgument(
            "model", name, f"a package with exactly one .gguf file, this one has {len(files)}"
        )
    return ModelSource(files[0].stem, str(files[0].parent), files[0].name)
