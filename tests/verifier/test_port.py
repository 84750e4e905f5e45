"""A lane's transport without a stream: what is freed when, and what fusion weights must look
like."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from draftwire.errors import FailedPrecondition
from draftwire.v1 import drafter_pb2, types_pb2
from verifier_service.lane import LaneFacts
from verifier_service.port import Port
from verifier_service.settle import Fusion

FACTS = LaneFacts("t", "n", "w", True, (0,), 8, 8, 1000, 4, False, 1 << 20)
CPU = torch.device("cpu")


@pytest.fixture
def port() -> Iterator[Port]:
    loop = asyncio.new_event_loop()
    port = Port(1, loop)
    hello = drafter_pb2.Hello()
    port.offer_ring(hello)
    assert hello.carriers, "no shared memory here"
    reply = drafter_pb2.HelloReply(
        verifier_carrier=types_pb2.CARRIER_KIND_SHARED_MEMORY,
        encoding=drafter_pb2.FEATURE_ENCODING_RAW,
        feature_dtype=types_pb2.ELEMENT_TYPE_FLOAT32,
    )
    port.settle(FACTS, reply, Fusion(reply, 4, torch.float32, CPU))
    yield port
    port.close()
    loop.close()


def step(port: Port, sequence: int, tensors: int) -> drafter_pb2.StepRequest:
    request = drafter_pb2.StepRequest(sequence=sequence)
    for _ in range(tensors):
        request.features.append(drafter_pb2.Features(rows=port.encode(torch.zeros(5000, 4))))
    return request


def test_only_what_an_acknowledged_message_named_is_freed(port: Port) -> None:
    assert port._ring is not None
    requests = [step(port, 1, 2), step(port, 2, 0), step(port, 3, 1)]
    for request in requests:
        port.send(request)
    used = port._ring.slots
    assert used.in_use == 3
    for sequence, left in ((1, 1), (2, 1), (3, 0)):
        port.acknowledge(sequence)
        assert used.in_use == left


def test_a_write_that_was_never_sent_is_freed_with_the_next_message(port: Port) -> None:
    assert port._ring is not None
    step(port, 1, 1)
    port.send(step(port, 1, 0))
    port.acknowledge(1)
    assert port._ring.slots.in_use == 0


def test_fusion_weights_for_other_layers_are_refused_at_the_handshake() -> None:
    reply = drafter_pb2.HelloReply(
        encoding=drafter_pb2.FEATURE_ENCODING_FUSED,
        feature_size=4,
        feature_dtype=types_pb2.ELEMENT_TYPE_FLOAT32,
    )
    fusion = Fusion(reply, 8, torch.float32, CPU)
    fusion.take("hidden_norm.weight", torch.ones(4))
    fusion.take("fc.weight", torch.ones(4, 12))
    with pytest.raises(FailedPrecondition, match=r"fc\.weight.*\[4, 8\].*\[4, 12\]"):
        fusion.check()
    fusion.take("fc.weight", torch.ones(4, 8))
    fusion.check()
