"""The scripted verifier itself: what users may rely on in their own tests."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from draftwire.config import ConfigError
from draftwire_client import Client, DeadlineExceeded, FinishReason
from draftwire_client.testing import (
    Finish,
    Hold,
    Pause,
    Reply,
    Say,
    ScriptedVerifier,
)

Serve = Callable[..., ScriptedVerifier]


def test_replies_come_in_order_and_the_last_one_again(serve: Serve) -> None:
    server = serve(Reply.of("one"), Reply.of("two"))
    with Client.connect(server.target) as client:
        assert [client.generate("hi").text for _ in range(3)] == ["one", "two", "two"]


def test_a_reply_may_depend_on_the_request(serve: Serve) -> None:
    server = serve(lambda request: Reply.of(request.text.upper()))
    with Client.connect(server.target) as client:
        assert client.generate("shout").text == "SHOUT"


def test_delays_are_kept(serve: Serve) -> None:
    server = serve(Reply.of("abc", first_delay_s=0.15, chunk_delay_s=0.1))
    with Client.connect(server.target) as client:
        times = [chunk.elapsed_s for chunk in client.stream("hi")]
    assert times[0] >= 0.15
    assert times[2] >= 0.35


def test_a_pause_ends_when_the_client_is_gone(serve: Serve) -> None:
    server = serve(Reply((Pause(3600),)))
    with Client.connect(server.target) as client, pytest.raises(DeadlineExceeded):
        client.generate("hi", timeout=0.2)
    assert server.calls[0].wait_ended()
    start = time.monotonic()
    server.close()
    assert time.monotonic() - start < 30


def test_a_hold_goes_on_when_it_is_released(serve: Serve) -> None:
    server = serve(Reply((Say("a", (97,)), Hold(), Say("b", (98,)))))
    with Client.connect(server.target) as client:
        stream = client.stream("hi")
        assert next(stream).text == "a"
        server.release()
        assert next(stream).text == "b"
        assert stream.result().finish_reason is FinishReason.EOS


def test_statistics_fit_the_chunks_and_add_up(serve: Serve) -> None:
    server = serve(Reply.of("x" * 10, tokens_per_chunk=4, end=Finish(FinishReason.MAX_TOKENS)))
    with Client.connect(server.target) as client:
        result = client.generate("hi")
    stats = result.acceptance
    assert stats.drafted == stats.accepted + stats.rejected + stats.discarded == 7
    assert (stats.rounds, stats.plain_rounds) == (3, 0)
    assert stats.accepted_per_position == (3, 2, 2)
    assert result.usage.completion_tokens == 10


def test_calls_that_do_not_come_are_a_timeout_error(serve: Serve) -> None:
    with pytest.raises(TimeoutError, match="0 of 1 calls"):
        serve().wait_for_calls(1, timeout=0.05)


def test_impossible_scripts_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens_per_chunk"):
        Reply.of("x", tokens_per_chunk=0)
    with pytest.raises(ConfigError):
        ScriptedVerifier(listen="nonsense")
