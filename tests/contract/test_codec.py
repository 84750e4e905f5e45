"""Tensors through messages: every type and shape comes back, and no claim is believed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwire import codec
from draftwire.carriers import SharedMemoryRing
from draftwire.errors import InvalidArgument
from draftwire.v1 import types_pb2

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
]
SHAPES = [(), (1,), (0,), (7,), (3, 5), (0, 4), (2, 0, 3), (5, 123, 17), (1, 1, 1, 1)]


def make(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Every bit pattern may occur."""
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8),
        right.contiguous().reshape(-1).view(torch.uint8),
    )


@pytest.fixture(scope="module")
def rings():
    sender = SharedMemoryRing.create(slots=16, slot_bytes=4096)
    receiver = SharedMemoryRing.attach(sender.offer())
    yield sender, receiver
    receiver.close()
    sender.close()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_comes_back_bit_for_bit(dtype, shape, rings):
    sender, receiver = rings
    tensor = make(dtype, shape)
    for ring_out, ring_in in ((None, None), (sender, receiver)):
        message = types_pb2.Tensor.FromString(codec.encode(tensor, ring_out).SerializeToString())
        back = codec.decode(message, ring_in, dtype=dtype, shape=shape, name="x")
        assert same_bits(back, tensor)
        back.fill_(1)  # the memory is the receiver's own
        sender.release(sender.slots.sequence)


def test_a_tensor_that_is_not_contiguous_is_sent_in_logical_order():
    tensor = torch.arange(60).reshape(3, 4, 5).transpose(0, 2)[::2]
    assert torch.equal(codec.decode(codec.encode(tensor), name="x"), tensor)
    grad = torch.ones(3, requires_grad=True)
    assert torch.equal(codec.decode(codec.encode(grad), name="x"), grad.detach())


def test_a_tensor_that_finds_no_room_goes_inline_and_is_counted(rings):
    sender, receiver = rings
    before = sender.slots.overflows
    big = torch.zeros(16 * 4096, dtype=torch.uint8)
    message = codec.encode(big, sender)
    assert message.WhichOneof("carrier") == "inline"
    assert sender.slots.overflows == before + 1
    assert same_bits(codec.decode(message, receiver, name="x"), big)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.complex64])
def test_types_that_do_not_travel_are_refused(dtype):
    with pytest.raises(InvalidArgument) as caught:
        codec.encode(torch.zeros(2, dtype=dtype))
    assert caught.value.field == "dtype"


GOOD = {"dtype": types_pb2.ELEMENT_TYPE_FLOAT32, "shape": [2, 3], "inline": bytes(24)}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": 0}, "rows.dtype"),
        ({"dtype": 99}, "rows.dtype"),
        ({"dtype": types_pb2.ELEMENT_TYPE_INT32}, "rows.dtype"),
        ({"shape": [3, 2]}, "rows.shape"),
        ({"shape": [6]}, "rows.shape"),
        ({"shape": [-2, -3]}, "rows.shape"),
        ({"shape": [2, 1 << 62]}, "rows.shape"),
        ({"shape": [1 << 40, 3]}, "rows.shape"),
        ({"shape": [1] * 9}, "rows.shape"),
        ({"inline": bytes(23)}, "rows.inline"),
        ({"inline": bytes(25)}, "rows.inline"),
        ({"inline": b""}, "rows.inline"),
        ({"inline": None}, "rows.carrier"),
        ({"inline": None, "shared_memory": types_pb2.RingSlot(length=24)}, "rows.carrier"),
        ({"inline": None, "cuda_ipc": types_pb2.RingSlot(length=24)}, "rows.carrier"),
    ],
)
def test_a_malformed_tensor_is_refused_by_field(change, field):
    parts = {key: value for key, value in (GOOD | change).items() if value is not None}
    with pytest.raises(InvalidArgument) as caught:
        codec.decode(types_pb2.Tensor(**parts), dtype=torch.float32, shape=(None, 3), name="rows")
    assert caught.value.field == field
    assert codec.decode(types_pb2.Tensor(**GOOD), shape=(None, 3), name="rows").shape == (2, 3)


@given(
    dtype=st.integers(0, 8),
    shape=st.lists(st.one_of(st.integers(-2, 4), st.integers(-(2**63), 2**63 - 1)), max_size=10),
    data=st.binary(max_size=64),
)
def test_any_message_decodes_or_is_an_invalid_argument(dtype, shape, data):
    message = types_pb2.Tensor(dtype=dtype, shape=shape, inline=data)
    try:
        tensor = codec.decode(message, name="x")
    except InvalidArgument as error:
        field = error.field
    else:
        field = "x."
        assert list(tensor.shape) == shape
        assert tensor.numel() * tensor.element_size() == len(data)
    assert field.startswith("x.")


@settings(max_examples=50)
@given(rows=st.integers(0, 40), columns=st.integers(0, 9), budget=st.integers(1, 200))
def test_rows_are_split_to_fit_and_join_again(rows, columns, budget):
    tensor = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    if columns * 4 > budget:
        with pytest.raises(InvalidArgument):
            list(codec.split_rows(tensor, budget))
        return
    pieces = list(codec.split_rows(tensor, budget))
    assert all(piece.numel() * 4 <= budget for _, piece in pieces)
    at = 0
    for first, piece in pieces:
        assert first == at
        at += piece.shape[0]
    assert at == rows
    if pieces:
        assert torch.equal(torch.cat([piece for _, piece in pieces]), tensor)


@settings(max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=3),
    budget=st.integers(1, 100),
    order=st.randoms(use_true_random=False),
)
def test_chunks_of_several_tensors_come_together_in_any_mixture(shapes, budget, order):
    tensors = {f"t{i}": make(torch.bfloat16, tuple(shape)) for i, shape in enumerate(shapes)}
    queues = [list(codec.chunks(name, tensor, budget)) for name, tensor in tensors.items()]
    assembler = codec.Assembler(max_bytes=10_000)
    done = {}
    while queues:
        queue = order.choice(queues)
        chunk = queue.pop(0)
        assert len(chunk.data) <= budget
        if (finished := assembler.add(chunk)) is not None:
            done[finished[0]] = finished[1]
        queues = [queue for queue in queues if queue]
    assert not assembler.pending
    assert done.keys() == tensors.keys()
    assert all(same_bits(done[name], tensor) for name, tensor in tensors.items())


def chunk(**change: object) -> types_pb2.TensorChunk:
    parts = {"name": "w", "dtype": 1, "shape": [4], "offset": 0, "data": bytes(8)} | change
    return types_pb2.TensorChunk(**parts)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": ""}, "chunk.name"),
        ({"name": "x" * 201}, "chunk.name"),
        ({"dtype": 0}, "w.dtype"),
        ({"dtype": 4}, "w.shape"),
        ({"shape": [2, 2]}, "w.shape"),
        ({"shape": [-4]}, "w.shape"),
        ({"name": "v", "shape": [1 << 30]}, "v.shape"),
        ({"offset": 0}, "w.offset"),
        ({"offset": 12}, "w.offset"),
        ({"offset": 8, "data": bytes(9)}, "w.data"),
        ({"offset": 8, "data": b""}, "w.data"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused_by_field(change, field):
    assembler = codec.Assembler(max_bytes=1000)
    assert assembler.add(chunk()) is None
    with pytest.raises(InvalidArgument) as caught:
        assembler.add(chunk(**change))
    assert caught.value.field == field
    name, tensor = assembler.add(chunk(offset=8))
    assert (name, tensor.shape) == ("w", (4,))


def test_the_bound_of_an_assembler_counts_all_its_tensors():
    assembler = codec.Assembler(max_bytes=24)
    assembler.add(chunk(data=bytes(16)))
    with pytest.raises(InvalidArgument):
        assembler.add(chunk(name="v"))
