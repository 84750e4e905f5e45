"""What the compiler makes of every kernel for an H100, at production shapes, without a GPU."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from bench import sm90_table
from bench.sm90 import Compiled

KEPT = Path(sm90_table.RESULTS)
KERNELS = {
    "_attend_kernel",
    "_compact_kernel",
    "_decide_kernel",
    "_draw_kernel",
    "_edit_kernel",
    "_filter_kernel",
    "_fold_kernel",
    "_joint_kernel",
    "_judge_kernel",
    "_mass_kernel",
    "_order_kernel",
    "_pack_kernel",
    "_resample_kernel",
    "_statistics_kernel",
    "_walk_kernel",
    "_write_kernel",
}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def compiled() -> list[tuple[str, str, int, Compiled]]:
    return sm90_table.production_cases()


def test_every_kernel_of_the_package_is_compiled(
    compiled: list[tuple[str, str, int, Compiled]],
) -> None:
    folder = sm90_table.ROOT / "kernels" / "draftwire_kernels"
    launched = {
        name
        for path in folder.glob("*_triton.py")
        for name in re.findall(r"^    (_\w+_kernel)\[", path.read_text(), re.MULTILINE)
        + re.findall(r"^        (_\w+_kernel)\[", path.read_text(), re.MULTILINE)
    }
    assert launched - {"_gumbel_at_kernel"} == KERNELS
    assert {kernel for _, kernel, _, _ in compiled} == KERNELS


def test_no_kernel_spills_to_local_memory(compiled: list[tuple[str, str, int, Compiled]]) -> None:
    spilled = {
        (case, kernel): (made.stack_bytes, made.local_accesses)
        for case, kernel, _, made in compiled
        if made.stack_bytes or made.local_accesses
    }
    assert not spilled


@pytest.mark.parametrize(
    "kernel",
    ["_statistics_kernel", "_mass_kernel", "_attend_kernel", "_write_kernel", "_compact_kernel"],
)
def test_bulk_data_is_read_128_bits_at_a_time(
    kernel: str, compiled: list[tuple[str, str, int, Compiled]]
) -> None:
    made = [made for _, name, _, made in compiled if name == kernel]
    assert made
    for one in made:
        assert one.widest_load == 128
        assert one.vector_loads >= 1
    if kernel == "_statistics_kernel":
        # A tile of 4,096 bf16 over 128 threads is four vectors a thread, and nothing else is bulk.
        assert {one.vector_loads for one in made} == {4}


def test_attention_runs_on_hoppers_matrix_units(
    compiled: list[tuple[str, str, int, Compiled]],
) -> None:
    for case, kernel, _, made in compiled:
        if kernel == "_attend_kernel":
            assert any(name.startswith("HGMMA") for name in made.tensor_core), case
            assert not any(name.startswith("HMMA") for name in made.tensor_core), case


def test_shared_memory_fits_a_multiprocessor(
    compiled: list[tuple[str, str, int, Compiled]],
) -> None:
    assert all(made.shared_bytes <= 227 * 1024 for *_, made in compiled)


def test_offsets_of_rows_and_slots_are_computed_in_64_bits(
    compiled: list[tuple[str, str, int, Compiled]],
) -> None:
    """Rows x vocabulary pass 2^31: a stride may only be multiplied after it was widened."""
    narrow = {
        (case, kernel): found
        for case, kernel, _, made in compiled
        if (
            found := re.findall(
                r"arith\.muli %\w+, %\w*(?:row|slot|group|stack)_stride\w* : i32", made.ttir
            )
        )
    }
    assert not narrow
    for kernel, stride in (
        ("_statistics_kernel", "row_stride"),
        ("_filter_kernel", "row_stride"),
        ("_draw_kernel", "row_stride"),
        ("_mass_kernel", "row_stride"),
        ("_attend_kernel", "k_slot_stride"),
        ("_write_kernel", "k_row_stride"),
        ("_compact_kernel", "stack_stride"),
    ):
        for _, name, _, made in compiled:
            if name == kernel:
                assert re.search(rf"arith\.extsi %{stride} : i32 to i64|%{stride}: i64", made.ttir)


def test_the_kept_table_has_every_case_and_this_compilers_figures(
    compiled: list[tuple[str, str, int, Compiled]],
) -> None:
    kept = json.loads(KEPT.read_text())
    fresh = json.loads(json.dumps(sm90_table.record(compiled)))
    names = [(row["case"], row["kernel"], row["bytes"]) for row in kept["kernels"]]
    assert names == [(row["case"], row["kernel"], row["bytes"]) for row in fresh["kernels"]]
    if kept["triton"] == triton.__version__:
        assert kept["kernels"] == fresh["kernels"]
    assert sm90_table.page(kept) == sm90_table.PAGE.read_text()
