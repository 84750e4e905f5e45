"""Options become the request: every name, every refusal. Pure, without gRPC."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client import ChatMessage, InvalidArgument, RequestOptions, SpeculationMode
from draftwire_client.requests import chat_request, generate_request

FIELDS: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.5, "sampling.temperature", 0.5),
    "top_p": (0.25, "sampling.top_p", 0.25),
    "top_k": (40, "sampling.top_k", 40),
    "min_p": (0.125, "sampling.min_p", 0.125),
    "repetition_penalty": (1.5, "sampling.repetition_penalty", 1.5),
    "presence_penalty": (-1, "sampling.presence_penalty", -1.0),
    "frequency_penalty": (0.5, "sampling.frequency_penalty", 0.5),
    "logit_bias": ({7: -1.5}, "sampling.logit_bias", {7: -1.5}),
    "seed": (2**64 - 1, "sampling.seed", 2**64 - 1),
    "max_tokens": (9, "stop.max_tokens", 9),
    "min_tokens": (0, "stop.min_tokens", 0),
    "ignore_eos": (False, "stop.ignore_eos", False),
    "stop": ("###", "stop.stop_strings", ["###"]),
    "stop_token_ids": ([1, 2], "stop.stop_token_ids", [1, 2]),
    "speculation": ("off", "speculation.mode", types_pb2.SPECULATION_MODE_OFF),
    "max_block_size": (8, "speculation.max_block_size", 8),
    "max_nodes": (32, "speculation.max_nodes", 32),
    "rule": ("block", "speculation.rule", types_pb2.ACCEPTANCE_RULE_BLOCK),
    "draft_parts": (["ngram"], "speculation.parts", [types_pb2.DRAFT_PART_NGRAM]),
    "logprobs": (True, "output.logprobs", True),
    "top_logprobs": (5, "output.top_logprobs", 5),
    "skip_special_tokens": (False, "output.skip_special_tokens", False),
    "json_schema": ({"type": "object"}, "grammar.json_schema", '{"type": "object"}'),
    "regex": ("a+", "grammar.regex", "a+"),
    "ebnf": ("root ::= x", "grammar.ebnf", "root ::= x"),
    "choices": (["yes", "no"], "grammar.choices.values", ["yes", "no"]),
    "request_id": ("r-1", "request_id", "r-1"),
    "priority": (-3, "priority", -3),
}


def at(message: Any, path: str) -> Any:
    for part in path.split("."):
        message = getattr(message, part)
    return message


def test_every_option_of_a_request_is_tried_here() -> None:
    assert set(FIELDS) | {"template_variables"} == set(get_type_hints(RequestOptions))


@pytest.mark.parametrize("name", FIELDS)
def test_an_option_lands_in_its_field_and_nowhere_else(name: str) -> None:
    value, path, expected = FIELDS[name]
    request = generate_request("hi", {name: value})
    found = at(request, path)
    assert (dict(found) if isinstance(expected, dict) else found) == expected
    assert len(request.ListFields()) == 2
    assert generate_request("hi", {name: None}) == verifier_pb2.GenerateRequest(text="hi")


def test_an_option_set_to_its_zero_is_not_the_same_as_left_out() -> None:
    request = generate_request("hi", {"temperature": 0, "top_k": 0, "seed": 0})
    assert all(request.sampling.HasField(name) for name in ("temperature", "top_k", "seed"))
    assert not request.sampling.HasField("top_p")


@given(st.one_of(st.text(), st.lists(st.integers(0, 2**32 - 1))))
def test_any_prompt_arrives_as_it_is(prompt: str | list[int]) -> None:
    request = generate_request(prompt, {})
    if isinstance(prompt, str):
        assert (request.WhichOneof("prompt"), request.text) == ("text", prompt)
    else:
        assert request.WhichOneof("prompt") == "token_ids"
        assert list(request.token_ids.ids) == prompt


def test_an_unknown_option_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="unknown option 'temprature'"):
        generate_request("hi", {"temprature": 1.0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", 1.0),
        ("top_k", True),
        ("seed", "7"),
        ("ignore_eos", 1),
        ("stop", b"x"),
        ("stop", [1]),
        ("stop_token_ids", "12"),
        ("logit_bias", [1]),
        ("speculation", 1),
        ("draft_parts", "ngram"),
        ("choices", {"a": "b"}),
        ("json_schema", 3),
        ("request_id", 5),
        ("template_variables", {"a": 1}),
    ],
)
def test_a_value_of_the_wrong_type_is_a_type_error_that_names_the_option(
    name: str, value: Any
) -> None:
    with pytest.raises(TypeError, match=name.split("_")[0]):
        generate_request("hi", {name: value})


@pytest.mark.parametrize("prompt", [b"bytes", {"a": 1}, 5, [1, "2"], [True]])
def test_a_prompt_of_the_wrong_type_is_a_type_error(prompt: Any) -> None:
    with pytest.raises(TypeError):
        generate_request(prompt, {})


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("top_k", -1, "sampling.top_k"),
        ("max_tokens", 2**32, "stop.max_tokens"),
        ("seed", 2**64, "sampling.seed"),
        ("priority", 2**31, "priority"),
        ("stop_token_ids", [0, -5], "stop.stop_token_ids[1]"),
        ("speculation", "sometimes", "speculation.mode"),
        ("rule", "luck", "speculation.rule"),
    ],
)
def test_what_the_wire_cannot_carry_is_a_typed_error_with_field_value_and_limit(
    name: str, value: Any, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        generate_request("hi", {name: value})
    error = caught.value
    assert error.field == field
    assert error.value in str(value)
    assert error.limit


def test_values_out_of_a_servers_limits_are_left_to_the_server() -> None:
    request = generate_request("", {"temperature": -1.0, "top_p": float("nan"), "max_tokens": 0})
    assert request.sampling.temperature == -1.0
    assert request.stop.max_tokens == 0


def test_half_a_character_is_refused_where_it_stands() -> None:
    with pytest.raises(InvalidArgument) as caught:
        generate_request("ab\ud800", {})
    assert caught.value.reason == "INVALID_UTF8"
    assert caught.value.value == "U+D800 at character 2"
    with pytest.raises(InvalidArgument, match=r"chat.messages\[0\].content"):
        chat_request("\udfff", {})


def test_two_grammars_exclude_one_another() -> None:
    with pytest.raises(TypeError, match="json_schema and regex"):
        generate_request("hi", {"regex": "a", "json_schema": "{}"})


def test_an_enum_may_be_given_as_a_word_or_as_its_member() -> None:
    word = generate_request("hi", {"speculation": "adaptive"})
    assert word == generate_request("hi", {"speculation": SpeculationMode.ADAPTIVE})


def test_messages_may_be_given_in_four_forms() -> None:
    forms: list[Any] = [
        "hi",
        [ChatMessage("user", "hi")],
        [{"role": "user", "content": "hi"}],
        [("user", "hi")],
    ]
    requests = [chat_request(form, {"template_variables": {"n": [1, None]}}) for form in forms]
    assert all(request == requests[0] for request in requests)
    assert requests[0].chat.messages[0].role == "user"
    assert requests[0].chat.template_variables["n"] == "[1, null]"


@pytest.mark.parametrize(
    "messages", [[5], [{"role": "user"}], [{"role": "u", "content": "c", "x": "y"}], b"hi", 5]
)
def test_anything_else_as_messages_is_a_type_error(messages: Any) -> None:
    with pytest.raises(TypeError, match="messages takes"):
        chat_request(messages, {})


def test_an_empty_conversation_is_left_to_the_server() -> None:
    assert chat_request([], {}).WhichOneof("prompt") == "chat"
