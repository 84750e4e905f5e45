"""One event loop that sends a plan and writes down what happens.

Knows open and closed loops, slots and how late it is itself. Clock and server are handed in, so
that a test can run hours of load in no time and know every figure. Does not know processes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from draftwire_client.bench.measure import Record
from draftwire_client.bench.plan import Planned
from draftwire_client.bench.stats import percentile
from draftwire_client.enums import FinishReason
from draftwire_client.errors import DraftwireError, describe, partial_of
from draftwire_client.types import Acceptance, Chunk, Result, Usage

PROBE_S = 0.02
# Beyond these the client, not the server, is part of what is measured.
LAG_LIMIT_MS = LATE_LIMIT_MS = 10.0
CPU_LIMIT = 0.9
_CUT_SHORT = (FinishReason.DEADLINE, FinishReason.SHUTDOWN)


class Stream(Protocol):
    """What `AsyncClient.stream` gives: chunks, then the result."""

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they come."""

    async def result(self) -> Result:
        """The complete answer."""


Ask = Callable[[Planned], AbstractAsyncContextManager[Stream]]


class Clock(Protocol):
    """Seconds since the start of the run."""

    def now(self) -> float:
        """The time; below 0 before the start."""

    async def sleep_until(self, when: float) -> None:
        """Return at `when`, or at once if it has passed."""


class WallClock:
    """The machine's monotonic clock, which all its processes share, counted from `epoch`.

    Waits in a thread: an event loop's own timers are a millisecond late, which at 200 requests/s
    would be seen in every latency.
    """

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self._stop = threading.Event()
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="bench-clock")

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.monotonic() - self._epoch

    async def sleep_until(self, when: float) -> None:
        """Return at `when`, or at once if it has passed."""
        if when > self.now():
            await asyncio.get_running_loop().run_in_executor(self._waiter, self._wait, when)

    def close(self) -> None:
        """End waits that are under way."""
        self._stop.set()
        self._waiter.shutdown(wait=False, cancel_futures=True)

    def _wait(self, when: float) -> None:
        self._stop.wait(min(max(0.0, when - self.now()), threading.TIMEOUT_MAX))


@dataclass(frozen=True, slots=True)
class LoopHealth:
    """How an event loop kept up. Lags and lateness in ms, `cpu` the share of one core."""

    worker: int
    lag_p50: float
    lag_p99: float
    lag_max: float
    late_p99: float
    late_max: float
    cpu: float

    @property
    def troubles(self) -> list[str]:
        """Why this client was a bottleneck; empty if it was not."""
        found = []
        if self.lag_p99 > LAG_LIMIT_MS:
            found.append(f"event loop {self.lag_p99:.1f} ms late at p99")
        if self.late_p99 > LATE_LIMIT_MS:
            found.append(f"requests sent {self.late_p99:.1f} ms late at p99")
        if self.cpu > CPU_LIMIT:
            found.append(f"{100 * self.cpu:.0f} % of a core in use")
        return [f"worker {self.worker}: {text}" for text in found]


class Runner:
    """Sends a plan. `started` and `done` are called with each Record as it changes."""

    def __init__(
        self,
        ask: Ask,
        clock: Clock,
        *,
        max_concurrency: int | None = None,
        worker: int = 0,
        started: Callable[[Record], None] = lambda record: None,
        done: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._most = max_concurrency
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._worker = worker
        self._started = started
        self._done = done
        self._lags: list[float] = []

    async def run(self, plan: Sequence[Planned]) -> tuple[list[Record], LoopHealth]:
        """Every request of the plan to its end, and how this loop kept up."""
        await self._clock.sleep_until(0.0)
        probe = asyncio.create_task(self._probe())
        wall, cpu = self._clock.now(), time.process_time()
        try:
            closed = bool(plan) and plan[0].at is None
            records = await (self._closed(plan) if closed else self._open(plan))
        finally:
            probe.cancel()
        wall, cpu = self._clock.now() - wall, time.process_time() - cpu
        return records, self._health(records, cpu / wall if wall > 0 else 0.0)

    async def _open(self, plan: Sequence[Planned]) -> list[Record]:
        """At the planned times, whatever the server does."""
        async with asyncio.TaskGroup() as tasks:
            running = []
            for item in plan:
                assert item.at is not None
                await self._clock.sleep_until(item.at)
                late = self._clock.now() - item.at
                running.append(tasks.create_task(self._slotted(item, item.at, late)))
        return [task.result() for task in running]

    async def _closed(self, plan: Sequence[Planned]) -> list[Record]:
        """Each slot sends its next request when its last one has ended."""
        queue = iter(plan)
        records: list[Record] = []

        async def slot() -> None:
            for item in queue:
                records.append(await self._one(item, self._clock.now()))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(self._most or 1, len(plan))):
                tasks.create_task(slot())
        return sorted(records, key=lambda record: record.index)

    async def _slotted(self, item: Planned, scheduled: float, late: float) -> Record:
        if self._slots is None:
            return await self._one(item, scheduled)
        async with self._slots:
            return await self._one(item, scheduled, late)

    async def _one(self, item: Planned, scheduled: float, late: float | None = None) -> Record:
        clock = self._clock
        record = Record(
            item.index,
            item.pair,
            item.arm,
            scheduled,
            asked_output=item.options.get("max_tokens"),
            worker=self._worker,
        )
        record.sent = clock.now()
        record.late = record.sent - scheduled if late is None else late
        self._started(record)
        try:
            async with self._ask(item) as stream:
                async for chunk in stream:
                    record.chunk(clock.now(), len(chunk.token_ids))
                result = await stream.result()
            record.ended = clock.now()
            _take(record, result)
        except DraftwireError as error:
            record.ended = clock.now()
            record.error = describe(error)
            if (partial := partial_of(error)) is not None:
                record.token_ids, record.text = partial.token_ids, partial.text
                record.attempts = partial.attempts
                _count(record, partial.usage, partial.acceptance)
        self._done(record)
        return record

    async def _probe(self) -> None:
        while True:
            due = self._clock.now() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self._lags.append(self._clock.now() - due)

    def _health(self, records: Sequence[Record], cpu: float) -> LoopHealth:
        lags = sorted(1000 * lag for lag in self._lags) or [0.0]
        late = sorted(1000 * r.late for r in records) or [0.0]
        return LoopHealth(
            self._worker,
            percentile(lags, 50),
            percentile(lags, 99),
            lags[-1],
            percentile(late, 99),
            late[-1],
            cpu,
        )


def _take(record: Record, result: Result) -> None:
    record.finish_reason = str(result.finish_reason)
    record.token_ids, record.text = result.token_ids, result.text
    record.attempts = result.timing.attempts
    _count(record, result.usage, result.acceptance)
    if result.finish_reason in _CUT_SHORT:
        record.error = f"{record.finish_reason.upper()}: the answer was cut short"


def _count(record: Record, usage: Usage | None, acceptance: Acceptance | None) -> None:
    record.acceptance = acceptance
    if usage is not None:
        record.input_len = usage.prompt_tokens
        record.completion_tokens = usage.completion_tokens
        record.cached_tokens = usage.cached_tokens
