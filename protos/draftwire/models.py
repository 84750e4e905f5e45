"""Where a model's files are.

Knows: how a name given by a user (folder, Hugging Face id, GGUF file, Python package that carries a
GGUF, the tiny model of tests) becomes a folder and a file name that `transformers` can load. Does
not know: torch, transformers, or what is inside the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwire import tiny
from draftwire.errors import InvalidArgument

PACKAGE_PREFIX = "package:"
RANDOM_PREFIX = "random:"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as `from_pretrained` wants it: `location` is a folder or a hub id, `gguf_file` a name
    inside the folder. One with `random_seed` has no folder before it is `unpacked`."""

    name: str
    location: str
    gguf_file: str | None = None
    random_seed: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether the files lie on this machine, so that nothing needs to be fetched."""
        return Path(self.location).is_dir()


def resolve(name: str) -> ModelSource:
    """Turn `name` into a ModelSource.

    Accepts a folder, a path to a `.gguf` file, `package:NAME` (a Python package that carries one
    GGUF file; it is found without importing it, since importing may pull in libraries that are not
    wanted), `random:tiny` or `random:tiny:SEED` (a tiny model with random weights, for tests), or
    else a Hugging Face id. Raises InvalidArgument naming the field `model` if a path or
    package does not exist.
    """
    if name.startswith(PACKAGE_PREFIX):
        return _in_package(name)
    if name.startswith(RANDOM_PREFIX):
        return _random(name)
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


def _random(name: str) -> ModelSource:
    found = re.fullmatch(r"tiny(?::([0-9]{1,9}))?", name.removeprefix(RANDOM_PREFIX))
    if found is None:
        raise InvalidArgument("model", name, "random:tiny or random:tiny:SEED, below 10**9")
    seed = int(found[1] or 0)
    return ModelSource(f"random-tiny-{seed}", name, random_seed=seed)


def unpacked(source: ModelSource) -> ModelSource:
    """`source` as a folder of safetensors and tokenizer files: a GGUF is dequantised to float32
    once and kept in the cache, a random model is drawn once.

    The cache is DRAFTWIRE_CACHE_DIR, else $XDG_CACHE_HOME/draftwire, else ~/.cache/draftwire. Other
    sources are returned as they are.
    """
    seed = source.random_seed
    if seed is not None:
        key = f"{source.name}-{tiny.FORMAT}"
        return _kept(source, key, lambda folder: tiny.write(folder, seed))
    if source.gguf_file is None:
        return source
    file = Path(source.location) / source.gguf_file
    return _kept(source, _key(file), lambda folder: _unpack(source, folder))


def _kept(source: ModelSource, key: str, make: Callable[[Path], None]) -> ModelSource:
    """`source` in the cache's folder `key`, which is made if it is not there."""
    folder = cache_folder() / "unpacked" / key
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder.parent))
        try:
            make(scratch)
            # Another process may have been quicker; its folder is as good.
            with contextlib.suppress(OSError):
                scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return ModelSource(source.name, str(folder))


def cache_folder() -> Path:
    """Where unpacked models are kept."""
    if chosen := os.environ.get("DRAFTWIRE_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftwire"


def _key(file: Path) -> str:
    """Changes with the file and with the library that reads it."""
    stat = file.stat()
    version = importlib.metadata.version("transformers")
    text = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{version}"
    return f"{file.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _unpack(source: ModelSource, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": source.gguf_file, "dtype": torch.float32}
    # Newer transformers keep GGUF weights packed unless told otherwise.
    with contextlib.suppress(ImportError):
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source.location, **options)
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.location, gguf_file=source.gguf_file).save_pretrained(
        folder
    )
