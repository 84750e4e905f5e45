"""Options to protobuf: the GenerateRequest both clients send.

Knows which option is which field and which Python types it takes. Does not know limits: whether a
temperature of -1 is allowed is the server's to say. Only what protobuf cannot carry at all is
refused here, with the same typed error.
"""

from __future__ import annotations

import difflib
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, get_type_hints

from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client.enums import AcceptanceRule, DraftPart, SpeculationMode
from draftwire_client.errors import InvalidArgument
from draftwire_client.types import ChatMessage, RequestOptions

Messages = str | Sequence[ChatMessage | Mapping[str, str] | tuple[str, str]]

_UINT32 = 2**32
_OPTION_NAMES = frozenset(get_type_hints(RequestOptions))


def generate_request(
    prompt: str | Iterable[int], options: Mapping[str, Any]
) -> verifier_pb2.GenerateRequest:
    """The request for a text or token ids.

    Raises TypeError for an unknown option or a value of the wrong type, InvalidArgument for a value
    that the wire cannot carry.
    """
    request = _with_options(options)
    if isinstance(prompt, str):
        request.text = _text("text", prompt)
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(_token_ids("token_ids", prompt))
    if options.get("template_variables") is not None:
        raise TypeError("template_variables belongs to chat and chat_stream")
    return request


def chat_request(messages: Messages, options: Mapping[str, Any]) -> verifier_pb2.GenerateRequest:
    """The request for messages of a conversation; a text is one message of the user.

    Raises as generate_request.
    """
    request = _with_options(options)
    request.chat.SetInParent()
    for index, message in enumerate(chat_messages(messages)):
        request.chat.messages.add(
            role=_text(f"chat.messages[{index}].role", message.role),
            content=_text(f"chat.messages[{index}].content", message.content),
        )
    variables = options.get("template_variables") or {}
    if not isinstance(variables, Mapping):
        raise _wrong("template_variables", "a mapping", variables)
    for name, value in variables.items():
        field = f"chat.template_variables[{name}]"
        request.chat.template_variables[_text(field, name)] = json.dumps(value)
    return request


def chat_messages(messages: Messages) -> tuple[ChatMessage, ...]:
    """Messages in any accepted form as ChatMessage. Raises TypeError."""
    if isinstance(messages, str):
        return (ChatMessage("user", messages),)
    if not isinstance(messages, Iterable) or isinstance(messages, bytes | Mapping):
        raise _wrong("messages", "text or a list of messages", messages)
    return tuple(_message(message) for message in messages)


def _message(message: object) -> ChatMessage:
    match message:
        case ChatMessage():
            return message
        case {"role": str(role), "content": str(content), **rest} if not rest:
            return ChatMessage(role, content)
        case (str(role), str(content)):
            return ChatMessage(role, content)
    raise _wrong("messages", 'ChatMessage, {"role": …, "content": …} or (role, content)', message)


def _with_options(options: Mapping[str, Any]) -> verifier_pb2.GenerateRequest:
    unknown = sorted(set(options) - _OPTION_NAMES)
    if unknown:
        close = difflib.get_close_matches(unknown[0], _OPTION_NAMES, 1)
        meant = f"did you mean {close[0]!r}? K" if close else "k"
        known = ", ".join(sorted(_OPTION_NAMES))
        raise TypeError(f"unknown option {unknown[0]!r}; {meant}nown are {known}")
    request = verifier_pb2.GenerateRequest()
    for name, value in options.items():
        if value is not None and name in _SCALARS:
            place, convert = _SCALARS[name]
            _set(request, place, convert(place, value))
    _fill_lists(request, options)
    _fill_grammar(request.grammar, options)
    return request


def _fill_lists(request: verifier_pb2.GenerateRequest, options: Mapping[str, Any]) -> None:
    if (bias := options.get("logit_bias")) is not None:
        if not isinstance(bias, Mapping):
            raise _wrong("logit_bias", "a mapping of token id to bias", bias)
        ids = _token_ids("sampling.logit_bias", list(bias))
        for token_id, value in zip(ids, bias.values(), strict=True):
            request.sampling.logit_bias[token_id] = _float("sampling.logit_bias", value)
    if (stop := options.get("stop")) is not None:
        request.stop.stop_strings.extend(_texts("stop.stop_strings", stop))
    if (stop_ids := options.get("stop_token_ids")) is not None:
        request.stop.stop_token_ids.extend(_token_ids("stop.stop_token_ids", stop_ids))
    if (parts := options.get("draft_parts")) is not None:
        if isinstance(parts, str) or not isinstance(parts, Iterable):
            raise _wrong("draft_parts", "a list of parts", parts)
        request.speculation.parts.extend(_part("speculation.parts", part) for part in parts)


def _fill_grammar(grammar: types_pb2.Grammar, options: Mapping[str, Any]) -> None:
    kinds = ("json_schema", "regex", "ebnf", "choices")
    given = [name for name in kinds if options.get(name) is not None]
    if len(given) > 1:
        raise TypeError(f"{' and '.join(given)} exclude one another")
    for name in given:
        value, place = options[name], f"grammar.{name}"
        if name == "choices":
            grammar.choices.SetInParent()
            grammar.choices.values.extend(_texts("grammar.choices", value))
        elif name == "json_schema" and isinstance(value, Mapping):
            grammar.json_schema = json.dumps(value)
        else:
            setattr(grammar, name, _text(place, value))


def _wrong(place: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{place} takes {expected}, not {type(value).__name__}")


def _float(place: str, value: object) -> float:
    # __float__ lets numpy's scalars through; text has none, and True is not a number anybody meant.
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise _wrong(place, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(place, value, "a number that a float holds") from None


def _integer(low: int, high: int) -> Callable[[str, object], int]:
    def convert(place: str, value: object) -> int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise _wrong(place, "an integer", value)
        number = operator.index(value)
        if not low <= number < high:
            raise InvalidArgument(place, number, f"in [{low}, {high - 1}]")
        return number

    return convert


_uint32 = _integer(0, _UINT32)


def _bool(place: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(place, "True or False", value)
    return value


def _text(place: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(place, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        wrong = f"U+{ord(value[exc.start]):04X} at character {exc.start}"
        raise InvalidArgument(place, wrong, "valid Unicode", reason="INVALID_UTF8") from None
    return value


def _name(place: str, value: object) -> str:
    """A text that stays on one line of a log."""
    name = _text(place, value)
    if not name.isprintable():
        raise InvalidArgument(place, ascii(name), "printable characters")
    return name


def _texts(place: str, value: object) -> list[str]:
    if isinstance(value, str):
        return [_text(place, value)]
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise _wrong(place, "text or a list of texts", value)
    return [_text(place, item) for item in value]


def _token_ids(place: str, value: object) -> list[int]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _wrong(place, "a list of token ids", value)
    return [_uint32(f"{place}[{index}]", item) for index, item in enumerate(value)]


def _choice(wrapper: Any, prefix: str, words: type[StrEnum]) -> Callable[[str, object], Any]:
    def convert(place: str, value: object) -> Any:
        if not isinstance(value, str):
            raise _wrong(place, f"one of {', '.join(words)}", value)
        if value not in [str(word) for word in words]:
            raise InvalidArgument(place, value, f"one of {', '.join(words)}")
        return wrapper.Value(f"{prefix}_{words(value).name}")

    return convert


_mode = _choice(types_pb2.SpeculationMode, "SPECULATION_MODE", SpeculationMode)
_rule = _choice(types_pb2.AcceptanceRule, "ACCEPTANCE_RULE", AcceptanceRule)
_part = _choice(types_pb2.DraftPart, "DRAFT_PART", DraftPart)

# Option -> (place in the request, conversion). The place is also the field that an error names.
_SCALARS: dict[str, tuple[str, Callable[[str, object], object]]] = {
    "temperature": ("sampling.temperature", _float),
    "top_p": ("sampling.top_p", _float),
    "top_k": ("sampling.top_k", _uint32),
    "min_p": ("sampling.min_p", _float),
    "repetition_penalty": ("sampling.repetition_penalty", _float),
    "presence_penalty": ("sampling.presence_penalty", _float),
    "frequency_penalty": ("sampling.frequency_penalty", _float),
    "seed": ("sampling.seed", _integer(0, 2**64)),
    "max_tokens": ("stop.max_tokens", _uint32),
    "min_tokens": ("stop.min_tokens", _uint32),
    "ignore_eos": ("stop.ignore_eos", _bool),
    "speculation": ("speculation.mode", _mode),
    "max_block_size": ("speculation.max_block_size", _uint32),
    "max_nodes": ("speculation.max_nodes", _uint32),
    "rule": ("speculation.rule", _rule),
    "logprobs": ("output.logprobs", _bool),
    "top_logprobs": ("output.top_logprobs", _uint32),
    "skip_special_tokens": ("output.skip_special_tokens", _bool),
    "request_id": ("request_id", _name),
    "priority": ("priority", _integer(-(2**31), 2**31)),
}


def _set(request: verifier_pb2.GenerateRequest, place: str, value: object) -> None:
    holder, _, leaf = place.rpartition(".")
    setattr(getattr(request, holder) if holder else request, leaf, value)
