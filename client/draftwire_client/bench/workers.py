"""The plan on one event loop or several: this process, or processes of its own.

Knows how a plan is split and how records come back. All workers count time from one epoch on the
machine's monotonic clock. Does not know what is measured.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from draftwire_client.aio import AsyncClient
from draftwire_client.bench.measure import Record
from draftwire_client.bench.plan import Planned
from draftwire_client.bench.runner import Ask, LoopHealth, Runner, WallClock
from draftwire_client.errors import DraftwireError, Internal
from draftwire_client.types import ChatMessage

_SWITCH_S = 0.0005  # the clock's thread must not wait 5 ms for the interpreter
_GRACE_S = 0.3
_END_S = 5.0

Told = Callable[[str, Record], None]
"""Called with "started" or "done" and the record."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one worker does."""

    plan: Sequence[Planned]
    connect: dict[str, Any]
    """Arguments of `AsyncClient.connect`."""
    chat: bool
    max_concurrency: int | None
    worker: int = 0


@dataclass(slots=True)
class Ran:
    """What came of all workers; `epoch` is the run's start on the monotonic clock."""

    epoch: float
    records: list[Record] = field(default_factory=list)
    health: list[LoopHealth] = field(default_factory=list)


def split(job: Job, workers: int) -> list[Job]:
    """The job as one for each worker: requests in turn, slots as even as they can be."""
    workers = min(workers, max(1, len(job.plan)))
    most = job.max_concurrency
    if most is not None:
        workers = min(workers, most)
    slots = [
        None if most is None else most // workers + (i < most % workers) for i in range(workers)
    ]
    return [
        replace(job, plan=job.plan[i::workers], max_concurrency=slots[i], worker=i)
        for i in range(workers)
    ]


def asker(client: AsyncClient, *, chat: bool) -> Ask:
    """Sends a planned request with `client`; texts go through the chat template if `chat`."""

    def ask(item: Planned) -> AbstractAsyncContextManager[Any]:
        prompt = item.prompt
        if isinstance(prompt, str):
            send: Any = client.chat_stream if chat else client.stream
            return send(prompt, **item.options)  # type: ignore[no-any-return]
        if prompt and isinstance(prompt[0], ChatMessage):
            messages: Any = prompt
            return client.chat_stream(messages, **item.options)
        ids: Any = prompt
        return client.stream(ids, **item.options)

    return ask


async def run_job(job: Job, epoch: float, told: Told) -> tuple[list[Record], LoopHealth]:
    """One worker's part, on this event loop."""
    clock = WallClock(epoch)
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        async with AsyncClient.connect(**job.connect) as client:
            runner = Runner(
                asker(client, chat=job.chat),
                clock,
                max_concurrency=job.max_concurrency,
                worker=job.worker,
                started=lambda record: told("started", record),
                done=lambda record: told("done", record),
            )
            return await runner.run(job.plan)
    finally:
        clock.close()
        sys.setswitchinterval(before)


async def run_all(job: Job, workers: int, told: Told, begun: Callable[[float], None]) -> Ran:
    """The whole job. `begun` gets the epoch before anything is sent.

    Raises Internal if a worker process dies.
    """
    if workers <= 1:
        ran = Ran(time.monotonic() + _GRACE_S / 3)
        begun(ran.epoch)
        ran.records, health = await run_job(job, ran.epoch, told)
        ran.health.append(health)
        return ran
    return await _in_processes(split(job, workers), told, begun)


async def _in_processes(jobs: Sequence[Job], told: Told, begun: Callable[[float], None]) -> Ran:
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    pipes, processes = [], []
    try:
        for job in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=_process, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            await asyncio.to_thread(_receive, pipe)  # "ready"
        ran = Ran(time.monotonic() + _GRACE_S)
        begun(ran.epoch)
        for pipe in pipes:
            pipe.send(ran.epoch)
        loop = asyncio.get_running_loop()

        def tell(what: str, record: Record) -> None:
            loop.call_soon_threadsafe(told, what, record)

        for records, health in await asyncio.gather(
            *(asyncio.to_thread(_collect, pipe, tell) for pipe in pipes)
        ):
            ran.records += records
            ran.health.append(health)
        ran.records.sort(key=lambda record: record.index)
        return ran
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for pipe in pipes:
            pipe.close()
        end = time.monotonic() + _END_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise Internal("WORKER_LOST", "a worker process of the load tester ended early") from error


def _collect(pipe: Connection, tell: Told) -> tuple[list[Record], LoopHealth]:
    records: list[Record] = []
    while True:
        what, value = _receive(pipe)
        if what == "health":
            return records, value
        if what == "failed":
            raise Internal("WORKER_FAILED", str(value))
        if what == "done":
            records.append(value)
        tell(what, value)


def _process(pipe: Connection, job: Job) -> None:
    """A worker process's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    pipe.send(("ready", None))
    epoch = pipe.recv()
    try:
        _, health = asyncio.run(run_job(job, epoch, lambda what, record: pipe.send((what, record))))
    except DraftwireError as error:
        pipe.send(("failed", error.message))
    else:
        pipe.send(("health", health))
