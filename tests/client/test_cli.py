"""The command line against a scripted verifier: what is printed where, and every exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from draftwire.errors import Internal, InvalidArgument, Unavailable
from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client import FinishReason
from draftwire_client.testing import Fail, Finish, Hold, Reply, Say, ScriptedVerifier

from .conftest import at

Serve = Callable[..., ScriptedVerifier]
TOKEN = "correct-horse-battery-staple"


def test_generate_prints_the_text_on_stdout_and_the_numbers_on_stderr(serve: Serve) -> None:
    server = serve(Reply.of("Hello, wörld", tokens_per_chunk=3))
    for mode in ("--stream", "--no-stream"):
        result = at(server, "generate", "hi", mode)
        assert (result.exit_code, result.stdout) == (0, "Hello, wörld\n")
        assert "13 tokens in" in result.stderr
        assert "tokens/s" in result.stderr
        assert "acceptance length 3.00 (8 of 8 drafted kept in 4 rounds)" in result.stderr
        assert "seed 1" in result.stderr


def test_every_flag_of_generate_reaches_the_server(serve: Serve) -> None:
    server = serve()
    flags = (
        "--temperature=0.5 --top-p=0.25 --top-k=4 --min-p=0.125 --repetition-penalty=1.5"
        " --presence-penalty=0.5 --frequency-penalty=-0.5 --logit-bias=7=-1.5 --logit-bias=8=2"
        " --seed=9 --max-tokens=20 --min-tokens=2 --ignore-eos --stop=A --stop=B"
        " --stop-token-id=3 --speculation=fixed --max-block-size=8 --max-nodes=16 --rule=follow"
        " --draft-part=ngram --draft-part=rank_tree --logprobs --top-logprobs=2"
        " --keep-special-tokens --regex=a+ --request-id=r --priority=-1"
    )
    assert at(server, "generate", "hi", *flags.split(), "--timeout=50").exit_code == 0
    expected = verifier_pb2.GenerateRequest(
        text="hi",
        sampling=types_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=4,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={7: -1.5, 8: 2.0},
            seed=9,
        ),
        stop=types_pb2.StopConditions(
            max_tokens=20,
            min_tokens=2,
            ignore_eos=True,
            stop_strings=["A", "B"],
            stop_token_ids=[3],
        ),
        speculation=types_pb2.SpeculationOptions(
            mode=types_pb2.SPECULATION_MODE_FIXED,
            max_block_size=8,
            max_nodes=16,
            rule=types_pb2.ACCEPTANCE_RULE_FOLLOW,
            parts=[types_pb2.DRAFT_PART_NGRAM, types_pb2.DRAFT_PART_RANK_TREE],
        ),
        output=verifier_pb2.OutputOptions(logprobs=True, top_logprobs=2, skip_special_tokens=False),
        grammar=types_pb2.Grammar(regex="a+"),
        request_id="r",
        priority=-1,
    )
    call = server.calls[0]
    assert call.request == expected
    assert 20 < (call.time_remaining_s or 0) < 52


def test_flags_left_out_are_left_to_the_server(serve: Serve) -> None:
    server = serve()
    at(server, "generate", "hi")
    assert server.calls[0].request == verifier_pb2.GenerateRequest(text="hi")


def test_the_prompt_comes_from_stdin_without_its_last_line_end(serve: Serve) -> None:
    server = serve()
    for arguments in (("generate",), ("generate", "-")):
        assert at(server, *arguments, stdin="two\nlines\n\n").exit_code == 0
    assert [call.request.text for call in server.calls] == ["two\nlines\n"] * 2


def test_text_that_is_not_utf8_is_bad_usage_and_says_where(serve: Serve) -> None:
    server = serve()
    line = "INVALID_UTF8: stdin is not UTF-8 (field=prompt, limit=valid UTF-8, value=byte 0xff"
    whole = at(server, "generate", stdin=b"good\n\xff\n")
    assert (whole.exit_code, whole.stderr) == (2, f"{line} at offset 5)\n")
    by_line = at(server, "chat", stdin=b"good\nalso\n\xff\n")
    assert by_line.exit_code == 2
    assert f"{line} at offset 10)\n" in by_line.stderr
    argument = at(server, "generate", "a\udcff")
    assert argument.exit_code == 2
    assert "INVALID_UTF8: the text is not UTF-8" in argument.stderr
    assert [call.request.WhichOneof("prompt") for call in server.calls] == ["chat", "chat"]


def test_json_is_one_object_or_one_object_a_chunk(serve: Serve) -> None:
    server = serve(Reply.of("abcd", tokens_per_chunk=2, logprob=float("-inf")))
    whole = json.loads(at(server, "generate", "hi", "--json", "--logprobs").stdout)
    assert (whole["text"], whole["token_ids"]) == ("abcd", list(b"abcd"))
    assert whole["finish_reason"] == "eos"
    assert whole["acceptance"]["mean_acceptance_length"] == 2.0
    assert whole["logprobs"][0] == {"token_id": 97, "logprob": None, "top": []}
    assert whole["settings"]["seed"] == 1
    assert whole["tokens_per_s"] > 0
    lines = at(server, "generate", "hi", "--json", "--stream").stdout.splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["chunk", "chunk", "result"]
    assert [event["text"] for event in events] == ["ab", "cd", "abcd"]


def test_logprobs_are_listed_on_stderr(serve: Serve) -> None:
    server = serve(Reply.of("a", logprob=-0.25))
    result = at(server, "generate", "hi", "--logprobs")
    assert result.stdout == "a\n"
    assert "97   -0.2500" in result.stderr


def test_a_refused_request_is_one_line_with_field_limit_and_value(serve: Serve) -> None:
    error = InvalidArgument("sampling.temperature", -1, "at least 0", "temperature is too low")
    server = serve(Reply.failing(error))
    result = at(server, "generate", "hi", "--temperature=-1")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "INVALID_FIELD: temperature is too low "
        "(field=sampling.temperature, limit=at least 0, value=-1)\n"
    )
    told = json.loads(at(server, "generate", "hi", "--json").stdout)
    assert told["error"]["code"] == "INVALID_ARGUMENT"
    assert told["error"]["metadata"]["limit"] == "at least 0"


def test_an_answer_that_breaks_off_shows_what_came_and_what_it_cost(serve: Serve) -> None:
    broken = Fail(Internal("NON_FINITE_ROW", "a row is not finite"))
    server = serve(Reply.of("abcd", tokens_per_chunk=2, end=broken))
    for mode in ("--stream", "--no-stream"):
        result = at(server, "generate", "hi", mode)
        assert (result.exit_code, result.stdout) == (1, "abcd\n")
        assert "[4 tokens before the error, acceptance length 2.00" in result.stderr
        assert result.stderr.endswith("NON_FINITE_ROW: a row is not finite\n")
    events = at(server, "generate", "hi", "--json", "--stream").stdout.splitlines()
    last = json.loads(events[-1])
    assert (last["event"], last["partial"]["text"]) == ("error", "abcd")


@pytest.mark.parametrize("reason", [FinishReason.DEADLINE, FinishReason.SHUTDOWN])
def test_an_answer_cut_short_by_the_server_is_a_failed_request(
    serve: Serve, reason: FinishReason
) -> None:
    server = serve(Reply.of("half", end=Finish(reason)))
    result = at(server, "generate", "hi")
    assert (result.exit_code, result.stdout) == (1, "half\n")
    assert f"{reason.name}: the answer was cut short" in result.stderr


def test_a_deadline_is_a_failed_request(serve: Serve) -> None:
    server = serve(Reply.of("a", end=Hold()))
    result = at(server, "generate", "hi", "--timeout=0.3")
    assert (result.exit_code, result.stdout) == (1, "a\n")
    assert "DEADLINE_PASSED" in result.stderr


def test_a_server_that_refuses_is_not_the_same_as_no_server(serve: Serve) -> None:
    server = serve(Reply.failing(Unavailable("DRAINING", "the service is going away")))
    result = at(server, "generate", "hi", "--retries=1")
    assert result.exit_code == 1
    assert "DRAINING" in result.stderr
    assert len(server.calls) == 2


def test_chat_answers_one_message_through_the_template(serve: Serve) -> None:
    server = serve(Reply.of("fine", tokens_per_chunk=2))
    result = at(server, "chat", "how are you?", "--system", "be brief", "--seed=3")
    assert (result.exit_code, result.stdout) == (0, "fine\n")
    assert "tokens/s" in result.stderr
    request = server.calls[0].request
    assert [(m.role, m.content) for m in request.chat.messages] == [
        ("system", "be brief"),
        ("user", "how are you?"),
    ]
    assert request.sampling.seed == 3


def test_a_conversation_remembers_until_it_is_reset(serve: Serve) -> None:
    server = serve(lambda request: Reply.of(f"answer {len(request.chat.messages)}"))
    lines = "one\n\ntwo\n/reset\nthree\n/exit\nnever\n"
    result = at(server, "chat", "--system=s", stdin=lines)
    assert (result.exit_code, result.stdout) == (0, "answer 2\nanswer 4\nanswer 2\n")
    assert result.stderr.count("tokens/s") == 3
    second = [m.content for m in server.calls[1].request.chat.messages]
    assert second == ["s", "one", "answer 2", "two"]
    assert len(server.calls) == 3


def test_a_piped_conversation_ends_at_a_failed_answer(serve: Serve) -> None:
    server = serve(Reply.of("ok"), Reply.failing(Internal("NAN", "broken")), Reply.of("no"))
    result = at(server, "chat", stdin="a\nb\nc\n")
    assert (result.exit_code, result.stdout) == (1, "ok\n")
    assert len(server.calls) == 2


def test_a_typed_conversation_outlives_a_failed_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(Reply.of("ok"), Reply.failing(Internal("NAN", "broken")), Reply.of("yes"))
    typed = iter(["a", "b", "c"])

    def type_in(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("draftwire_client.cli.chat.is_terminal", lambda: True)
    monkeypatch.setattr("builtins.input", type_in)
    result = at(server, "chat")
    assert (result.exit_code, result.stdout) == (0, "ok\nyes\n")
    assert "NAN: broken" in result.stderr
    last = [m.content for m in server.calls[2].request.chat.messages]
    assert last == ["a", "ok", "c"]


def test_the_process_streams_text_before_the_answer_is_complete(serve: Serve) -> None:
    server = serve(Reply((Say("first ", (1,)), Hold(), Say("second", (2, 3)))))
    command = [sys.executable, "-m", "draftwire_client", "generate", "hi"]
    environment = {**os.environ, "DRAFTWIRE_TARGET": server.target}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(6) == b"first "
        server.release()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"second\n")
    assert b"acceptance length 2.00" in err


def test_a_server_lost_in_the_middle_is_a_failed_request(serve: Serve) -> None:
    server = serve(Reply.of("ab", end=Hold()))
    command = [sys.executable, "-m", "draftwire_client", "generate", "hi"]
    environment = {**os.environ, "DRAFTWIRE_TARGET": server.target}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b"ab"
        server.close()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"CONNECTION_LOST" in err


def test_an_interrupted_process_cancels_its_call_and_exits_130(serve: Serve) -> None:
    server = serve(Reply.of("ab", end=Hold()))
    command = [sys.executable, "-m", "draftwire_client", "generate", "hi"]
    environment = {**os.environ, "DRAFTWIRE_TARGET": server.target}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b"ab"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert server.calls[0].wait_ended()
    assert server.calls[0].cancelled
