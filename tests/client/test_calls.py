"""Both clients over real gRPC against a scripted verifier: answers, errors, retries, deadlines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftwire.errors import (
    DeadlineExceeded,
    DraftwireError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from draftwire.v1 import verifier_pb2
from draftwire_client import (
    FinishReason,
    RetryConfig,
    describe,
    partial_of,
)
from draftwire_client.testing import (
    Cut,
    Fail,
    Finish,
    Hold,
    Reply,
    Say,
    ScriptedVerifier,
    Send,
    Start,
)

from .conftest import Either

Serve = Callable[..., ScriptedVerifier]
TEXT = "Grüße, 世界 🌍!"
TOKEN = "correct-horse-battery-staple"
QUICK = {"retry": RetryConfig(initial_backoff_s=0.001, max_backoff_s=0.002)}
DOWN = Unavailable("DRAINING", "the service is going away")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_joined_chunks_are_the_text_whatever_their_size(
    either: Either, serve: Serve, size: int
) -> None:
    server = serve(Reply.of(TEXT, tokens_per_chunk=size, logprob=-0.5))
    chunks, result = either.stream(server.target, "hi", logprobs=True)
    assert "".join(chunk.text for chunk in chunks) == result.text == TEXT
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert ids == list(result.token_ids) == list(TEXT.encode())
    assert [entry.token_id for entry in result.logprobs] == ids
    assert {entry.logprob for entry in result.logprobs} == {-0.5}
    assert result.usage.completion_tokens == len(ids)
    times = [chunk.elapsed_s for chunk in chunks]
    assert times == sorted(times)
    assert result.timing.first_token_s == times[0]
    assert times[-1] <= result.timing.total_s


def test_generate_is_the_same_answer_in_one_piece(either: Either, serve: Serve) -> None:
    server = serve(Reply.of(TEXT, tokens_per_chunk=4, end=Finish(FinishReason.STOP_STRING, "x")))
    result = either.call(server.target, "generate", [1, 2, 3], seed=9, max_tokens=50)
    assert result.text == TEXT
    assert (result.finish_reason, result.matched_stop) == (FinishReason.STOP_STRING, "x")
    assert (result.seed, result.settings.max_tokens, result.request_id) == (9, 50, "scripted")
    assert result.acceptance.drafted == result.acceptance.accepted > 0
    assert result.tokens_per_s > 0
    call = server.calls[0]
    assert list(call.request.token_ids.ids) == [1, 2, 3]
    assert not call.cancelled


def test_chat_sends_messages_and_a_seed_is_told_when_none_was_given(
    either: Either, serve: Serve
) -> None:
    server = serve(Reply.of("ok", tokens_per_chunk=2))
    result = either.call(server.target, "chat", [("system", "be brief"), ("user", "hi")])
    assert result.seed == 1
    sent = server.calls[0].request.chat.messages
    assert [(message.role, message.content) for message in sent] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]


def test_every_call_has_a_deadline_and_the_callers_own_comes_first(
    either: Either, serve: Serve
) -> None:
    server = serve()
    either.call(server.target, "generate", "hi", connect={"timeout": 77.0})
    either.call(server.target, "generate", "hi", timeout=33.0)
    either.call(server.target, "generate", "hi")
    remaining = [call.time_remaining_s or 0.0 for call in server.calls]
    # gRPC rounds long deadlines up on their way; the machine may be slow.
    assert 60 < remaining[0] < 79
    assert 20 < remaining[1] < 35
    assert 270 < remaining[2] < 302


def test_a_deadline_that_passes_is_typed_seen_by_the_server_and_keeps_what_came(
    either: Either, serve: Serve
) -> None:
    server = serve(Reply.of("abc", end=Hold()))
    with pytest.raises(DeadlineExceeded) as caught:
        either.call(server.target, "generate", "hi", timeout=0.4)
    assert caught.value.reason == "DEADLINE_PASSED"
    partial = partial_of(caught.value)
    assert partial is not None
    assert partial.text == "abc"
    call = server.wait_for_calls(1)[0]
    assert call.wait_ended()
    assert call.cancelled


ERRORS: list[DraftwireError] = [
    InvalidArgument("sampling.temperature", -1.0, "at least 0"),
    FailedPrecondition("NO_TEMPLATE", "the target has no chat template", field="chat"),
    ResourceExhausted("QUEUE_FULL", "the queue is full", limit=64, value=65),
    DeadlineExceeded("DEADLINE_TOO_SHORT", "cannot be met", value="1 ms"),
    Internal("INTERNAL_ERROR", "see the log", error_id="abc"),
    NotFound("NO_SUCH_MODEL", "no such model"),
]


@pytest.mark.parametrize("sent", ERRORS, ids=lambda error: error.code.name)
def test_a_servers_error_arrives_as_its_class_with_all_it_says(
    either: Either, serve: Serve, sent: DraftwireError
) -> None:
    server = serve(Reply.failing(sent))
    with pytest.raises(type(sent)) as caught:
        either.call(server.target, "generate", "hi", connect=QUICK)
    error = caught.value
    assert (error.code, error.reason, error.message) == (sent.code, sent.reason, sent.message)
    assert error.metadata == sent.metadata
    assert len(server.calls) == 1
    if isinstance(error, InvalidArgument):
        assert (error.field, error.value, error.limit) == (
            "sampling.temperature",
            "-1.0",
            "at least 0",
        )
        assert describe(error).endswith(
            "(field=sampling.temperature, limit=at least 0, value=-1.0)"
        )


def test_an_error_is_described_in_one_line_with_the_parts_it_has() -> None:
    assert describe(InvalidArgument("text", "", "at least one token", "no\ntext")) == (
        "INVALID_FIELD: no text (field=text, limit=at least one token, value=empty)"
    )
    assert (
        describe(ResourceExhausted("QUEUE_FULL", "full", limit=4)) == "QUEUE_FULL: full (limit=4)"
    )
    assert describe(Internal("INTERNAL_ERROR", "see the log")) == "INTERNAL_ERROR: see the log"


def test_the_next_request_is_served_after_an_error(either: Either, serve: Serve) -> None:
    server = serve(Reply.failing(ERRORS[0]), Reply.of("fine"))
    with pytest.raises(InvalidArgument):
        either.call(server.target, "generate", "hi")
    assert either.call(server.target, "generate", "hi").text == "fine"


def test_an_error_after_tokens_keeps_tokens_and_statistics_of_the_trailers(
    either: Either, serve: Serve
) -> None:
    server = serve(Reply.of("abcdef", tokens_per_chunk=3, end=Fail(Internal("NAN", "row"))))
    with pytest.raises(Internal) as caught:
        either.stream(server.target, "hi", seed=4)
    partial = partial_of(caught.value)
    assert partial is not None
    assert (partial.text, list(partial.token_ids)) == ("abcdef", list(b"abcdef"))
    assert partial.usage is not None
    assert partial.usage.completion_tokens == 6
    assert partial.acceptance is not None
    assert (partial.acceptance.rounds, partial.acceptance.accepted) == (2, 4)
    assert partial.settings is not None
    assert partial.settings.seed == 4


def test_unavailable_before_the_first_message_is_tried_again(either: Either, serve: Serve) -> None:
    server = serve(Reply.failing(DOWN), Reply.failing(DOWN), Reply.of("up"))
    result = either.call(server.target, "generate", "hi", connect=QUICK, seed=5)
    assert (result.text, result.timing.attempts) == ("up", 3)
    requests = [call.request for call in server.calls]
    assert len(requests) == 3
    assert requests[0] == requests[1] == requests[2]


@pytest.mark.parametrize("first", [(Start(),), (Say("a", (97,)),)], ids=["started", "delta"])
def test_nothing_is_tried_again_after_the_first_message(
    either: Either, serve: Serve, first: tuple[Any, ...]
) -> None:
    server = serve(Reply((*first, Fail(DOWN))), Reply.of("never asked for"))
    with pytest.raises(Unavailable) as caught:
        either.call(server.target, "generate", "hi", connect=QUICK)
    assert caught.value.reason == "DRAINING"
    assert len(server.calls) == 1


def test_attempts_end_and_the_last_error_is_raised(either: Either, serve: Serve) -> None:
    server = serve(Reply.failing(DOWN))
    with pytest.raises(Unavailable, match="going away") as caught:
        either.call(server.target, "generate", "hi", connect=QUICK)
    assert len(server.calls) == 4
    partial = partial_of(caught.value)
    assert partial is not None
    assert partial.attempts == 4


def test_retry_info_of_the_server_is_waited_for(either: Either, serve: Serve) -> None:
    server = serve(Reply.failing(DOWN, retry_after_s=0.25), Reply.of("up"))
    result = either.call(server.target, "generate", "hi", connect=QUICK)
    assert result.timing.attempts == 2
    assert result.timing.total_s >= 0.25


def test_a_retry_asked_for_past_the_deadline_fails_at_once(either: Either, serve: Serve) -> None:
    server = serve(Reply.failing(DOWN, retry_after_s=60))
    with pytest.raises(Unavailable):
        either.call(server.target, "generate", "hi", timeout=30.0, connect=QUICK)
    assert len(server.calls) == 1


def test_a_stream_that_ends_without_its_last_message_is_an_error(
    either: Either, serve: Serve
) -> None:
    server = serve(Reply.of("half", tokens_per_chunk=4, end=Cut()))
    with pytest.raises(Internal) as caught:
        either.call(server.target, "generate", "hi")
    assert caught.value.reason == "BAD_STREAM"
    partial = partial_of(caught.value)
    assert partial is not None
    assert partial.text == "half"


def test_a_message_out_of_order_ends_the_call(either: Either, serve: Serve) -> None:
    delta = verifier_pb2.GenerateResponse(delta=verifier_pb2.Delta(text="x"))
    server = serve(Reply((Send(delta), Hold())))
    with pytest.raises(Internal, match="out of order"):
        either.call(server.target, "generate", "hi")
    assert server.calls[0].wait_ended()
    assert server.calls[0].cancelled


def test_an_event_of_a_newer_server_is_passed_over(either: Either, serve: Serve) -> None:
    future = Send(verifier_pb2.GenerateResponse())
    server = serve(Reply((Start(), future, Say("a", (97,)), future, Finish())))
    assert either.call(server.target, "generate", "hi").text == "a"


def test_an_answer_of_more_than_four_mebibytes_fits(either: Either, serve: Serve) -> None:
    text = "x" * (5 * 1024 * 1024)
    server = serve(Reply((Say(text, (1,)), Finish())))
    assert either.call(server.target, "generate", "hi").text == text


def test_a_message_over_the_clients_limit_names_the_option(either: Either, serve: Serve) -> None:
    server = serve(Reply((Say("x" * 4096, (1,)), Finish())))
    with pytest.raises(ResourceExhausted) as caught:
        either.call(server.target, "generate", "hi", connect={"max_message_bytes": 1024})
    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert caught.value.metadata["option"] == "max_message_bytes"


def test_type_errors_are_raised_before_anything_is_sent(either: Either, serve: Serve) -> None:
    server = serve()
    with pytest.raises(TypeError):
        either.call(server.target, "generate", "hi", temperature="hot")
    with pytest.raises(TypeError):
        either.call(server.target, "generate", "hi", timeout="long")
    assert server.calls == []
