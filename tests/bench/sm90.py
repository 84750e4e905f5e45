"""Compiles the kernels that a launch function would start, for sm_90, on a machine without a GPU.

Knows Triton's compiler and the SASS it makes. Launch functions run as they are, on host tensors:
their launches are caught, so that what is compiled is what production starts, with the same
specialisation (16-byte pointers, divisible strides, constants). Works only where TRITON_INTERPRET
is not set.
"""

import contextlib
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One start of a kernel: the function, its arguments by name, the grid and the options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    grid: tuple[int, ...]
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a launch."""

    name: str
    grid: tuple[int, ...]
    threads: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    local_accesses: int
    widest_load: int
    """Bits of the widest global load."""
    vector_loads: int
    """Global loads of 128 bits, plain or asynchronous."""
    global_loads: int
    tensor_core: tuple[str, ...]
    """Matrix instructions used."""
    ttir: str
    ptx: str
    sass: str


@contextlib.contextmanager
def caught(launches: list[Launch]) -> Iterator[None]:
    """Within: kernels are not started but noted."""
    original = JITFunction.run

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [parameter.name for parameter in self.params]
        arguments = dict(zip(names, args, strict=False))
        options = {}
        for key, value in kwargs.items():
            (arguments if key in names else options)[key] = value
        launches.append(Launch(self, arguments, tuple(grid), options))

    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = original


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """The kernels that `call` starts."""
    launches: list[Launch] = []
    with caught(launches):
        call()
    return launches


def compile_launch(launch: Launch) -> Compiled:
    """Compile a launch for sm_90 and read what came out."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _DTYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[parameter.name] = "i1"
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    source = ASTSource(launch.kernel, signature, constants, attributes)
    made = triton.compile(source, target=TARGET, options=dict(launch.options))
    sass, usage = _disassemble(made.asm["cubin"])
    loads = re.findall(r"\bLDG\.E[.\w]*", sass)
    copies = re.findall(r"\bLDGSTS\.E[.\w]*", sass)
    widths = [_width(load) for load in loads + copies]
    return Compiled(
        name=launch.kernel.fn.__name__,
        grid=launch.grid,
        threads=32 * made.metadata.num_warps,
        registers=usage["REG"],
        shared_bytes=made.metadata.shared,
        stack_bytes=usage["STACK"],
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        widest_load=max(widths, default=0),
        vector_loads=sum(width == 128 for width in widths),
        global_loads=len(widths),
        tensor_core=tuple(sorted(set(re.findall(r"\b(?:HGMMA|HMMA)\.[\w.]+", sass)))),
        ttir=made.asm["ttir"],
        ptx=made.asm["ptx"],
        sass=sass,
    )


def _width(load: str) -> int:
    for mark, bits in (
        (".128", 128),
        (".64", 64),
        (".U16", 16),
        (".S16", 16),
        (".U8", 8),
        (".S8", 8),
    ):
        if mark in load:
            return bits
    return 32


def _disassemble(cubin: bytes) -> tuple[str, dict[str, int]]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        sass = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True)
        usage = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        )
    text = usage.stdout + usage.stderr
    return sass.stdout, {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}
