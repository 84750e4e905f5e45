"""The other end of a lane for tests: speaks the real protocol to a real drafter service over real
gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import torch
from drafter import kit

from drafter_service import checkpoint
from drafter_service.config import Config
from drafter_service.model import DraftModel
from drafter_service.service import DrafterService
from draftwire.channel import ChannelConfig, open_channel
from draftwire.codec import Assembler, chunks, encode
from draftwire.errors import DraftwireError, from_rpc_error
from draftwire.runtime import serve
from draftwire.v1 import drafter_pb2 as pb
from draftwire.v1 import drafter_pb2_grpc, types_pb2

TIMEOUT_S = 60.0


def write_checkpoint(folder: Path, **changes: Any) -> DraftModel:
    """A small checkpoint in `folder`; returns its model with the target attached."""
    raw = kit.raw_config(**changes)
    model = kit.lively_model(raw)
    checkpoint.save(folder, model, raw)
    return model


@contextlib.asynccontextmanager
async def drafter(folder: Path, **settings: Any) -> AsyncIterator[tuple[DrafterService, str]]:
    """The drafter service on a free port; yields it and its address. Stopped at the end."""
    values: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "checkpoint": str(folder),
        "log_level": "error",
        "drain_grace_s": 5.0,
        "cache_rows": 4096,
    }
    service = DrafterService(Config(**values | settings))
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(service, service._config, ready=address.set_result, stop=stop)
    )
    try:
        await asyncio.wait({serving, address}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        service.stop_event = stop  # type: ignore[attr-defined]
        yield service, address.result()
    finally:
        stop.set()
        await serving


class Peer:
    """A verifier without a target."""

    def __init__(self, model: DraftModel, call: Any) -> None:
        self.model = model
        self.call = call
        self.sequence = 0
        self.reply = pb.HelloReply()
        self.weights: dict[str, torch.Tensor] = {}

    def hello(self, **changes: Any) -> pb.Hello:
        """Hello of the target that fits the test checkpoints."""
        target = types_pb2.ModelIdentity(
            name="tiny",
            vocab_size=kit.VOCAB,
            embedding_rows=kit.VOCAB,
            hidden_size=kit.HIDDEN,
            num_layers=6,
            weights_sha256="w1",
        )
        for name in list(changes):
            if name in types_pb2.ModelIdentity.DESCRIPTOR.fields_by_name:
                setattr(target, name, changes.pop(name))
        values: dict[str, Any] = {
            "target": target,
            "verifier_name": "peer",
            "encodings": [pb.FEATURE_ENCODING_FUSED, pb.FEATURE_ENCODING_RAW],
            "tensors_on_offer": ["embed_tokens.weight", "lm_head.weight"],
        }
        return pb.Hello(**values | changes)

    async def send(self, **message: Any) -> None:
        """Write one DraftRequest; on a lane that has ended the next read says why."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self.call.write(pb.DraftRequest(**message))

    async def read(self) -> pb.DraftResponse:
        """The next DraftResponse; the typed error if the lane ended with one; EOFError if
        cleanly.
        """
        try:
            message = await asyncio.wait_for(self.call.read(), TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        if message is not grpc.aio.EOF:
            return message  # type: ignore[no-any-return]
        if await self.call.code() is grpc.StatusCode.OK:
            raise EOFError
        raise await self.error()

    async def read_to_the_end(self) -> None:
        """Read until the lane ends, and raise how."""
        while True:
            await self.read()

    async def error(self) -> DraftwireError:
        """The error that the lane ended with."""
        return from_rpc_error(
            grpc.aio.AioRpcError(
                await self.call.code(),
                await self.call.initial_metadata(),
                await self.call.trailing_metadata(),
                details=await self.call.details(),
            )
        )

    async def shake_hands(self, **changes: Any) -> pb.HelloReply:
        """The whole handshake; weights are sent before any are read."""
        await self.send(hello=self.hello(**changes))
        self.reply = (await self.read()).hello
        embedding, head = kit.target_matrices(self.model.config)
        tensors = {"embed_tokens.weight": embedding, "lm_head.weight": head}
        for name in self.reply.tensors_needed:
            for chunk in chunks(name, tensors[name], 5000):
                await self.send(weights=chunk)
        assembler = Assembler(1 << 30)
        while (message := await self.read()).HasField("weights"):
            complete = assembler.add(message.weights)
            if complete is not None:
                self.weights[complete[0]] = complete[1]
        assert message.HasField("ready"), message
        return self.reply

    def key(self, session_id: int, base: int, epoch: int = 1) -> types_pb2.SessionKey:
        """A session's key."""
        return types_pb2.SessionKey(session_id=session_id, epoch=epoch, base_position=base)

    def opening(
        self, session_id: int, length: int, *, want: bool = True, epoch: int = 1
    ) -> tuple[pb.OpenSession, pb.Features]:
        """An opening with greedy sampling and all its features."""
        generator = torch.Generator().manual_seed(session_id)
        tokens = torch.randint(0, kit.VOCAB - 1, (length,), generator=generator).tolist()
        key = self.key(session_id, length - 1, epoch)
        message = pb.OpenSession(
            key=key,
            token_ids=tokens,
            prompt_tokens=length,
            sampling=types_pb2.SamplingParams(temperature=0.0, seed=5),
            budget=pb.RoundBudget(want_proposal=want),
            request_id=f"r{session_id}",
        )
        rows = encode(self.rows(length - 1, seed=session_id))
        return message, pb.Features(key=key, first_position=0, rows=rows)

    def rows(self, count: int, seed: int) -> torch.Tensor:
        """Feature rows of the width agreed on."""
        return kit.features(count, self.reply.feature_size, seed)

    def outcome(
        self, session_id: int, previous: int, tokens: list[int], **changes: Any
    ) -> pb.Outcome:
        """An outcome with its features."""
        values: dict[str, Any] = {
            "key": self.key(session_id, previous + len(tokens)),
            "previous_base": previous,
            "token_ids": tokens,
            "features": encode(self.rows(len(tokens), seed=1000 + previous)),
            "budget": pb.RoundBudget(want_proposal=True),
        }
        return pb.Outcome(**values | changes)

    async def step(self, **parts: Any) -> pb.StepResponse:
        """Send one step and wait for its answer."""
        await self.send_step(**parts)
        response = await self.read()
        while not response.HasField("step"):
            response = await self.read()
        return response.step

    async def send_step(self, **parts: Any) -> None:
        """Send one step."""
        self.sequence += 1
        await self.send(step=pb.StepRequest(sequence=self.sequence, **parts))

    async def open(self, *sessions: tuple[int, int]) -> pb.StepResponse:
        """Open sessions of (id, length) in one step."""
        pairs = [self.opening(number, length) for number, length in sessions]
        return await self.step(opens=[p[0] for p in pairs], features=[p[1] for p in pairs])


@contextlib.asynccontextmanager
async def peer(address: str, model: DraftModel) -> AsyncIterator[Peer]:
    """A lane to the drafter at `address`, cancelled at the end if it is still open."""
    async with open_channel(address, ChannelConfig()) as channel:
        call = drafter_pb2_grpc.DrafterStub(channel).Draft()
        try:
            yield Peer(model, call)
        finally:
            call.cancel()


async def get_info(address: str) -> pb.DrafterGetInfoResponse:
    """GetInfo of the drafter at `address`."""
    async with open_channel(address, ChannelConfig()) as channel:
        return await drafter_pb2_grpc.DrafterStub(channel).GetInfo(
            pb.DrafterGetInfoRequest(), timeout=30
        )  # type: ignore[no-any-return]


async def settled(address: str, sessions: int, lanes: int) -> pb.DrafterGetInfoResponse:
    """GetInfo once the drafter has so many sessions and lanes; fails if it never comes to that."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            info = await get_info(address)
            if (info.sessions, info.lanes) == (sessions, lanes):
                return info
