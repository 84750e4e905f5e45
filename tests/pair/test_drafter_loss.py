"""The drafter is disposable: killed, missing, slow, stopped, added under load, every request ends
with the same tokens.

Drafters here are the shipped service in processes of their own, with random weights: what they get
right comes from n-gram lookup.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import (
    OFF,
    ScriptedDrafter,
    always_right,
    eventually,
    generate,
    prompts,
    scripted,
    tiny_target,
    verifier,
)

from draftwire.v1 import types_pb2, verifier_pb2

STOP = {"max_tokens": 60, "ignore_eos": True}
READY = verifier_pb2.LANE_STATE_READY


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def checkpoint(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig

    from drafter_service.checkpoint import write_random

    return write_random(
        tmp_path_factory.mktemp("drafter") / "checkpoint",
        AutoConfig.from_pretrained(target),
        seed=1,
        num_layers=2,
        target_layer_ids=(1, 2),
    )


# Repetitive prompts, so that n-gram lookup has something to find.
TEXTS = [(p * 12)[:60] for p in prompts(4, 256, seed=4, low=5, high=7)]


class DrafterProcess:
    """The shipped drafter in a process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process, self.address = process, address

    @classmethod
    async def start(cls, checkpoint: Path, listen: str = "127.0.0.1:0") -> DrafterProcess:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "drafter_service", "--listen", listen, "--threads", "1"),
            *("--checkpoint", str(checkpoint), "--log-level", "error"),
            stdout=asyncio.subprocess.PIPE,
            env={k: v for k, v in os.environ.items() if not k.startswith("DRAFTWIRE_")},
        )
        assert process.stdout is not None
        async for line in process.stdout:
            word, _, address = line.decode().strip().partition(" ")
            if word == "serving":
                return cls(process, address)
        raise AssertionError(f"the drafter ended with {await process.wait()}")

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()


@asynccontextmanager
async def drafters(checkpoint: Path, count: int) -> AsyncIterator[list[DrafterProcess]]:
    started = await asyncio.gather(*(DrafterProcess.start(checkpoint) for _ in range(count)))
    try:
        yield list(started)
    finally:
        await asyncio.gather(*(d.stop() for d in started))


async def _plain(target: Path) -> list[list[int]]:
    async with verifier(target) as (_, stub):
        return [(await generate(stub, p, stop=STOP)).tokens for p in TEXTS]


async def _lanes(service: Any, wanted: int) -> None:
    """Return when `wanted` lanes are ready."""

    async def there() -> bool:
        return sum(lane.state == READY for lane in (await service.describe()).lanes) >= wanted

    await eventually(there)


async def _load(stub: Any, until: asyncio.Event, expected: Sequence[Sequence[int]]) -> list[Any]:
    """Requests one after another on each prompt until told to stop; each must give the expected
    tokens."""
    answers: list[Any] = []

    async def stream(index: int) -> None:
        while not until.is_set():
            answer = await generate(stub, TEXTS[index], stop=STOP)
            assert answer.tokens == expected[index]
            answers.append(answer)

    await asyncio.gather(*(stream(i) for i in range(len(TEXTS))))
    return answers


def _speculated(answers: Sequence[Any]) -> int:
    return sum(a.finished.acceptance.rounds for a in answers)


def test_one_killed_in_mid_generation_and_started_again(target: Path, checkpoint: Path) -> None:
    async def main() -> None:
        expected = await _plain(target)
        async with drafters(checkpoint, 1) as (drafter,):  # noqa: SIM117  the address is needed
            async with verifier(target, [drafter.address], draft_wait_ms=2000) as (service, stub):
                until = asyncio.Event()
                load = asyncio.create_task(_load(stub, until, expected))
                lanes = service.engine.lanes.lanes
                await eventually(lambda: any(lane.links for lane in list(lanes.values())))
                drafter.process.send_signal(signal.SIGKILL)
                await drafter.process.wait()
                answers = [await generate(stub, p, stop=STOP) for p in TEXTS]
                assert [a.tokens for a in answers] == expected
                again = await DrafterProcess.start(checkpoint, listen=drafter.address)
                try:
                    await _lanes(service, 1)
                    back = [await generate(stub, p, stop=STOP) for p in TEXTS]
                    assert [a.tokens for a in back] == expected
                    assert _speculated(back) > 0, "speculation comes back by itself"
                    until.set()
                    assert len(await load) > 0
                finally:
                    await again.stop()
                assert service.engine.pool.free_pages == service.engine.pool.num_pages - 1

    asyncio.run(main())


def test_one_that_was_never_there(target: Path) -> None:
    async def main() -> None:
        expected = await _plain(target)
        async with verifier(target, ["127.0.0.1:1"]) as (service, stub):
            answers = [await generate(stub, p, stop=STOP) for p in TEXTS]
            assert [a.tokens for a in answers] == expected
            assert _speculated(answers) == 0
            assert (await service.describe()).lanes[0].last_error

    asyncio.run(main())


def test_of_two_one_is_killed_and_a_third_started_under_load_is_used(
    target: Path, checkpoint: Path
) -> None:
    async def main() -> None:
        expected = await _plain(target)
        third_listen = "127.0.0.1:0"
        async with drafters(checkpoint, 3) as (first, second, third):
            address = third.address
            await third.kill()  # its address is known now, and nobody is there
            third_listen = address
            async with verifier(
                target, [first.address, second.address, address], draft_wait_ms=2000
            ) as (service, stub):
                await _lanes(service, 2)
                until = asyncio.Event()
                load = asyncio.create_task(_load(stub, until, expected))
                await first.kill()
                survivors = [await generate(stub, p, stop=STOP) for p in TEXTS]
                assert [a.tokens for a in survivors] == expected
                assert _speculated(survivors) > 0, "speculation goes on with the other"
                late = await DrafterProcess.start(checkpoint, listen=third_listen)
                try:
                    await _lanes(service, 2)

                    async def used() -> bool:
                        found = (await service.describe()).lanes
                        return any(f.target == address and f.steps_received > 3 for f in found)

                    await eventually(used)
                    until.set()
                    await load
                finally:
                    await late.stop()

    asyncio.run(main())


def test_one_that_hangs_is_left_alone_and_used_again_when_it_goes_on(
    target: Path, checkpoint: Path
) -> None:
    async def main() -> None:
        expected = await _plain(target)
        async with (
            drafters(checkpoint, 1) as (drafter,),
            verifier(target, [drafter.address], draft_wait_ms=300, lane_timeout_s=1.0) as (
                service,
                stub,
            ),
        ):
            drafter.process.send_signal(signal.SIGSTOP)
            try:
                answers = [await generate(stub, p, stop=STOP) for p in TEXTS]
            finally:
                drafter.process.send_signal(signal.SIGCONT)
            assert [a.tokens for a in answers] == expected
            await _lanes(service, 1)
            for _ in range(50):
                back = [await generate(stub, p, stop=STOP) for p in TEXTS]
                assert [a.tokens for a in back] == expected
                if _speculated(back):
                    break
            assert _speculated(back) > 0

    asyncio.run(main())


def test_one_that_drains_hands_its_sessions_over(target: Path, checkpoint: Path) -> None:
    async def main() -> None:
        expected = await _plain(target)
        async with drafters(checkpoint, 2) as (first, second):  # noqa: SIM117
            async with verifier(target, [first.address, second.address], draft_wait_ms=2000) as (
                service,
                stub,
            ):
                await _lanes(service, 2)
                until = asyncio.Event()
                load = asyncio.create_task(_load(stub, until, expected))
                first.process.terminate()
                assert await first.process.wait() == 0
                more = [await generate(stub, p, stop=STOP) for p in TEXTS]
                assert [a.tokens for a in more] == expected
                assert _speculated(more) > 0
                until.set()
                await load

    asyncio.run(main())


def test_late_answers_are_dropped_and_counted(target: Path) -> None:
    async def main() -> None:
        expected = await _plain(target)
        whole = [p + e for p, e in zip(TEXTS, expected, strict=True)]
        drafter = ScriptedDrafter(always_right(whole))
        turn = 0

        async def slow_every_third() -> None:
            nonlocal turn
            turn += 1
            if turn % 3 == 0:
                await asyncio.sleep(0.05)

        drafter.before_answer = slow_every_third
        async with (
            scripted(drafter) as address,
            verifier(target, [address], draft_wait_ms=10) as (service, stub),
        ):
            answers = [await generate(stub, p, stop=STOP) for p in TEXTS]
            assert [a.tokens for a in answers] == expected
            counters = service.engine.lanes.counters
            assert counters.late > 0
            assert sum(a.finished.acceptance.plain_rounds for a in answers) > 0
            assert drafter.faults == []

    asyncio.run(main())


@pytest.mark.parametrize("what", ["epoch", "base", "session", "duplicate", "order"])
def test_answers_about_another_state_never_change_the_tokens(target: Path, what: str) -> None:
    async def main() -> None:
        expected = await _plain(target)
        whole = [p + e for p, e in zip(TEXTS, expected, strict=True)]
        drafter = ScriptedDrafter(always_right(whole))
        kept: list[Any] = []

        def spoil(response: Any) -> None:
            for proposal in list(response.proposals):
                if what == "epoch":
                    proposal.key.epoch += 1
                elif what == "base":
                    proposal.key.base_position -= 1
                elif what == "session":
                    proposal.key.session_id += 1000
                else:
                    kept.append(type(proposal).FromString(proposal.SerializeToString()))
            if what == "duplicate" and kept:
                response.proposals.extend(kept[:2])
            elif what == "order" and len(kept) > 3:
                response.proposals.extend(kept[:4])
                del response.proposals[0]

        drafter.change_response = spoil
        async with (
            scripted(drafter) as address,
            verifier(target, [address], draft_wait_ms=2000) as (service, stub),
        ):
            answers = await asyncio.gather(*(generate(stub, p, stop=STOP) for p in TEXTS))
            assert [a.tokens for a in answers] == expected
            assert service.engine.lanes.counters.stale > 0
            assert drafter.faults == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.feature_layers.append(99), "feature_layers"),
        (lambda r: setattr(r, "feature_size", 7), "feature_size"),
        (lambda r: setattr(r, "encoding", 0), "encoding"),
        (lambda r: setattr(r, "max_block_size", 1), "max_block_size"),
        (lambda r: setattr(r, "credits", 0), "credits"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_name_and_requests_go_on_plainly(
    target: Path, change: Any, field: str
) -> None:
    async def main() -> None:
        drafter = ScriptedDrafter(lambda tokens, session: None, change_reply=change)
        async with scripted(drafter) as address, verifier(target, [address]) as (service, stub):
            (lane,) = (await service.describe()).lanes
            assert lane.state == verifier_pb2.LANE_STATE_REFUSED
            assert field in lane.last_error
            assert (await generate(stub, TEXTS[0], stop=STOP, speculation=OFF)).tokens == (
                await generate(stub, TEXTS[0], stop=STOP)
            ).tokens

    asyncio.run(main())


def test_a_drafter_made_for_another_model_refuses_and_says_what_differs(
    target: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        from transformers import AutoConfig

        from drafter_service.checkpoint import write_random

        other = tiny_target(tmp_path / "other", hidden=96)
        wrong = write_random(
            tmp_path / "wrong",
            AutoConfig.from_pretrained(other),
            seed=1,
            num_layers=1,
            target_layer_ids=(1, 2),
        )
        async with (
            drafters(wrong, 1) as (drafter,),
            verifier(target, [drafter.address]) as (service, stub),
        ):
            (lane,) = (await service.describe()).lanes
            assert lane.state == verifier_pb2.LANE_STATE_REFUSED
            assert "hidden" in lane.last_error
            assert "96" in lane.last_error
            assert "48" in lane.last_error
            assert len((await generate(stub, TEXTS[0], stop=STOP)).tokens) == 60

    asyncio.run(main())


def test_parts_named_by_a_request_are_used_alone(target: Path, checkpoint: Path) -> None:
    async def main() -> None:
        async with (
            drafters(checkpoint, 1) as (drafter,),
            verifier(target, [drafter.address], draft_wait_ms=5000) as (service, stub),
        ):
            await _lanes(service, 1)
            used = {}
            for part in (types_pb2.DRAFT_PART_NGRAM, types_pb2.DRAFT_PART_ARGMAX):
                answer = await generate(stub, TEXTS[0], stop=STOP, speculation={"parts": [part]})
                used[part] = {c.part for c in answer.finished.acceptance.accepted_per_part}
            assert used[types_pb2.DRAFT_PART_NGRAM] <= {types_pb2.DRAFT_PART_NGRAM}
            assert used[types_pb2.DRAFT_PART_ARGMAX] == {types_pb2.DRAFT_PART_ARGMAX}
            # This drafter has no branches: what was asked for is not replaced by something else.
            branches = {"parts": [types_pb2.DRAFT_PART_BRANCHES]}
            answer = await generate(stub, TEXTS[0], stop=STOP, speculation=branches)
            assert answer.finished.acceptance.drafted_tokens == 0

    asyncio.run(main())
