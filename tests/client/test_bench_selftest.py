"""The load tester's wall-clock self-test, for a machine with nothing else to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "loadtest_selftest.py"


@pytest.mark.slow
def test_latencies_and_rates_are_measured_within_their_limits() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
