"""`make up` and `make down` on a tiny model: the real services as processes, and the real
Prometheus where it is installed."""

from __future__ import annotations

import fcntl
import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftwire_client import Client

SCRIPT = Path(__file__).resolve().parents[2] / "compose/local.py"
VERIFIER = "--model=random:tiny --kv-tokens=4096"
DRAFTER = "--target=random:tiny --random-weights-seed=1 --draft-parts=ngram"


def local(action: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), action, "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for number in sockets:
        number.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for number in sockets:
        number.close()
    return ports


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    local("down", tmp_path / "run")


def flags(ports: list[int]) -> list[str]:
    names = ("verifier", "drafter", "verifier-metrics", "drafter-metrics", "prometheus")
    found = [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]
    if shutil.which("prometheus") is None:
        found.append("--no-prometheus")
    return [*found, f"--verifier={VERIFIER}", f"--drafter={DRAFTER}"]


def test_up_serves_again_does_nothing_and_down_leaves_nothing(folder: Path) -> None:
    ports = free_ports(5)
    first = local("up", folder, *flags(ports))
    assert first.returncode == 0, first.stderr
    ids = {path.stem: path.read_text() for path in folder.glob("*.pid")}
    with Client.connect(f"127.0.0.1:{ports[0]}") as client:
        assert client.generate("abc", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
    if shutil.which("prometheus"):
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[4]}/api/v1/targets") as reply:
            active = json.load(reply)["data"]["activeTargets"]
        jobs = {target["labels"]["job"] for target in active}
        assert jobs == {"draftwire-verifier", "draftwire-drafter"}
    again = local("up", folder, *flags(ports))
    assert again.returncode == 0, again.stderr
    assert {path.stem: path.read_text() for path in folder.glob("*.pid")} == ids
    assert local("status", folder).stdout.count("up, process") == len(ids)
    assert local("down", folder).returncode == 0
    assert not list(folder.glob("*.pid"))
    assert local("status", folder).stdout.count("down") == 3
    for port in ports[:2]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))  # free again


def test_what_cannot_start_says_why_and_takes_the_others_down(folder: Path) -> None:
    ports = free_ports(5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        taken.listen()
        failed = local("up", folder, *flags(ports))
    assert failed.returncode == 1
    assert "verifier ended" in failed.stderr
    assert f"127.0.0.1:{ports[0]}" in failed.stderr
    assert "not in use" in failed.stderr
    assert not list(folder.glob("*.pid"))


def test_a_process_id_that_was_reused_is_not_taken_for_ours(folder: Path) -> None:
    folder.mkdir()
    (folder / "verifier.pid").write_text("1 12345\n")  # process 1 lives, and is not ours
    assert "verifier   down" in local("status", folder).stdout
    assert local("down", folder).returncode == 0


@pytest.mark.parametrize(
    "text", ["", "one two\n", "-1 1\n", "0 1\n", "1\n", "\xff \xfe\n", "9" * 30]
)
def test_a_damaged_process_id_is_none(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "verifier.pid").write_text(text, encoding="latin-1")
    status = local("status", folder)
    assert (status.returncode, status.stderr) == (0, "")
    assert "verifier   down" in status.stdout
    assert local("down", folder).returncode == 0


def test_up_refuses_what_would_not_be_its_own(folder: Path, tmp_path: Path) -> None:
    ports = [*free_ports(4), 0]
    given = [*flags(ports), "--no-prometheus"]
    assert local("up", folder, *given).returncode == 0
    ids = {path.name: path.read_text() for path in folder.glob("*.pid")}
    # Another folder's `up`: the ports answer, but not for it.
    other = local("up", tmp_path / "other", *given)
    assert other.returncode == 1
    assert f"another process serves 127.0.0.1:{ports[1]}" in other.stderr
    # The same folder's with other settings: what runs does not have them.
    changed = local("up", folder, *given, "--verifier=--model=random:tiny --max-nodes=3")
    assert changed.returncode == 1
    assert "verifier runs with other settings" in changed.stderr
    with (folder / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        at_once = local("up", folder, *given)
    assert at_once.returncode == 1
    assert "under way" in at_once.stderr
    assert {path.name: path.read_text() for path in folder.glob("*.pid")} == ids
    assert local("status", folder).stdout.count("up, process") == 2
