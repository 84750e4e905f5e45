"""What each session holds in the cache: its extent, rows on their way into it, and who must yield.

Knows the pool, the model's context side and session tables (to tell faults). Does not know lanes,
proposals or threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from drafter_service.cache import Context, ContextPool, NoRoom
from drafter_service.messages import FaultKind
from drafter_service.model import DraftModel
from drafter_service.session import Session, SessionTable

HEADROOM = 128  # rows reserved past what a session has, so that short answers never move


@dataclass(frozen=True, slots=True)
class SeatLimits:
    """Bounds of all seats; `block_size` counts the anchor, `evict_idle_s` is in seconds."""

    cache_rows: int
    max_sessions: int
    max_context: int
    block_size: int
    evict_idle_s: float


@dataclass(slots=True, eq=False)
class Seat:
    """One session's place. `context` None: past the drafter's context, the session lives on
    n-grams.
    """

    table: SessionTable
    raw: bool
    context: Context | None = None
    incoming: list[torch.Tensor] = field(default_factory=list)
    last_heard: float = 0.0


class Seats:
    """All seats and the pool they share. After `extend`, a seat with a context holds exactly the
    rows its session has accounted for.
    """

    def __init__(self, model: DraftModel, limits: SeatLimits) -> None:
        config = model.config
        self.limits = limits
        self.pool = ContextPool(
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rows=limits.cache_rows,
            dtype=model.dtype,
            device=model.device,
        )
        self.evicted = 0
        self._model = model
        self._seats: dict[Session, Seat] = {}

    def __len__(self) -> int:
        return len(self._seats)

    def __contains__(self, session: Session) -> bool:
        return session in self._seats

    def context(self, session: Session) -> Context | None:
        """The session's extent, if it has one."""
        return self._seats[session].context

    def room(self, session: Session) -> int:
        """Positions from the anchor on that the drafter's context still has."""
        return self.limits.max_context - session.base

    def open(self, table: SessionTable, session: Session, *, raw: bool) -> None:
        """Seat a new session, or fault it where there is no place."""
        if len(self._seats) >= self.limits.max_sessions:
            detail = f"max_sessions = {self.limits.max_sessions} are open"
            table.fail(session, FaultKind.NO_ROOM, detail)
            return
        seat = Seat(table, raw, last_heard=time.monotonic())
        self._seats[session] = seat
        if self.room(session) < 2:
            return
        wanted = session.base + HEADROOM + self.limits.block_size

        def open_context() -> None:
            seat.context = self.pool.open(min(wanted, self.limits.max_context))

        self._with_room(session, open_context)

    def add_rows(self, session: Session, rows: torch.Tensor) -> None:
        """Set rows aside for `extend`; they follow those that came before."""
        self._seats[session].incoming.append(rows)

    def heard(self, sessions: Sequence[Session]) -> None:
        """These sessions have spoken now."""
        now = time.monotonic()
        for session in sessions:
            if session in self._seats:
                self._seats[session].last_heard = now

    def free(self, table: SessionTable) -> None:
        """Give back what the table has released."""
        for session in table.take_released():
            seat = self._seats.pop(session, None)
            if seat is not None and seat.context is not None:
                self.pool.close(seat.context)

    def extend(self, sessions: Sequence[Session]) -> int:
        """Fuse the raw rows, then make keys and values of all rows that wait, of all sessions at
        once. Sessions for which there is no room are faulted. Returns the number of rows.
        """
        parts: list[tuple[Context, torch.Tensor]] = []
        raw: list[int] = []
        for session in sessions:
            if session not in self._seats:
                continue
            rows = self._collect(session)
            seat = self._seats.get(session)
            if rows is None or seat is None or seat.context is None:
                continue
            if seat.raw:
                raw.append(len(parts))
            parts.append((seat.context, rows))
        self._fuse(parts, raw)
        # A session evicted for another's sake has given its extent back.
        parts = [part for part in parts if part[0].capacity]
        self._model.extend(self.pool, parts)
        return sum(rows.shape[0] for _, rows in parts)

    def _collect(self, session: Session) -> torch.Tensor | None:
        """The session's waiting rows as one tensor, room for them and a block reserved."""
        seat = self._seats[session]
        incoming, seat.incoming = seat.incoming, []
        context = seat.context
        if context is None:
            return None
        if self.room(session) < 2:
            self.pool.close(context)
            seat.context = None
            return None
        needed = min(session.rows + self.limits.block_size, self.limits.max_context)
        self._with_room(session, lambda: self.pool.reserve(context, needed))
        if not incoming:
            return None
        return incoming[0] if len(incoming) == 1 else torch.cat(incoming)

    def _fuse(self, parts: list[tuple[Context, torch.Tensor]], raw: Sequence[int]) -> None:
        if not raw:
            return
        model = self._model
        sizes = [parts[index][1].shape[0] for index in raw]
        joined = torch.cat([parts[index][1] for index in raw]).to(model.device, model.dtype)
        for index, rows in zip(raw, torch.split(model.fuse(joined), sizes), strict=True):
            parts[index] = (parts[index][0], rows)

    def _with_room(self, session: Session, action: Callable[[], None]) -> None:
        """Do what needs cache rows; evict idle sessions if they are short, fault the session if
        that is not enough.
        """
        table = self._seats[session].table
        while True:
            try:
                action()
                return
            except NoRoom as error:
                if not self._evict_idle(keep=session):
                    table.fail(session, FaultKind.NO_ROOM, f"{error}; option cache_rows")
                    self.free(table)
                    return

    def _evict_idle(self, keep: Session) -> bool:
        """Let go of the session that has been silent longest, if for long enough."""
        latest = time.monotonic() - self.limits.evict_idle_s
        idle = [
            (seat.last_heard, session)
            for session, seat in self._seats.items()
            if seat.context is not None and seat.last_heard <= latest and session is not keep
        ]
        if not idle:
            return False
        _, session = min(idle, key=lambda entry: entry[0])
        table = self._seats[session].table
        detail = "evicted: silent for long, and its cache rows were needed"
        table.fail(session, FaultKind.UNKNOWN_SESSION, detail)
        self.evicted += 1
        self.free(table)
        return True
