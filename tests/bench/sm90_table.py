"""Compiles every kernel at production shapes for sm_90 and keeps what came out.

    python tests/bench/sm90_table.py

writes results/sm90_kernels.json and kernels/TRITON.md: registers, shared memory, spills, load
widths, bytes that must move and the floor they set at an H100's 3.35 TB/s. Needs Triton and no GPU.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "kernels")]

import triton  # noqa: E402
from bench.kernel_cases import (  # noqa: E402
    H100_BYTES_PER_SECOND,
    Sizes,
    Step,
    acceptance_cases,
    attention_cases,
)
from bench.sm90 import Compiled, compile_launch, launches_of  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "sm90_kernels.json"
PAGE = ROOT / "kernels" / "TRITON.md"
HEAD = """# Triton kernels, compiled for Hopper

Made by `python tests/bench/sm90_table.py` with Triton {triton}; every figure here comes from the
compiler, on a machine without a GPU. Shapes: {sizes}.
`bytes` is what a launch must read and write at least once; `floor` is that over 3.35 TB/s (H100).
Times of real runs are made by `tests/bench/gpu_kernels.py`. No kernel spills to local memory.

A whole `follow` step with filters (statistics, filter, draw, walk) cannot be faster than
{step:.1f} µs on an H100; one layer's attention over {keys:,} keys a session not faster than
{layer:.0f} µs.

"""
COLUMNS = (
    "case",
    "kernel",
    "programs x threads",
    "registers",
    "shared memory",
    "widest load",
    "128-bit loads",
    "matrix instructions",
    "bytes",
    "floor, µs",
)


def production_cases() -> list[tuple[str, str, int, Compiled]]:
    """(case, kernel, bytes, compiled) of every kernel, each once a case."""
    step = Step(Sizes())
    rows = []
    for case in [*acceptance_cases(step), *attention_cases(step)]:
        for launch in launches_of(case.call):
            moved = case.kernels.get(launch.kernel.fn.__name__)
            if moved is not None:
                rows.append((case.name, launch.kernel.fn.__name__, moved, compile_launch(launch)))
    return rows


def record(rows: list[tuple[str, str, int, Compiled]]) -> dict[str, object]:
    """The figures as they are kept."""
    return {
        "triton": triton.__version__,
        "sizes": {key: str(value) for key, value in vars(Sizes()).items()},
        "kernels": [
            {
                "case": case,
                "kernel": kernel,
                "grid": list(made.grid),
                "threads": made.threads,
                "registers": made.registers,
                "shared_bytes": made.shared_bytes,
                "stack_bytes": made.stack_bytes,
                "local_accesses": made.local_accesses,
                "widest_load_bits": made.widest_load,
                "loads_of_128_bits": made.vector_loads,
                "global_loads": made.global_loads,
                "matrix_instructions": list(made.tensor_core),
                "bytes": moved,
                "floor_us": round(moved / H100_BYTES_PER_SECOND * 1e6, 3),
            }
            for case, kernel, moved, made in rows
        ],
    }


def page(kept: dict[str, object]) -> str:
    """The table as Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for row in kept["kernels"]:  # type: ignore[attr-defined]
        lines.append(
            (
                row["case"],
                f"`{row['kernel']}`",
                f"({' x '.join(str(n) for n in row['grid'])}) x {row['threads']}",
                str(row["registers"]),
                f"{row['shared_bytes']:,}",
                str(row["widest_load_bits"]),
                f"{row['loads_of_128_bits']} of {row['global_loads']}",
                ", ".join(row["matrix_instructions"]) or "none",
                f"{row['bytes']:,}",
                f"{row['floor_us']:.2f}",
            )
        )
    sizes = kept["sizes"].items()  # type: ignore[attr-defined]
    floors = [(row["case"], row["floor_us"]) for row in kept["kernels"]]  # type: ignore[attr-defined]
    head = HEAD.format(
        triton=kept["triton"],
        sizes=", ".join(f"{key} {value}" for key, value in sizes),
        step=sum(floor for case, floor in floors if case == "follow, filtered"),
        keys=int(dict(sizes)["keys"]),
        layer=next(floor for case, floor in floors if case.startswith("attention, chain")),
    )
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Compile, check nothing, write both files."""
    kept = record(production_cases())
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))
    sys.stdout.write(page(kept))


if __name__ == "__main__":
    main()
