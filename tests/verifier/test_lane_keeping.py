"""A lane is kept for as long as its address is wanted, whatever ended the attempt before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from fakes import eventually

from draftwire.channel import ChannelConfig
from draftwire.errors import FailedPrecondition
from draftwire.v1 import drafter_pb2, types_pb2
from verifier_service import drafters
from verifier_service.drafters import DrafterPool
from verifier_service.settle import settle


@pytest.mark.parametrize(
    "end", [asyncio.CancelledError(), RuntimeError("a fault of ours"), OSError("gone")], ids=repr
)
def test_another_attempt_follows_whatever_ended_the_first(
    monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    attempts: list[str] = []

    async def main() -> None:
        second = asyncio.Event()

        async def attempt(_: Any) -> None:
            attempts.append("attempt")
            if len(attempts) > 1:
                second.set()
                await asyncio.Event().wait()
            raise end

        monkeypatch.setattr(drafters, "_require_serving", attempt)
        engine: Any = SimpleNamespace(post=lambda action: None)
        pool = DrafterPool(
            ["127.0.0.1:1"], ChannelConfig(), engine, drafter_pb2.Hello, use_rings=False
        )
        await pool.start(0.0)
        await second.wait()
        await pool.close()

    asyncio.run(main())
    assert len(attempts) == 2


def test_a_keeper_that_ended_itself_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    async def main() -> None:
        again = asyncio.Event()

        async def keep(self: DrafterPool, status: Any) -> None:
            started.append(status.target)
            if len(started) > 1:
                again.set()
                await asyncio.Event().wait()

        monkeypatch.setattr(DrafterPool, "_keep_lane", keep)
        monkeypatch.setattr(drafters, "_RESOLVE_EVERY", 0.01)
        engine: Any = SimpleNamespace(post=lambda action: None)
        pool = DrafterPool(
            ["127.0.0.1:1"], ChannelConfig(), engine, drafter_pb2.Hello, use_rings=False
        )
        await pool.start(0.0)
        await again.wait()
        await pool.close()

    asyncio.run(main())
    assert started == ["127.0.0.1:1", "127.0.0.1:1"]


@pytest.mark.parametrize("least", [0, 1, 65536])
def test_a_message_limit_that_nothing_fits_is_refused_and_none_is_the_verifiers(least: int) -> None:
    hello = drafter_pb2.Hello(
        target=types_pb2.ModelIdentity(num_layers=4, hidden_size=8),
        encodings=[drafter_pb2.FEATURE_ENCODING_RAW],
        max_block_size=8,
        max_message_bytes=1 << 20,
    )
    reply = drafter_pb2.HelloReply(
        encoding=drafter_pb2.FEATURE_ENCODING_RAW,
        feature_layers=[1],
        feature_size=8,
        max_block_size=8,
        credits=1,
        max_message_bytes=least,
    )
    if least == 1:
        with pytest.raises(FailedPrecondition, match="max_message_bytes"):
            settle(hello, reply, "there")
    else:
        assert settle(hello, reply, "there").max_message_bytes == (least or 1 << 20)


def test_a_draining_drafter_keeps_its_lane_when_its_name_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []
    found = {"127.0.0.1:1", "127.0.0.1:2"}

    async def main() -> None:
        looked = asyncio.Event()

        async def addresses(target: str) -> list[str]:
            looked.set()
            return sorted(found)

        async def keep(self: DrafterPool, status: Any) -> None:
            status.state = drafters.State.LANE_STATE_READY
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(status.target)

        monkeypatch.setattr(DrafterPool, "_keep_lane", keep)
        monkeypatch.setattr(drafters, "_addresses", addresses)
        monkeypatch.setattr(drafters, "_RESOLVE_EVERY", 0.0)
        engine: Any = SimpleNamespace(post=lambda action: None)
        pool = DrafterPool(
            ["dns:///d:1"], ChannelConfig(), engine, drafter_pb2.Hello, use_rings=False
        )
        await pool.start(0.0)
        ready = drafters.State.LANE_STATE_READY
        await eventually(lambda: [s.state for s in pool.status.values()] == [ready] * 2)
        pool.status["127.0.0.1:1#0"].state = drafters.State.LANE_STATE_DRAINING
        pool.status["127.0.0.1:2#0"].state = drafters.State.LANE_STATE_LOST
        found.clear()
        await eventually(lambda: ended)
        for _ in range(2):  # two more looks
            looked.clear()
            await looked.wait()
        assert ended == ["127.0.0.1:2"]
        await pool.close()

    asyncio.run(main())


def test_a_name_that_leads_nowhere_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[], [], ["127.0.0.1:1"], [], []])

    async def main() -> list[str]:
        over = asyncio.Event()

        async def addresses(target: str) -> list[str]:
            found = next(answers, None)
            if found is None:
                over.set()
                await asyncio.Event().wait()
            return found or []

        async def keep(self: DrafterPool, status: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(DrafterPool, "_keep_lane", keep)
        monkeypatch.setattr(drafters, "_addresses", addresses)
        monkeypatch.setattr(drafters, "_RESOLVE_EVERY", 0.0)
        with structlog.testing.capture_logs() as logs:
            engine: Any = SimpleNamespace(post=lambda action: None)
            pool = DrafterPool(
                ["dns:///d:1"], ChannelConfig(), engine, drafter_pb2.Hello, use_rings=False
            )
            await pool.start(0.0)
            await over.wait()
            await pool.close()
        return [entry["target"] for entry in logs if entry["log_level"] == "warning"]

    assert asyncio.run(main()) == ["dns:///d:1"] * 2
