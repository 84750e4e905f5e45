"""What is asked: samples from files, traces, random lengths or our own prompts.

Knows the formats and how lengths are drawn, scaled and cut. Does not know tokenizers: a text of so
many tokens is made with a measured number of characters a token, and the server's own count is what
is reported.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from draftwire_client.bench import texts
from draftwire_client.errors import InvalidArgument
from draftwire_client.types import ChatMessage

NAMES = ("builtin", "custom", "sharegpt", "random", "azure")
Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]
_TEXT_FIELDS = ("prompt", "text", "question", "instruction", "input")
_ID_FIELDS = ("prompt_token_ids", "token_ids")
_LENGTH_FIELDS = ("max_tokens", "output_tokens", "output_len")


@dataclass(frozen=True, slots=True)
class Sample:
    """One thing to ask. `at` is the trace's time in seconds, None for data without times."""

    prompt: Prompt
    max_tokens: int | None = None
    input_len: int | None = None
    at: float | None = None
    clipped: bool = False


@dataclass(frozen=True, slots=True)
class Lengths:
    """What the target allows, and how asked lengths are scaled first."""

    max_context: int
    max_tokens: int
    overhead: int = 64
    """Tokens kept free for the chat template."""
    input_scale: float = 1.0
    output_scale: float = 1.0
    max_input: int | None = None
    max_output: int | None = None

    def __post_init__(self) -> None:
        for flag, scale in (("input", self.input_scale), ("output", self.output_scale)):
            if not (math.isfinite(scale) and scale > 0):
                raise InvalidArgument(f"--{flag}-len-scale", scale, "finite and above 0")

    def fit(self, context: int, generated: int) -> tuple[int, int, bool]:
        """(prompt tokens, tokens to make, whether a limit cut one of them), each at least 1."""
        asked_in = max(1, round(context * self.input_scale))
        asked_out = max(1, round(generated * self.output_scale))
        most_out = min(self.max_tokens, self.max_context - self.overhead - 1)
        made = max(1, min(asked_out, most_out, self.max_output or most_out))
        most_in = max(1, self.max_context - self.overhead - made)
        taken = max(1, min(asked_in, most_in, self.max_input or most_in))
        return taken, made, (taken, made) != (asked_in, asked_out)


def builtin(seed: int) -> list[Sample]:
    """Our own prompts, in an order drawn with `seed`."""
    return [Sample(text) for text in texts.prompts(seed)]


def custom(path: Path) -> list[Sample]:
    """JSON lines with a prompt each: `messages`, `turns` (the first), token ids or a text.

    Texts are in prompt, text, question or instruction (with `input` after it); `max_tokens`,
    `output_tokens` or `output_len` is the length of the answer. Raises InvalidArgument naming the
    line.
    """
    found = []
    for number, row in _rows(path):
        try:
            prompt = _prompt(row)
        except (KeyError, TypeError, ValueError):
            prompt = None
        if not prompt:
            raise InvalidArgument(
                "--dataset-path",
                f"{path.name} line {number}: fields {', '.join(map(str, row)) or 'none'}",
                f"messages, turns, {', '.join((*_ID_FIELDS, *_TEXT_FIELDS[:-1]))}",
            )
        found.append(Sample(prompt, _length(row, path, number)))
    return found


def sharegpt(path: Path, characters_per_token: float) -> list[Sample]:
    """Conversations in the ShareGPT format: the first human turn, and the length of its answer.

    `path` is a JSON list or JSON lines of {"conversations": [{"from": …, "value": …}, …]}. Ones
    without a question and its answer are left out.
    """
    with _opened(path) as file:
        text = file.read().lstrip()
    rows = _json(path.name, text) if text.startswith("[") else [row for _, row in _rows(path)]
    found = []
    for row in rows:
        turns = row.get("conversations") if isinstance(row, Mapping) else None
        turns = turns if isinstance(turns, list) else []
        said = [
            (turn.get("from"), turn.get("value")) for turn in turns if isinstance(turn, Mapping)
        ]
        for (who, question), (_, answer) in pairwise(said):
            texts_both = isinstance(question, str) and isinstance(answer, str)
            if who in ("human", "user") and texts_both and question and answer:
                length = max(1, round(len(answer) / characters_per_token))
                found.append(Sample(question, length))
                break
    return found


def random_ids(
    count: int, *, vocab_size: int, input_len: int, output_len: int, spread: float, seed: int
) -> list[Sample]:
    """Token ids drawn evenly; lengths drawn evenly from length x [1 - spread, 1 + spread].

    Ids keep away from both ends of the vocabulary, where special tokens are.
    """
    if not 0 <= spread < 1:
        raise InvalidArgument("--random-range-ratio", spread, "in [0, 1)")
    rng = random.Random(f"random ids {seed}")
    low, high = vocab_size // 20, max(vocab_size // 20 + 1, vocab_size * 19 // 20)

    def length(middle: int) -> int:
        least = max(1, math.floor(middle * (1 - spread)))
        return rng.randint(least, max(least, math.ceil(middle * (1 + spread))))

    found = []
    for _ in range(count):
        size, made = length(input_len), length(output_len)
        found.append(Sample(tuple(rng.randrange(low, high) for _ in range(size)), made, size))
    return found


def azure(
    path: Path, count: int, lengths: Lengths, characters_per_token: float, seed: int
) -> list[Sample]:
    """The first `count` rows of an Azure LLM trace, as prose of their lengths and times in seconds.

    Columns TIMESTAMP (rising), ContextTokens, GeneratedTokens (Patel et al., Splitwise, ISCA 2024).
    Raises InvalidArgument naming the line.
    """
    found: list[Sample] = []
    begin: datetime | None = None
    number = 1
    with _opened(path, newline="") as file:
        try:
            for number, row in enumerate(csv.DictReader(file), 2):
                if len(found) == count:
                    break
                moment = _moment(row["TIMESTAMP"])
                context, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                begin = begin or moment
                at = (moment - begin).total_seconds()
                if min(context, generated) < 0 or (found and at < (found[-1].at or 0.0)):
                    raise ValueError("a length below 0, or earlier than the line before")
                taken, made, clipped = lengths.fit(context, generated)
                text = texts.prose(round(taken * characters_per_token), f"{seed} {number}")
                found.append(Sample(text, made, taken, at, clipped))
        except (KeyError, ValueError, AttributeError, TypeError, csv.Error) as error:
            raise InvalidArgument(
                "--dataset-path",
                f"{path.name} line {number}: {error}",
                "TIMESTAMP, ContextTokens, GeneratedTokens",
            ) from None
    return found


def _moment(text: str) -> datetime:
    """A trace's time. Some rows of a trace tell their zone, UTC, and others do not."""
    whole, point, rest = text.strip().partition(".")
    # Seven digits of a second are more than every Python reads; a zone may come after them.
    moment = datetime.fromisoformat(f"{whole}.{rest[:6]}" if point else whole)
    return moment.replace(tzinfo=None)


def choose(
    samples: Sequence[Sample], count: int, *, shuffle: bool, oversample: bool, seed: int
) -> list[Sample]:
    """`count` of the samples, each once; again and again only with `oversample`.

    Raises InvalidArgument when there are too few: repeated prompts are faster and draft better than
    what they stand for.
    """
    if len(samples) < count and not (oversample and samples):
        raise InvalidArgument(
            "--num-prompts", count, f"at most {len(samples)}, or --oversample to repeat prompts"
        )
    chosen = list(samples)
    if shuffle:
        random.Random(f"shuffle {seed}").shuffle(chosen)
    return [chosen[i % len(chosen)] for i in range(count)]


def with_lengths(samples: Iterable[Sample], output_len: int | None) -> list[Sample]:
    """The samples, all asking for `output_len` tokens if that is given."""
    if output_len is None:
        return list(samples)
    return [replace(sample, max_tokens=output_len) for sample in samples]


def distinct(samples: Sequence[Sample]) -> int:
    """How many different prompts there are."""
    return len({sample.prompt for sample in samples})


@contextmanager
def _opened(path: Path, newline: str | None = None) -> Iterator[IO[str]]:
    """The file as text. Raises InvalidArgument for one that cannot be read, or is none."""
    try:
        with path.open(newline=newline, encoding="utf-8-sig") as file:
            yield file
    except (OSError, UnicodeDecodeError) as error:
        limit = f"a UTF-8 file that can be read ({error})"
        raise InvalidArgument("--dataset-path", str(path), limit) from None


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("--dataset-path", f"{where}: {error}", "JSON") from None


def _rows(path: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    with _opened(path) as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            row = _json(f"{path.name} line {number}", text)
            if not isinstance(row, Mapping):
                where = f"{path.name} line {number}: {type(row).__name__}"
                raise InvalidArgument("--dataset-path", where, "JSON objects")
            yield number, row


def _prompt(row: Mapping[str, Any]) -> Prompt | None:
    match row:
        case {"messages": list(messages)}:
            return tuple(ChatMessage(_said(m["role"]), _said(m["content"])) for m in messages)
        case {"turns": [str(first), *_]}:
            return first
    for name in _ID_FIELDS:
        if isinstance(ids := row.get(name), list):
            return tuple(_id(token) for token in ids)
    found = [row[name] for name in _TEXT_FIELDS if isinstance(row.get(name), str) and row[name]]
    if "instruction" in row and found:
        return "\n\n".join(found)
    return found[0] if found else None


def _said(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("role and content are texts")
    return value


def _id(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError("a token id is a whole number")
    return value


def _length(row: Mapping[str, Any], path: Path, number: int) -> int | None:
    read: Callable[[str], Any] = row.get
    for name in _LENGTH_FIELDS:
        if (value := read(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                where = f"{path.name} line {number}: {name}={value!r}"
                raise InvalidArgument("--dataset-path", where, "a whole number above 0")
            return value
    return None
