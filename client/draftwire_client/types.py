"""What a user passes and gets back: frozen dataclasses, seconds as floats, token ids as ints.

Knows the shape of options, answers and statistics. Does not know protobuf, gRPC or limits: the
server judges values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from draftwire_client.enums import (
    AcceptanceRule,
    BlockSizeReason,
    DraftPart,
    FinishReason,
    SpeculationMode,
)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; `role` is "system", "user", "assistant" or what the template knows."""

    role: str
    content: str


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of generate, stream, chat and chat_stream.

    Left out or None: the server's default.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    speculation: SpeculationMode | str | None
    max_block_size: int | None
    max_nodes: int | None
    rule: AcceptanceRule | str | None
    draft_parts: Sequence[DraftPart | str] | None
    logprobs: bool | None
    top_logprobs: int | None
    skip_special_tokens: bool | None
    json_schema: str | Mapping[str, object] | None
    regex: str | None
    ebnf: str | None
    choices: Sequence[str] | None
    request_id: str | None
    priority: int | None
    template_variables: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most likely tokens of a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of an emitted token under the target, and the likeliest tokens."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """What is in force for a request, as the server said in its first message.

    None: the server did not say.
    """

    request_id: str
    prompt_tokens: int
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    speculation: SpeculationMode | None = None
    max_block_size: int | None = None
    max_nodes: int | None = None
    rule: AcceptanceRule | None = None
    draft_parts: tuple[DraftPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted; `completion_tokens` includes the stop token."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BlockSizeCount:
    """Rounds with one block size (anchor included) for one reason."""

    block_size: int
    reason: BlockSizeReason
    rounds: int


@dataclass(frozen=True, slots=True)
class PartCount:
    """Tokens drafted and accepted, by the part that drafted them."""

    part: DraftPart
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What speculation did. drafted = accepted + rejected + discarded."""

    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    discarded: int = 0
    accepted_per_position: tuple[int, ...] = ()
    drafted_per_position: tuple[int, ...] = ()
    mean_acceptance_length: float = 0.0
    stale_proposals: int = 0
    reopened: int = 0
    block_sizes: tuple[BlockSizeCount, ...] = ()
    parts: tuple[PartCount, ...] = ()

    @property
    def rate(self) -> float:
        """Accepted share of the drafted tokens, in [0, 1]; 0 if none were drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def rate_per_position(self) -> tuple[float, ...]:
        """Accepted share at each depth of the block; [0] is the first drafted position."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=False)
        return tuple(accepted / drafted if drafted else 0.0 for accepted, drafted in pairs)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds.

    The first four are the server's clock, the others the client's, counted from the call's start.
    """

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_wait_s: float = 0.0
    first_token_s: float | None = None
    """Until the first chunk with a token; None if there was none."""
    total_s: float = 0.0
    """Until the status of the call arrived."""
    attempts: int = 1
    """Calls made: 1 and the retries before the first message."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text and tokens.

    A chunk of n tokens says the same as n chunks of one; text may lag behind its tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    elapsed_s: float
    """Seconds from the call's start to this chunk."""


@dataclass(frozen=True, slots=True)
class Result:
    """A complete answer.

    `logprobs` has one entry a token if they were asked for, else it is empty.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    matched_stop: str
    usage: Usage
    acceptance: Acceptance
    timing: Timing
    settings: Settings

    @property
    def request_id(self) -> str:
        """The request's id, as in the server's logs."""
        return self.settings.request_id

    @property
    def seed(self) -> int | None:
        """The seed in force; passing it with the same request makes the same tokens."""
        return self.settings.seed

    @property
    def tokens_per_s(self) -> float:
        """Tokens made over the whole time of the call at the client; 0 if no time passed."""
        total = self.timing.total_s
        return self.usage.completion_tokens / total if total > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first over the server's time from the first to the last; else 0."""
        made, seconds = self.usage.completion_tokens - 1, self.timing.decode_s
        return made / seconds if made > 0 and seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Partial:
    """What had arrived when a call failed.

    `usage` and `acceptance` come from the trailers, None without them.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    settings: Settings | None = None
    usage: Usage | None = None
    acceptance: Acceptance | None = None
    attempts: int = 1
