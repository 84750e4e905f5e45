"""Faults of the load tester: a drafter's process killed, stopped and started again."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from typing import Any

import pytest

from draftwire_client import FailedPrecondition
from draftwire_client.bench.faults import Drafter, Fault, play

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
