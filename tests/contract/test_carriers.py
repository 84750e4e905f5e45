"""The shared-memory ring: slots are never given out twice, and a peer's claims are checked."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from draftwire import carriers, cuda_ring
from draftwire.carriers import HEADER_BYTES, SharedMemoryRing, Slots
from draftwire.errors import FailedPrecondition, InvalidArgument
from draftwire.v1 import drafter_pb2, types_pb2

SHM = Path("/dev/shm")


@pytest.fixture
def sender():
    ring = SharedMemoryRing.create(slots=4, slot_bytes=1024)
    yield ring
    ring.close()


@pytest.fixture
def receiver(sender):
    ring = SharedMemoryRing.attach(sender.offer())
    yield ring
    ring.close()


class RingMachine(RuleBasedStateMachine):
    """Random writes and releases against a list of what must still be readable."""

    def __init__(self) -> None:
        super().__init__()
        self.sender = SharedMemoryRing.create(slots=5, slot_bytes=256)
        self.receiver = SharedMemoryRing.attach(self.sender.offer())
        self.live: list[tuple[types_pb2.RingSlot, bytes]] = []

    @rule(data=st.binary(max_size=5 * 256))
    def write(self, data: bytes) -> None:
        before = self.sender.slots.overflows
        slot = self.sender.write(memoryview(data))
        if slot is None:
            assert self.sender.slots.overflows == before + 1
            # An empty ring takes whatever fits at all.
            assert self.live or self.sender.slots.count_for(len(data)) > 5
        else:
            self.live.append((slot, data))

    @rule(count=st.integers(0, 3))
    def release(self, count: int) -> None:
        if self.live[:count]:
            self.sender.release(self.live[:count][-1][0].sequence)
            del self.live[:count]

    @invariant()
    def all_that_is_not_released_is_intact(self) -> None:
        for slot, data in self.live:
            assert bytes(self.receiver.read(slot, len(data))) == data

    @invariant()
    def slots_in_use_are_those_of_live_writes(self) -> None:
        table = self.sender.slots
        assert table.in_use == sum(table.count_for(len(data)) for _, data in self.live)

    def teardown(self) -> None:
        self.receiver.close()
        self.sender.close()


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_slot_written_over_is_refused(sender, receiver):
    old = sender.write(memoryview(b"old"))
    sender.release(old.sequence)
    new = sender.write(memoryview(b"new"))
    assert new.slot == old.slot
    with pytest.raises(InvalidArgument, match=r"slot\.sequence"):
        receiver.read(old, 3)
    assert bytes(receiver.read(new, 3)) == b"new"


@pytest.mark.parametrize(
    ("change", "length"),
    [
        ({"sequence": 2}, 100),
        ({"sequence": 0}, 100),
        ({"slot": 1}, 100),
        ({"slot": 4}, 100),
        ({"slot": 2**32 - 1}, 100),
        ({"length": 101}, 100),
        ({"length": 101}, 101),
        ({"length": 2**63}, 2**63),
        ({"length": 4 * 1024}, 4 * 1024),
        ({"length": 0}, 0),
    ],
)
def test_a_forged_slot_is_refused(sender, receiver, change, length):
    slot = sender.write(memoryview(bytes(100)))
    forged = types_pb2.RingSlot(slot=slot.slot, length=slot.length, sequence=slot.sequence)
    for name, value in change.items():
        setattr(forged, name, value)
    with pytest.raises(InvalidArgument):
        receiver.read(forged, length)
    assert bytes(receiver.read(slot, 100)) == bytes(100)


@pytest.mark.parametrize("left", [0, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 50])
def test_a_file_cut_short_under_the_receiver_is_an_error_and_no_signal(sender, receiver, left):
    slot = sender.write(memoryview(bytes(100)))
    os.truncate(SHM / sender.name, left)
    with pytest.raises(InvalidArgument, match=r"slot\."):
        receiver.read(slot, 100)


def test_the_receiver_cannot_write_and_the_sender_cannot_be_fooled_by_an_ack(sender, receiver):
    with pytest.raises(ValueError, match="only the sender"):
        receiver.write(memoryview(b"x"))
    sender.write(memoryview(b"x"))
    with pytest.raises(InvalidArgument) as caught:
        sender.release(2)
    assert caught.value.field == "sequence"
    assert sender.slots.in_use == 1


def offer(sender: SharedMemoryRing, **change: object) -> drafter_pb2.CarrierOffer:
    made = sender.offer()
    for name, value in change.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    "change",
    [
        {"locality": ""},
        {"locality": "other-boot:26"},
        {"ring_name": "draftwire-" + "0" * 32},
        {"slots": 3},
        {"slots": 5},
        {"slot_bytes": 2048},
    ],
)
def test_an_offer_that_does_not_prove_itself_is_refused(sender, change):
    with pytest.raises(FailedPrecondition) as caught:
        SharedMemoryRing.attach(offer(sender, **change))
    assert caught.value.reason == "CARRIER_REFUSED"


@pytest.mark.parametrize(
    "change",
    [
        {"ring_name": ""},
        {"ring_name": "../etc/passwd"},
        {"ring_name": "draftwire-" + "0" * 31 + "/"},
        {"ring_name": "draftwire-" + "A" * 32},
        {"ring_name": "draftwire-" + "0" * 32 + "\n"},
        {"slots": 0},
        {"slots": 2**32 - 1},
        {"slot_bytes": 0},
        {"slot_bytes": 1000},
        {"slot_bytes": 2**63},
    ],
)
def test_an_offer_that_is_malformed_is_refused(sender, change):
    with pytest.raises(InvalidArgument):
        SharedMemoryRing.attach(offer(sender, **change))


def test_a_ring_over_the_receivers_bound_is_refused(sender):
    with pytest.raises(InvalidArgument):
        SharedMemoryRing.attach(sender.offer(), max_bytes=4095)


def test_links_and_other_kinds_of_files_are_refused(sender):
    link = SHM / ("draftwire-" + "1" * 32)
    fifo = SHM / ("draftwire-" + "2" * 32)
    try:
        link.symlink_to(SHM / sender.name)
        os.mkfifo(fifo)
        for path in (link, fifo):
            with pytest.raises(FailedPrecondition):
                SharedMemoryRing.attach(offer(sender, ring_name=path.name))
    finally:
        link.unlink(missing_ok=True)
        fifo.unlink(missing_ok=True)


def test_only_the_owner_can_open_a_ring_and_nothing_stays_behind(sender, receiver):
    path = SHM / sender.name
    assert path.stat().st_mode & 0o777 == 0o600
    slot = sender.write(memoryview(b"still here"))
    sender.unlink()
    assert not path.exists()
    assert bytes(receiver.read(slot, 10)) == b"still here"
    sender.close()
    sender.close()
    with pytest.raises(ValueError, match="open ring"):
        sender.write(memoryview(b"x"))
    other = SharedMemoryRing.create(slots=1, slot_bytes=256)
    other.close()
    assert not (SHM / other.name).exists()


def test_a_ring_that_does_not_fit_into_dev_shm_is_refused(monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = set(SHM.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FailedPrecondition, match="No space left"):
        SharedMemoryRing.create(slots=1, slot_bytes=256)
    assert {path for path in SHM.iterdir() if path.name.startswith("draftwire-")} <= before


@pytest.mark.parametrize(
    ("slots", "slot_bytes"), [(0, 1024), (1, 100), (1, 1000), (65536, 1 << 20)]
)
def test_a_table_of_slots_has_bounds(slots, slot_bytes):
    with pytest.raises(InvalidArgument):
        Slots(slots, slot_bytes)


def test_locality_names_this_boot_and_this_dev_shm(monkeypatch, tmp_path):
    here = carriers.locality()
    assert here == carriers.locality()
    assert here.endswith(f":{SHM.stat().st_dev}")
    monkeypatch.setattr(carriers, "FOLDER", tmp_path / "missing")
    assert carriers.locality() == ""


def test_a_cuda_ring_without_cuda_is_refused_by_name():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(FailedPrecondition, match="no CUDA device"):
        cuda_ring.CudaIpcRing.create(slots=4, slot_bytes=1024)
    offered = drafter_pb2.CarrierOffer(slots=4, slot_bytes=1024, handle=bytes(64))
    with pytest.raises(FailedPrecondition, match="no CUDA device"):
        cuda_ring.CudaIpcRing.attach(offered)
    offered.handle = bytes(63)
    with pytest.raises(InvalidArgument, match="handle"):
        cuda_ring.CudaIpcRing.attach(offered)


_CHILD = """
import sys
from draftwire import codec, cuda_ring
from draftwire.v1 import drafter_pb2, types_pb2
offer = drafter_pb2.CarrierOffer.FromString(bytes.fromhex(sys.argv[1]))
ring = cuda_ring.CudaIpcRing.attach(offer)
for line in sys.stdin:
    message = types_pb2.Tensor.FromString(bytes.fromhex(line))
    try:
        tensor = codec.decode(message, ring, name="x")
        print(tensor.device.type, tensor.double().sum().item(), flush=True)
    except ValueError as error:
        print("refused", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
ring.close()
"""


@pytest.mark.gpu
def test_a_cuda_ring_carries_tensors_between_two_processes():
    import subprocess

    import torch

    from draftwire import codec

    ring = cuda_ring.CudaIpcRing.create(slots=8, slot_bytes=1 << 16)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, ring.offer().SerializeToString().hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        last = None
        for step in range(20):
            tensor = torch.full((100, 64), float(step), device="cuda", dtype=torch.bfloat16)
            message = codec.encode(tensor, ring)
            assert message.WhichOneof("carrier") == "cuda_ipc"
            child.stdin.write(message.SerializeToString().hex() + "\n")
            child.stdin.flush()
            assert child.stdout.readline().split() == ["cuda", str(6400.0 * step)]
            ring.release(message.cuda_ipc.sequence)
            last = message
        last.cuda_ipc.sequence += 1
        child.stdin.write(last.SerializeToString().hex() + "\n")
        child.stdin.flush()
        assert child.stdout.readline().strip() == "InvalidArgument"
        child.stdin.close()
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait()
        ring.close()
