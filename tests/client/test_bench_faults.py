"""Faults of the load tester: a drafter's process killed, stopped and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwire_client import Acceptance, FailedPrecondition, InvalidArgument
from draftwire_client.bench.faults import Drafter, Fault, play
from draftwire_client.bench.watch import watch
from draftwire_client.enums import LaneState

SERVES = "import time; print('serving 127.0.0.1:1', flush=True); time.sleep(600)"


def test_a_drafter_of_ours_is_killed_and_started_again_at_its_times() -> None:
    drafter = Drafter(command=shlex.join([sys.executable, "-c", SERVES]))
    try:
        assert drafter.start() == "127.0.0.1:1"
        first = drafter.pid
        assert first is not None
        events: list[Any] = []
        epoch = time.monotonic()
        faults = (
            Fault("stop", 0.0),
            Fault("cont", 0.01),
            Fault("kill", 0.02),
            Fault("restart", 0.1),
        )
        asyncio.run(play(faults, drafter, epoch, events.append))
        assert [event.name for event in events] == ["stop", "cont", "kill", "restart", "serving"]
        assert all(event.at >= fault.at for event, fault in zip(events, faults, strict=False))
        assert drafter.pid != first
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
    finally:
        drafter.stop()
    assert drafter.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(drafter.pid, 0)


def test_a_fault_without_its_process_is_an_event_not_a_crash() -> None:
    drafter = Drafter(command=shlex.join([sys.executable, "-c", SERVES]))
    drafter.start()
    drafter.act("kill")
    events: list[Any] = []
    asyncio.run(play((Fault("kill", 0.0),), drafter, time.monotonic(), events.append))
    assert [event.name for event in events] == ["kill", "kill failed"]


def test_a_drafter_that_ends_before_it_serves_is_an_error_with_its_status() -> None:
    drafter = Drafter(command=shlex.join([sys.executable, "-c", "raise SystemExit(7)"]))
    with pytest.raises(FailedPrecondition, match="status 7"):
        drafter.start()


def test_a_restart_that_is_under_way_at_the_end_starts_nothing_any_more(tmp_path: Path) -> None:
    starts, ending, go = (tmp_path / name for name in ("starts", "ending", "go"))
    go.mkdir()
    program = f"""
import pathlib, signal, sys, time
def end(number, frame):
    pathlib.Path({str(ending)!r}).touch()
    while pathlib.Path({str(go)!r}).is_dir():
        time.sleep(0.01)
    sys.exit()
signal.signal(signal.SIGTERM, end)
with open({str(starts)!r}, "a") as file:
    file.write("one\\n")
print("serving 127.0.0.1:1", flush=True)
time.sleep(600)
"""
    drafter = Drafter(command=shlex.join([sys.executable, "-c", program]))
    drafter.start()
    with ThreadPoolExecutor(2) as pool:
        restarted = pool.submit(drafter.act, "restart")
        while not ending.exists():
            time.sleep(0.01)
        closed = pool.submit(drafter.close)
        while not drafter._over:
            time.sleep(0.01)
        go.rmdir()
        closed.result()
        with pytest.raises(FailedPrecondition, match="any more"):
            restarted.result()
    assert starts.read_text() == "one\n"


@pytest.mark.parametrize("command", ["", "  ", "'"])
def test_a_command_that_is_none_is_refused(command: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Drafter(command=command)
    assert caught.value.field == "--drafter-command"


def test_lanes_to_one_address_are_told_apart() -> None:
    ready, lost = LaneState.READY, LaneState.LOST
    states = iter([(ready, lost), (ready, lost), (ready, ready)])
    events: list[Any] = []

    async def info(**_: float) -> Any:
        found = next(states, None)
        if found is None:
            raise asyncio.CancelledError
        return SimpleNamespace(
            lanes=[SimpleNamespace(target="a:1", state=state) for state in found],
            load=SimpleNamespace(running=0, waiting=0, tokens=0),
            totals=Acceptance(),
        )

    client: Any = SimpleNamespace(info=info)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(watch(client, 0.0, 0.0, lambda reading: None, events.append))
    assert [event.name for event in events] == ["lane ready"]
