"""Services of this package as processes on this machine.

Knows how one is started on a free address, when it serves, and how it is stopped. Imports none of
them: they need more than the client has.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from draftwire import tether
from draftwire_client.errors import FailedPrecondition, Unavailable

_STOP_S = 30.0
_KEPT = ("DRAFTWIRE_CACHE_DIR",)
_NEEDED = ("torch", "transformers", "grpc_reflection")
_LAST_LINES = 15


def require_services() -> None:
    """Raise FailedPrecondition naming the extra to install if the services cannot run here."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise FailedPrecondition(
            "EXTRA_MISSING",
            f"the services need {missing[0]}, which is not installed: "
            "pip install 'draftwire[serve]'",
            missing=missing[0],
            extra="serve",
        )


class ServiceProcess:
    """One service, started now: `python -m MODULE` with `arguments`.

    Variables DRAFTWIRE_* of this process are not the service's. It ends with `stop` or `kill`, when
    the object is dropped, and with this process, also if that is killed. `log`: where stderr goes,
    else it is shared.
    """

    def __init__(self, module: str, arguments: Sequence[str], log: Path | None = None) -> None:
        own = [name for name in os.environ if name.startswith("DRAFTWIRE_") and name not in _KEPT]
        environment = {name: value for name, value in os.environ.items() if name not in own}
        self.module = module
        self._log = log
        stderr: IO[bytes] | None = log.open("ab") if log else None
        try:
            self._process = subprocess.Popen(
                tether.command(module, arguments),
                stdin=subprocess.PIPE,  # closed by the system when this process is gone
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )
        finally:
            if stderr is not None:
                stderr.close()
        self._addresses: list[str] = []
        self._told = threading.Event()
        weakref.finalize(self, _end, self._process)
        # Not a method: the thread must not keep the object, and with it the process, alive.
        told = (self._process, self._addresses, self._told)
        threading.Thread(target=_listen, args=told, daemon=True).start()

    def serving(self, timeout: float) -> str:
        """The address, once the service serves.

        Raises Unavailable with the last lines of its log if it ended instead, or took longer than
        `timeout` seconds.
        """
        self._told.wait(timeout)
        if self._addresses:
            return self._addresses[0]
        ended = self._process.poll() is not None or self._told.is_set()
        what = (
            f"ended with status {self._process.wait()}"
            if ended
            else f"did not serve within {timeout:g} s"
        )
        raise Unavailable("START_FAILED", f"{self.module} {what}{self._last_lines()}")

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it as an operator would (SIGTERM, which drains), or hard after 30 s."""
        if self.alive:
            self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        _let_go(self._process)

    def kill(self) -> None:
        """End it at once (SIGKILL), as a crash would."""
        _end(self._process)

    def _last_lines(self) -> str:
        if self._log is None:
            return "; its log is above"
        lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return ":\n" + "\n".join(lines) if lines else ""


def _listen(process: subprocess.Popen[str], addresses: list[str], told: threading.Event) -> None:
    """Read stdout to its end, where a service says "serving ADDRESS"."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            word, _, address = line.strip().partition(" ")
            if word == "serving":
                addresses.append(address)
                told.set()
    told.set()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    _let_go(process)


def _let_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for sockets and logs, removed with its object; short, as sockets' paths must be."""
    return tempfile.TemporaryDirectory(prefix="draftwire-", dir="/tmp")
