"""A real Prometheus scrapes the shipped pair under load: every documented metric arrives, numbers
are the clients', every panel of the dashboard has data, every alert fires on its fault and clears.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from fakes import ScriptedDrafter, eventually, generate, scripted, tiny_target
from observe.kit import RULES, Prometheus, compose_module, free_port, prometheus, scaled
from observe.pair_kit import Load, metered_drafter, metered_verifier

from draftwire.metric_table import of_service
from draftwire.v1 import types_pb2
from draftwire_kernels.tree import TokenTree

ALERTS = {alert["alert"] for alert in compose_module("generate").alerts()}
# 60 times shorter: a window of five minutes is five seconds.
SCALE = 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def host(url: str) -> str:
    """host:port of a metrics URL."""
    return url.removeprefix("http://").removesuffix("/metrics")


@contextlib.asynccontextmanager
async def loaded(stub: Any, clients: int = 4) -> AsyncIterator[Load]:
    """Clients that ask again and again until the block ends; then the load is complete."""
    load, stop = Load(), asyncio.Event()
    task = asyncio.create_task(load.until(stub, stop, clients=clients))
    try:
        yield load
    finally:
        stop.set()
        await task


CALLS = 'draftwire_rpc_handled_total{method="Verifier/Generate",code="OK"}'


def test_prometheus_has_every_documented_metric_and_the_clients_numbers(
    target: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with (
            metered_drafter(target) as (_, address, drafter_url),
            metered_verifier(target, address) as (service, stub, url),
        ):
            jobs = {"draftwire-verifier": [host(url)], "draftwire-drafter": [host(drafter_url)]}
            async with prometheus(tmp_path, jobs) as server:
                async with loaded(stub) as load:
                    await _until_up(server, 2)
                    missing = _queries()
                    await eventually(lambda: _less(server, missing))
                await eventually(lambda: not service.engine.sessions)
                await _until_settled(server, load)
                await _check_documented(server)
                await _check_numbers(server, load)

    asyncio.run(main())


async def _until_up(server: Prometheus, targets: int) -> None:
    async def up() -> bool:
        return sum(value for _, value in await server.query("up")) == targets

    await eventually(up)


def _queries() -> set[tuple[str, str]]:
    """Every query of the dashboard that needs no GPU, with its panel."""
    return {
        (panel.title, query)
        for panel in compose_module("panels").panels()
        if not panel.gpu
        for query, _ in panel.queries
    }


async def _less(server: Prometheus, missing: set[tuple[str, str]]) -> bool:
    """Ask the queries that had no data; whether all have some by now."""
    for title, query in sorted(missing):
        shown = query.replace("$__rate_interval", "5s").replace("$instance", ".*")
        if any(math.isfinite(value) for _, value in await server.query(shown)):
            missing.discard((title, query))
    return not missing


async def _until_settled(server: Prometheus, load: Load) -> None:
    """A scrape has come after the last request. Tokens are counted when they are committed,
    requests and calls when their ends have gone to the client: a scrape may fall in between."""

    async def reached(query: str, count: int) -> bool:
        found = await server.query(query)
        return bool(found) and found[0][1] >= count

    async def settled() -> bool:
        return (
            await reached("draftwire_verifier_generated_tokens_total", load.tokens)
            and await reached("sum(draftwire_verifier_requests_total)", len(load.answers))
            and await reached(CALLS, len(load.answers))
        )

    await eventually(settled)


async def _check_documented(server: Prometheus) -> None:
    for service in ("verifier", "drafter"):
        for metric in of_service(service):
            suffix = "_count" if metric.kind == "histogram" else ""
            selector = f'{metric.name}{suffix}{{job="draftwire-{service}"}}'
            found = await server.query(selector)
            assert found or metric.gpu, f"{selector} is not in Prometheus"
            for labels, _ in found:
                own = labels.keys() - {"__name__", "job", "instance"}
                assert own == set(metric.label_names)


async def _check_numbers(server: Prometheus, load: Load) -> None:
    async def value(query: str) -> float:
        return sum(value for _, value in await server.query(query))

    spec = "draftwire_spec_decode_"
    assert await value("draftwire_verifier_generated_tokens_total") == load.tokens
    assert await value("sum(draftwire_verifier_requests_total)") == len(load.answers)
    accepted, rounds = load.sum("accepted_tokens"), load.sum("rounds")
    assert await value(f"{spec}num_accepted_tokens_total") == accepted > 0
    assert await value(f"{spec}num_drafts_total") == rounds
    assert await value(f"sum({spec}num_accepted_tokens_per_pos_total)") == accepted
    length = f"1 + {spec}num_accepted_tokens_total / {spec}num_drafts_total"
    assert await value(length) == pytest.approx(1 + accepted / rounds)
    assert await value(CALLS) == len(load.answers)
    # The drafter hears of every round but the last of each answer.
    heard = await value("draftwire_drafter_accepted_tokens_total")
    assert 0 < heard <= accepted


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_alert_fires_on_its_fault_and_clears_when_it_is_over(
    target: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        drafter = ScriptedDrafter(guess(True))
        metrics = f"127.0.0.1:{free_port()}"
        settings = {"stall_s": 0.5, "max_sessions": 4, "draft_wait_ms": 100.0}
        settings["metrics_listen"] = metrics
        rules, jobs = scaled(RULES.read_text(), SCALE), {"draftwire-verifier": [metrics]}
        async with (
            scripted(drafter) as address,
            prometheus(tmp_path, jobs, interval="1s", rules=rules) as server,
        ):
            await fires(server, "DraftwireDown")  # nobody is there yet
            async with metered_verifier(target, address, **settings) as (service, stub, _):
                await clears(server, "DraftwireDown")
                faults, stop = Faults(service, drafter), asyncio.Event()
                repeating = asyncio.create_task(_repeat(stub, stop))
                try:
                    await _history(server)
                    for alert, (begin, end) in faults.staged().items():
                        await clears(server, alert)
                        begin()
                        await fires(server, alert)
                        end()
                        await clears(server, alert)
                finally:
                    faults.hold.set()
                    stop.set()
                    await repeating
            assert {*faults.staged(), "DraftwireDown"} == ALERTS

    asyncio.run(main())


async def fires(server: Prometheus, alert: str) -> None:
    """Wait until it does."""

    async def firing() -> bool:
        return alert in await server.firing()

    await eventually(firing)


async def clears(server: Prometheus, alert: str) -> None:
    """Wait until it does not."""

    async def gone() -> bool:
        return alert not in await server.firing()

    await eventually(gone)


async def _history(server: Prometheus) -> None:
    """A drop is judged by what was before."""

    async def known() -> bool:
        rate = await server.query("draftwire:accepted_per_draft:rate5m offset 10s")
        return bool(rate) and rate[0][1] > 0

    await eventually(known)


class Faults:
    """What can be done to a verifier and its drafter, and undone."""

    def __init__(self, service: Any, drafter: ScriptedDrafter) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self._engine, self._drafter = service.engine, drafter
        self._poisoned = False
        inner = self._engine.host.step

        def step(*arguments: Any) -> Any:
            self.hold.wait()
            output = inner(*arguments)
            if self._poisoned:
                bad = torch.full_like(output.logits, float("nan"))
                output = dataclasses.replace(output, logits=bad)
            return output

        self._engine.host.step = step

    def staged(self) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
        """Alert -> how its fault begins and ends."""
        held = (self.hold.clear, self.hold.set)
        poisoned = (self._set(self, "_poisoned", True), self._set(self, "_poisoned", False))
        return {
            "DraftwireAcceptanceDrop": (
                self._set(self._drafter, "propose", guess(False)),
                self._set(self._drafter, "propose", guess(True)),
            ),
            "DraftwireNoProgress": held,
            "DraftwireQueueTime": held,
            "DraftwireDivergence": (
                self._set(self._drafter, "change_response", malformed),
                self._set(self._drafter, "change_response", lambda _: None),
            ),
            "DraftwireFallbacks": (
                self._set(self._drafter, "before_answer", lambda: asyncio.sleep(0.4)),
                self._set(self._drafter, "before_answer", lambda: asyncio.sleep(0)),
            ),
            "DraftwireNonfinite": poisoned,
            "DraftwireErrors": poisoned,
            "DraftwireDrafterPoolEmpty": (
                self._cut,
                self._set(self._drafter, "change_reply", lambda _: None),
            ),
        }

    def _set(self, thing: object, name: str, value: object) -> Callable[[], None]:
        return lambda: setattr(thing, name, value)

    def _cut(self) -> None:
        def fail(_: Any) -> None:
            raise RuntimeError("staged: no handshake is answered")

        self._drafter.change_reply = fail
        for lane in list(self._engine.lanes.lanes.values()):
            self._engine.post(lambda port=lane.port: port.abandon("staged"))  # type: ignore[misc]


def malformed(response: Any) -> None:
    """Proposals that are no trees."""
    for proposal in response.proposals:
        proposal.tree.parents[0] = 5


def guess(right: bool) -> Callable[..., TokenTree]:
    """Drafts of the letter that the load is made to repeat, or of another."""

    def propose(tokens: list[int], session: Any) -> TokenTree:
        token = tokens[-1] if right else (tokens[-1] + 1) % 200
        return TokenTree.chain((token,) * max(1, min(4, session.budget.max_depth)))

    return propose


async def _repeat(stub: Any, stop: asyncio.Event, clients: int = 8) -> None:
    """Requests that repeat one letter, faults of the server passed over."""

    async def client() -> None:
        while not stop.is_set():
            with contextlib.suppress(grpc.RpcError):
                await generate(
                    stub,
                    "aaaa",
                    sampling={"temperature": 0, "logit_bias": {64: 100.0}},
                    stop={"max_tokens": 40, "ignore_eos": True},
                    speculation={"mode": types_pb2.SPECULATION_MODE_FIXED},
                )

    await asyncio.gather(*(client() for _ in range(clients)))
