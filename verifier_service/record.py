"""One request from the shell's side: its log line, its span, its share of the metrics.

Knows what a request took and how it ended. A prompt's text is logged only where `--log-prompts`
says so; answers never are. Does not know the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from draftwire import tracing
from draftwire.errors import DraftwireError
from draftwire.meters import REQUEST_S, STEP_S, Distribution, Reading, by_label
from draftwire.v1 import types_pb2, verifier_pb2
from verifier_service.session import Request

_LONGEST_LOGGED = 65536  # characters of a prompt


@dataclass(slots=True)
class RequestMeter:
    """Of all requests; written on the event loop only."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue: Distribution = field(default_factory=lambda: Distribution(REQUEST_S))
    first_token: Distribution = field(default_factory=lambda: Distribution(REQUEST_S))
    per_token: Distribution = field(default_factory=lambda: Distribution(STEP_S))
    seconds: Distribution = field(default_factory=lambda: Distribution(REQUEST_S))
    stream: Distribution = field(default_factory=lambda: Distribution(STEP_S))

    def readings(self) -> Iterator[Reading]:
        """For the metrics."""
        name = "draftwire_verifier_".__add__
        yield from by_label(name("requests_total"), dict(self.outcomes).items())
        yield from by_label(name("requests_refused_total"), dict(self.refusals).items())
        yield Reading(name("prompt_tokens_total"), self.prompt_tokens)
        yield Reading(name("cached_prompt_tokens_total"), self.cached_tokens)
        yield Reading(name("queue_seconds"), self.queue)
        yield Reading(name("time_to_first_token_seconds"), self.first_token)
        yield Reading(name("time_per_token_seconds"), self.per_token)
        yield Reading(name("request_seconds"), self.seconds)
        yield Reading(name("round_seconds"), self.stream, ("stream",))


class Record:
    """A call of Generate. `close` in the end, whatever happened, writes the one line."""

    def __init__(
        self,
        meter: RequestMeter,
        traces: tracing.Tracing | None,
        message: verifier_pb2.GenerateRequest,
        context: Any,
        *,
        log_prompts: bool,
    ) -> None:
        self._meter = meter
        self._message = message
        self._log_prompts = log_prompts
        self._begun = time.monotonic()
        self._request: Request | None = None
        self._outcome, self._error = "cancelled", ""
        self._tokens = 0
        self._first_token: float | None = None
        self._finished: verifier_pb2.Finished | None = None
        self._peer = context.peer()
        self._traceparent = tracing.traceparent_of(context.invocation_metadata())
        self._span: tracing.Span | None = None
        if traces is not None:
            self._span = traces.span(
                "draftwire.v1.Verifier/Generate",
                "server",
                self._traceparent,
                rpc__system="grpc",
                rpc__service="draftwire.v1.Verifier",
                rpc__method="Generate",
                network__peer__address=self._peer,
            )
            self._traceparent = self._span.traceparent

    def admitted(self, request: Request) -> Request:
        """The request as the engine gets it: with its trace, and rounds as events of the span."""
        self._request = replace(
            request,
            traceparent=self._traceparent,
            watch=None if self._span is None else self._round,
        )
        structlog.contextvars.bind_contextvars(request_id=request.request_id)
        self._meter.prompt_tokens += len(request.prompt)
        return self._request

    def sent(self, tokens: int, emitted_at: float) -> None:
        """A message with `tokens` tokens, given by the engine at `emitted_at` (perf_counter), is
        with gRPC."""
        self._meter.stream.add(time.perf_counter() - emitted_at)
        self._tokens += tokens
        if self._first_token is None and tokens:
            self._first_token = time.monotonic() - self._begun
            self._meter.first_token.add(self._first_token)
            if self._span is not None:
                self._span.event("first token")

    def finished(self, finished: verifier_pb2.Finished) -> None:
        """The engine is done with it."""
        self._finished = finished
        name = verifier_pb2.FinishReason.Name(finished.reason)
        self._outcome = name.removeprefix("FINISH_REASON_").lower()

    def failed(self, error: DraftwireError) -> None:
        """It ends with an error instead."""
        self._outcome, self._error = "failed", error.reason

    def broke(self) -> None:
        """It ends with a fault of ours; the client is told INTERNAL."""
        self._outcome, self._error = "failed", "INTERNAL_ERROR"

    def close(self) -> None:
        """The call is over."""
        refused = self._request is None or self._error == "QUEUE_FULL"
        if refused and self._error:
            self._outcome = "refused"
            self._meter.refusals[self._error.lower()] += 1
        elif not refused:
            self._meter.outcomes[self._outcome] += 1
            self._meter.seconds.add(time.monotonic() - self._begun)
            self._take_timing()
        facts = self._facts()
        structlog.get_logger("verifier.request").info("request", **facts)
        if self._span is not None:
            spanned = {key: value for key, value in facts.items() if key != "prompt"}
            self._span.set(request__id=spanned.pop("request_id"), **spanned)
            self._span.end(self._error)

    def _take_timing(self) -> None:
        if self._finished is None:
            return
        usage, timing = self._finished.usage, self._finished.timing
        self._meter.cached_tokens += usage.cached_tokens
        self._meter.queue.add(_seconds(timing.queued))
        if usage.completion_tokens > 1:
            self._meter.per_token.add(_seconds(timing.decode) / (usage.completion_tokens - 1))

    def _facts(self) -> dict[str, Any]:
        """The line, in the order in which people read it."""
        request, finished = self._request, self._finished
        facts: dict[str, Any] = {
            "request_id": request.request_id if request else self._message.request_id[:128],
            "outcome": self._outcome,
        }
        if self._error:
            facts["error"] = self._error
        if request is not None:
            facts |= {
                "prompt_tokens": len(request.prompt),
                "completion_tokens": self._tokens,
                "temperature": request.sampling.temperature,
                "speculation": types_pb2.SpeculationMode.Name(request.speculation.mode)  # type: ignore[arg-type]
                .removeprefix("SPECULATION_MODE_")
                .lower(),
            }
        if finished is not None:
            timing, acceptance = finished.timing, finished.acceptance
            facts |= {
                "completion_tokens": finished.usage.completion_tokens,
                "cached_tokens": finished.usage.cached_tokens,
                "rounds": acceptance.rounds,
                "plain_rounds": acceptance.plain_rounds,
                "drafted": acceptance.drafted_tokens,
                "accepted": acceptance.accepted_tokens,
                "mean_acceptance_length": round(acceptance.mean_acceptance_length, 3),
                "queued_ms": _ms(timing.queued),
                "prefill_ms": _ms(timing.prefill),
                "decode_ms": _ms(timing.decode),
                "draft_wait_ms": _ms(timing.draft_wait),
            }
        if self._first_token is not None:
            facts["first_token_ms"] = round(1e3 * self._first_token, 2)
        facts |= {"seconds": round(time.monotonic() - self._begun, 4), "peer": self._peer}
        if self._traceparent:
            facts["trace_id"] = tracing.trace_id_of(self._traceparent)
        if self._log_prompts:
            facts["prompt"] = _prompt(self._message)
        return facts

    def _round(self, **facts: int) -> None:
        """On the engine's thread."""
        assert self._span is not None
        reason = types_pb2.BlockSizeReason.Name(facts.pop("reason"))  # type: ignore[arg-type]
        self._span.event("round", **facts, reason=reason.removeprefix("BLOCK_SIZE_REASON_").lower())


def _prompt(message: verifier_pb2.GenerateRequest) -> str:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        text = message.text
    elif kind == "chat":
        text = "\n".join(f"{m.role}: {m.content}" for m in message.chat.messages)
    else:
        text = " ".join(map(str, message.token_ids.ids))
    return text[:_LONGEST_LOGGED]


def _seconds(duration: Any) -> float:
    return float(duration.seconds + 1e-9 * duration.nanos)


def _ms(duration: Any) -> float:
    return round(1e3 * _seconds(duration), 2)
