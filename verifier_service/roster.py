"""Who is served: how a request becomes a session, and each way in which a session ends.

Knows: all sessions, their deadlines, who has to forget one that ends, what waits to be told to
clients. Pure: the time is an argument. Does not know: steps and rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from draftwire.errors import DraftwireError, Internal, ResourceExhausted
from draftwire.v1 import drafter_pb2, verifier_pb2
from verifier_service.lanes import Lanes
from verifier_service.policy import Policy
from verifier_service.reports import Emitted, finished_message
from verifier_service.scheduler import Scheduler
from verifier_service.session import Delta, Ending, FinishReason, Request, Session
from verifier_service.stats import Statistics
from verifier_service.text import Decoder

EndReason = drafter_pb2.EndReason


class Roster:
    """All sessions, queued and running. What clients are told is kept until `flush`."""

    def __init__(
        self,
        scheduler: Scheduler,
        lanes: Lanes,
        policy: Policy,
        tokenizer: Decoder,
        *,
        vocab_size: int,
        emit: Callable[[list[Emitted]], None],
    ) -> None:
        self.sessions: dict[int, Session] = {}
        self.totals = Statistics()  # of sessions that have ended
        self.out: list[Emitted] = []
        self._scheduler, self._lanes, self._policy = scheduler, lanes, policy
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._emit = emit
        self._log = structlog.get_logger("verifier.engine")

    def submit(self, session_id: int, request: Request) -> None:
        """Queue a request; a full queue is told to the client."""
        try:
            session = Session(session_id, request, self._vocab_size, self._tokenizer)
            self._scheduler.add(session)
        except ResourceExhausted as error:
            self.out.append(Emitted(session_id, error=error))
            return
        except Exception as error:  # noqa: BLE001  nobody else would answer this client
            self._log.exception("request not taken", error=repr(error))
            refusal = Internal("SUBMIT_FAILED", "the request was not taken; see the server's log")
            self.out.append(Emitted(session_id, error=refusal))
            return
        self.sessions[session_id] = session

    def go_on(
        self, session: Session, delta: Delta, logprobs: Sequence[verifier_pb2.TokenLogprob]
    ) -> None:
        """A round is committed and did not end the session."""
        self.out.append(Emitted(session.session_id, delta, logprobs))

    def flush(self) -> None:
        """Tell clients what is new."""
        if self.out:
            out, self.out = self.out, []
            self._emit(out)

    # -- endings

    def finish(
        self, session: Session, delta: Delta, logprobs: Sequence[verifier_pb2.TokenLogprob]
    ) -> None:
        """The last round ended the session."""
        self._retire(session, EndReason.END_REASON_FINISHED)
        finished = finished_message(session)
        self.out.append(Emitted(session.session_id, delta, logprobs, finished))

    def finish_all(self, reason: int) -> None:
        """End every session with what it has made so far."""
        for session in list(self.sessions.values()):
            self._end(session, reason)

    def expire(self, time: float) -> None:
        """End sessions whose deadline has come at `time`, with what they have."""
        for session in list(self.sessions.values()):
            deadline = session.request.deadline
            if deadline is not None and time >= deadline:
                self._end(session, FinishReason.FINISH_REASON_DEADLINE)

    def first_deadline(self) -> float | None:
        """The next time at which a session expires."""
        deadlines = [s.request.deadline for s in self.sessions.values() if s.request.deadline]
        return min(deadlines, default=None)

    def fail(self, session: Session, error: DraftwireError) -> None:
        """End a session with an error."""
        self._retire(session, EndReason.END_REASON_FAILED)
        self.out.append(Emitted(session.session_id, error=error))

    def cancel(self, session_id: int) -> None:
        """The client is gone: free the session here and on its drafter."""
        if session := self.sessions.get(session_id):
            self._retire(session, EndReason.END_REASON_CANCELLED)

    def _end(self, session: Session, reason: int) -> None:
        session.ending = Ending(reason)
        self.finish(session, Delta(session.text.finish(), ()), ())

    def _retire(self, session: Session, reason: int) -> None:
        self._scheduler.remove(session)
        self._lanes.forget(session, reason)
        self._policy.forget(session)
        self.totals.add(session.stats)
        self.sessions.pop(session.session_id, None)
