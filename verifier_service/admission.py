"""Turns a GenerateRequest into an admitted Request, or says exactly what is wrong with it.

Knows: every field's limits and defaults, the context. Pure: no engine, no gRPC context. Anything
that is not exact with speculation, or not served, is refused by name: nothing is silently
ignored.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftwire.errors import InvalidArgument
from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_kernels.sampling import Sampling, SamplingError
from verifier_service.chat import chat_ids
from verifier_service.session import Request, Speculation

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_BIASES, MAX_TOP_LOGPROBS, MAX_REQUEST_ID = 1024, 20, 128
# Beyond these a penalty no longer ranks tokens: logits leave fp32, as if the model were broken.
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.015625, 64.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What this server serves."""

    vocab_size: int
    max_context: int
    max_tokens: int
    default_max_tokens: int
    max_block_size: int
    max_nodes: int
    eos_ids: frozenset[int]
    mode: int = types_pb2.SPECULATION_MODE_ADAPTIVE  # where a request does not say
    longest_token: int = 1024  # bytes that one token can stand for


def admit(
    message: verifier_pb2.GenerateRequest,
    tokenizer: Any,
    limits: Limits,
    *,
    now: float,
    deadline: float | None,
) -> Request:
    """The admitted request. Raises InvalidArgument naming field, limit and value."""
    if message.HasField("grammar"):
        kind = message.grammar.WhichOneof("kind") or "unset"
        raise InvalidArgument(
            f"grammar.{kind}", kind, "unset: constrained generation is not served"
        )
    if len(message.request_id) > MAX_REQUEST_ID:
        raise InvalidArgument(
            "request_id",
            f"{len(message.request_id)} characters",
            f"at most {MAX_REQUEST_ID} characters",
        )
    if not message.request_id.isprintable():
        # It would break the lines of logs.
        raise InvalidArgument("request_id", ascii(message.request_id), "printable characters")
    prompt = _prompt(message, tokenizer, limits)
    max_tokens = _max_tokens(message.stop, limits, len(prompt))
    eos = frozenset() if message.stop.ignore_eos else limits.eos_ids
    stop_ids = frozenset(_token_ids("stop.stop_token_ids", message.stop.stop_token_ids, limits))
    sampling = _sampling(message, limits, len(prompt), max_tokens, eos | stop_ids)
    output = message.output
    if output.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidArgument(
            "output.top_logprobs", output.top_logprobs, f"at most {MAX_TOP_LOGPROBS}"
        )
    if output.top_logprobs and not output.logprobs:
        raise InvalidArgument(
            "output.top_logprobs", output.top_logprobs, "0 unless output.logprobs is set"
        )
    return Request(
        request_id=message.request_id or secrets.token_hex(8),
        prompt=tuple(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        speculation=_speculation(message.speculation, limits),
        eos_ids=eos,
        stop_token_ids=stop_ids,
        stop_strings=_stop_strings(message.stop.stop_strings),
        logprobs=output.logprobs,
        top_logprobs=output.top_logprobs,
        skip_special_tokens=output.skip_special_tokens
        if output.HasField("skip_special_tokens")
        else True,
        priority=message.priority,
        deadline=deadline,
        arrival=now,
    )


def _prompt(message: verifier_pb2.GenerateRequest, tokenizer: Any, limits: Limits) -> Sequence[int]:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("prompt", "", "set: text, chat or token_ids")
    _check_size(message, kind, limits)
    if kind == "token_ids":
        ids: Sequence[int] = _token_ids("token_ids.ids", message.token_ids.ids, limits)
        field = "token_ids.ids"
    elif kind == "text":
        ids, field = tokenizer.encode(message.text), "text"
    else:
        ids, field = chat_ids(message.chat, tokenizer), "chat"
    if not ids:
        raise InvalidArgument(field, "", "at least one token")
    _check_length(field, len(ids), limits)
    return ids


def _check_size(message: verifier_pb2.GenerateRequest, kind: str, limits: Limits) -> None:
    """Refuse a text that cannot fit whatever its tokens are, before time is spent on its tokens."""
    if kind == "token_ids":
        _check_length("token_ids.ids", len(message.token_ids.ids), limits)
        return
    size = message.ByteSize()
    most = limits.max_context * limits.longest_token
    if size > most:
        raise InvalidArgument(
            kind, f"{size} bytes", f"at most {most} bytes", reason="PROMPT_TOO_LONG"
        )


def _check_length(field: str, tokens: int, limits: Limits) -> None:
    if tokens >= limits.max_context:
        raise InvalidArgument(
            field,
            f"{tokens} tokens",
            f"at most {limits.max_context - 1} tokens, one less than the context",
            reason="PROMPT_TOO_LONG",
        )


def _token_ids(field: str, ids: Sequence[int], limits: Limits) -> Sequence[int]:
    if len(ids) > max(limits.vocab_size, limits.max_context):
        raise InvalidArgument(field, f"{len(ids)} ids", f"at most {limits.vocab_size} ids")
    for index, token in enumerate(ids):
        if token >= limits.vocab_size:
            raise InvalidArgument(
                f"{field}[{index}]", token, f"below the vocabulary size {limits.vocab_size}"
            )
    return list(ids)


def _max_tokens(stop: types_pb2.StopConditions, limits: Limits, prompt: int) -> int:
    room = limits.max_context - prompt
    if not stop.HasField("max_tokens"):
        return min(limits.default_max_tokens, room)
    if stop.max_tokens < 1:
        raise InvalidArgument("stop.max_tokens", stop.max_tokens, "at least 1")
    if stop.max_tokens > limits.max_tokens:
        raise InvalidArgument("stop.max_tokens", stop.max_tokens, f"at most {limits.max_tokens}")
    # Past the context generation ends with FINISH_REASON_CONTEXT; asking for more is no mistake.
    return stop.max_tokens


def _sampling(
    message: verifier_pb2.GenerateRequest,
    limits: Limits,
    prompt: int,
    max_tokens: int,
    endings: frozenset[int],
) -> Sampling:
    s, stop = message.sampling, message.stop
    if stop.min_tokens > max_tokens:
        raise InvalidArgument(
            "stop.min_tokens", stop.min_tokens, f"at most max_tokens ({max_tokens})"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(s, name)
        if not -2 <= value <= 2:
            raise InvalidArgument(f"sampling.{name}", value, "in [-2, 2]")
    least, most = LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY
    if s.HasField("repetition_penalty") and not least <= s.repetition_penalty <= most:
        raise InvalidArgument(
            "sampling.repetition_penalty", s.repetition_penalty, f"in [{least:g}, {most:g}]"
        )
    if len(s.logit_bias) > MAX_BIASES:
        raise InvalidArgument(
            "sampling.logit_bias", f"{len(s.logit_bias)} entries", f"at most {MAX_BIASES} entries"
        )
    for token, bias in s.logit_bias.items():
        if not (math.isfinite(bias) and -100 <= bias <= 100):
            raise InvalidArgument(f"sampling.logit_bias[{token}]", bias, "in [-100, 100]")
    if s.top_k > limits.vocab_size:
        raise InvalidArgument(
            "sampling.top_k", s.top_k, f"at most the vocabulary size {limits.vocab_size}"
        )
    try:
        sampling = Sampling(
            temperature=s.temperature if s.HasField("temperature") else 1.0,
            top_k=s.top_k,
            top_p=s.top_p if s.HasField("top_p") else 1.0,
            min_p=s.min_p,
            repetition_penalty=s.repetition_penalty if s.HasField("repetition_penalty") else 1.0,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            logit_bias=tuple(sorted(s.logit_bias.items())),
            seed=s.seed if s.HasField("seed") else secrets.randbits(64),
            banned_ids=tuple(sorted(endings)) if stop.min_tokens else (),
            banned_before=prompt + stop.min_tokens if stop.min_tokens else 0,
        )
        sampling.check_vocabulary(limits.vocab_size)
    except SamplingError as error:
        raise InvalidArgument(f"sampling.{error.field}", error.value, error.limit) from error
    return sampling


def _stop_strings(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidArgument(
            "stop.stop_strings", f"{len(stops)} strings", f"at most {MAX_STOPS} strings"
        )
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidArgument(
                f"stop.stop_strings[{index}]",
                f"{len(stop)} characters",
                f"1 to {MAX_STOP_LENGTH} characters",
            )
    return tuple(stops)


def _speculation(options: types_pb2.SpeculationOptions, limits: Limits) -> Speculation:
    if options.mode not in types_pb2.SpeculationMode.values():
        raise InvalidArgument(
            "speculation.mode", str(options.mode), "OFF, FIXED, PREDICTED or ADAPTIVE"
        )
    if options.rule not in (
        types_pb2.ACCEPTANCE_RULE_UNSPECIFIED,
        types_pb2.ACCEPTANCE_RULE_FOLLOW,
    ):
        raise InvalidArgument(
            "speculation.rule",
            _name(types_pb2.AcceptanceRule, options.rule),
            "FOLLOW: others are not served",
        )
    # Each once: a list of millions would travel on to the drafter, and back in Started.
    parts = tuple(dict.fromkeys(options.parts))
    for index, part in enumerate(parts):
        if part not in types_pb2.DraftPart.values() or part in (
            types_pb2.DRAFT_PART_UNSPECIFIED,
            types_pb2.DRAFT_PART_SAMPLED,
        ):
            raise InvalidArgument(
                f"speculation.parts[{index}]",
                _name(types_pb2.DraftPart, part),
                "ARGMAX, RANK_TREE, BRANCHES or NGRAM",
            )
    block = options.max_block_size if options.HasField("max_block_size") else limits.max_block_size
    if not 1 <= block <= limits.max_block_size:
        raise InvalidArgument("speculation.max_block_size", block, f"1 to {limits.max_block_size}")
    nodes = options.max_nodes if options.HasField("max_nodes") else limits.max_nodes
    if not 1 <= nodes <= limits.max_nodes:
        raise InvalidArgument("speculation.max_nodes", nodes, f"1 to {limits.max_nodes}")
    mode = options.mode or limits.mode
    if mode == types_pb2.SPECULATION_MODE_OFF or block == 1:
        return Speculation(False, 1, nodes, parts, types_pb2.SPECULATION_MODE_OFF)
    return Speculation(True, block, nodes, parts, mode)


def _name(enum: Any, value: int) -> str:
    try:
        return str(enum.Name(value))
    except ValueError:
        return str(value)
