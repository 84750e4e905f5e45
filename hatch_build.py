"""Makes the stubs of the contract: hatchling's build hook, and what `make protos` runs.

Knows where the protos lie and which generators run on them. Does not know their content.
"""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
PROTOS = ROOT / "protos"


def generate(output: Path = PROTOS) -> list[Path]:
    """Writes *_pb2.py, *_pb2_grpc.py and their .pyi below `output`; returns the files.

    Raises RuntimeError if protoc fails.
    """
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("draftwire/v1/*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    plugins = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{well_known}",
        f"--python_out={output}",
        f"--grpc_python_out={output}",
        f"--mypy_out=quiet:{output}",
        f"--mypy_grpc_out=quiet:{output}",
        # By full path: the environment's scripts are not always on PATH.
        *(
            f"--plugin={plugin}={plugins / plugin}"
            for plugin in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
            if (plugins / plugin).exists()
        ),
    ]
    status = protoc.main([*arguments, *sources])
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}")
    stems = [output / source.removesuffix(".proto") for source in sources]
    suffixes = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    made = [stem.with_name(stem.name + suffix) for stem in stems for suffix in suffixes]
    return [path for path in made if path.exists()]


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:
    pass  # make protos needs no hatchling
else:

    class StubsHook(BuildHookInterface[Any]):
        """Runs `generate` before anything is packed."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Generates the stubs into the tree; `artifacts` of pyproject.toml packs them."""
            generate()


if __name__ == "__main__":
    for made in generate():
        sys.stdout.write(f"{made.relative_to(ROOT)}\n")
