"""Processes that were started here end with the program that started them, however it ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftwire.v1 import verifier_pb2
from draftwire_client.testing import Hold, Reply, Say, ScriptedVerifier

BENCH = Path(__file__).resolve().parents[1] / "bench"
ASLEEP = "import os, time\nprint('serving', os.getpid(), flush=True)\ntime.sleep(1000)\n"
BY_OBJECT = """
from draftwire_client.processes import ServiceProcess
process = ServiceProcess("asleep", [])
print(process.serving(100), flush=True)
time.sleep(1000)
"""
BY_BENCHMARK = f"""
sys.path.insert(0, {str(BENCH)!r})
import common
from draftwire_client.demo import service
common.end_on_sigterm()
with service(["asleep"], "it") as address:
    print(address, flush=True)
    time.sleep(1000)
"""
BY_COMMAND = f"""
sys.path.insert(0, {str(BENCH)!r})
import common
common.run_module("asleep")
"""


@contextmanager
def program(folder: Path, text: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A running program and the process that it has started."""
    (folder / "asleep.py").write_text(ASLEEP)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys, time\n{text}"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[-1])
    try:
        yield process, child
    finally:
        process.kill()
        process.wait()
        if lives(child):
            os.kill(child, signal.SIGKILL)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def gone(pid: int) -> None:
    """Return when the process has ended; the test's time limit ends it otherwise."""
    while lives(pid):
        time.sleep(0.02)


@pytest.mark.parametrize("text", [BY_OBJECT, BY_BENCHMARK, BY_COMMAND], ids=["o", "b", "c"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_what_a_program_started_ends_with_it(
    tmp_path: Path, text: str, number: signal.Signals
) -> None:
    with program(tmp_path, text) as (process, child):
        assert lives(child)
        process.send_signal(number)
        process.wait()
        gone(child)


def test_a_benchmark_that_is_ended_says_so(tmp_path: Path) -> None:
    with program(tmp_path, BY_BENCHMARK) as (process, child):
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
        gone(child)


def test_the_load_tester_takes_its_drafter_along_when_it_is_ended(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    drafter = f"import os, time; open({str(told)!r}, 'w').write(f'{{os.getpid()}}\\n');" + (
        "print('serving 127.0.0.1:1', flush=True); time.sleep(1000)"
    )
    with ScriptedVerifier() as server:  # without any lane: the load tester waits for one
        command = [*(sys.executable, "-m", "draftwire_client", "bench", "--quiet")]
        command += ["--target", server.target]
        command += ["--drafter-command", shlex.join([sys.executable, "-c", drafter])]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            while not (told.is_file() and told.read_text().endswith("\n")):
                assert process.poll() is None
                time.sleep(0.02)
            process.terminate()
            assert process.wait() == 128 + signal.SIGTERM
            gone(int(told.read_text()))
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_load_tester_that_is_ended_ends_its_workers_at_once(number: signal.Signals) -> None:
    def reply(request: verifier_pb2.GenerateRequest) -> Reply:
        warming = request.stop.max_tokens == 8
        return Reply.of("ok") if warming else Reply((Say("a", (1,)), Hold()))

    flags = "--quiet --num-prompts 4 --max-concurrency 4 --workers 2 --output-len 9 --target"
    with ScriptedVerifier(reply) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "draftwire_client", "bench", *flags.split(), server.target],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell in the background may have left it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            while len(server.calls) < 5:
                assert process.poll() is None
                time.sleep(0.02)
            workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert len(workers) >= 2
            began = time.monotonic()
            os.killpg(process.pid, number)
            _, errors = process.communicate(timeout=100)
            assert process.returncode == 128 + number
            assert "Traceback" not in errors
            assert time.monotonic() - began < 9  # waiting for each in turn takes ten seconds
            for worker in workers:
                gone(int(worker))
        finally:
            process.kill()
