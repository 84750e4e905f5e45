"""Requests at the door: what is refused, and what must not travel on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes import tiny_target

from draftwire.errors import InvalidArgument
from draftwire.v1 import types_pb2, verifier_pb2
from verifier_service.admission import Limits, admit
from verifier_service.session import Request

LIMITS = Limits(258, 4096, 400, 64, 16, 32, frozenset({257}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def admitted(tokenizer: Any = None, **fields: Any) -> Request:
    message = verifier_pb2.GenerateRequest(**fields)
    return admit(message, tokenizer, LIMITS, now=0.0, deadline=None)


def chat(tokenizer: Any, variables: dict[str, str]) -> Request:
    messages = [verifier_pb2.ChatMessage(role="user", content="hi")]
    fields = verifier_pb2.Chat(messages=messages, template_variables=variables)
    return admitted(tokenizer, chat=fields)


@pytest.mark.parametrize(
    "value", ["[" * 100_000, "1" * 5000, "{", ""], ids=["deep", "long", "cut off", "empty"]
)
def test_a_variable_that_json_cannot_be_read_from_is_refused(tokenizer: Any, value: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat(tokenizer, {"x": value})
    assert caught.value.field == "chat.template_variables[x]"


@pytest.mark.parametrize(
    "name", ["padding", "truncation", "max_length", "tokenizer_kwargs", "tokenize", "conversation"]
)
def test_arguments_of_the_tokenizer_are_no_variables(tokenizer: Any, name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat(tokenizer, {name: "5"})
    assert caught.value.field == f"chat.template_variables[{name}]"


def test_a_variable_of_the_template_is_used_and_half_a_character_is_refused(
    tokenizer: Any,
) -> None:
    tokenizer.chat_template = "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert chat(tokenizer, {"mood": '"ab"'}).prompt == tuple(tokenizer.encode("abhi"))
    with pytest.raises(InvalidArgument) as caught:
        chat(tokenizer, {"mood": '"\\ud800"'})
    assert (caught.value.field, caught.value.value) == ("chat", "UnicodeEncodeError")


def test_each_part_is_taken_once_however_often_it_is_named() -> None:
    options = types_pb2.SpeculationOptions(parts=[4, 1] * 100_000)
    request = admitted(token_ids=verifier_pb2.TokenIds(ids=[1]), speculation=options)
    assert request.speculation.parts == (4, 1)


def test_lists_that_are_too_long_are_refused_by_their_length() -> None:
    with pytest.raises(InvalidArgument) as caught:
        admitted(token_ids=verifier_pb2.TokenIds(ids=[70_000] * 4096))
    assert (caught.value.field, caught.value.reason) == ("token_ids.ids", "PROMPT_TOO_LONG")
    stop = types_pb2.StopConditions(stop_token_ids=[70_000] * 5000)
    with pytest.raises(InvalidArgument) as caught:
        admitted(token_ids=verifier_pb2.TokenIds(ids=[1]), stop=stop)
    assert caught.value.field == "stop.stop_token_ids"


@pytest.mark.parametrize("penalty", [0.0, 1e-45, 0.01, 65.0, float("inf"), float("nan")])
def test_a_penalty_that_would_leave_the_numbers_is_the_requests_fault(penalty: float) -> None:
    sampling = types_pb2.SamplingParams(repetition_penalty=penalty)
    with pytest.raises(InvalidArgument) as caught:
        admitted(token_ids=verifier_pb2.TokenIds(ids=[1]), sampling=sampling)
    assert caught.value.field == "sampling.repetition_penalty"


@pytest.mark.parametrize("penalty", [0.015625, 0.5, 1.0, 64.0])
def test_a_penalty_within_the_limits_is_in_force_as_it_is(penalty: float) -> None:
    sampling = types_pb2.SamplingParams(repetition_penalty=penalty)
    request = admitted(token_ids=verifier_pb2.TokenIds(ids=[1]), sampling=sampling)
    assert request.sampling.repetition_penalty == penalty
