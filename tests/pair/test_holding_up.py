"""What one session waits for, or breaks on, is nobody else's: newcomers are served meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes import (
    OFF,
    ScriptedDrafter,
    eventually,
    generate,
    random_trees,
    scripted,
    tiny_target,
    verifier,
)

from draftwire.errors import from_rpc_error
from draftwire.v1 import types_pb2

LONG = {"max_tokens": 200, "ignore_eos": True}
SHORT = {"max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("mode", ["FIXED", "ADAPTIVE"])
def test_a_newcomer_does_not_wait_for_a_proposal_of_another_session(
    target: Path, mode: str
) -> None:
    speculation = {"mode": types_pb2.SpeculationMode.Value(f"SPECULATION_MODE_{mode}")}

    async def main() -> None:
        silent = asyncio.Event()
        drafter = ScriptedDrafter(random_trees(258, 4), before_answer=silent.wait)
        async with (
            scripted(drafter) as address,
            verifier(target, [address], draft_wait_ms=30_000, lane_timeout_s=60) as (_, stub),
        ):
            waits = asyncio.create_task(
                generate(stub, [1, 2, 3], stop=LONG, speculation=speculation)
            )
            await eventually(lambda: drafter.steps)
            for number in range(3):
                answer = await generate(
                    stub, [4, 5, number], stop=SHORT, speculation=OFF, timeout=15
                )
                assert len(answer.tokens) == 3
            assert drafter.answers == 0
            silent.set()
            assert len((await waits).tokens) == 200

    asyncio.run(main())


def test_a_fault_in_deciding_what_to_wait_for_costs_its_requests_and_not_the_engine(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> float:
        raise ZeroDivisionError

    async def main() -> None:
        drafter = ScriptedDrafter(random_trees(258, 4))
        async with scripted(drafter) as address, verifier(target, [address]) as (service, stub):
            await generate(stub, [1, 2, 3], stop=SHORT)
            with monkeypatch.context() as patch:
                patch.setattr(service.engine, "_decide", broken)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await generate(stub, [1, 2, 3], stop=LONG, timeout=15)
                assert from_rpc_error(caught.value).reason == "STEP_FAILED"
            answer = await generate(stub, [1, 2, 3], stop=SHORT, timeout=15)
            assert len(answer.tokens) == 3

    asyncio.run(main())


def test_a_fault_before_going_to_sleep_does_not_end_the_engine(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        drafter = ScriptedDrafter(random_trees(258, 4))
        async with scripted(drafter) as address, verifier(target, [address]) as (service, stub):
            engine = service.engine
            decide = engine._decide

            def before_sleep(now: float) -> Any:
                if engine._wake._is_owned():
                    raise ZeroDivisionError
                return decide(now)

            monkeypatch.setattr(engine, "_decide", before_sleep)
            answer = await generate(stub, [1, 2, 3], stop=SHORT, timeout=15)
            assert len(answer.tokens) == 3

    asyncio.run(main())
