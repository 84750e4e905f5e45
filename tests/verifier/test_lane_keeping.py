"""A lane is kept for as long as its address is wanted, whatever ended the attempt before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from draftwire.channel import ChannelConfig
from draftwire.v1 import drafter_pb2
from verifier_service import drafters
from verifier_service.drafters import DrafterPool


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
