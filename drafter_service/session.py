"""Sessions of one lane as a state machine: what each message may do to which session.

Every message names session, epoch and positions. The verifier is the only truth: what is older than
the session's state is dropped and counted, what does not join on ends the session with a fault.
Pure: knows tokens, positions and how many feature rows came; does not hold rows, run models or know
the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from drafter_service.messages import (
    Budget,
    DraftSampling,
    End,
    Fault,
    FaultKind,
    Features,
    Malformed,
    Open,
    Outcome,
    Speculation,
)
from drafter_service.ngram import NgramIndex

MAX_TOMBSTONES = 4096


class SessionError(Exception):
    """The session cannot go on."""

    def __init__(self, kind: FaultKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """One generation as the drafter sees it. `rows` feature rows have come, for positions 0 .. rows
    - 1; the round's block hangs on the anchor at `base`, whose own features are never known before
    the next round. `predicted_size`: what the predictor said, once it was asked; `awaits_size`: it
    has yet to be.
    """

    session_id: int
    epoch: int
    history: NgramIndex
    sampling: DraftSampling
    speculation: Speculation
    budget: Budget
    request_id: str = ""
    rows: int = 0
    wants_proposal: bool = False
    prompt_tokens: int = 0
    awaits_size: bool = False
    predicted_size: int | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens at positions 0 .. base."""
        return self.history.tokens

    @property
    def base(self) -> int:
        """Position of the anchor."""
        return len(self.history.tokens) - 1

    @property
    def ready(self) -> bool:
        """Whether a block can be drafted now: it is wanted and the features of all positions before
        the anchor are here.
        """
        return self.wants_proposal and self.rows == self.base

    @property
    def last_prompt_position(self) -> int:
        """The last prompt position whose features are known at the first draft: before the anchor,
        even where the prompt ends with it.
        """
        return min(self.prompt_tokens - 1, self.base - 1)

    def take_features(self, first: int, count: int) -> bool:
        """Account for `count` rows from position `first`. False: they are already here."""
        if first == self.rows:
            self.rows += count
            return True
        if first >= 0 and first + count <= self.rows:
            return False
        raise SessionError(
            FaultKind.OUT_OF_SYNC,
            f"features of positions {first} .. {first + count - 1} came, {self.rows} is next",
        )

    def take_outcome(self, outcome: Outcome) -> bool:
        """Move the base. False: the outcome is older than the session."""
        if outcome.base <= self.base:
            return False
        if outcome.previous_base != self.base:
            raise SessionError(
                FaultKind.OUT_OF_SYNC,
                f"outcome of base {outcome.previous_base} came, the base is {self.base}",
            )
        count = len(outcome.token_ids)
        if count != outcome.base - outcome.previous_base:
            raise SessionError(
                FaultKind.OUT_OF_SYNC,
                f"{count} tokens came for positions {self.base + 1} .. {outcome.base}",
            )
        if outcome.features is not None:
            given = outcome.features.shape[0]
            if given != count:
                raise SessionError(
                    FaultKind.BAD_TENSOR, f"{given} feature rows came with {count} tokens"
                )
            if not self.take_features(outcome.previous_base, given):
                raise SessionError(
                    FaultKind.OUT_OF_SYNC,
                    f"features of position {outcome.previous_base} came twice",
                )
        self.history.extend(outcome.token_ids)
        self.budget = outcome.budget
        self.wants_proposal = outcome.budget.want_proposal
        return True

    def settle(self) -> None:
        """After all of a step: features may not reach the anchor."""
        if self.rows > self.base:
            raise SessionError(
                FaultKind.OUT_OF_SYNC,
                f"{self.rows} feature rows came, the anchor is at position {self.base}",
            )


@dataclass(slots=True)
class SessionTable:
    """The sessions of one lane. `faults` and `released` collect what the engine has to tell and to
    free; `touched` are the sessions that a message reached since the last step.
    """

    vocab_size: int
    max_tokens: int
    sessions: dict[int, Session] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    released: list[Session] = field(default_factory=list)
    touched: dict[int, Session] = field(default_factory=dict)
    stale: int = 0
    # Sessions lost here, by id, with their epoch: what still comes for them is dropped, for the
    # fault is already told.
    _tombstones: dict[int, int] = field(default_factory=dict)

    def end(self, message: End) -> None:
        """Free the session and forget that it ever was."""
        session = self.sessions.get(message.session_id)
        if session is not None and session.epoch <= message.epoch:
            self._release(session)
        elif session is not None:
            self.stale += 1
        if self._tombstones.get(message.session_id, message.epoch + 1) <= message.epoch:
            del self._tombstones[message.session_id]

    def open(self, message: Open) -> Session | None:
        """A new session, in the place of one of an older epoch. None: stale, or refused with a
        fault.
        """
        old = self.sessions.get(message.session_id)
        lost = self._tombstones.get(message.session_id)
        if (old is not None and message.epoch <= old.epoch) or (
            lost is not None and message.epoch <= lost
        ):
            self.stale += 1
            return None
        if old is not None:
            self._release(old)
        self._tombstones.pop(message.session_id, None)
        try:
            self._check_open(message)
        except SessionError as error:
            self._fault(message.session_id, message.epoch, message.base, error)
            return None
        session = Session(
            session_id=message.session_id,
            epoch=message.epoch,
            history=NgramIndex(message.token_ids),
            sampling=message.sampling,
            speculation=message.speculation,
            budget=message.budget,
            request_id=message.request_id,
            wants_proposal=message.budget.want_proposal,
            prompt_tokens=message.prompt_tokens,
        )
        self.sessions[session.session_id] = session
        self.touched[session.session_id] = session
        return session

    def features(self, message: Features | Malformed) -> Session | None:
        """The session if the rows are to be kept."""
        session = self._current(message.session_id, message.epoch)
        if session is None:
            return None
        try:
            if isinstance(message, Malformed):
                raise SessionError(FaultKind.BAD_TENSOR, message.detail)
            if session.take_features(message.first_position, message.rows.shape[0]):
                return session
            self.stale += 1
        except SessionError as error:
            self.fail(session, error.kind, error.detail)
        return None

    def outcome(self, message: Outcome | Malformed) -> Session | None:
        """The session if the outcome moved it."""
        session = self._current(message.session_id, message.epoch)
        if session is None:
            return None
        try:
            if isinstance(message, Malformed):
                raise SessionError(FaultKind.BAD_TENSOR, message.detail)
            self._check_tokens(message.token_ids)
            if session.take_outcome(message):
                return session
            self.stale += 1
        except SessionError as error:
            self.fail(session, error.kind, error.detail)
        return None

    def settle(self) -> list[Session]:
        """After all messages of a step: the sessions they reached that live on."""
        for session in list(self.touched.values()):
            try:
                session.settle()
            except SessionError as error:
                self.fail(session, error.kind, error.detail)
        alive = list(self.touched.values())
        self.touched.clear()
        return alive

    def fail(self, session: Session, kind: FaultKind, detail: str) -> None:
        """Let go of a session and say so."""
        self._fault(session.session_id, session.epoch, session.base, SessionError(kind, detail))
        self._release(session)

    def release_all(self) -> None:
        """The lane is over."""
        for session in list(self.sessions.values()):
            self._release(session)

    def take_faults(self) -> list[Fault]:
        """Faults not yet told."""
        faults, self.faults = self.faults, []
        return faults

    def take_released(self) -> list[Session]:
        """Sessions whose rows are to be freed."""
        released, self.released = self.released, []
        return released

    def _current(self, session_id: int, epoch: int) -> Session | None:
        session = self.sessions.get(session_id)
        if session is None:
            if self._tombstones.get(session_id, -1) >= epoch:
                self.stale += 1
            else:
                error = SessionError(
                    FaultKind.UNKNOWN_SESSION, f"session {session_id} is not open here"
                )
                self._fault(session_id, epoch, -1, error)
            return None
        if epoch < session.epoch:
            self.stale += 1
            return None
        if epoch > session.epoch:
            detail = f"epoch {epoch} came, the session is in epoch {session.epoch}"
            # Told for the epoch that the verifier is in, or it would take the fault for an old one.
            error = SessionError(FaultKind.OUT_OF_SYNC, detail)
            self._fault(session_id, epoch, session.base, error)
            self._release(session)
            return None
        self.touched[session_id] = session
        return session

    def _check_open(self, message: Open) -> None:
        count = len(message.token_ids)
        if count == 0 or count != message.base + 1:
            raise SessionError(
                FaultKind.OUT_OF_SYNC, f"{count} tokens came for positions 0 .. {message.base}"
            )
        if not 0 <= message.prompt_tokens <= count:
            raise SessionError(
                FaultKind.OUT_OF_SYNC,
                f"prompt_tokens is {message.prompt_tokens}, {count} tokens came",
            )
        if count > self.max_tokens:
            raise SessionError(
                FaultKind.NO_ROOM, f"{count} tokens came, at most {self.max_tokens} are taken"
            )
        self._check_tokens(message.token_ids)

    def _check_tokens(self, tokens: Iterable[int]) -> None:
        highest = max(tokens, default=0)
        if highest >= self.vocab_size:
            raise SessionError(
                FaultKind.OUT_OF_SYNC,
                f"token id {highest} came, the vocabulary has {self.vocab_size}",
            )

    def _fault(self, session_id: int, epoch: int, base: int, error: SessionError) -> None:
        self.faults.append(Fault(session_id, epoch, base, error.kind, error.detail))
        self._tombstones[session_id] = epoch
        if len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def _release(self, session: Session) -> None:
        del self.sessions[session.session_id]
        self.touched.pop(session.session_id, None)
        self.released.append(session)
