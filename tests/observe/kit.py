"""What the tests of metrics and traces share: Prometheus as a process, scrapes, the parts of
compose/ that are code.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import re
import shutil
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

COMPOSE = Path(__file__).resolve().parents[2] / "compose"
RULES = COMPOSE / "prometheus" / "rules.yml"


def compose_module(name: str) -> ModuleType:
    """A script of compose/, imported as it imports its neighbours."""
    sys.path.insert(0, str(COMPOSE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(COMPOSE))


def debian(program: str) -> str:
    """Path of a program of Debian's package prometheus."""
    found = shutil.which(program)
    if found is None:
        pytest.fail(f"{program} is missing: apt-get install prometheus")
    return found


def fetch(url: str) -> str:
    """The body of a GET."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
    return body.decode()


Labels = tuple[tuple[str, str], ...]


def scrape(url: str) -> dict[str, dict[Labels, float]]:
    """Every series of an exporter: sample name -> sorted labels -> value."""
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(fetch(url)):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def total(found: dict[str, dict[Labels, float]], name: str, **labels: str) -> float:
    """Sum over the series of a metric that have these labels."""
    wanted = set(labels.items())
    return sum(value for key, value in found[name].items() if wanted <= set(key))


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scaled(rules: str, factor: float) -> str:
    """The rules with every duration (windows, offsets, `for`) `factor` times shorter; thresholds
    and names stay."""
    units = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

    def shorter(match: re.Match[str]) -> str:
        milliseconds = int(match[2]) * units[match[3]] / factor
        return f"{match[1]}{max(1, round(milliseconds))}ms{match[4]}"

    return re.sub(r"(\[|offset |for: )(\d+)([smhd])(\]|\b)", shorter, rules)


class Prometheus:
    """A running Prometheus; queries go through its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def get(self, path: str, **parameters: str) -> Any:
        """`data` of an API call."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        answer = json.loads(await asyncio.to_thread(fetch, url))
        assert answer["status"] == "success", answer
        return answer["data"]

    async def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """An instant query: labels and value of each series."""
        data = await self.get("query", query=expression)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(series["metric"], float(series["value"][1])) for series in data["result"]]

    async def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        alerts = (await self.get("alerts"))["alerts"]
        return {a["labels"]["alertname"] for a in alerts if a["state"] == "firing"}


@contextlib.asynccontextmanager
async def prometheus(
    folder: Path,
    targets: dict[str, Sequence[str]],
    *,
    interval: str = "500ms",
    rules: str | None = None,
) -> AsyncIterator[Prometheus]:
    """Debian's Prometheus scraping `targets` (job -> host:port), until the block ends."""
    from fakes import eventually  # brings torch, which the tests of rules and table do without

    jobs = [
        {
            "job_name": job,
            "scrape_interval": interval,
            "scrape_timeout": interval,
            "static_configs": [{"targets": list(addresses)}],
        }
        for job, addresses in targets.items()
    ]
    config: dict[str, Any] = {
        "global": {"evaluation_interval": interval},
        "scrape_configs": jobs,
    }
    if rules is not None:
        (folder / "rules.yml").write_text(rules)
        config["rule_files"] = ["rules.yml"]
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        debian("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=(folder / "prometheus.log").open("wb"),
    )
    running = Prometheus(f"http://127.0.0.1:{port}")
    try:

        async def ready() -> bool:
            if process.returncode is not None:
                pytest.fail((folder / "prometheus.log").read_text())
            with contextlib.suppress(OSError):
                return "Ready" in await asyncio.to_thread(fetch, f"{running.url}/-/ready")
            return False

        await eventually(ready)
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
