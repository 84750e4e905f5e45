"""`make up`, `make down`, `make status`: the pair and Prometheus as processes of this machine.

Knows how each is started, how to tell that it serves, and where its process id, log and settings
lie (the folder .run of the project, or --folder). Does not know what they do. Needs no container
engine.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 900.0  # the first start unpacks the demo's model
STOP_LIMIT_S = 40.0  # the services drain for up to 30 s


class StartFailed(Exception):
    """A process ended or did not serve in time; the message has the end of its log."""


@dataclass(frozen=True)
class Part:
    """One process: how it is started, and a check that it serves."""

    name: str
    command: Sequence[str]
    serves: Callable[[], bool]
    address: str
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ports:
    """Where everything listens, all on the loopback."""

    verifier: int = 7450
    drafter: int = 7451
    verifier_metrics: int = 9464
    drafter_metrics: int = 9465
    prometheus: int = 9090


def parts(
    ports: Ports, folder: Path, verifier: Sequence[str], drafter: Sequence[str], *, prometheus: bool
) -> list[Part]:
    """The processes in the order of their start. `verifier`, `drafter`: further arguments."""
    python = sys.executable
    found = [
        Part(
            "drafter",
            [
                *(python, "-m", "drafter_service", f"--listen=127.0.0.1:{ports.drafter}"),
                f"--metrics-listen=127.0.0.1:{ports.drafter_metrics}",
                *(
                    drafter
                    or ("--checkpoint=package:drafter_service/checkpoints/smollm2-135m-demo",)
                ),
            ],
            lambda: _healthy(ports.drafter, "draftwire.v1.Drafter"),
            f"127.0.0.1:{ports.drafter}",
        ),
        Part(
            "verifier",
            [
                *(python, "-m", "verifier_service", f"--listen=127.0.0.1:{ports.verifier}"),
                f"--metrics-listen=127.0.0.1:{ports.verifier_metrics}",
                f"--drafters=127.0.0.1:{ports.drafter}",
                *verifier,
            ],
            lambda: _healthy(ports.verifier, "draftwire.v1.Verifier"),
            f"127.0.0.1:{ports.verifier}",
        ),
    ]
    if prometheus:
        found.append(_prometheus(ports, folder))
    return found


def _prometheus(ports: Ports, folder: Path) -> Part:
    binary = shutil.which("prometheus")
    if binary is None:
        raise StartFailed("prometheus is not installed: apt install prometheus, or --no-prometheus")
    config = folder / "prometheus.yml"
    config.write_text(prometheus_config(ports), encoding="utf-8")
    url = f"http://127.0.0.1:{ports.prometheus}"
    return Part(
        "prometheus",
        [
            binary,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{ports.prometheus}",
        ],
        lambda: _answers(f"{url}/-/ready"),
        url,
    )


def prometheus_config(ports: Ports) -> str:
    """JSON is YAML: the shipped rules, and both services of this machine as targets."""
    jobs = {
        "draftwire-verifier": ports.verifier_metrics,
        "draftwire-drafter": ports.drafter_metrics,
    }
    return json.dumps(
        {
            "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
            "rule_files": [str(ROOT / "compose/prometheus/rules.yml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
                for job, port in jobs.items()
            ],
        },
        indent=2,
    )


def up(wanted: Sequence[Part], folder: Path, limit_s: float = START_LIMIT_S) -> None:
    """Start what does not run, all at once, and wait until each serves. Raises StartFailed."""
    with _alone(folder):
        _up(wanted, folder, limit_s)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two at once would both find nothing running, and one would forget the other's processes."""
    with (folder / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartFailed(f"another `up` of {folder} is under way") from None
        yield


def _up(wanted: Sequence[Part], folder: Path, limit_s: float) -> None:
    started: list[str] = []
    try:
        for part in wanted:
            if running(folder, part.name) is None:
                if part.serves():
                    raise StartFailed(
                        f"{part.name}: another process serves {part.address}; stop it, or choose "
                        "another port"
                    )
                started.append(part.name)
                _start(part, folder)
            elif _started_as(folder, part.name) != shlex.join(part.command):
                raise StartFailed(f"{part.name} runs with other settings: `make down` first")
        end = time.monotonic() + limit_s
        for part in wanted:
            _await(part, folder, end)
            sys.stdout.write(f"{part.name:<10} {part.address}  log {folder / part.name}.log\n")
            sys.stdout.flush()
    except BaseException:
        down([part.name for part in wanted if part.name in started], folder)
        raise


def _start(part: Part, folder: Path) -> None:
    log = (folder / f"{part.name}.log").open("ab")
    with log:
        process = subprocess.Popen(
            part.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C of the shell that ran `make up` is not theirs
        )
    about = f"{process.pid} {_birth(process.pid)}\n{shlex.join(part.command)}\n"
    (folder / f"{part.name}.pid").write_text(about, encoding="utf-8")


def _await(part: Part, folder: Path, end: float) -> None:
    pause = 0.1
    while not part.serves():
        if running(folder, part.name) is None:
            raise StartFailed(f"{part.name} ended:\n{_tail(folder / f'{part.name}.log')}")
        if time.monotonic() > end:
            raise StartFailed(f"{part.name} does not serve:\n{_tail(folder / f'{part.name}.log')}")
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)


def down(names: Sequence[str], folder: Path, limit_s: float = STOP_LIMIT_S) -> None:
    """SIGTERM to each, last started first; SIGKILL to what is still there after the limit."""
    for name in reversed(names):
        if (pid := running(folder, name)) is not None:
            _signal(pid, signal.SIGTERM)
            end = time.monotonic() + limit_s
            while running(folder, name) is not None and time.monotonic() < end:
                time.sleep(0.05)
            if running(folder, name) is not None:
                _signal(pid, signal.SIGKILL)
            sys.stdout.write(f"{name:<10} stopped\n")
        (folder / f"{name}.pid").unlink(missing_ok=True)


def running(folder: Path, name: str) -> int | None:
    """Process id of a part that was started here and lives; a reused number is not taken for it."""
    try:
        number, birth = _about(folder, name)[0].split()
        pid = int(number)
    except (FileNotFoundError, ValueError, IndexError):
        return None
    if pid < 1:  # 0 and below are groups of processes
        return None
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return pid if _birth(pid) == birth else None


def _started_as(folder: Path, name: str) -> str:
    """The command of a part that runs."""
    return _about(folder, name)[-1]


def _about(folder: Path, name: str) -> list[str]:
    text = (folder / f"{name}.pid").read_text(encoding="utf-8", errors="replace")
    return text.rstrip("\n").split("\n")


def _birth(pid: int) -> str:
    """When the process was started, in ticks since boot; empty if there is none or it is dead."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if after_name[0] == "Z" else after_name[19]


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _healthy(port: int, service: str) -> bool:
    from draftwire_client import Client, DraftwireError, HealthStatus, RetryConfig

    retry = RetryConfig(max_attempts=1)
    with Client.connect(f"127.0.0.1:{port}", retry=retry, timeout=2.0) as client:
        try:
            return client.health(service) is HealthStatus.SERVING
        except DraftwireError:
            return False


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _tail(log: Path, lines: int = 15) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return "\n".join(text.splitlines()[-lines:])


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0, or 1 with the end of the log of what did not start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("up", "down", "status"))
    parser.add_argument("--folder", type=Path, default=ROOT / ".run", help="ids, logs, settings")
    parser.add_argument("--no-prometheus", action="store_true")
    parser.add_argument("--verifier", default="", help="further arguments, separated by blanks")
    parser.add_argument("--drafter", default="", help="as --verifier; in place of --checkpoint")
    for name in Ports.__dataclass_fields__:
        flag = f"--{name.replace('_', '-')}-port"
        parser.add_argument(flag, type=int, default=getattr(Ports, name), metavar="PORT")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    given = {name: getattr(options, f"{name}_port") for name in Ports.__dataclass_fields__}
    ports = Ports(**given)
    names = ["drafter", "verifier", "prometheus"]
    if options.action == "down":
        down(names, options.folder)
        return 0
    if options.action == "status":
        for name in names:
            pid = running(options.folder, name)
            sys.stdout.write(f"{name:<10} {'down' if pid is None else f'up, process {pid}'}\n")
        return 0
    try:
        wanted = parts(
            ports,
            options.folder,
            options.verifier.split(),
            options.drafter.split(),
            prometheus=not options.no_prometheus,
        )
        up(wanted, options.folder)
    except StartFailed as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
