"""Five hundred answers at once from one process, half of them given up: nothing is left of them."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from draftwire_client import AsyncClient, Cancelled, Client, RetryConfig
from draftwire_client.testing import Hold, LocalPair, Reply, ScriptedVerifier

from .conftest import eventually

Serve = Callable[..., ScriptedVerifier]
STREAMS = 500
ENDLESS = Reply.of("ab", end=Hold())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def own_threads() -> int:
    """Threads but for those of the scripted verifier, which come as it needs them."""
    return sum(not t.name.startswith("scripted-verifier") for t in threading.enumerate())


def calls_alive() -> int:
    """Calls of grpc.aio that are still held by something."""
    gc.collect()
    return sum(type(thing).__name__ == "UnaryStreamCall" for thing in gc.get_objects())


async def half_cancelled(client: AsyncClient, server: ScriptedVerifier, seed: int) -> None:
    """All streams read at once; of each two one is given up in one of the ways there are."""
    before = asyncio.all_tasks()
    first = len(server.calls)
    streams = [client.stream("endless" if i % 2 else "short") for i in range(STREAMS)]
    ways = random.Random(seed)

    async def give_up(stream: object, way: int) -> None:
        assert hasattr(stream, "result")
        if way == 0:
            async for _ in stream:  # type: ignore[attr-defined]
                break
        elif way == 1:
            async with stream:  # type: ignore[attr-defined]
                await anext(stream)  # type: ignore[call-overload]
        else:
            await anext(stream)  # type: ignore[call-overload]
            stream.cancel()  # type: ignore[attr-defined]
        with pytest.raises(Cancelled):
            await stream.result()

    tasks = [asyncio.create_task(streams[i].result()) for i in range(0, STREAMS, 2)]
    await asyncio.gather(*(give_up(streams[i], ways.randrange(3)) for i in range(1, STREAMS, 2)))
    assert {result.text for result in await asyncio.gather(*tasks)} == {"ok"}
    for call in server.calls[first:]:
        assert await asyncio.to_thread(call.wait_ended)
    assert sum(call.cancelled for call in server.calls[first:]) == STREAMS // 2
    del streams, tasks
    # gRPC's own task of a call ends some turns of the loop after the call.
    await eventually(lambda: asyncio.all_tasks() == before)
    await eventually(lambda: calls_alive() == 0)


def test_no_task_call_file_or_memory_is_left_of_500_streams_half_of_them_cancelled(
    serve: Serve,
) -> None:
    server = serve(
        lambda request: ENDLESS if request.text == "endless" else Reply.of("ok"),
        max_calls=STREAMS + 10,
    )

    async def main() -> None:
        async with AsyncClient.connect(server.target) as client:
            await half_cancelled(client, server, 1)  # brings up threads, buffers and the channel
            server.calls.clear()
            gc.collect()
            files, blocks = open_files(), sys.getallocatedblocks()
            await half_cancelled(client, server, 2)
            server.calls.clear()
            gc.collect()
            assert open_files() == files
            # A stream that is held holds more than 100 blocks of memory.
            assert sys.getallocatedblocks() - blocks < 10 * STREAMS

    files = open_files()
    asyncio.run(main())
    gc.collect()
    assert open_files() <= files + 1  # gRPC keeps one of its own


def test_no_thread_or_file_is_left_of_many_streams_of_the_threaded_client(serve: Serve) -> None:
    server = serve(
        lambda request: ENDLESS if request.text == "endless" else Reply.of("ok"), max_calls=110
    )

    def round_of(client: Client) -> None:
        streams = [client.stream("endless" if i % 2 else "short") for i in range(100)]
        for index, stream in enumerate(streams):
            if index % 2:
                assert next(stream).text == "a"
                stream.cancel()
            else:
                assert stream.result().text == "ok"

    with Client.connect(server.target) as client:
        round_of(client)
        for call in server.calls:
            assert call.wait_ended()
        files = open_files()
        round_of(client)
        for call in server.calls:
            assert call.wait_ended()
        assert open_files() == files
        assert own_threads() < 10  # gRPC's own come and go
    assert sum(call.cancelled for call in server.calls) == 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_pair_has_no_session_or_page_left_of_500_streams_half_of_them_cancelled() -> None:
    async def main(pair: LocalPair) -> None:
        retry = RetryConfig(max_attempts=8)
        async with AsyncClient.connect(pair.target, retry=retry, timeout=600) as client:
            pages = (await client.info()).load.free_pages

            async def ask(index: int) -> None:
                if index % 2:
                    async with client.stream(f"prompt {index}", max_tokens=900) as stream:
                        await anext(stream)
                else:
                    result = await client.generate(f"prompt {index}", max_tokens=4)
                    assert result.usage.completion_tokens <= 4

            await asyncio.gather(*(ask(index) for index in range(STREAMS)))
            while True:
                info = await client.info()
                sessions = sum(lane.sessions for lane in info.lanes)
                if info.load.running == info.load.waiting == sessions == 0:
                    break
                await asyncio.sleep(0.05)
            assert info.load.free_pages == pages

    with LocalPair(start_timeout_s=600) as pair:
        asyncio.run(main(pair))
