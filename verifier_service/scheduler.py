"""Who runs in the next step, and in whose pages.

Knows: the queue, the running sessions, page and row budgets, preemption. Pure: no model, no gRPC,
no clock. Does not know how tokens are drawn or what the drafter says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from draftwire.errors import ResourceExhausted
from verifier_service.cache import PagePool
from verifier_service.packing import Feed
from verifier_service.session import Proposal, Session


@dataclass(frozen=True, slots=True)
class Work:
    """What one session feeds into a step. `proposal` is None for prefill and plain rounds; `draws`
    if logits are wanted."""

    session: Session
    feed: Feed
    proposal: Proposal | None
    draws: bool

    @property
    def anchor(self) -> int:
        """Position of the last row fed that was committed before: the anchor, or the end of the
        piece of the prompt."""
        committed = 1 if self.proposal is not None else len(self.feed.tokens)
        return self.feed.base + committed - 1


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of a step."""

    max_sessions: int
    max_step_rows: int
    prefill_rows: int
    max_waiting: int


class Scheduler:
    """First come, first served within a priority; decoding goes before prefilling; the youngest is
    preempted first."""

    def __init__(self, pool: PagePool, budgets: Budgets) -> None:
        self.pool = pool
        self.budgets = budgets
        self.waiting: list[Session] = []
        self.running: list[Session] = []
        self.preempted: list[Session] = []  # since last asked

    def add(self, session: Session) -> None:
        """Queue a session. Raises ResourceExhausted if too many wait already."""
        seats = max(0, self.budgets.max_sessions - len(self.running))
        if len(self.waiting) >= self.budgets.max_waiting + seats:
            raise ResourceExhausted(
                "QUEUE_FULL",
                f"{len(self.waiting)} requests wait already",
                field="max_waiting",
                limit=self.budgets.max_waiting,
            )
        self.waiting.append(session)
        self.waiting.sort(key=_order)

    def remove(self, session: Session) -> None:
        """Forget a session and free its pages."""
        if session in self.running:
            self.running.remove(session)
        if session in self.waiting:
            self.waiting.remove(session)
        self._free(session)

    def prompt_rows(self) -> int:
        """Rows of prompts that the next step would have, if trees leave room for them."""
        wanted = sum(len(s.tokens) - s.computed for s in self.running if not s.at_anchor)
        return min(wanted, self.budgets.prefill_rows)

    def plan(self, hold: Collection[int] = ()) -> list[Work]:
        """Admit what fits and lay out the next step. `hold`: ids of sessions that sit it out."""
        self.admit()
        work: list[Work] = []
        rows_left = self.budgets.max_step_rows
        prefill_left = self.budgets.prefill_rows
        anchored = [s for s in self.running if s.at_anchor and s.session_id not in hold]
        kept_back = self._prefill_share()
        for index, session in enumerate(anchored):
            # Every session after this one still gets its anchor's row, and prompts their share.
            later = anchored[index + 1 :]
            spare = min(rows_left - 1 - len(later) - kept_back, self._spare(session, later))
            proposal = _cut(session.proposal, spare)
            if rows_left < 1 or session not in self.running:
                continue
            nodes = len(proposal.tree.tokens) if proposal else 0
            if not self._hold(session, session.computed + 1 + nodes):
                continue
            work.append(_round(session, proposal))
            rows_left -= 1 + nodes
        for session in [s for s in self.running if not s.at_anchor]:
            count = min(len(session.tokens) - session.computed, prefill_left, rows_left)
            if (
                count < 1
                or session not in self.running
                or not self._hold(session, session.computed + count)
            ):
                continue
            work.append(_prefill(session, count))
            prefill_left -= count
            rows_left -= count
        # A session preempted after it was laid out has lost its pages.
        return [item for item in work if item.session in self.running]

    def _prefill_share(self) -> int:
        """Rows that trees must leave to prompts, so that full trees never starve them."""
        return min(self.prompt_rows(), self.budgets.max_step_rows // 4)

    def _spare(self, session: Session, later: Sequence[Session]) -> int:
        """Positions past the anchor that `session` can have without anybody being preempted, the
        anchors of `later` sessions included: drafted tokens are never worth that."""
        if session.proposal is None:
            return 0
        needed = sum(max(0, self.pool.pages_for(s.computed + 1) - len(s.pages)) for s in later)
        pages = len(session.pages) + max(0, self.pool.free_pages - needed)
        return pages * self.pool.page_size - session.computed - 1

    def admit(self) -> None:
        """Let waiting sessions run for which there are pages."""
        while self.waiting and len(self.running) < self.budgets.max_sessions:
            session = self.waiting[0]
            # At least one position is fed, so that there are logits to draw from.
            known = self.pool.find_prefix(session.tokens[: len(session.tokens) - 1])
            missing = self.pool.pages_for(len(session.tokens) + 1) - len(known)
            if missing > self.pool.free_pages:
                self.pool.release(known)
                return
            self.waiting.pop(0)
            self._adopt(session, known)
            self.running.append(session)

    def _adopt(self, session: Session, pages: list[int]) -> None:
        session.pages = []
        session.slots = np.empty(0, dtype=np.int64)
        self._extend(session, pages)
        session.computed = len(pages) * self.pool.page_size
        if session.made == 0:
            session.cached_tokens = session.computed

    def _hold(self, session: Session, positions: int) -> bool:
        """Make sure that `session` has pages for `positions`; preempts younger sessions, at last
        itself."""
        missing = self.pool.pages_for(positions) - len(session.pages)
        if missing <= 0:
            return True
        while missing > self.pool.free_pages:
            victim = max(self.running, key=_order)
            self._preempt(victim)
            if victim is session:
                return False
        self._extend(session, self.pool.allocate(missing))
        return True

    def _extend(self, session: Session, pages: Iterable[int]) -> None:
        size = self.pool.page_size
        for page in pages:
            session.pages.append(page)
            session.slots = np.concatenate(
                [session.slots, np.arange(page * size, (page + 1) * size, dtype=np.int64)]
            )

    def recompute(self, session: Session) -> None:
        """Drop what is computed for a running session and queue it again."""
        if session in self.running:
            self._preempt(session)

    def _preempt(self, session: Session) -> None:
        self.running.remove(session)
        self._free(session)
        session.computed = 0
        session.proposal = None
        session.captured = None
        self.preempted.append(session)
        self.waiting.append(session)
        self.waiting.sort(key=_order)

    def _free(self, session: Session) -> None:
        self.pool.release(session.pages)
        session.pages = []
        session.slots = np.empty(0, dtype=np.int64)


def _order(session: Session) -> tuple[int, float, int]:
    return (-session.request.priority, session.request.arrival, session.session_id)


def _cut(proposal: Proposal | None, nodes: int) -> Proposal | None:
    if proposal is None or nodes <= 0:
        return None
    if len(proposal.tree.tokens) <= nodes:
        return proposal
    return proposal.cut(nodes)


def _round(session: Session, proposal: Proposal | None) -> Work:
    tokens = [session.tokens[-1]]
    parents = None
    if proposal is not None:
        tokens.extend(proposal.tree.tokens)
        parents = [-1, *(parent + 1 for parent in proposal.tree.parents)]
    feed = Feed(tokens, session.base, session.slots, parents, tuple(range(len(tokens))))
    return Work(session, feed, proposal, draws=True)


def _prefill(session: Session, count: int) -> Work:
    end = session.computed + count
    draws = end == len(session.tokens)
    feed = Feed(
        session.tokens[session.computed : end],
        session.computed,
        session.slots,
        None,
        (count - 1,) if draws else (),
    )
    return Work(session, feed, None, draws)
