"""What a step tells clients.

Knows: the messages that end up in Generate's stream. Pure. Does not know: the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftwire.errors import DraftwireError
from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_kernels.walk import Verdict
from verifier_service.session import Delta, Session


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step gives one client: new tokens, then perhaps the end or an error."""

    session_id: int
    delta: Delta | None = None
    logprobs: Sequence[verifier_pb2.TokenLogprob] = ()
    finished: verifier_pb2.Finished | None = None
    error: DraftwireError | None = None


def token_logprobs(verdict: Verdict, count: int) -> list[verifier_pb2.TokenLogprob]:
    """Entries of the first `count` committed tokens."""
    tops = verdict.top or ((),) * len(verdict.tokens)
    assert verdict.logprobs is not None
    return [
        verifier_pb2.TokenLogprob(
            token_id=token,
            logprob=logprob,
            top=[verifier_pb2.TopLogprob(token_id=other, logprob=value) for other, value in top],
        )
        for token, logprob, top in list(zip(verdict.tokens, verdict.logprobs, tops, strict=True))[
            :count
        ]
    ]


def timing_of(session: Session) -> verifier_pb2.Timing:
    """Where the time of a session went."""
    timing = verifier_pb2.Timing()
    started = session.started_at if session.started_at is not None else session.request.arrival
    timing.queued.FromNanoseconds(int(1e9 * max(0.0, started - session.request.arrival)))
    if session.first_token_at is not None and session.last_token_at is not None:
        timing.prefill.FromNanoseconds(int(1e9 * (session.first_token_at - started)))
        timing.decode.FromNanoseconds(int(1e9 * (session.last_token_at - session.first_token_at)))
    timing.draft_wait.FromNanoseconds(int(1e9 * session.draft_wait))
    return timing


def finished_message(session: Session) -> verifier_pb2.Finished:
    """The last message of a session that has ended."""
    assert session.ending is not None
    return verifier_pb2.Finished(
        reason=session.ending.reason,  # type: ignore[arg-type]
        matched_stop=session.ending.matched,
        usage=types_pb2.Usage(
            prompt_tokens=session.prompt_length,
            completion_tokens=session.made,
            cached_tokens=session.cached_tokens,
        ),
        acceptance=session.stats.to_proto(),
        timing=timing_of(session),
    )
