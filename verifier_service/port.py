"""One lane's transport: between the engine's thread and the stream's writer.

Knows: the queue of outgoing messages, the carrier of large tensors, how a stream is read to its
end. Does not know: what the messages mean.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator

import grpc
import torch

from draftwire.carriers import SharedMemoryRing
from draftwire.codec import encode
from draftwire.errors import DraftwireError
from draftwire.v1 import drafter_pb2, types_pb2
from verifier_service.lane import LaneFacts
from verifier_service.settle import Fusion

Call = grpc.aio.StreamStreamCall[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse]
_RING_FROM_BYTES = 64 * 1024  # smaller tensors are quicker inline
_SLOT_BYTES, _SLOTS = 1024 * 1024, 32


class Port:
    """Implements `lanes.LanePort`. `send`, `encode`, `acknowledge` and `abandon` are called on the
    engine's thread, and so is `close` once the engine has the port: the ring has one user. The rest
    is called on the loop."""

    facts: LaneFacts

    def __init__(
        self,
        lane_id: int,
        loop: asyncio.AbstractEventLoop,
        carried: Counter[str] | None = None,
    ) -> None:
        """`carried` counts bytes of tensors by carrier, over all lanes of the engine."""
        self.lane_id = lane_id
        self.abandoned = ""
        self._loop = loop
        self._queue: asyncio.Queue[drafter_pb2.StepRequest | drafter_pb2.CloseLane] = (
            asyncio.Queue()
        )
        self._ring: SharedMemoryRing | None = None
        self._ring_in_use = False
        self._written = 0  # last write into the ring
        self._carried = Counter[str]() if carried is None else carried
        # (message, last write when it was sent, first write that it names or 0), oldest first
        self._sent: deque[tuple[int, int, int]] = deque()
        self._fusion: Fusion | None = None
        self._call: Call | None = None

    def offer_ring(self, hello: drafter_pb2.Hello) -> None:
        """Make a ring and put the offer into `hello`; without shared memory on this host nothing is
        offered."""
        try:
            self._ring = SharedMemoryRing.create(_SLOTS, _SLOT_BYTES)
            hello.carriers.append(self._ring.offer())
        except (OSError, DraftwireError):
            self._ring = None

    def settle(self, facts: LaneFacts, reply: drafter_pb2.HelloReply, fusion: Fusion) -> None:
        """The handshake is over."""
        self.facts = facts
        self._fusion = fusion
        self._ring_in_use = reply.verifier_carrier == types_pb2.CARRIER_KIND_SHARED_MEMORY
        if self._ring is not None and self._ring_in_use:
            self._ring.unlink()  # both ends hold it: a killed process leaves nothing behind
        elif self._ring is not None:
            self._ring.close()
            self._ring = None

    def encode(self, rows: torch.Tensor) -> types_pb2.Tensor:
        """Features as the drafter wants them."""
        assert self._fusion is not None
        return self.encode_plain(self._fusion.apply(rows))

    def encode_plain(self, tensor: torch.Tensor) -> types_pb2.Tensor:
        """A tensor inline, or in the ring if it is large and the ring has room."""
        size = tensor.numel() * tensor.element_size()
        large = size >= _RING_FROM_BYTES
        message = encode(tensor, self._ring if large and self._ring_in_use else None)
        self._carried[message.WhichOneof("carrier") or "inline"] += size
        if message.WhichOneof("carrier") == "shared_memory":
            self._written = message.shared_memory.sequence
        return message

    def acknowledge(self, sequence: int) -> None:
        """The drafter has taken in all messages up to `sequence`: their slots are free."""
        taken = 0
        while self._sent and self._sent[0][0] <= sequence:
            taken = self._sent.popleft()[1]
        # Several messages of one step are sent at once: what a later one names is not read yet.
        named = next((first for _, _, first in self._sent if first), taken + 1)
        if self._ring is not None and taken:
            self._ring.release(min(taken, named - 1))

    def send(self, request: drafter_pb2.StepRequest) -> None:
        """Queue a message for the writer."""
        if self._ring is not None:
            self._sent.append((request.sequence, self._written, _first_named(request)))
        self._loop.call_soon_threadsafe(self._queue.put_nowait, request)

    def abandon(self, why: str) -> None:
        """Cut the stream; the reader ends and the pool connects again."""
        self.abandoned = why
        if self._call is not None:
            self._loop.call_soon_threadsafe(self._call.cancel)

    def farewell(self, reason: str) -> None:
        """Queue the clean end of the lane; on the loop's thread."""
        self._queue.put_nowait(drafter_pb2.CloseLane(reason=reason))

    async def write(self, call: Call) -> None:
        """The stream's only writer."""
        self._call = call
        try:
            while True:
                item = await self._queue.get()
                if isinstance(item, drafter_pb2.CloseLane):
                    await call.write(drafter_pb2.DraftRequest(close=item))
                    await call.done_writing()
                    return
                await call.write(drafter_pb2.DraftRequest(step=item))
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader sees the end of the stream and says why

    def close(self) -> None:
        """Free the ring."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None


def _first_named(request: drafter_pb2.StepRequest) -> int:
    """The first write into the ring that a message names; 0 if it names none."""
    tensors = [
        *(opening.last_logits for opening in request.opens),
        *(features.rows for features in request.features),
        *(outcome.features for outcome in request.outcomes),
    ]
    return min(
        (t.shared_memory.sequence for t in tensors if t.WhichOneof("carrier") == "shared_memory"),
        default=0,
    )


async def responses(call: Call) -> AsyncIterator[drafter_pb2.DraftResponse]:
    """What the drafter says, to the end of the stream. Raises AioRpcError if that is not clean."""
    while isinstance(message := await call.read(), drafter_pb2.DraftResponse):
        yield message
    await _raise_status(call)


async def _raise_status(call: Call) -> None:
    """read() says EOF for every kind of end; the status tells a clean one from the others."""
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            code,
            await call.initial_metadata(),
            await call.trailing_metadata(),
            details=await call.details(),
        )
