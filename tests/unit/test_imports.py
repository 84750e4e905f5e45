"""Imports go one way, and the client stays light.

draftwire (contract) and draftwire_kernels import nothing of ours; draftwire_client the contract;
the services contract and kernels, never each other.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "draftwire": ROOT / "protos" / "draftwire",
    "draftwire_kernels": ROOT / "kernels" / "draftwire_kernels",
    "draftwire_client": ROOT / "client" / "draftwire_client",
    "drafter_service": ROOT / "drafter_service",
    "verifier_service": ROOT / "verifier_service",
}
MAY_IMPORT = {
    "draftwire": set(),
    "draftwire_kernels": set(),
    "draftwire_client": {"draftwire"},
    "drafter_service": {"draftwire", "draftwire_kernels"},
    "verifier_service": {"draftwire", "draftwire_kernels"},
}
# Offline training alone hosts the target as the verifier does, or asks a running one.
TRAINING = PACKAGES["drafter_service"] / "training"
# Nothing of these may be imported at module level by what the client installs.
HEAVY = {"torch", "numpy", "transformers", "triton", "safetensors", "accelerate"}
Imported = tuple[str, int, bool]


def imports(path: Path) -> list[Imported]:
    """(top-level package, line, at module level) of every absolute import of a file.

    What stands under `if TYPE_CHECKING` is no import at run time, but counts for the direction.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    found: list[Imported] = []

    def walk(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend(
                    (name.name.partition(".")[0], child.lineno, top) for name in child.names
                )
            elif isinstance(child, ast.ImportFrom) and child.level == 0:
                found.append(((child.module or "").partition(".")[0], child.lineno, top))
            elif isinstance(child, ast.Call) and _names_a_module(child):
                found.append((child.args[0].value.partition(".")[0], child.lineno, False))  # type: ignore[attr-defined]
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            walk(child, top and not inner and not _is_type_checking(child))

    walk(tree, True)
    return found


def _names_a_module(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    literal = bool(call.args) and isinstance(call.args[0], ast.Constant)
    return name in ("import_module", "__import__") and literal


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def sources(package: str) -> list[Path]:
    files = [path for path in PACKAGES[package].rglob("*.py") if "_pb2" not in path.name]
    assert files, f"{package} has no sources at {PACKAGES[package]}"
    return sorted(files)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_packages_go_one_way(package):
    wrong = []
    for path in sources(package):
        allowed = MAY_IMPORT[package] | {package}
        if TRAINING in path.parents:
            allowed |= {"verifier_service", "draftwire_client"}
        wrong += [
            f"{path.relative_to(ROOT)}:{line} imports {name}"
            for name, line, _ in imports(path)
            if name in PACKAGES and name not in allowed
        ]
    assert not wrong


def test_the_kernels_know_no_grpc():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources("draftwire_kernels")
        for name, line, _ in imports(path)
        if name.startswith(("grpc", "google"))
    ]
    assert not wrong


@pytest.mark.parametrize("package", ["draftwire", "draftwire_client"])
def test_what_the_client_installs_imports_nothing_heavy(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(package)
        for name, line, top in imports(path)
        if name in HEAVY and (top or package == "draftwire_client")
    ]
    assert not wrong


def test_importing_the_client_loads_nothing_heavy():
    program = (
        "import sys, draftwire_client, draftwire_client.cli, draftwire.runtime; "
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (found.stdout.strip(), found.returncode) == ("[]", 0), found.stderr


@pytest.mark.parametrize("folder", ["kernels", "client", "protos", "tests"])
def test_folders_of_packages_are_no_packages_themselves(folder):
    # `kernels/__init__.py` would shadow the package of that name and break `import transformers`.
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed_and_every_file_says_what_it_is(package):
    assert (PACKAGES[package] / "py.typed").exists()
    silent = [
        str(path.relative_to(ROOT))
        for path in sources(package)
        if path.read_text().strip()
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_the_guard_sees_imports_wherever_they_stand(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(
        "import torch.nn\n"
        "from verifier_service.engine import step\n"
        "from . import sibling\n"
        "if TYPE_CHECKING:\n    import numpy\n"
        "class A:\n    import scipy\n"
        "def f():\n    import transformers\n    importlib.import_module('triton.language')\n"
    )
    assert imports(path) == [
        ("torch", 1, True),
        ("verifier_service", 2, True),
        ("numpy", 5, False),
        ("scipy", 7, True),
        ("transformers", 9, False),
        ("triton", 10, False),
    ]
