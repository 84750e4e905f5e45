"""The real Envoy, with the shipped configuration, between the verifier and two drafters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import yaml
from fakes import ScriptedDrafter, eventually, generate, scripted, tiny_target, verifier

from draftwire_kernels.tree import TokenTree

SHIPPED = Path(__file__).resolve().parents[2] / "compose/envoy/envoy.yaml"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def localised(port: int, admin: int, drafters: Sequence[str]) -> str:
    """The shipped configuration with other addresses and nothing else changed."""
    config = yaml.safe_load(SHIPPED.read_text())
    config["admin"]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": admin}
    (listener,) = config["static_resources"]["listeners"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    (cluster,) = config["static_resources"]["clusters"]
    (group,) = cluster["load_assignment"]["endpoints"]
    places = [drafter.rpartition(":") for drafter in drafters]
    group["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": h, "port_value": int(p)}}}}
        for h, _, p in places
    ]
    return json.dumps(config)  # which is YAML


@contextlib.asynccontextmanager
async def envoy(folder: Path, drafters: Sequence[str]) -> AsyncIterator[str]:
    binary = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
    if binary is None:
        pytest.skip("envoy is not installed")
    port = free_port()
    config = folder / "envoy.yaml"
    config.write_text(localised(port, free_port(), drafters))
    log = folder / "envoy.log"
    process = await asyncio.create_subprocess_exec(
        binary,
        *("--config-path", str(config), "--log-path", str(log), "--log-level", "warning"),
        *("--disable-hot-restart", "--concurrency", "1"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )

    async def listening() -> bool:
        assert process.returncode is None, log.read_text()
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    try:
        await eventually(listening)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


def test_lanes_through_envoy_spread_over_the_drafters_and_requests_are_served(
    tmp_path: Path,
) -> None:
    target = tiny_target(tmp_path / "target")

    async def main() -> None:
        drafters = [ScriptedDrafter(lambda tokens, _: TokenTree.chain([tokens[-1]])) for _ in "ab"]
        async with (
            scripted(drafters[0]) as one,
            scripted(drafters[1]) as two,
            envoy(tmp_path, [one, two]) as proxy,
            verifier(target, [proxy], drafter_lanes=2) as (service, stub),
        ):
            await eventually(lambda: len(service.engine.lanes.lanes) == 2)
            # Placed by streams, so one lane each; both are used, since sessions go to the lane with
            # the fewest.
            assert [drafter.lanes for drafter in drafters] == [1, 1]
            stop = {"max_tokens": 24, "ignore_eos": True}
            answers = await asyncio.gather(
                *(generate(stub, f"prompt {n}", stop=stop) for n in range(4))
            )
            assert [len(answer.tokens) for answer in answers] == [24] * 4
            assert all(answer.finished.acceptance.drafted_tokens for answer in answers)
            assert all(drafter.opened for drafter in drafters)
            assert not any(drafter.faults for drafter in drafters)

    asyncio.run(main())
