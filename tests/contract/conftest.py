"""A small verifier, served for real on the loopback or a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from draftwire import errors, runtime
from draftwire.config import WireConfig
from draftwire.v1 import verifier_pb2, verifier_pb2_grpc

SERVICE = "draftwire.v1.Verifier"


@dataclass
class Script(verifier_pb2_grpc.VerifierServicer):
    """Its answers depend on the text of the prompt."""

    draining: asyncio.Event = field(default_factory=asyncio.Event)
    closed: list[str] = field(default_factory=list)
    warm: asyncio.Event | None = None
    started: bool = False
    freed: int = 0
    moving: bool = True
    drain_waits: asyncio.Event | None = None
    start_error: Exception | None = None
    service_names = (SERVICE,)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        kind = request.text
        try:
            if kind == "bug":
                raise RuntimeError("the password is swordfish, see /srv/secret")
            if kind == "typed":
                raise errors.InvalidArgument("sampling.temperature", -1.0, "at least 0")
            if kind == "trailers":
                context.set_trailing_metadata((("draftwire-usage-bin", b"usage"),))
                raise errors.ResourceExhausted("QUEUE_FULL", "8 requests wait", limit=8)
            yield delta(kind)
            if kind == "late bug":
                raise KeyError("swordfish")
            if kind == "until drain":
                await self.draining.wait()
                yield delta("last words")
            if kind == "forever":
                await asyncio.Event().wait()
            if kind == "flood":
                while True:
                    yield delta("x" * 60_000)
        finally:
            await asyncio.sleep(0)  # cleaning up may await
            self.closed.append(kind)

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return verifier_pb2.VerifierGetInfoResponse(draining=self.draining.is_set())

    def register(self, server: Any) -> None:
        verifier_pb2_grpc.add_VerifierServicer_to_server(self, server)

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        if self.warm is not None:
            await self.warm.wait()
        self.started = True

    def progress(self) -> bool:
        return self.moving

    async def drain(self) -> None:
        self.draining.set()
        if self.drain_waits is not None:
            await self.drain_waits.wait()

    async def close(self) -> None:
        self.freed += 1


def delta(text: str) -> Any:
    return verifier_pb2.GenerateResponse(delta=verifier_pb2.Delta(text=text))


@dataclass
class Running:
    """A server in this process."""

    address: str
    ready: asyncio.Event
    stop: asyncio.Event
    task: asyncio.Task[None]


@contextlib.asynccontextmanager
async def _serving(service: Any, wire: WireConfig | None = None, *, wait: bool = True) -> Any:
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ready, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(
        runtime.serve(
            service,
            wire or WireConfig(drain_grace_s=5.0),
            bound=bound.set_result,
            ready=lambda _: ready.set(),
            stop=stop,
        )
    )
    try:
        for waited in (bound, asyncio.create_task(ready.wait())) if wait else (bound,):
            await asyncio.wait({task, waited}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                waited.cancel()
                await task
        yield Running(await bound, ready, stop, task)
    finally:
        stop.set()
        if not task.done():
            await task


@pytest.fixture
def serving() -> Callable[..., Any]:
    """`async with serving(Script(), wire) as running`."""
    return _serving


@pytest.fixture
def script() -> type[Script]:
    """The small verifier."""
    return Script
