"""The drafters from the network's side: finding them, carrying the lanes.

Knows: addresses, channels, one reader and one writer per stream, reconnecting. Lives on the event
loop; tells the engine of lanes and responses by posting to it. Does not know: what is said in the
handshake, sessions or tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.channel import ChannelConfig, open_channel
from draftwire.errors import DraftwireError, FailedPrecondition, Unavailable, from_rpc_error
from draftwire.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2
from verifier_service.engine import Engine
from verifier_service.handshake import shake_hands
from verifier_service.lane import LaneFacts
from verifier_service.port import Call, Port, responses

SERVICE = "draftwire.v1.Drafter"
LANE_HEADER = "draftwire-lane"
State = verifier_pb2.LaneState
_FIRST_RETRY, _LONGEST_RETRY, _REFUSED_RETRY = 0.1, 2.0, 30.0
_RESOLVE_EVERY = 2.0
_FAREWELL = 1.0  # seconds for a drafter to answer the clean end of its lane
_HANDSHAKE_TIMEOUT = 120.0
# A draining drafter leaves its name first: its lane ends when its sessions have moved.
_SERVING = (State.LANE_STATE_READY, State.LANE_STATE_DRAINING)


@dataclass(slots=True)
class DrafterStatus:
    """What is known of one lane to an address, for GetInfo and logs."""

    target: str
    name: str = ""  # sent along as metadata: what a proxy in between may hash on
    state: int = State.LANE_STATE_CONNECTING
    facts: LaneFacts | None = None
    lane_id: int = 0
    port: Port | None = None  # while its stream is open
    losses: int = 0
    last_error: str = ""


class DrafterPool:
    """Lanes to each drafter found behind the configured names: one to an address, or several where
    a proxy stands behind it."""

    def __init__(
        self,
        targets: Sequence[str],
        channel: ChannelConfig,
        engine: Engine,
        hello: Callable[[], drafter_pb2.Hello],
        *,
        use_rings: bool,
        lanes: int = 1,
    ) -> None:
        self.status: dict[str, DrafterStatus] = {}
        self._lanes = lanes
        self.targets = tuple(targets)
        self.losses = 0  # of lanes that were ready, all together
        self.carried: Counter[str] = Counter()  # bytes of tensors sent, by carrier
        self._channel = channel
        self._engine = engine
        self._hello = hello
        self._use_rings = use_rings
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._lane_ids = itertools.count(1)
        self._log = structlog.get_logger("verifier.drafters")
        self._unknown: set[str] = set()  # names without any address when last looked up
        self._settled = asyncio.Event()
        self._closing = False

    async def start(self, wait: float) -> None:
        """Begin to look for drafters; returns when the first round of attempts is over, or after
        `wait` seconds."""
        if self.targets:
            self._watch = asyncio.create_task(self._follow_names())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), wait)

    async def close(self) -> None:
        """Close every lane: drafters are told, and what does not end by itself is cut."""
        self._closing = True
        if self._watch is not None:
            self._watch.cancel()
        ending = []
        for key, task in self._tasks.items():
            if (port := self.status[key].port) is not None:
                port.farewell("the verifier ends")
                ending.append(task)
        if ending:
            await asyncio.wait(ending, timeout=_FAREWELL)
        tasks = [task for task in (self._watch, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _follow_names(self) -> None:
        """Keep one task per address; DNS names are looked up again and again, so that new drafters
        are found."""
        while True:
            found: dict[str, str] = {}  # key of the lane -> address
            for target in self.targets:
                addresses = await _addresses(target)
                self._note_found(target, addresses)
                for address in addresses:
                    found |= {f"{address}#{number}": address for number in range(self._lanes)}
            for key in [k for k, task in self._tasks.items() if task.done()]:
                del self._tasks[key]  # whatever ended it: a lane is kept while it is wanted
            for key in found.keys() - self._tasks.keys():
                name = f"{self._hello().verifier_name}/{key}"
                self.status[key] = DrafterStatus(found[key], name)
                self._tasks[key] = asyncio.create_task(self._keep_lane(self.status[key]))
            for key in [
                k for k in self._tasks if k not in found and self.status[k].state not in _SERVING
            ]:
                self._tasks.pop(key).cancel()
                self.status.pop(key, None)
            await asyncio.sleep(_RESOLVE_EVERY)

    async def _keep_lane(self, status: DrafterStatus) -> None:
        """Connect, serve the lane until it is lost, and again."""
        address = status.target
        delay = _FIRST_RETRY
        while True:
            try:
                async with open_channel(address, self._channel) as channel:
                    await _require_serving(channel)
                    await self._serve_lane(channel, status)
                status.state = State.LANE_STATE_LOST
                status.last_error = "the drafter closed the lane"
                delay = _FIRST_RETRY
            except (grpc.RpcError, DraftwireError, OSError) as error:
                typed = error if isinstance(error, DraftwireError) else None
                if isinstance(error, grpc.RpcError):
                    typed = from_rpc_error(error)
                refused = isinstance(typed, FailedPrecondition)
                if status.state == State.LANE_STATE_READY:
                    delay = _FIRST_RETRY
                status.state = State.LANE_STATE_REFUSED if refused else State.LANE_STATE_LOST
                status.last_error = str(typed or error)
                log = self._log.warning if delay == _FIRST_RETRY or refused else self._log.debug
                log(
                    "drafter not reachable",
                    target=address,
                    error=status.last_error,
                    refused=refused,
                )
                delay = _REFUSED_RETRY if refused else delay
            except asyncio.CancelledError:
                # A call that gRPC itself cancelled ends its reader like this too: only who cancels
                # this task ends it.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                status.state, status.last_error = State.LANE_STATE_LOST, "the call was cancelled"
            except Exception as error:  # noqa: BLE001  a fault of one lane must not end the pool
                status.state, status.last_error = State.LANE_STATE_LOST, repr(error)
                self._log.exception("lane failed", target=address)
            finally:
                if status.lane_id:
                    lane_id, status.lane_id = status.lane_id, 0
                    status.losses += 1
                    self.losses += 1
                    self._engine.post(lambda lane_id=lane_id: self._engine.lanes.lane_down(lane_id))  # type: ignore[misc]
                self._note_settled()
            if self._closing:
                return
            await asyncio.sleep(delay * (0.75 + 0.5 * random.random()))
            delay = min(2 * delay, _LONGEST_RETRY) if delay < _LONGEST_RETRY else delay

    async def _serve_lane(self, channel: grpc.aio.Channel, status: DrafterStatus) -> None:
        status.state = State.LANE_STATE_CONNECTING
        call = drafter_pb2_grpc.DrafterStub(channel).Draft(metadata=((LANE_HEADER, status.name),))
        port = Port(next(self._lane_ids), asyncio.get_running_loop(), self.carried)
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT):
                await self._shake_hands(call, port, status)
            writer = asyncio.create_task(port.write(call))
            status.port = port
            try:
                self._engine.post(lambda: self._engine.lane_up(port))
                status.state, status.facts, status.lane_id = (
                    State.LANE_STATE_READY,
                    port.facts,
                    port.lane_id,
                )
                self._log.info(
                    "lane ready",
                    target=status.target,
                    drafter=port.facts.name,
                    trained=port.facts.trained,
                )
                self._note_settled()
                await self._read(call, port, status)
            finally:
                status.port = None
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
        finally:
            call.cancel()
            if status.lane_id:
                self._engine.post(port.close)  # the engine may be writing into the ring
            else:
                port.close()  # also after a handshake that failed half-way

    async def _read(self, call: Call, port: Port, status: DrafterStatus) -> None:
        try:
            await self._hear(call, port, status)
        except asyncio.CancelledError:
            # A cancelled call ends its pending read like a cancelled task does; only the lane is
            # meant to end here.
            if port.abandoned:
                raise Unavailable("LANE_ABANDONED", port.abandoned) from None
            raise

    async def _hear(self, call: Call, port: Port, status: DrafterStatus) -> None:
        engine, lane_id = self._engine, port.lane_id
        async for message in responses(call):
            kind = message.WhichOneof("message")
            if kind == "step":
                engine.post_response(lane_id, message.step)
            elif kind == "draining":
                status.state = State.LANE_STATE_DRAINING
                engine.post(lambda: engine.lanes.lane_draining(lane_id))

    async def _shake_hands(self, call: Call, port: Port, status: DrafterStatus) -> None:
        hello = self._hello()
        if self._use_rings:
            port.offer_ring(hello)
        await shake_hands(call, port, hello, self._engine.host, status.target)

    def _note_found(self, target: str, addresses: Sequence[str]) -> None:
        """A name that leads nowhere has no lane to show in GetInfo, so the log says it, once."""
        if addresses:
            self._unknown.discard(target)
        elif target not in self._unknown:
            self._unknown.add(target)
            self._log.warning("no drafter behind this name", target=target)

    def _note_settled(self) -> None:
        if all(s.state != State.LANE_STATE_CONNECTING for s in self.status.values()):
            self._settled.set()


async def _require_serving(channel: grpc.aio.Channel) -> None:
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5.0)
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise OSError("the drafter is not serving yet")


async def _addresses(target: str) -> list[str]:
    """The single addresses behind a target: each behind a DNS name, or the target itself."""
    if not target.startswith("dns:"):
        return [part.strip() for part in target.split(",")]
    host, _, port = target.removeprefix("dns:").lstrip("/").rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
    except (OSError, ValueError):
        return []
    return sorted(
        {f"[{a[4][0]}]:{port}" if a[0] == socket.AF_INET6 else f"{a[4][0]}:{port}" for a in found}
    )
