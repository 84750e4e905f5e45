"""The handshake on a new stream, from the verifier's side.

Knows: the order of its messages, and the weights that go both ways. Does not know: what fits this
target (`settle`), or what becomes of the lane (`drafters`).
"""

from __future__ import annotations

from draftwire.codec import Assembler, chunks
from draftwire.errors import FailedPrecondition
from draftwire.v1 import drafter_pb2
from verifier_service.model import TargetHost
from verifier_service.port import Call, Port, responses
from verifier_service.settle import Fusion, settle

_MAX_FUSION_BYTES = 4 << 30


async def shake_hands(
    call: Call, port: Port, hello: drafter_pb2.Hello, host: TargetHost, target: str
) -> None:
    """Hello, HelloReply, weights both ways, Ready; then `port` is settled. `target`: the drafter's
    address. Raises FailedPrecondition if the two do not fit."""
    await call.write(drafter_pb2.DraftRequest(hello=hello))
    first = await _read_one(call)
    if first.WhichOneof("message") != "hello":
        raise FailedPrecondition(
            "BAD_HANDSHAKE", "the drafter did not answer Hello with HelloReply"
        )
    reply = first.hello
    facts = settle(hello, reply, target)
    for name in reply.tensors_needed:
        for chunk in chunks(name, host.tensor(name), facts.max_message_bytes // 4):
            await call.write(drafter_pb2.DraftRequest(weights=chunk))
    raw_size = len(reply.feature_layers) * hello.target.hidden_size
    fusion = Fusion(reply, raw_size, host.dtype, host.device)
    assembler = Assembler(_MAX_FUSION_BYTES)
    while True:
        message = await _read_one(call)
        kind = message.WhichOneof("message")
        if kind == "ready":
            break
        if kind == "weights" and (whole := assembler.add(message.weights)) is not None:
            fusion.take(*whole)
    fusion.check()
    port.settle(facts, reply, fusion)


async def _read_one(call: Call) -> drafter_pb2.DraftResponse:
    async for message in responses(call):
        return message
    raise FailedPrecondition("BAD_HANDSHAKE", "the drafter ended the lane during the handshake")
