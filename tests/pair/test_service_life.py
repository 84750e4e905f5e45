"""What the verifier does besides answering: told to go away, asked what it is, idle, refused by a
drafter. None of it costs a request."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import (
    ScriptedDrafter,
    eventually,
    generate,
    running,
    scripted,
    tiny_target,
    verifier,
)

from draftwire.carriers import FOLDER, SharedMemoryRing
from draftwire.channel import open_channel
from draftwire.codec import encode
from draftwire.v1 import drafter_pb2, types_pb2, verifier_pb2, verifier_pb2_grpc
from verifier_service.config import VerifierConfig
from verifier_service.lane import LaneFacts
from verifier_service.service import VerifierService

FINISH = verifier_pb2.FinishReason
STOP = {"max_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


class Gate:
    """Holds the engine's steps until opened."""

    def __init__(self, engine: Any, passes: int = 0) -> None:
        self._step, self._passes, self._open = engine.host.step, passes, threading.Event()
        self.steps = 0
        engine.host.step = self

    def __call__(self, *args: Any) -> Any:
        self.steps += 1
        if self.steps > self._passes:
            self._open.wait()
        return self._step(*args)

    def open(self) -> None:
        self._open.set()


def test_who_gives_up_on_get_info_harms_no_request(target: Path) -> None:
    async def main() -> None:
        async with verifier(target) as (service, stub):
            gate = Gate(service.engine)
            answer = asyncio.create_task(generate(stub, "hello", stop=STOP))
            try:
                await eventually(lambda: gate.steps)
                asked = stub.GetInfo(verifier_pb2.VerifierGetInfoRequest())
                await eventually(lambda: service.engine._inbox)
                asked.cancel()
                # A second one, which the service itself gives up waiting for, is still answered.
                info = await stub.GetInfo(verifier_pb2.VerifierGetInfoRequest())
                assert info.load.total_pages > 0
            finally:
                gate.open()
            assert len((await answer).tokens) == 30

    asyncio.run(main())


def test_an_event_that_breaks_harms_no_request_and_no_other_event(target: Path) -> None:
    async def main() -> None:
        async with verifier(target) as (service, stub):
            gate = Gate(service.engine)
            first = asyncio.create_task(generate(stub, "hello", stop=STOP))
            try:
                await eventually(lambda: gate.steps)
                service.engine.post(lambda: [][0])
                second = asyncio.create_task(generate(stub, "there", stop=STOP))
                await eventually(lambda: len(service.servicer._queues) == 2)
            finally:
                gate.open()
            assert [len((await a).tokens) for a in (first, second)] == [30, 30]

    asyncio.run(main())


def test_a_request_longer_than_the_grace_ends_with_what_was_made(target: Path) -> None:
    async def main() -> None:
        config = VerifierConfig(
            listen="127.0.0.1:0",
            model=str(target),
            dtype="float32",
            drain_grace_s=4.0,
            log_level="error",
        )
        service = VerifierService(config)
        serving = running(service, config)
        address = await serving.__aenter__()
        assert service.engine is not None
        inner = service.engine.host.step

        def slow(*args: Any) -> Any:
            time.sleep(0.05)
            return inner(*args)

        service.engine.host.step = slow  # type: ignore[method-assign]
        async with open_channel(address) as channel:
            stub = verifier_pb2_grpc.VerifierStub(channel)
            stop = {"max_tokens": 400, "ignore_eos": True}
            answers = [asyncio.create_task(generate(stub, p, stop=stop)) for p in ("a", "b")]
            await eventually(lambda: len(service.servicer._queues) == 2)
            await serving.__aexit__(None, None, None)
            for answer in answers:
                result = await answer
                assert result.finished.reason == FINISH.FINISH_REASON_SHUTDOWN
                assert 0 < len(result.tokens) < 400
                assert result.finished.usage.completion_tokens == len(result.tokens)

    asyncio.run(main())


def test_the_first_step_after_a_long_rest_is_no_stall(target: Path) -> None:
    async def main() -> None:
        async with verifier(target, stall_s=0.5) as (service, stub):
            engine, moving = service.engine, []
            await generate(stub, "hello", stop=STOP)
            inner = engine.host.step

            def watched(*args: Any) -> Any:
                moving.append(engine.progress())
                return inner(*args)

            engine.host.step = watched
            await eventually(lambda: time.monotonic() - engine._last_step > 0.6)
            await generate(stub, "hello", stop={"max_tokens": 1})
            assert moving == [True]

    asyncio.run(main())


def test_a_deadline_that_passes_while_a_proposal_is_awaited_ends_the_answer_in_time(
    target: Path,
) -> None:
    async def main() -> None:
        never = asyncio.Event()
        drafter = ScriptedDrafter(lambda tokens, session: None, before_answer=never.wait)
        async with (
            scripted(drafter) as address,
            verifier(target, [address], draft_wait_ms=30000, lane_timeout_s=60) as (_, stub),
        ):
            answer = await generate(stub, "hello", stop=STOP, timeout=5)
            assert answer.finished.reason == FINISH.FINISH_REASON_DEADLINE
            assert answer.tokens
            never.set()

    asyncio.run(main())


def test_a_handshake_that_fails_leaves_no_ring_behind(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SharedMemoryRing] = []
    create = SharedMemoryRing.create

    def recorded(slots: int, slot_bytes: int) -> SharedMemoryRing:
        made.append(create(slots, slot_bytes))
        return made[-1]

    monkeypatch.setattr(SharedMemoryRing, "create", recorded)

    async def main() -> None:
        drafter = ScriptedDrafter(
            lambda tokens, session: None, change_reply=lambda r: setattr(r, "credits", 0)
        )
        async with scripted(drafter) as address, verifier(target, [address]) as (service, _):
            (lane,) = (await service.describe()).lanes
            assert lane.state == verifier_pb2.LANE_STATE_REFUSED
            await eventually(lambda: all(ring._descriptor < 0 for ring in made))
        assert made
        assert not any((FOLDER / ring.name).exists() for ring in made)

    asyncio.run(main())


def test_without_room_for_a_ring_the_lane_works_inline(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwire.errors import FailedPrecondition

    def no_room(slots: int, slot_bytes: int) -> SharedMemoryRing:
        raise FailedPrecondition("CARRIER_REFUSED", "no room")

    monkeypatch.setattr(SharedMemoryRing, "create", no_room)

    async def main() -> None:
        drafter = ScriptedDrafter(lambda tokens, session: None)
        async with scripted(drafter) as address, verifier(target, [address]) as (service, stub):
            (lane,) = (await service.describe()).lanes
            assert lane.state == verifier_pb2.LANE_STATE_READY
            assert len((await generate(stub, "hello", stop=STOP)).tokens) == 30

    asyncio.run(main())


class SilentPort:
    """A lane that wants features and never answers."""

    def __init__(self) -> None:
        self.lane_id = 77
        self.facts = LaneFacts("t", "n", "w", True, (1, 2), 8, 8, 1000, 4, False, 1 << 20)

    def encode(self, rows: torch.Tensor) -> types_pb2.Tensor:
        return encode(rows)

    encode_plain = encode

    def send(self, request: drafter_pb2.StepRequest) -> None: ...

    def acknowledge(self, sequence: int) -> None: ...

    def abandon(self, why: str) -> None: ...


def test_pages_without_the_features_of_a_new_drafter_are_not_shared(target: Path) -> None:
    """The drafter comes in the middle of a prompt: what lies before has no features of its
    layers."""

    async def main() -> None:
        async with verifier(target, prefill_rows=32, draft_wait_ms=0) as (service, stub):
            engine = service.engine
            inner, calls = engine.host.step, 0

            def joined(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                output = inner(*args)
                if calls == 1:
                    engine.lane_up(SilentPort())
                return output

            engine.host.step = joined
            prompt = [i % 250 for i in range(96)]
            cached = []
            for _ in range(3):
                answer = await generate(stub, prompt, stop={"max_tokens": 2, "ignore_eos": True})
                cached.append(answer.finished.usage.cached_tokens)
            assert cached == [0, 0, 80]

    asyncio.run(main())


@pytest.mark.slow
def test_calls_that_wait_long_to_be_picked_up_are_served_and_not_cancelled(target: Path) -> None:
    """The process is held up for longer than gRPC's own patience of 30 s with a call that waits."""

    async def main() -> None:
        async with verifier(target) as (_, stub):
            await generate(stub, "warm", stop={"max_tokens": 1})
            calls = [asyncio.create_task(generate(stub, "hello", stop=STOP)) for _ in range(8)]
            for _ in range(6):  # the calls are under way, the server has taken in one of them
                await asyncio.sleep(0)
            time.sleep(32)  # noqa: ASYNC251  the loop itself is what is held up
            assert [len((await call).tokens) for call in calls] == [30] * 8

    asyncio.run(main())
