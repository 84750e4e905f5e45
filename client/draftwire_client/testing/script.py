"""What a scripted verifier says: replies as lists of steps.

Knows the contract's messages and the statistics that fit the steps. Does not know calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import grpc

from draftwire.errors import DraftwireError
from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client.enums import FinishReason


@dataclass(frozen=True, slots=True)
class Start:
    """Send Started now. Otherwise it goes out right before the first Say, Send or Finish."""


@dataclass(frozen=True, slots=True)
class Say:
    """Send a Delta. `logprobs` has one natural logarithm a token, or is empty."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait that many seconds, or until the client is gone."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait until the test calls `release`, or until the client is gone."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End with an error, with RetryInfo if `retry_after_s` is given."""

    error: DraftwireError
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End with a bare status, without reason, as gRPC itself or a proxy makes one."""

    code: grpc.StatusCode
    message: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """Send Finished and end."""

    reason: FinishReason = FinishReason.EOS
    matched_stop: str = ""


@dataclass(frozen=True, slots=True)
class Send:
    """Send any message of the contract as it is, for tests of what must not happen."""

    message: verifier_pb2.GenerateResponse


@dataclass(frozen=True, slots=True)
class Cut:
    """End with status OK and without Finished, which no verifier does."""


Step = Start | Say | Pause | Hold | Fail | Abort | Finish | Send | Cut


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. Without Fail, Abort, Finish or Cut as last step it ends with Finish()."""

    steps: tuple[Step, ...]
    prompt_tokens: int = 1
    seed: int = 1
    """The seed told in Started if the request has none."""
    acceptance: types_pb2.AcceptanceStats | None = None
    """None: each Say is a round that drafted all but its last token, all accepted."""
    timing: verifier_pb2.Timing | None = None
    trailers: bool = True
    """Whether usage and acceptance are in the trailers too."""

    @classmethod
    def of(
        cls,
        text: str,
        *,
        tokens_per_chunk: int = 1,
        first_delay_s: float = 0.0,
        chunk_delay_s: float = 0.0,
        logprob: float | None = None,
        end: Finish | Fail | Abort | Hold | Cut | None = None,
    ) -> Self:
        """A text in chunks of so many tokens; a token is a byte of UTF-8, and none is split.

        The first chunk comes `first_delay_s` after the request, the others `chunk_delay_s` after
        one another, in seconds. With `logprob` every token has that log-probability.
        """
        steps: list[Step] = [Start()]
        for index, said in enumerate(_chunks(text, tokens_per_chunk, logprob)):
            delay = chunk_delay_s if index else first_delay_s
            if delay > 0:
                steps.append(Pause(delay))
            steps.append(said)
        return cls((*steps, end or Finish()))

    @classmethod
    def failing(cls, error: DraftwireError, *, retry_after_s: float | None = None) -> Self:
        """An error before anything is sent."""
        return cls((Fail(error, retry_after_s),))

    def usage(self, sent: Iterable[Say]) -> types_pb2.Usage:
        """Usage after the steps sent."""
        made = sum(len(said.token_ids) for said in sent)
        return types_pb2.Usage(prompt_tokens=self.prompt_tokens, completion_tokens=made)

    def statistics(self, sent: Iterable[Say]) -> types_pb2.AcceptanceStats:
        """Acceptance after the steps sent; drafted = accepted + rejected + discarded holds."""
        if self.acceptance is not None:
            return self.acceptance
        stats = types_pb2.AcceptanceStats()
        lengths = [len(said.token_ids) for said in sent if said.token_ids]
        drafted = [length - 1 for length in lengths if length > 1]
        stats.rounds = len(drafted)
        stats.plain_rounds = len(lengths) - len(drafted)
        stats.drafted_tokens = stats.accepted_tokens = sum(drafted)
        per_depth = [
            sum(depth < length for length in drafted) for depth in range(max(drafted, default=0))
        ]
        stats.accepted_per_position.extend(per_depth)
        stats.drafted_per_position.extend(per_depth)
        if drafted:
            stats.mean_acceptance_length = 1 + sum(drafted) / len(drafted)
        return stats


def _chunks(text: str, size: int, logprob: float | None) -> Iterator[Say]:
    if size < 1:
        raise ValueError(f"tokens_per_chunk is {size}; it must be at least 1")
    data = text.encode()
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        logprobs = () if logprob is None else (logprob,) * len(piece)
        yield Say(decoder.decode(piece), tuple(piece), logprobs)
