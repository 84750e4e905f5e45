"""Every way to leave an answer reaches the server, and what is left of it is typed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from draftwire_client import (
    AsyncClient,
    Cancelled,
    Client,
    FailedPrecondition,
    RetryConfig,
    Unavailable,
    partial_of,
)
from draftwire_client.testing import Hold, ReceivedCall, Reply, ScriptedVerifier

Serve = Callable[..., ScriptedVerifier]
ENDLESS = Reply.of("ab", end=Hold())


def assert_seen_as_cancelled(call: ReceivedCall) -> None:
    assert call.wait_ended()
    assert call.cancelled


def test_breaking_out_of_the_loop_cancels_the_call(serve: Serve) -> None:
    server = serve(ENDLESS)
    with Client.connect(server.target) as client:
        stream = client.stream("hi")
        for chunk in stream:
            assert chunk.text == "a"
            break
        assert_seen_as_cancelled(server.calls[0])
        with pytest.raises(Cancelled) as caught:
            stream.result()
        partial = partial_of(caught.value)
        assert partial is not None
        assert partial.text == stream.partial.text == "a"


def test_leaving_the_with_block_cancels_the_call(serve: Serve) -> None:
    server = serve(ENDLESS)
    with Client.connect(server.target) as client:
        with client.stream("hi") as stream:
            assert next(stream).text == "a"
            assert stream.settings is not None
        assert_seen_as_cancelled(server.calls[0])


def test_an_exception_in_the_with_block_cancels_the_call(serve: Serve) -> None:
    server = serve(ENDLESS)
    with Client.connect(server.target) as client:
        with pytest.raises(ZeroDivisionError), client.stream("hi") as stream:
            raise ZeroDivisionError(next(stream).text)
        assert_seen_as_cancelled(server.calls[0])


def test_a_stream_that_is_dropped_cancels_the_call(serve: Serve) -> None:
    server = serve(ENDLESS)
    with Client.connect(server.target) as client:
        stream = client.stream("hi")
        call = server.wait_for_calls(1)[0]
        del stream
        assert_seen_as_cancelled(call)


def test_another_thread_may_cancel_and_the_reader_gets_cancelled(serve: Serve) -> None:
    server = serve(ENDLESS)
    with Client.connect(server.target) as client:
        stream = client.stream("hi")
        assert [next(stream).text, next(stream).text] == ["a", "b"]
        threading.Timer(0.05, stream.cancel).start()
        with pytest.raises(Cancelled) as caught:
            next(stream)
        assert caught.value.reason == "CANCELLED_BY_CALLER"
        assert_seen_as_cancelled(server.calls[0])


def test_a_stream_may_be_cancelled_while_it_waits_to_try_again(serve: Serve) -> None:
    server = serve(Reply.failing(Unavailable("DOWN", "down"), retry_after_s=100))
    with Client.connect(server.target, timeout=200, retry=RetryConfig()) as client:
        stream = client.stream("hi")
        server.wait_for_calls(1)
        threading.Timer(0.05, stream.cancel).start()
        with pytest.raises(Cancelled):
            next(stream)
    assert len(server.calls) == 1


def test_closing_the_client_ends_its_calls_and_refuses_new_ones(serve: Serve) -> None:
    server = serve(ENDLESS)
    client = Client.connect(server.target)
    stream = client.stream("hi")
    next(stream)
    client.close()
    with pytest.raises(Cancelled):
        stream.result()
    assert_seen_as_cancelled(server.calls[0])
    for call in (client.info, client.health, lambda: client.generate("hi")):
        with pytest.raises(FailedPrecondition, match="closed"):
            call()


def test_cancelling_an_answer_that_is_complete_changes_nothing(serve: Serve) -> None:
    server = serve(Reply.of("ab"))
    with Client.connect(server.target) as client:
        stream = client.stream("hi")
        chunks = list(stream)
        stream.cancel()
        stream.close()
        assert stream.result().text == "".join(chunk.text for chunk in chunks) == "ab"
        assert list(stream) == []
    assert not server.calls[0].cancelled


def test_a_server_that_goes_away_in_the_middle_is_a_lost_connection(serve: Serve) -> None:
    server = serve(ENDLESS)
    with Client.connect(server.target) as client:
        stream = client.stream("hi")
        assert [next(stream).text, next(stream).text] == ["a", "b"]
        server.close()
        with pytest.raises(Unavailable) as caught:
            stream.result()
    assert caught.value.reason == "CONNECTION_LOST"
    partial = partial_of(caught.value)
    assert partial is not None
    assert partial.text == "ab"


def test_many_threads_may_share_a_client(serve: Serve) -> None:
    server = serve(lambda request: Reply.of(request.text * 3, tokens_per_chunk=2))
    texts: dict[str, str] = {}
    with Client.connect(server.target) as client:

        def work(prompt: str) -> None:
            texts[prompt] = client.generate(prompt).text

        threads = [threading.Thread(target=work, args=(f"p{index}",)) for index in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {f"p{index}": f"p{index}" * 3 for index in range(16)}


def on_loop(server: ScriptedVerifier, body: Callable[[AsyncClient], object]) -> None:
    async def main() -> None:
        async with AsyncClient.connect(server.target) as client, asyncio.timeout(20):
            await body(client)  # type: ignore[misc]

    asyncio.run(main())


async def seen_as_cancelled(call: ReceivedCall) -> None:
    await asyncio.to_thread(assert_seen_as_cancelled, call)


def test_breaking_out_of_an_async_loop_cancels_the_call_at_once(serve: Serve) -> None:
    server = serve(ENDLESS)

    async def body(client: AsyncClient) -> None:
        stream = client.stream("hi")
        async for chunk in stream:
            assert chunk.text == "a"
            break
        with pytest.raises(Cancelled) as caught:
            await stream.result()
        partial = partial_of(caught.value)
        assert partial is not None
        assert partial.text == "a"
        await seen_as_cancelled(server.calls[0])

    on_loop(server, body)


def test_leaving_async_with_cancels_the_call(serve: Serve) -> None:
    server = serve(ENDLESS)

    async def body(client: AsyncClient) -> None:
        async with client.stream("hi") as stream:
            assert (await anext(stream)).text == "a"
        await seen_as_cancelled(server.calls[0])

    on_loop(server, body)


def test_cancelling_the_task_cancels_the_call_and_is_not_swallowed(serve: Serve) -> None:
    server = serve(ENDLESS)

    async def body(client: AsyncClient) -> None:
        task = asyncio.create_task(client.generate("hi"))
        await asyncio.to_thread(server.wait_for_calls, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await seen_as_cancelled(server.calls[0])

    on_loop(server, body)


def test_asyncio_timeout_around_an_answer_is_a_timeout_error(serve: Serve) -> None:
    server = serve(ENDLESS)

    async def body(client: AsyncClient) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.generate("hi")
        await seen_as_cancelled(server.wait_for_calls(1)[0])

    on_loop(server, body)


def test_another_task_may_cancel_and_the_reader_gets_a_typed_error(serve: Serve) -> None:
    server = serve(ENDLESS)

    async def body(client: AsyncClient) -> None:
        stream = client.stream("hi")
        assert [(await anext(stream)).text, (await anext(stream)).text] == ["a", "b"]
        asyncio.get_running_loop().call_later(0.05, stream.cancel)
        with pytest.raises(Cancelled) as caught:
            await anext(stream)
        assert caught.value.reason == "CANCELLED_BY_CALLER"
        await seen_as_cancelled(server.calls[0])

    on_loop(server, body)


def test_an_async_stream_may_be_cancelled_while_it_waits_to_try_again(serve: Serve) -> None:
    server = serve(Reply.failing(Unavailable("DOWN", "down"), retry_after_s=100))

    async def body(client: AsyncClient) -> None:
        stream = client.stream("hi", timeout=200)
        await asyncio.to_thread(server.wait_for_calls, 1)
        asyncio.get_running_loop().call_later(0.05, stream.cancel)
        with pytest.raises(Cancelled):
            await stream.result()

    on_loop(server, body)
    assert len(server.calls) == 1


def test_closing_the_async_client_ends_its_calls_and_refuses_new_ones(serve: Serve) -> None:
    server = serve(ENDLESS)

    async def body(client: AsyncClient) -> None:
        stream = client.stream("hi")
        await anext(stream)
        await client.close()
        with pytest.raises(Cancelled):
            await stream.result()
        await seen_as_cancelled(server.calls[0])
        for call in (client.info, client.health, lambda: client.generate("hi")):
            with pytest.raises(FailedPrecondition, match="closed"):
                await call()

    on_loop(server, body)


def test_a_hundred_answers_run_at_once_and_half_are_cancelled_without_a_trace(
    serve: Serve,
) -> None:
    server = serve(
        lambda request: ENDLESS if request.text == "endless" else Reply.of("ok"), max_calls=110
    )

    async def body(client: AsyncClient) -> None:
        before = asyncio.all_tasks()
        endless = [asyncio.create_task(client.generate("endless")) for _ in range(50)]
        done = await asyncio.gather(*(client.generate("short") for _ in range(50)))
        assert {result.text for result in done} == {"ok"}
        await asyncio.to_thread(server.wait_for_calls, 100)
        for task in endless:
            task.cancel()
        ends = await asyncio.gather(*endless, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        for call in server.calls:
            assert await asyncio.to_thread(call.wait_ended)
        assert asyncio.all_tasks() == before

    on_loop(server, body)
    assert sum(call.cancelled for call in server.calls) == 50
