"""Runs a module as a command that ends with whoever started it, however that one ended.

`python -m draftwire.tether MODULE [ARGUMENT ...]`, its stdin a pipe that the starter holds open and
never writes to. The system closes the pipe when the starter is gone, killed or not; then the
process gets SIGTERM, and SIGKILL if it is still there after a while. Unlike Linux's parent-death
signal this works on every system with pipes and does not depend on the thread that started it.
Knows how programs that start others end together. Does not know what they run.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

GRACE_S = 40.0  # services drain for up to 30 s


@contextlib.contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM is SystemExit(143), so that what was started is stopped on the way out; for
    programs that start others. Other threads than the main one are left as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """What to start; with `stdin=subprocess.PIPE`, or the read end of a pipe."""
    return [sys.executable, "-m", "draftwire.tether", module, *arguments]


def main() -> None:
    """Watch stdin, which the module then has no more of, and run the module in this process."""
    held = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_watch, args=(held,), name="tether", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _watch(held: int) -> None:
    while os.read(held, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
