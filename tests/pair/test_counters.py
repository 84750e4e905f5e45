"""What is counted: whole, and never going back."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import grpc
import pytest
from fakes import generate, tiny_target, verifier

from draftwire.v1 import verifier_pb2
from draftwire_client.responses import read_info
from verifier_service import service as services
from verifier_service import servicer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def test_a_long_life_does_not_end_the_counters(target: Path) -> None:
    many = 2**32 + 5

    async def main() -> None:
        async with verifier(target) as (service, stub):
            service.engine.totals.drafted = many
            service.engine.totals.rounds = many
            info = await stub.GetInfo(verifier_pb2.VerifierGetInfoRequest())
        assert (info.counters.drafted_tokens, info.counters.rounds) == (many, many)
        assert (info.totals.drafted_tokens, info.totals.rounds) == (2**32 - 1, 2**32 - 1)
        assert read_info(info).totals.drafted == many
        info.ClearField("counters")  # an older server
        assert read_info(info).totals.drafted == 2**32 - 1

    asyncio.run(main())


def test_counters_do_not_go_back_while_a_step_lasts(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "_INFO_TIMEOUT", 0.2)

    async def main() -> None:
        async with verifier(target) as (service, stub):
            ask = verifier_pb2.VerifierGetInfoRequest()
            await generate(stub, [1, 2, 3], stop={"max_tokens": 9, "ignore_eos": True})
            before = (await stub.GetInfo(ask)).counters
            assert before.plain_rounds == 8
            held = threading.Event()
            service.engine.post(held.wait)
            try:
                during = await stub.GetInfo(ask)
            finally:
                held.set()
            assert during.counters == before
            await generate(stub, [1, 2, 3], stop={"max_tokens": 9, "ignore_eos": True})
            assert (await stub.GetInfo(ask)).counters.plain_rounds == 16

    asyncio.run(main())


def test_a_fault_of_ours_is_counted_as_a_failed_request(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with verifier(target) as (service, stub):
            monkeypatch.setattr(servicer, "_started", broken)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(stub, [1, 2, 3])
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert service.servicer.meter.outcomes == {"failed": 1}
            assert service.servicer.meter.outcomes["cancelled"] == 0

    asyncio.run(main())
