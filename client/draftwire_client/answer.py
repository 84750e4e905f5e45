"""One answer on its way in, the same for both clients.

Knows the order of a stream (Started, Deltas, Finished), what is complete and what is partial, and
how a failure keeps what had arrived. Does not know calls or threads: `client` and `aio` read the
messages and hand them in.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc

from draftwire.v1 import verifier_pb2
from draftwire_client import enums
from draftwire_client.errors import (
    DraftwireError,
    Internal,
    cancelled_by_caller,
    from_call,
    trailers_of,
    with_partial,
)
from draftwire_client.responses import (
    Trailers,
    read_acceptance,
    read_logprob,
    read_settings,
    read_trailers,
    read_usage,
    seconds,
    word,
)
from draftwire_client.retry import Attempts
from draftwire_client.types import (
    Acceptance,
    Chunk,
    Partial,
    Result,
    Settings,
    Timing,
    TokenLogprob,
    Usage,
)


class Answer:
    """One answer being received: `add` its messages, then take `result` or `partial`."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finished: verifier_pb2.Finished | None = None
        self._first_token_s: float | None = None

    @property
    def begun(self) -> bool:
        """Whether a message has arrived, after which nothing may be tried again."""
        return self.settings is not None

    def add(self, message: verifier_pb2.GenerateResponse, elapsed_s: float) -> Chunk | None:
        """Take one message; the Chunk if it brought text or tokens.

        Raises Internal if it may not come here.
        """
        event = message.WhichOneof("event")
        if event == "started" and self.settings is None:
            self.settings = read_settings(message.started)
        elif event == "delta" and self.settings is not None and self._finished is None:
            return self._delta(message.delta, elapsed_s)
        elif event == "finished" and self.settings is not None and self._finished is None:
            self._finished = message.finished
        elif event is not None:  # None: an event that a newer server knows
            raise Internal("BAD_STREAM", f"the server sent {event} out of order", event=event)
        return None

    def _delta(self, delta: verifier_pb2.Delta, elapsed_s: float) -> Chunk | None:
        if not delta.text and not delta.token_ids:
            return None
        if delta.token_ids and self._first_token_s is None:
            self._first_token_s = elapsed_s
        logprobs = tuple(read_logprob(entry) for entry in delta.logprobs)
        chunk = Chunk(delta.text, tuple(delta.token_ids), logprobs, elapsed_s)
        self._texts.append(chunk.text)
        self._token_ids.extend(chunk.token_ids)
        self._logprobs.extend(logprobs)
        return chunk

    def result(self, trailers: Trailers, elapsed_s: float, attempts: int) -> Result:
        """The complete answer. Raises Internal if the server ended it without Finished."""
        if self.settings is None or self._finished is None:
            raise Internal("BAD_STREAM", "the server ended the answer without its last message")
        end = self._finished
        usage, acceptance = read_trailers(trailers)
        return Result(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=word(verifier_pb2.FinishReason, enums.FinishReason, end.reason),
            matched_stop=end.matched_stop,
            usage=read_usage(end.usage) if end.HasField("usage") else usage or Usage(),
            acceptance=(
                read_acceptance(end.acceptance)
                if end.HasField("acceptance")
                else acceptance or Acceptance()
            ),
            timing=Timing(
                queued_s=seconds(end.timing.queued),
                prefill_s=seconds(end.timing.prefill),
                decode_s=seconds(end.timing.decode),
                draft_wait_s=seconds(end.timing.draft_wait),
                first_token_s=self._first_token_s,
                total_s=elapsed_s,
                attempts=attempts,
            ),
            settings=self.settings,
        )

    def partial(self, trailers: Trailers, attempts: int) -> Partial:
        """What has arrived so far, with the trailers' statistics if there are any."""
        usage, acceptance = read_trailers(trailers)
        return Partial(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            settings=self.settings,
            usage=usage,
            acceptance=acceptance,
            attempts=attempts,
        )


class StreamState:
    """What a stream of either client remembers; the reading itself is the subclass's."""

    def __init__(self, attempts: Attempts, closed: Callable[[], bool]) -> None:
        """`closed` tells whether the client was closed, which ends its calls as cancelled."""
        self._attempts = attempts
        self._closed = closed
        self._answer = Answer()
        self._trailers: Trailers = None
        self._result: Result | None = None
        self._error: DraftwireError | None = None

    @property
    def settings(self) -> Settings | None:
        """What is in force, seed included; None until the first message is read."""
        return self._answer.settings

    @property
    def partial(self) -> Partial:
        """What has been read so far; with usage and acceptance once the trailers are in."""
        return self._answer.partial(self._trailers, self._attempts.made)

    @property
    def _ended(self) -> bool:
        return self._result is not None or self._error is not None

    def _take(self, message: verifier_pb2.GenerateResponse) -> Chunk | None:
        return self._answer.add(message, self._attempts.elapsed())

    def _complete(self, trailers: Trailers) -> None:
        elapsed, made = self._attempts.elapsed(), self._attempts.made
        self._result = self._answer.result(trailers, elapsed, made)

    def _fail(self, error: DraftwireError, trailers: Trailers = None) -> DraftwireError:
        """`error` as the outcome, remembering what had arrived."""
        self._trailers = trailers
        self._error = with_partial(error, self.partial)
        return self._error

    def _delay_or_fail(self, exc: grpc.RpcError, *, cancelled: bool) -> float:
        """Seconds until the next attempt. Raises the typed error if there is to be none."""
        begun, late = self._answer.begun, self._attempts.remaining() <= 0
        given_up = cancelled or self._closed()
        error = from_call(exc, begun=begun, given_up=given_up, late=late)
        if not begun:
            delay = self._attempts.next_delay(error, exc)
            if delay is not None:
                return delay
        raise self._fail(error, trailers_of(exc)) from exc

    def _outcome(self) -> Result:
        if self._result is None:
            raise self._error or self._fail(cancelled_by_caller())
        return self._result
