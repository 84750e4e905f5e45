"""Faults on a timeline: a drafter killed, stopped or started again while load runs.

Knows the notation, and the process it may touch: one it was given the id of, or one it started and
owns. Does not know what the load does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO

from draftwire_client.errors import DraftwireError, FailedPrecondition, InvalidArgument

_SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "stop": signal.SIGSTOP,
    "cont": signal.SIGCONT,
}
ACTIONS = (*_SIGNALS, "restart")
_FORM = "drafter:ACTION@TIME[,ACTION@TIME…], ACTION of " + ", ".join(ACTIONS)
_STEP = re.compile(r"([a-z]+)@(\d+(?:\.\d+)?)(ms|s|m)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1.0}
_START_LIMIT_S = 900.0
_OWN = ("DRAFTWIRE_CLIENT__", "DRAFTWIRE_TARGET", "DRAFTWIRE_TOKEN", "DRAFTWIRE_TLS_CA")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something done to the drafter, seconds after the start of the run."""

    action: str
    at: float


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, seconds after the start of the run."""

    at: float
    name: str
    detail: str = ""


def parse_faults(items: Iterable[str], *, owned: bool, known: bool) -> tuple[Fault, ...]:
    """`drafter:kill@30s,restart@45s` in order of time.

    Times are `30s`, `500ms`, `1.5m` or seconds. `owned`: the drafter can be started; `known`: there
    is a process to signal. Raises InvalidArgument.
    """
    found = []
    for item in items:
        target, _, steps = item.partition(":")
        if target != "drafter":
            raise InvalidArgument("--fault", item, _FORM)
        for step in steps.split(","):
            match = _STEP.fullmatch(step.strip())
            if match is None or match[1] not in ACTIONS:
                raise InvalidArgument("--fault", step or item, _FORM)
            if match[1] == "restart" and not owned:
                raise InvalidArgument("--fault", step, "given with --drafter-command")
            if not (owned or known):
                raise InvalidArgument("--fault", step, "given with --drafter-command or -pid")
            found.append(Fault(match[1], float(match[2]) * _UNITS[match[3]]))
    return tuple(sorted(found, key=lambda fault: fault.at))


class Drafter:
    """The drafter's process. Started with `command`, it is ours and ends with us."""

    def __init__(
        self, *, command: str | None = None, pid: int | None = None, log: IO[bytes] | None = None
    ) -> None:
        self._command = None if command is None else _words(command)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._over = False
        self.pid = pid
        """The process's id; None before the start."""

    def start(self) -> str:
        """Start it and return the address it serves at. Blocks until it serves.

        Raises FailedPrecondition if it ends first.
        """
        assert self._command is not None
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_OWN)}
        with self._starting:
            if self._over:
                raise FailedPrecondition("RUN_OVER", "no drafter is started any more")
            try:
                process = subprocess.Popen(
                    self._command,
                    stdout=subprocess.PIPE,
                    stderr=self._log or subprocess.DEVNULL,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the load tester, which then ends it
                )
            except OSError as error:
                raise InvalidArgument("--drafter-command", self._command[0], str(error)) from error
            self._process, self.pid = process, process.pid
        address = _served_address(process)
        if address is None:
            status = process.wait(_START_LIMIT_S)
            raise FailedPrecondition(
                "DRAFTER_ENDED", f"the drafter ended with status {status} before it served"
            )
        threading.Thread(target=_drain, args=(process,), daemon=True).start()
        return address

    def act(self, action: str) -> str:
        """Do a fault's action; what came of it, in words. Blocks for `restart`.

        Raises FailedPrecondition if there is no such process.
        """
        if action == "restart":
            self.stop()
            return f"serving {self.start()}"
        if self._process is not None and self._process.poll() is not None:
            # Its id may be somebody else's by now.
            raise FailedPrecondition("NO_DRAFTER", f"process {self.pid} has ended")
        try:
            assert self.pid is not None
            os.kill(self.pid, _SIGNALS[action])
        except (ProcessLookupError, PermissionError) as error:
            raise FailedPrecondition("NO_DRAFTER", f"process {self.pid}: {error}") from error
        if action == "kill" and self._process is not None:
            self._process.wait()
        return f"process {self.pid}"

    def close(self) -> None:
        """As stop; a restart that is under way in another thread starts nothing any more."""
        with self._starting:
            self._over = True
        self.stop()

    def stop(self) -> None:
        """End the process if it is ours and runs."""
        if self._process is None or self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidArgument("--drafter-command", command, f"quoted in pairs ({error})") from error
    if not words:
        raise InvalidArgument("--drafter-command", command, "a command")
    return words


async def play(
    faults: Iterable[Fault],
    drafter: Drafter,
    epoch: float,
    tell: Callable[[Event], None],
) -> None:
    """Act at each fault's time, counted from `epoch` on the monotonic clock."""

    def now() -> float:
        return time.monotonic() - epoch

    for fault in faults:
        await asyncio.sleep(max(0.0, fault.at - now()))
        began = now()
        tell(Event(began, fault.action))
        try:
            detail = await asyncio.to_thread(drafter.act, fault.action)
        except DraftwireError as error:
            tell(Event(now(), f"{fault.action} failed", error.message))
        else:
            if fault.action == "restart":
                tell(Event(now(), "serving", detail))


def _served_address(process: subprocess.Popen[bytes]) -> str | None:
    assert process.stdout is not None
    for line in process.stdout:
        word, _, address = line.decode(errors="replace").strip().partition(" ")
        if word == "serving":
            return address
    return None


def _drain(process: subprocess.Popen[bytes]) -> None:
    # A pipe that nobody reads would stop the drafter when it is full.
    assert process.stdout is not None
    for _ in process.stdout:
        pass
