"""Tensors to and from messages.

Knows element types, shapes, and how large tensors are cut up. Does not know what a tensor means.
Nothing is trusted that a message says of itself: lengths are checked against the bytes there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from draftwire.errors import InvalidArgument
from draftwire.v1 import types_pb2

if TYPE_CHECKING:
    import torch

    from draftwire.carriers import Ring

MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40
_NAMES: Mapping[types_pb2.ElementType.ValueType, tuple[str, int]] = {
    types_pb2.ELEMENT_TYPE_FLOAT32: ("float32", 4),
    types_pb2.ELEMENT_TYPE_FLOAT16: ("float16", 2),
    types_pb2.ELEMENT_TYPE_BFLOAT16: ("bfloat16", 2),
    types_pb2.ELEMENT_TYPE_INT32: ("int32", 4),
    types_pb2.ELEMENT_TYPE_INT64: ("int64", 8),
    types_pb2.ELEMENT_TYPE_UINT8: ("uint8", 1),
}
_TYPES = {name: element for element, (name, _) in _NAMES.items()}


def element_type(dtype: torch.dtype) -> types_pb2.ElementType.ValueType:
    """The wire's name of a dtype. Raises InvalidArgument for one that does not travel."""
    name = str(dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise InvalidArgument("dtype", name, f"one of {', '.join(_TYPES)}")
    return _TYPES[name]


def torch_dtype(element: int, name: str = "dtype") -> torch.dtype:
    """The dtype of a wire value. Raises InvalidArgument naming `name`."""
    import torch

    return getattr(torch, _known(element, name)[0])  # type: ignore[no-any-return]


def _known(element: int, name: str) -> tuple[str, int]:
    found = _NAMES.get(element)  # type: ignore[call-overload]
    if found is None:
        raise InvalidArgument(name, element, f"one of {', '.join(_TYPES)}")
    return found  # type: ignore[no-any-return]


def encode(tensor: torch.Tensor, ring: Ring | None = None) -> types_pb2.Tensor:
    """A message with the bytes in the ring's next slots, or inline without a ring or room in it."""
    message = types_pb2.Tensor(dtype=element_type(tensor.dtype), shape=list(tensor.shape))
    flat = _bytes_of(tensor)
    if ring is not None and ring.kind == types_pb2.CARRIER_KIND_CUDA_IPC:
        if flat.is_cuda and (slot := ring.write(flat)) is not None:
            message.cuda_ipc.CopyFrom(slot)
            return message
    elif ring is not None and (slot := ring.write(flat.cpu().numpy().data)) is not None:
        message.shared_memory.CopyFrom(slot)
        return message
    message.inline = flat.cpu().numpy().tobytes()
    return message


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes]: the way to numpy for bfloat16, which it does not know."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def decode(
    message: types_pb2.Tensor,
    ring: Ring | None = None,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int | None, ...] | None = None,
    name: str,
) -> torch.Tensor:
    """The tensor of a message, in memory of its own; on the GPU if it came over CUDA IPC.

    `dtype` and `shape` (None: any size) are what is expected. Raises InvalidArgument naming `name`.
    """
    import torch

    found = torch_dtype(message.dtype, f"{name}.dtype")
    if dtype is not None and found != dtype:
        raise InvalidArgument(
            f"{name}.dtype", str(found).removeprefix("torch."), str(dtype).removeprefix("torch.")
        )
    sizes, length = _check_shape(message.dtype, tuple(message.shape), shape, name)
    carrier = message.WhichOneof("carrier")
    if carrier == "inline":
        data: bytes | memoryview | torch.Tensor = message.inline
    elif carrier is None:
        raise InvalidArgument(f"{name}.carrier", "", "set")
    else:
        wanted = {
            "shared_memory": types_pb2.CARRIER_KIND_SHARED_MEMORY,
            "cuda_ipc": types_pb2.CARRIER_KIND_CUDA_IPC,
        }[carrier]
        if ring is None or ring.kind != wanted:
            raise InvalidArgument(f"{name}.carrier", carrier, "inline, or the ring agreed on")
        data = ring.read(getattr(message, carrier), length)
    if isinstance(data, torch.Tensor):
        return data.view(found).reshape(sizes)
    if len(data) != length:
        raise InvalidArgument(
            f"{name}.inline", f"{len(data)} bytes", f"{length} bytes, the shape's"
        )
    if length == 0:
        return torch.empty(sizes, dtype=found)
    writable = data if isinstance(data, memoryview) else bytearray(data)
    return torch.frombuffer(writable, dtype=found).reshape(sizes)


def _check_shape(
    element: int, sizes: tuple[int, ...], wanted: tuple[int | None, ...] | None, name: str
) -> tuple[tuple[int, ...], int]:
    """The sizes and the bytes they take."""
    field = f"{name}.shape"
    if len(sizes) > MAX_DIMENSIONS:
        raise InvalidArgument(field, len(sizes), f"of at most {MAX_DIMENSIONS} dimensions")
    if any(not 0 <= size <= MAX_ELEMENTS for size in sizes) or (
        math.prod(max(1, size) for size in sizes) > MAX_ELEMENTS
    ):
        raise InvalidArgument(
            field, list(sizes), f"not negative, of at most {MAX_ELEMENTS} elements"
        )
    if wanted is not None and (
        len(wanted) != len(sizes)
        or any(want is not None and want != size for want, size in zip(wanted, sizes, strict=True))
    ):
        shown = ["any" if want is None else want for want in wanted]
        raise InvalidArgument(field, list(sizes), f"[{', '.join(map(str, shown))}]")
    return sizes, math.prod(sizes) * _known(element, f"{name}.dtype")[1]


def split_rows(tensor: torch.Tensor, max_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) of at most `max_bytes`. Raises InvalidArgument if one row is larger."""
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    if row_bytes > max_bytes:
        raise InvalidArgument("max_bytes", max_bytes, f"at least {row_bytes}, one row")
    step = max(1, max_bytes // max(1, row_bytes))
    for first in range(0, tensor.shape[0], step):
        yield first, tensor[first : first + step]


def chunks(name: str, tensor: torch.Tensor, max_bytes: int) -> Iterator[types_pb2.TensorChunk]:
    """The tensor in pieces of at most `max_bytes`, for Assembler; at least one."""
    if max_bytes < 1:
        raise InvalidArgument("max_bytes", max_bytes, "at least 1")
    data = _bytes_of(tensor).cpu().numpy().data
    for offset in range(0, max(1, data.nbytes), max_bytes):
        yield types_pb2.TensorChunk(
            name=name,
            dtype=element_type(tensor.dtype),
            shape=list(tensor.shape),
            offset=offset,
            data=bytes(data[offset : offset + max_bytes]) if data.nbytes else b"",
        )


class Assembler:
    """Puts chunks together again. Each tensor's chunks come in order; tensors may be interleaved.

    `max_bytes` bounds all tensors together, also those already handed out.
    """

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._parts: dict[
            str, tuple[types_pb2.ElementType.ValueType, tuple[int, ...], int, bytearray]
        ] = {}

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of tensors begun and not complete."""
        return tuple(self._parts)

    def add(self, chunk: types_pb2.TensorChunk) -> tuple[str, torch.Tensor] | None:
        """(name, tensor) once it is complete, else None. Raises InvalidArgument for a bad chunk."""
        import torch

        name = chunk.name
        if not 0 < len(name) <= 200:
            raise InvalidArgument("chunk.name", name, "of 1 to 200 characters")
        sizes, length = _check_shape(chunk.dtype, tuple(chunk.shape), None, name)
        if name not in self._parts:
            if length > self._left:
                raise InvalidArgument(f"{name}.shape", list(sizes), f"at most {self._left} bytes")
            self._left -= length
            self._parts[name] = (chunk.dtype, sizes, length, bytearray())
        dtype, known, length, data = self._parts[name]
        if (chunk.dtype, sizes) != (dtype, known):
            raise InvalidArgument(f"{name}.shape", list(sizes), f"{list(known)} as before")
        if chunk.offset != len(data):
            raise InvalidArgument(f"{name}.offset", chunk.offset, f"{len(data)}, the next byte")
        piece = chunk.data
        if len(data) + len(piece) > length or (not piece and length):
            raise InvalidArgument(
                f"{name}.data", f"{len(piece)} bytes", f"1 to {length - len(data)} bytes"
            )
        data += piece
        if len(data) < length:
            return None
        del self._parts[name]
        found = torch_dtype(dtype, name)
        if length == 0:
            return name, torch.empty(sizes, dtype=found)
        return name, torch.frombuffer(data, dtype=found).reshape(sizes)
