"""Runs a batch: a bounded number of answers at once, each outcome as it comes.

Knows threads and tasks, and that whoever leaves early leaves nothing running. What a batch is, is
in `batch`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from draftwire.v1 import verifier_pb2
from draftwire_client.aio_stream import AsyncStream
from draftwire_client.batch import Batch, BatchItem, reporting
from draftwire_client.errors import DraftwireError, InvalidArgument
from draftwire_client.stream import Stream

Request = verifier_pb2.GenerateRequest


def in_threads(batch: Batch, start: Callable[[Request], Stream]) -> Iterator[BatchItem]:
    """Items as they finish. Closing the generator cancels what runs and waits for its end."""
    live = _Live()

    def answer(index: int, request: Request | InvalidArgument) -> BatchItem:
        if isinstance(request, InvalidArgument):
            return BatchItem(index, error=request)
        try:
            with live.adding(start(request)) as stream:
                return BatchItem(index, stream.result())
        except DraftwireError as error:
            return BatchItem(index, error=error)

    running: set[Future[BatchItem]] = set()
    finished: deque[BatchItem] = deque()
    with reporting(batch) as count, ThreadPoolExecutor(batch.concurrency) as pool:
        try:
            while True:
                while len(running) < batch.concurrency:
                    if (asked := next(batch.requests, None)) is None:
                        break
                    running.add(pool.submit(answer, *asked))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                finished.extend(future.result() for future in done)
                while finished:
                    item = finished.popleft()
                    count(item)
                    yield item
        finally:
            live.cancel()


class _Live:
    """Streams that are being read; once cancelled, those that come later are cancelled too."""

    def __init__(self) -> None:
        self._streams: set[Stream] = set()
        self._over = False
        self._lock = threading.Lock()

    @contextmanager
    def adding(self, stream: Stream) -> Iterator[Stream]:
        """Have `stream` cancelled with the others until the block ends, and at its end."""
        with self._lock:
            self._streams.add(stream)
            over = self._over
        if over:
            stream.cancel()
        try:
            with stream:
                yield stream
        finally:
            with self._lock:
                self._streams.discard(stream)

    def cancel(self) -> None:
        with self._lock:
            self._over = True
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()


class AsyncBatch(AsyncIterator[BatchItem]):
    """Items of a batch as they finish: iterate over it once.

    Leaving the loop early, leaving `async with` and `aclose` cancel what runs.
    """

    def __init__(self, batch: Batch, start: Callable[[Request], AsyncStream]) -> None:
        self._batch = batch
        self._start = start
        self._running: set[asyncio.Task[BatchItem]] = set()
        self._finished: deque[BatchItem] = deque()
        self._reporting = ExitStack()
        self._count: Callable[[BatchItem], None] | None = None
        self._closed = False

    async def __anext__(self) -> BatchItem:
        if self._closed:
            raise StopAsyncIteration
        try:
            return await self._next()
        except BaseException:
            await self.aclose()
            raise

    async def _next(self) -> BatchItem:
        if self._count is None:
            self._count = self._reporting.enter_context(reporting(self._batch))
        if not self._finished:
            while len(self._running) < self._batch.concurrency:
                if (asked := next(self._batch.requests, None)) is None:
                    break
                self._running.add(asyncio.create_task(_answer(*asked, self._start)))
            if not self._running:
                raise StopAsyncIteration
            done, self._running = await asyncio.wait(
                self._running, return_when=asyncio.FIRST_COMPLETED
            )
            self._finished.extend(task.result() for task in done)
        item = self._finished.popleft()
        self._count(item)
        return item

    async def aclose(self) -> None:
        """Cancel what runs and wait for its end; nothing happens after the last item."""
        self._closed = True
        self._reporting.close()
        running, self._running = self._running, set()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # `break` drops the iterator: what runs must not run on until somebody collects garbage.
        self._reporting.close()
        for task in self._running:
            task.cancel()


async def _answer(
    index: int, request: Request | InvalidArgument, start: Callable[[Request], AsyncStream]
) -> BatchItem:
    if isinstance(request, InvalidArgument):
        return BatchItem(index, error=request)
    try:
        async with start(request) as stream:
            return BatchItem(index, await stream.result())
    except DraftwireError as error:
        return BatchItem(index, error=error)
