"""Many prompts as one piece of work: what goes in, what comes out, and how far it is.

Knows the shape of items, how a request is built from one and how progress is told. Does not know
calls: `pools` runs them.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from draftwire.v1 import verifier_pb2
from draftwire_client.errors import DraftwireError, InvalidArgument
from draftwire_client.requests import Messages, chat_request, generate_request
from draftwire_client.types import RequestOptions, Result

DEFAULT_CONCURRENCY = 16
Prompt = str | Iterable[int] | Messages


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A prompt of a batch with options of its own, which come before those of the batch."""

    prompt: Prompt
    options: RequestOptions = field(default_factory=RequestOptions)


@dataclass(frozen=True, slots=True)
class BatchItem:
    """The outcome of one prompt: a `result` or an `error`, never both.

    `index` is the prompt's place in the batch. What had arrived before an error is in
    `partial_of(error)`.
    """

    index: int
    result: Result | None = None
    error: DraftwireError | None = None

    def unwrap(self) -> Result:
        """The result. Raises the item's error."""
        if self.result is None:
            assert self.error is not None
            raise self.error
        return self.result


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is. `total` is None if the prompts have no length."""

    done: int
    failed: int
    total: int | None
    tokens: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens made by all finished items over the time so far; 0 if no time passed."""
        return self.tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0


Progress = Callable[[BatchProgress], object]
Requests = Iterator[tuple[int, verifier_pb2.GenerateRequest | InvalidArgument]]


@dataclass(frozen=True, slots=True)
class Batch:
    """A checked batch, ready to run."""

    requests: Requests
    concurrency: int
    total: int | None
    progress: Progress | bool


def make_batch(
    prompts: Iterable[Prompt | BatchRequest],
    options: RequestOptions,
    *,
    chat: bool,
    concurrency: int,
    progress: Progress | bool,
) -> Batch:
    """The batch; prompts are taken from their iterable one by one, when there is room for one.

    Raises TypeError for prompts that are one text, InvalidArgument for a concurrency below 1. A
    wrong type among prompts or options raises TypeError when its turn comes.
    """
    if isinstance(prompts, str | bytes):
        raise TypeError("a batch takes a list of prompts; for one text use generate or chat")
    if isinstance(concurrency, bool) or not isinstance(concurrency, int):
        raise TypeError(f"concurrency takes an integer, not {type(concurrency).__name__}")
    if concurrency < 1:
        raise InvalidArgument("concurrency", concurrency, "at least 1")
    total = operator.length_hint(prompts, -1)
    return Batch(
        _requests(prompts, options, chat), concurrency, None if total < 0 else total, progress
    )


def _requests(
    prompts: Iterable[Prompt | BatchRequest], options: RequestOptions, chat: bool
) -> Requests:
    build: Callable[[Any, Any], verifier_pb2.GenerateRequest] = (
        chat_request if chat else generate_request
    )
    for index, prompt in enumerate(prompts):
        request = prompt if isinstance(prompt, BatchRequest) else BatchRequest(prompt)
        try:
            yield index, build(request.prompt, {**options, **request.options})
        except InvalidArgument as error:  # a fault of this prompt alone
            yield index, error


@contextmanager
def reporting(batch: Batch) -> Iterator[Callable[[BatchItem], None]]:
    """A function that counts an item and tells the progress, by a bar on stderr if it is True."""
    start, done, failed, tokens = time.monotonic(), 0, 0, 0
    with _bar(batch.total) if batch.progress is True else _told(batch.progress or None) as tell:

        def count(item: BatchItem) -> None:
            nonlocal done, failed, tokens
            done += 1
            failed += item.error is not None
            tokens += item.result.usage.completion_tokens if item.result else 0
            tell(BatchProgress(done, failed, batch.total, tokens, time.monotonic() - start))

        yield count


@contextmanager
def _told(progress: Progress | None) -> Iterator[Progress]:
    yield progress or (lambda _: None)


@contextmanager
def _bar(total: int | None) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed, {task.fields[rate]:.1f} tokens/s"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with bars:
        task = bars.add_task("", total=total, failed=0, rate=0.0)
        yield lambda p: bars.update(task, completed=p.done, failed=p.failed, rate=p.tokens_per_s)
