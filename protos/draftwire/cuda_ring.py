"""A ring in the memory of one GPU, shared by CUDA IPC between two processes of one host.

Knows the driver's IPC calls, slots and headers. Needs torch with CUDA and libcuda; without them a
typed error says so. The memory comes from cuMemAlloc and not from torch's allocator: the handle
names this ring alone, and no reference counting of torch's stands between the processes.
"""

from __future__ import annotations

import ctypes
from typing import Any

from draftwire import carriers
from draftwire.errors import FailedPrecondition, InvalidArgument
from draftwire.v1 import drafter_pb2, types_pb2

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def _refused(why: str) -> FailedPrecondition:
    return FailedPrecondition(
        "CARRIER_REFUSED", f"the CUDA IPC ring cannot be used: {why}", why=why
    )


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise _refused("torch is not installed") from error
    if not torch.cuda.is_available():
        raise _refused("no CUDA device")
    return torch


def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise _refused("libcuda is not there") from error
    driver.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
    driver.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
    driver.cuIpcOpenMemHandle_v2.argtypes = [
        ctypes.POINTER(ctypes.c_uint64),
        _Handle,
        ctypes.c_uint,
    ]
    driver.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    driver.cuMemGetAddressRange_v2.argtypes = [
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_uint64,
    ]
    return driver


def _call(what: str, status: int) -> None:
    if status != 0:
        raise _refused(f"{what} failed with CUDA error {status}")


def device_uuid(device: int) -> str:
    """The locality of a GPU: both ends must see this one."""
    return str(_torch().cuda.get_device_properties(device).uuid)


class _Memory:
    """Device memory as torch takes it, without a copy."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }


class CudaIpcRing:
    """A ring on one GPU: `create` at the sender, `attach` at the receiver."""

    kind = types_pb2.CARRIER_KIND_CUDA_IPC

    def __init__(
        self, driver: Any, pointer: int, device: int, slots: carriers.Slots, handle: bytes
    ) -> None:
        self.slots = slots
        self.device = device
        self._driver = driver
        self._pointer = pointer
        self._handle = handle  # empty at the receiver
        self._bytes: Any = _torch().as_tensor(
            _Memory(pointer, slots.ring_bytes), device=f"cuda:{device}"
        )

    @classmethod
    def create(cls, slots: int, slot_bytes: int, device: int = 0) -> CudaIpcRing:
        """A new ring. Raises FailedPrecondition where CUDA or its IPC is not to be had."""
        table = carriers.Slots(slots, slot_bytes)
        torch, driver = _torch(), _driver()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the context current in this thread
            pointer, handle = ctypes.c_uint64(), _Handle()
            _call("cuMemAlloc", driver.cuMemAlloc_v2(ctypes.byref(pointer), table.ring_bytes))
            status = driver.cuIpcGetMemHandle(ctypes.byref(handle), pointer)
            if status != 0:
                driver.cuMemFree_v2(pointer)
            _call("cuIpcGetMemHandle", status)
            return cls(
                driver,
                pointer.value,
                device,
                table,
                ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES),
            )

    @classmethod
    def attach(
        cls,
        offer: drafter_pb2.CarrierOffer,
        device: int = 0,
        max_bytes: int = carriers.MAX_RING_BYTES,
    ) -> CudaIpcRing:
        """The peer's ring on the same GPU. Raises FailedPrecondition or InvalidArgument."""
        table = carriers.Slots(offer.slots, offer.slot_bytes)
        if table.ring_bytes > max_bytes:
            raise InvalidArgument("slots", offer.slots, f"at most {max_bytes} bytes in all")
        if len(offer.handle) != HANDLE_BYTES:
            raise InvalidArgument("handle", len(offer.handle), f"{HANDLE_BYTES} bytes")
        torch, driver = _torch(), _driver()
        if offer.locality != device_uuid(device):
            raise _refused("the peer is on another GPU")
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            pointer = ctypes.c_uint64()
            handle = _Handle.from_buffer_copy(offer.handle)
            _call(
                "cuIpcOpenMemHandle",
                driver.cuIpcOpenMemHandle_v2(ctypes.byref(pointer), handle, _LAZY_PEER_ACCESS),
            )
            size = ctypes.c_size_t()
            status = driver.cuMemGetAddressRange_v2(None, ctypes.byref(size), pointer)
            if status != 0 or size.value < table.ring_bytes:
                driver.cuIpcCloseMemHandle(pointer)
                raise InvalidArgument(
                    "slots", offer.slots, f"inside the memory of {size.value} bytes"
                )
            return cls(driver, pointer.value, device, table, b"")

    def offer(self) -> drafter_pb2.CarrierOffer:
        """What the peer needs to attach."""
        return drafter_pb2.CarrierOffer(
            kind=self.kind,
            locality=device_uuid(self.device),
            slot_bytes=self.slots.slot_bytes,
            slots=self.slots.slots,
            handle=self._handle,
        )

    def write(self, data: Any) -> types_pb2.RingSlot | None:
        """Copies a uint8 CUDA tensor [n] into free slots, and waits for it; None without room."""
        if not self._handle:
            raise ValueError("only the sender writes, and only to an open ring")
        slot = self.slots.reserve(data.numel())
        if slot is None:
            return None
        torch = _torch()
        start = slot.slot * self.slots.slot_bytes
        payload = start + carriers.HEADER_BYTES
        header = bytearray(carriers.HEADER_BYTES)
        carriers.HEADER.pack_into(header, 0, carriers.MAGIC, slot.sequence, slot.length)
        self._bytes[payload : payload + data.numel()].copy_(data)
        self._bytes[start:payload].copy_(torch.frombuffer(header, dtype=torch.uint8))
        # The message that names the slot may overtake the copy otherwise.
        torch.cuda.current_stream(self.device).synchronize()
        return slot

    def read(self, slot: types_pb2.RingSlot, length: int) -> Any:
        """A copy of a write, uint8 [length] there. Raises InvalidArgument for a forged slot."""
        start = self.slots.locate(slot, length)
        payload = start + carriers.HEADER_BYTES
        data = self._bytes[payload : payload + length].clone()
        header = bytes(self._bytes[start:payload].cpu().numpy())
        carriers.check_header(header, slot)
        return data

    def release(self, sequence: int) -> None:
        """Frees the writes up to `sequence`."""
        self.slots.release(sequence)

    def close(self) -> None:
        """Gives the memory back."""
        if self._pointer:
            pointer, self._pointer, self._bytes = self._pointer, 0, None
            torch = _torch()
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()
                if self._handle:
                    self._driver.cuMemFree_v2(pointer)
                else:
                    self._driver.cuIpcCloseMemHandle(pointer)
            self._handle = b""
