"""Runs the kernels under Triton's interpreter, in a process of its own.

The interpreter is chosen when Triton is imported, so it cannot be had in the process that runs the
other tests. `TRITON_INTERPRET=1 pytest tests/kernels/triton` runs the same files by hand.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"


@pytest.mark.timeout(900)
def test_every_kernel_agrees_with_its_reference_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", FOLDER, "-q", "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
