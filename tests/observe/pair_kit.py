"""The shipped pair in this process with metrics on, and load for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from fakes import Answer, generate

from drafter_service.config import Config
from drafter_service.service import DrafterService
from draftwire.channel import ChannelConfig, open_channel
from draftwire.config import WireConfig
from draftwire.runtime import serve
from draftwire.v1 import types_pb2, verifier_pb2_grpc
from verifier_service.config import VerifierConfig
from verifier_service.service import VerifierService

METERED = {"metrics_listen": "127.0.0.1:0", "log_level": "error", "drain_grace_s": 0.5}


@contextlib.asynccontextmanager
async def metered(service: Any, config: WireConfig) -> AsyncIterator[tuple[str, str]]:
    """Serve until the block ends; yields the address and the URL of the metrics."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    address: asyncio.Future[str] = loop.create_future()
    url: asyncio.Future[str] = loop.create_future()
    task = asyncio.create_task(
        serve(service, config, ready=address.set_result, metrics=url.set_result, stop=stop)
    )
    try:
        await asyncio.wait({task, address}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield address.result(), url.result()
    finally:
        stop.set()
        await task


@contextlib.asynccontextmanager
async def metered_drafter(target: Path, **settings: Any) -> AsyncIterator[tuple[Any, str, str]]:
    """The drafter with drawn weights: service, address, URL."""
    defaults = Config(
        listen="127.0.0.1:0", target=str(target), random_weights_seed=1, block_size=6, **METERED
    )
    service = DrafterService(config := replace(defaults, **settings))
    async with metered(service, config) as (address, url):
        yield service, address, url


@contextlib.asynccontextmanager
async def metered_verifier(
    target: Path, *drafters: str, **settings: Any
) -> AsyncIterator[tuple[Any, Any, str]]:
    """The verifier: service, stub, URL."""
    defaults = VerifierConfig(
        listen="127.0.0.1:0",
        model=str(target),
        dtype="float32",
        drafters=drafters,
        kv_tokens=4096,
        **METERED,
    )
    service = VerifierService(config := replace(defaults, **settings))
    async with (
        metered(service, config) as (address, url),
        open_channel(address, ChannelConfig()) as channel,
    ):
        service.tested_address = address  # type: ignore[attr-defined]
        yield service, verifier_pb2_grpc.VerifierStub(channel), url


@dataclass
class Load:
    """What clients asked and got."""

    mode: int = types_pb2.SPECULATION_MODE_FIXED
    answers: list[Answer] = field(default_factory=list)
    refused: int = 0

    def sum(self, name: str) -> int:
        """Sum of a field of AcceptanceStats over all answers."""
        return sum(getattr(a.finished.acceptance, name) for a in self.answers)

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(len(answer.tokens) for answer in self.answers)

    async def one(self, stub: Any, number: int, tokens: int = 24) -> None:
        """A request; every fourth decodes plainly, two of three draw at a temperature. Most are
        made to repeat a letter, which n-grams foresee."""
        mode = types_pb2.SPECULATION_MODE_OFF if number % 4 == 3 else self.mode
        sampling: dict[str, Any] = {"temperature": (0.0, 0.4, 1.3)[number % 3], "seed": number}
        if number % 5:
            sampling["logit_bias"] = {64 + number % 3: 100.0}
        answer = await generate(
            stub,
            ("abcabcabc", "x y x y", "hello hello hello", "12121212")[number % 4]
            * (1 + number % 3),
            sampling=sampling,
            stop={"max_tokens": tokens, "ignore_eos": True},
            request_id=f"load-{number}",
            speculation={"mode": mode},
        )
        self.answers.append(answer)

    async def refuse(self, stub: Any) -> None:
        """A request that is wrong."""
        with contextlib.suppress(grpc.RpcError):
            await generate(stub, "x", sampling={"temperature": -1.0})
        self.refused += 1

    async def until(self, stub: Any, stop: asyncio.Event, *, clients: int = 4) -> None:
        """Clients that ask again and again until `stop`."""
        numbers = iter(range(1_000_000))

        async def client() -> None:
            while not stop.is_set():
                await self.one(stub, next(numbers))

        await asyncio.gather(*(client() for _ in range(clients)))
