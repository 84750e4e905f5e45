"""`make bench`: runs the benchmarks of this folder one after another, one line for each result.

Knows: which there are and in which order. Each is a program of its own, so that none inherits the
threads and the memory of another. Does not know: what they measure. Benchmarks that need a GPU are
run by hand.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from draftwire.tether import leaving_on_sigterm

HERE = Path(__file__).parent
NAMES = (
    "engine_placement",
    "pair_loop",
    "concurrency",
    "demo_speed",
    "same_tokens",
    "loadtest_selftest",
)


def main() -> int:
    """The number of benchmarks that failed."""
    parser = argparse.ArgumentParser(description="Run the benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="a few rounds each; writes no result")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    with leaving_on_sigterm():
        return run(options.names or NAMES, quick=options.quick)


def run(names: Sequence[str], *, quick: bool) -> int:
    """How many of `names` failed."""
    failed = 0
    for name in names:
        started = time.monotonic()
        command = [sys.executable, str(HERE / f"{name}.py"), *["--quick"] * quick]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(f"{name}:"):
                    sys.stdout.write(line)
                    sys.stdout.flush()
            status = process.wait()
        except BaseException:
            process.terminate()  # it stops what it has started
            process.wait()
            raise
        failed += status != 0
        word = "done" if status == 0 else f"FAILED, exit status {status}"
        sys.stdout.write(f"{name}: {word} in {time.monotonic() - started:.0f} s\n")
        sys.stdout.flush()
    return failed


if __name__ == "__main__":
    sys.exit(main())
