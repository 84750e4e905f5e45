"""What the server says while load runs: its load, lanes and counters, once in a while.

Knows GetInfo and what of it is worth keeping. Does not know requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from draftwire_client.aio import AsyncClient
from draftwire_client.bench.faults import Event
from draftwire_client.enums import LaneState
from draftwire_client.errors import DraftwireError
from draftwire_client.info import Info

_SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The server at one moment; `at` in seconds from the start of the run."""

    at: float
    running: int
    waiting: int
    tokens: int
    rounds: int
    accepted: int
    lanes_ready: int


async def watch(
    client: AsyncClient,
    epoch: float,
    every: float,
    keep: Callable[[Reading], None],
    tell: Callable[[Event], None],
) -> None:
    """Read until cancelled. A change of a lane's state is an event."""
    states: dict[tuple[str, int], LaneState] = {}  # one address may have several lanes
    while True:
        at = time.monotonic() - epoch
        try:
            info = await client.info(timeout=max(5.0, every))
        except DraftwireError as error:
            tell(Event(at, "no info", error.reason))
        else:
            keep(reading(info, at))
            seen: Counter[str] = Counter()
            for lane in info.lanes:
                seen[lane.target] += 1
                key = lane.target, seen[lane.target]
                before = states.get(key)
                if before is not None and lane.state != before:
                    tell(Event(at, f"lane {lane.state}", lane.target))
                states[key] = lane.state
        await asyncio.sleep(every)


def reading(info: Info, at: float) -> Reading:
    """What is kept of an Info."""
    return Reading(
        at,
        info.load.running,
        info.load.waiting,
        info.load.tokens,
        info.totals.rounds,
        info.totals.accepted,
        sum(lane.state == LaneState.READY for lane in info.lanes),
    )


async def settled(client: AsyncClient, good: Callable[[Info], bool]) -> Info:
    """Info as soon as `good` says so, or the last one after a few seconds.

    An answer's last message may reach the client before the server has counted it.
    """
    give_up = time.monotonic() + _SETTLE_S
    while True:
        info = await client.info()
        if good(info) or time.monotonic() > give_up:
            return info
        await asyncio.sleep(0.1)
