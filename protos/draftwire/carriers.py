"""Rings that carry tensor bytes beside the stream: POSIX shared memory here, CUDA IPC in cuda_ring.

Knows slots, their headers and the proof that both ends share a host. Does not know tensors.

Trust: a ring is made, written and owned by its sender. The receiver opens it only after the proof
of locality, read-only, without following links, and never maps it: it reads with preadv, so that a
file cut short under its hands is a short read and not a SIGBUS. It believes no length that it has
not read.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
import struct
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from draftwire.errors import FailedPrecondition, InvalidArgument
from draftwire.v1 import drafter_pb2, types_pb2

FOLDER = Path("/dev/shm")
HEADER = struct.Struct("<8sQQ")  # magic, sequence of the write, bytes of the payload
HEADER_BYTES = 64  # keeps the payload on a cache line
MAGIC = b"drftwire"
MAX_RING_BYTES = 4 << 30
MIN_SLOT_BYTES = 256
MAX_SLOTS = 65536
_NAME = re.compile(r"draftwire-[0-9a-f]{32}")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Ring(Protocol):
    """One ring: its sender writes and releases, its receiver reads; one thread on each end."""

    kind: types_pb2.CarrierKind.ValueType
    slots: Slots

    def write(self, data: Any) -> types_pb2.RingSlot | None:
        """Takes bytes (memoryview; on CUDA a uint8 tensor), or None if there is no room."""

    def read(self, slot: types_pb2.RingSlot, length: int) -> Any:
        """A copy of the bytes: memoryview; on CUDA a uint8 tensor. Raises InvalidArgument."""

    def release(self, sequence: int) -> None:
        """The receiver has taken in every write up to this one."""

    def close(self) -> None:
        """Gives everything back; may be called twice."""


def locality() -> str:
    """Identity of this boot and this /dev/shm, the same at both ends if they share it; or empty."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
        return f"{boot}:{FOLDER.stat().st_dev}"
    except OSError:
        return ""


class Slots:
    """Which slots of a ring are in use. Writes take consecutive slots and are freed in order."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise InvalidArgument("slots", slots, f"in [1, {MAX_SLOTS}]")
        if slot_bytes < MIN_SLOT_BYTES or slot_bytes % HEADER_BYTES:
            raise InvalidArgument(
                "slot_bytes", slot_bytes, f"a multiple of {HEADER_BYTES}, at least {MIN_SLOT_BYTES}"
            )
        if slots * slot_bytes > MAX_RING_BYTES:
            raise InvalidArgument("slots", slots, f"at most {MAX_RING_BYTES} bytes in all")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.sequence = 0
        self.overflows = 0
        self._used: deque[tuple[int, int, int]] = deque()  # sequence, first slot, slots

    @property
    def ring_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def in_use(self) -> int:
        """Slots that are not free."""
        return sum(count for _, _, count in self._used)

    def count_for(self, length: int) -> int:
        """Slots that `length` bytes take with their header."""
        return -(-(length + HEADER_BYTES) // self.slot_bytes)

    def reserve(self, length: int) -> types_pb2.RingSlot | None:
        """Slots for `length` bytes, or None (counted in `overflows`) if they are not free."""
        count = self.count_for(length)
        first = self._first_free(count)
        if first is None:
            self.overflows += 1
            return None
        self.sequence += 1
        self._used.append((self.sequence, first, count))
        return types_pb2.RingSlot(slot=first, length=length, sequence=self.sequence)

    def _first_free(self, count: int) -> int | None:
        if not self._used:
            return 0 if count <= self.slots else None
        tail = self._used[0][1]
        _, last, last_count = self._used[-1]
        head = last + last_count
        if last >= tail:  # in use: tail .. head
            if head + count <= self.slots:
                return head
            return 0 if count <= tail else None
        return head if head + count <= tail else None  # in use: .. head and tail ..

    def release(self, sequence: int) -> None:
        """Frees every write up to this one; a number that was never given out frees nothing."""
        if sequence > self.sequence:
            raise InvalidArgument("sequence", sequence, f"at most {self.sequence}, the last write")
        while self._used and self._used[0][0] <= sequence:
            self._used.popleft()

    def locate(self, slot: types_pb2.RingSlot, length: int) -> int:
        """Offset of a slot that the peer named. Raises InvalidArgument outside the ring."""
        if slot.length != length:
            raise InvalidArgument("slot.length", slot.length, f"{length}, what the shape takes")
        if slot.slot + self.count_for(length) > self.slots:
            raise InvalidArgument("slot.slot", slot.slot, f"inside a ring of {self.slots} slots")
        return slot.slot * self.slot_bytes


def check_header(header: bytes | memoryview, slot: types_pb2.RingSlot) -> None:
    """Raises InvalidArgument unless the header is that of this write."""
    magic, sequence, length = HEADER.unpack_from(header)
    if (magic, sequence, length) != (MAGIC, slot.sequence, slot.length):
        raise InvalidArgument("slot.sequence", slot.sequence, "the one in the slot's header")


class SharedMemoryRing:
    """A ring in /dev/shm: `create` at the sender, `attach` at the receiver."""

    kind = types_pb2.CARRIER_KIND_SHARED_MEMORY

    def __init__(self, descriptor: int, name: str, slots: Slots, memory: mmap.mmap | None) -> None:
        self.slots = slots
        self.name = name
        self._descriptor = descriptor
        self._memory = memory
        self._linked = memory is not None

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> SharedMemoryRing:
        """A new ring, its pages reserved. Raises FailedPrecondition if /dev/shm has no room."""
        table = Slots(slots, slot_bytes)
        name = f"draftwire-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(FOLDER / name, flags, 0o600)
        except OSError as error:
            raise _refused(error.strerror or "not there") from error
        try:
            # Reserved now: a page that cannot be had later would be a SIGBUS in the middle of a
            # step.
            os.posix_fallocate(descriptor, 0, table.ring_bytes)
            memory = mmap.mmap(descriptor, table.ring_bytes)
        except OSError as error:
            os.close(descriptor)
            (FOLDER / name).unlink(missing_ok=True)
            raise _refused(error.strerror or "no room") from error
        return cls(descriptor, name, table, memory)

    @classmethod
    def attach(
        cls, offer: drafter_pb2.CarrierOffer, max_bytes: int = MAX_RING_BYTES
    ) -> SharedMemoryRing:
        """The peer's ring. Raises FailedPrecondition or InvalidArgument if it cannot be trusted."""
        if not offer.locality or offer.locality != locality():
            raise _refused("the peer is on another host, or has another /dev/shm")
        if not _NAME.fullmatch(offer.ring_name):
            raise InvalidArgument("ring_name", offer.ring_name, "draftwire- and 32 hex digits")
        table = Slots(offer.slots, offer.slot_bytes)
        if table.ring_bytes > max_bytes:
            raise InvalidArgument("slots", offer.slots, f"at most {max_bytes} bytes in all")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(FOLDER / offer.ring_name, flags)
        except OSError as error:
            raise _refused(error.strerror or "not there") from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != table.ring_bytes:
            os.close(descriptor)
            raise _refused(f"it is no file of {table.ring_bytes} bytes")
        return cls(descriptor, offer.ring_name, table, None)

    def offer(self) -> drafter_pb2.CarrierOffer:
        """What the peer needs to attach."""
        return drafter_pb2.CarrierOffer(
            kind=self.kind,
            locality=locality(),
            ring_name=self.name,
            slot_bytes=self.slots.slot_bytes,
            slots=self.slots.slots,
        )

    def write(self, data: memoryview) -> types_pb2.RingSlot | None:
        """Copies the bytes into free slots; None, counted, if there are not enough."""
        if self._memory is None:
            raise ValueError("only the sender writes, and only to an open ring")
        data = data.cast("B") if data.nbytes else memoryview(b"")
        slot = self.slots.reserve(data.nbytes)
        if slot is None:
            return None
        start = slot.slot * self.slots.slot_bytes
        payload = start + HEADER_BYTES
        self._memory[payload : payload + data.nbytes] = data
        HEADER.pack_into(self._memory, start, MAGIC, slot.sequence, slot.length)
        return slot

    def read(self, slot: types_pb2.RingSlot, length: int) -> memoryview:
        """A copy of a write. Raises InvalidArgument for a forged or overwritten slot."""
        start, got = self.slots.locate(slot, length), 0
        data = memoryview(bytearray(HEADER_BYTES + length))
        while got < len(data):  # a signal or the 2 GiB limit of one call may cut a read short
            more = os.preadv(self._descriptor, [data[got:]], start + got)
            if more == 0:
                raise InvalidArgument("slot.length", length, f"in the ring, which ends after {got}")
            got += more
        check_header(data[:HEADER_BYTES], slot)
        return data[HEADER_BYTES:]

    def release(self, sequence: int) -> None:
        """Frees the writes up to `sequence`."""
        self.slots.release(sequence)

    def unlink(self) -> None:
        """Takes the name away once the peer has attached: a killed process leaves nothing."""
        if self._linked:
            self._linked = False
            (FOLDER / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Gives memory, descriptor and name back."""
        self.unlink()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _refused(why: str) -> FailedPrecondition:
    return FailedPrecondition(
        "CARRIER_REFUSED", f"the shared-memory ring cannot be used: {why}", why=why
    )
