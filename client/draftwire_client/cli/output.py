"""Text out: answers, statistics and errors, for people and as JSON.

Knows that answers go to stdout and everything about them to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import click

from draftwire_client.errors import DraftwireError, partial_of
from draftwire_client.types import Acceptance, Chunk, Partial, Result


def to_json(value: object) -> str:
    """One line of JSON. Numbers that JSON does not have become null."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)


def result_object(result: Result) -> dict[str, Any]:
    """A Result with its derived numbers."""
    return {
        **plain(result),
        "tokens_per_s": result.tokens_per_s,
        "decode_tokens_per_s": result.decode_tokens_per_s,
    }


def chunk_line(chunk: Chunk) -> str:
    """A Chunk as an event."""
    return to_json({"event": "chunk", **plain(chunk)})


def result_line(result: Result) -> str:
    """A Result as an event."""
    return to_json({"event": "result", **result_object(result)})


def error_object(error: DraftwireError) -> dict[str, Any]:
    """An error, and what had arrived before it."""
    partial = partial_of(error)
    return {
        "error": {
            "code": error.code.name,
            "reason": error.reason,
            "message": error.message,
            "metadata": error.metadata,
        },
        "partial": None if partial is None else plain(partial),
    }


@contextlib.contextmanager
def errors(as_json: bool) -> Iterator[None]:
    """With `as_json`, an error of the block is printed as an object too, on its way up."""
    try:
        yield
    except DraftwireError as error:
        if as_json:
            say(to_json(error_object(error)))
        raise


def statistics(result: Result) -> str:
    """Speed and acceptance in one line."""
    count = result.usage.completion_tokens
    first = result.timing.first_token_s
    parts = [
        f"{count} token{'s' * (count != 1)} in {result.timing.total_s:.2f} s",
        f"{result.tokens_per_s:.1f} tokens/s",
        *([] if first is None else [f"first after {first:.2f} s"]),
        acceptance(result.acceptance),
        f"finish: {result.finish_reason}",
        *([] if result.seed is None else [f"seed {result.seed}"]),
    ]
    return "[" + ", ".join(parts) + "]"


def partial_statistics(partial: Partial) -> str:
    """The same for what had arrived before an error."""
    count = partial.usage.completion_tokens if partial.usage else len(partial.token_ids)
    parts = [f"{count} token{'s' * (count != 1)} before the error"]
    if partial.acceptance is not None:
        parts.append(acceptance(partial.acceptance))
    return "[" + ", ".join(parts) + "]"


def acceptance(stats: Acceptance) -> str:
    """Acceptance in a few words."""
    if not stats.rounds:
        return "no speculation"
    return (
        f"acceptance length {stats.mean_acceptance_length:.2f} "
        f"({stats.accepted} of {stats.drafted} drafted kept in {stats.rounds} rounds)"
    )


def logprob_lines(result: Result) -> str:
    """A line for each token: id, log-probability, likeliest tokens."""
    return "\n".join(
        f"{entry.token_id:>8} {entry.logprob:9.4f}  "
        + " ".join(f"{top.token_id}:{top.logprob:.4f}" for top in entry.top)
        for entry in result.logprobs
    )


def say(text: str, *, end: str = "\n") -> None:
    """Write UTF-8 to stdout at once."""
    # As bytes: click would take escape sequences out of text that does not go to a terminal.
    click.echo((text + end).encode(), nl=False)


def note(text: str) -> None:
    """Write a line to stderr."""
    click.echo(text, err=True)


def plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
