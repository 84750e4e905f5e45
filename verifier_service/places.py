"""Which session is on which lane.

Knows: the lanes, each session's place on one, epochs, and how long a session that was turned away
stays plain. Pure. Does not know: messages, what a drafter is told or asked for, time.
"""

from __future__ import annotations

from verifier_service.lane import Lane, Link
from verifier_service.session import Session

_LONGEST_PAUSE = 64  # rounds


class Places:
    """The places of all sessions. An epoch is one stay of a session on a lane, numbered from 1."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self._lane_of: dict[int, Lane] = {}
        self._epochs: dict[int, int] = {}
        self._setbacks: dict[
            int, tuple[int, int]
        ] = {}  # session -> (times, rounds left to stay plain)

    def lane_of(self, session: Session) -> Lane | None:
        """The lane a session is on."""
        return self._lane_of.get(session.session_id)

    def lane_for(self, session: Session) -> Lane | None:
        """The lane a session is on, or the one it would be opened on."""
        lane = self.lane_of(session)
        if lane is None and not self._setbacks.get(session.session_id, (0, 0))[1]:
            lane = self.choose()
        return lane

    def choose(self) -> Lane | None:
        """The lane with the fewest sessions among those that take new ones; lanes that keep up go
        first."""
        open_lanes = [lane for lane in self.lanes.values() if not lane.draining]
        return min(
            open_lanes,
            key=lambda lane: (lane.behind, len(lane.links), lane.port.lane_id),
            default=None,
        )

    def take(self, session: Session, lane: Lane) -> Link:
        """Give a session a place on `lane`, in a new epoch."""
        epoch = self._epochs.get(session.session_id, 0) + 1
        self._epochs[session.session_id] = epoch
        link = Link(session, epoch, session.base)
        lane.links[session.session_id] = link
        self._lane_of[session.session_id] = lane
        return link

    def leave(self, session_id: int) -> None:
        """Free the place of a session, if it has one; its proposal is void."""
        lane = self._lane_of.pop(session_id, None)
        if lane is not None:
            lane.links.pop(session_id).session.proposal = None

    def remove(self, lane_id: int) -> None:
        """Free all places of a lane, and forget the lane."""
        lane = self.lanes.pop(lane_id, None)
        for session_id in list(lane.links) if lane else ():
            self.leave(session_id)

    def forget(self, session_id: int) -> None:
        """The session is over: its epochs and setbacks too."""
        self._epochs.pop(session_id, None)
        self._setbacks.pop(session_id, None)

    # -- sessions that were turned away

    def set_back(self, session_id: int, *, no_room: bool) -> None:
        """A drafter turned the session away: it leaves, and stays plain for longer each time, for
        longest where there is no room for it."""
        times = self._setbacks.get(session_id, (0, 0))[0] + 1
        rounds = _LONGEST_PAUSE if no_room else min(_LONGEST_PAUSE, 2 ** (times - 1) - 1)
        self._setbacks[session_id] = (times, rounds)
        self.leave(session_id)

    def stays_plain(self, session_id: int) -> bool:
        """Whether a session is not to be opened in this round, which is counted."""
        times, rounds = self._setbacks.get(session_id, (0, 0))
        if rounds:
            self._setbacks[session_id] = (times, rounds - 1)
        return rounds > 0

    def drafted(self, session_id: int) -> None:
        """A proposal came: the setbacks are over."""
        self._setbacks.pop(session_id, None)

    def check(self) -> None:
        """Raise RuntimeError if the books do not agree."""
        linked = {session_id for lane in self.lanes.values() for session_id in lane.links}
        if linked != set(self._lane_of):
            raise RuntimeError(
                f"links {sorted(linked)} != lanes of sessions {sorted(self._lane_of)}"
            )
