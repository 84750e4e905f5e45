"""What a lane still has to be told, and how it is cut into messages.

Knows: the order inside a StepRequest (ends, opens, features, outcomes), sequence numbers, the
message limit. One message a step is the rule; more only when features do not fit. Does not know:
sessions, lanes, sockets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftwire.v1 import drafter_pb2, types_pb2

_SHARE = 4  # a message is closed at this share of the limit, so that one more item still fits


class Outbox:
    """Items in order of arrival. `sequence` is the number of the last message taken."""

    def __init__(self, max_message_bytes: int) -> None:
        self.sequence = 0
        self.responses_seen = 0
        self._limit = max_message_bytes // _SHARE
        self._current = drafter_pb2.StepRequest()
        self._bytes = 0
        self._closed: list[drafter_pb2.StepRequest] = []
        self.pending = False

    def end(self, item: drafter_pb2.EndSession) -> None:
        """A session is over. What the present message says of it is dropped, since the drafter
        reads ends first; opened and ended within it, the drafter need not hear of it at all."""
        fresh = any(o.key.session_id == item.key.session_id for o in self._current.opens)
        for name in ("opens", "features", "outcomes"):
            items = getattr(self._current, name)
            others = [o for o in items if o.key.session_id != item.key.session_id]
            if len(others) != len(items):
                del items[:]
                items.extend(others)
        if fresh and not any(
            o.key.session_id == item.key.session_id for m in self._closed for o in m.opens
        ):
            return
        self._current.ends.append(item)
        self.pending = True

    def open(self, item: drafter_pb2.OpenSession) -> None:
        """A session begins."""
        self._room(item.ByteSize())
        self._current.opens.append(item)

    def features(
        self,
        key: types_pb2.SessionKey,
        first_position: int,
        rows: torch.Tensor,
        encode: Callable[[torch.Tensor], types_pb2.Tensor],
    ) -> None:
        """Feature rows [rows, width] from `first_position` on, split so that each message stays
        inside its limit."""
        row_bytes = max(1, rows.shape[1] * rows.element_size()) if len(rows) else 1
        step = max(1, self._limit // row_bytes)
        for start in range(0, len(rows), step):
            tensor = encode(rows[start : start + step])
            self._room(tensor.ByteSize())
            self._current.features.append(
                drafter_pb2.Features(key=key, first_position=first_position + start, rows=tensor)
            )

    def outcome(self, item: drafter_pb2.Outcome) -> None:
        """What became of a round."""
        self._room(item.ByteSize())
        self._current.outcomes.append(item)

    def take(self) -> list[drafter_pb2.StepRequest]:
        """The messages to send now, numbered."""
        messages = [*self._closed, self._current]
        for message in messages:
            self.sequence += 1
            message.sequence = self.sequence
            message.ack_sequence = self.responses_seen
        self._closed, self._current, self._bytes, self.pending = (
            [],
            drafter_pb2.StepRequest(),
            0,
            False,
        )
        return messages

    def _room(self, size: int) -> None:
        if self._bytes and self._bytes + size > self._limit:
            self._closed.append(self._current)
            self._current, self._bytes = drafter_pb2.StepRequest(), 0
        self._bytes += size
        self.pending = True
