"""Calls that the server or a proxy drops are the server's doing, whatever gRPC calls their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from draftwire_client import (
    AsyncClient,
    Cancelled,
    Client,
    RetryConfig,
    Unavailable,
    partial_of,
)
from draftwire_client.errors import from_call
from draftwire_client.testing import Abort, Fail, Hold, Reply, Say, ScriptedVerifier, Start

from .conftest import Either

Serve = Callable[..., ScriptedVerifier]
QUICK = {"retry": RetryConfig(initial_backoff_s=0.001, max_backoff_s=0.002)}
DROPPED = Abort(grpc.StatusCode.CANCELLED, "stream reset")


def test_a_call_dropped_before_its_first_message_is_tried_again(
    either: Either, serve: Serve
) -> None:
    server = serve(Reply((DROPPED,)), Reply((DROPPED,)), Reply.of("up"))
    result = either.call(server.target, "generate", "hi", connect=QUICK)
    assert (result.text, result.timing.attempts) == ("up", 3)


@pytest.mark.parametrize("steps", [(Start(),), (Say("ab", (97, 98)),)], ids=["started", "delta"])
def test_a_call_dropped_after_its_first_message_is_unavailable_and_keeps_what_came(
    either: Either, serve: Serve, steps: tuple[Start | Say, ...]
) -> None:
    server = serve(Reply((*steps, DROPPED)), Reply.of("never asked for"))
    with pytest.raises(Unavailable) as caught:
        either.call(server.target, "generate", "hi", connect=QUICK)
    assert caught.value.reason == "CANCELLED_BY_SERVER"
    assert "stream reset" in str(caught.value)
    partial = partial_of(caught.value)
    assert partial is not None
    if isinstance(steps[0], Say):
        assert partial.text == "ab"
        assert partial.usage is not None
        assert partial.usage.completion_tokens == 2
    assert len(server.calls) == 1


def test_attempts_end_when_every_call_is_dropped(either: Either, serve: Serve) -> None:
    server = serve(Reply((DROPPED,)))
    with pytest.raises(Unavailable) as caught:
        either.call(server.target, "generate", "hi", connect=QUICK)
    assert (caught.value.reason, len(server.calls)) == ("CANCELLED_BY_SERVER", 4)


def test_a_server_that_says_why_it_cancelled_is_believed_and_not_asked_again(
    either: Either, serve: Serve
) -> None:
    server = serve(Reply((Fail(Cancelled("BY_OPERATOR", "an operator ended it")),)))
    with pytest.raises(Cancelled) as caught:
        either.call(server.target, "generate", "hi", connect=QUICK)
    assert (caught.value.reason, len(server.calls)) == ("BY_OPERATOR", 1)


def test_what_the_caller_cancelled_stays_cancelled_even_if_the_server_drops_it_too(
    serve: Serve,
) -> None:
    server = serve(Reply((Say("a", (97,)), Hold(), DROPPED)))
    with Client.connect(server.target) as client:
        stream = client.stream("hi")
        assert next(stream).text == "a"
        stream.cancel()
        server.release()
        with pytest.raises(Cancelled) as caught:
            stream.result()
        assert caught.value.reason == "CANCELLED_BY_CALLER"

    async def main() -> None:
        async with AsyncClient.connect(server.target) as client:
            stream = client.stream("hi")
            assert (await anext(stream)).text == "a"
            stream.cancel()
            with pytest.raises(Cancelled, match="by its caller"):
                await stream.result()

    asyncio.run(main())


def test_a_drop_after_the_deadline_is_the_deadline() -> None:
    class Dropped(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.CANCELLED

        def details(self) -> str:
            return ""

    assert from_call(Dropped(), late=True).reason == "DEADLINE_PASSED"
    assert from_call(Dropped()).code is grpc.StatusCode.UNAVAILABLE
    assert from_call(Dropped(), given_up=True).code is grpc.StatusCode.CANCELLED


def test_a_client_closed_during_info_or_health_is_cancelled_and_not_a_bare_cancelled_error() -> (
    None
):
    async def main() -> None:
        # A server that accepts and says nothing.
        silent = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        async with silent:
            client = AsyncClient.connect(f"127.0.0.1:{port}")
            asked = [asyncio.create_task(client.info()), asyncio.create_task(client.health())]
            await asyncio.sleep(0)
            await client.close()
            for end in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(end, Cancelled), end

    asyncio.run(main())
