"""Modes over the wire: the same tokens in each, what is in force is told, drafts are asked for when
they pay and each plain round says why it was one."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fakes import (
    OFF,
    ScriptedDrafter,
    always_wrong,
    at_rates,
    eventually,
    generate,
    scripted,
    tiny_target,
    verifier,
)

from draftwire.v1 import types_pb2

PROMPT, VOCAB = list(range(40, 60)), 258
STOP = {"max_tokens": 60, "ignore_eos": True}
MODES = {
    "fixed": types_pb2.SPECULATION_MODE_FIXED,
    "predicted": types_pb2.SPECULATION_MODE_PREDICTED,
    "adaptive": types_pb2.SPECULATION_MODE_ADAPTIVE,
    "off": types_pb2.SPECULATION_MODE_OFF,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def reasons(answer: Any) -> Counter[int]:
    """Plain rounds by reason."""
    return Counter(
        {b.reason: b.rounds for b in answer.finished.acceptance.block_sizes if b.block_size == 1}
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_are_the_same_in_every_mode_with_good_and_bad_drafts(
    target: Path, temperature: float
) -> None:
    sampling = {"temperature": temperature, "seed": 3}

    async def main() -> None:
        async with verifier(target) as (_, stub):
            plain = await generate(stub, PROMPT, sampling=sampling, stop=STOP)
        texts = [PROMPT + plain.tokens]
        for propose in (at_rates(texts, [0.9, 0.5, 0.2], VOCAB), always_wrong(texts, VOCAB)):
            drafter = ScriptedDrafter(propose)
            async with (
                scripted(drafter) as address,
                verifier(target, [address], profile_s=0.2) as (_, stub),
            ):
                for mode in MODES.values():
                    answer = await generate(
                        stub, PROMPT, sampling=sampling, stop=STOP, speculation={"mode": mode}
                    )
                    assert answer.tokens == plain.tokens
                    assert answer.started.speculation.mode == mode
                    stats = answer.finished.acceptance
                    assert stats.drafted_tokens == (
                        stats.accepted_tokens + stats.rejected_tokens + stats.discarded_tokens
                    )
            assert not drafter.faults

    asyncio.run(main())


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_says_nothing_has_the_mode_of_the_server(target: Path, mode: str) -> None:
    async def main() -> None:
        async with verifier(target, speculation=mode) as (_, stub):
            answer = await generate(stub, PROMPT, stop={"max_tokens": 2})
            assert answer.started.speculation.mode == MODES[mode]

    asyncio.run(main())


def test_plain_rounds_tell_no_drafter_an_empty_answer_and_the_last_token_apart(
    target: Path,
) -> None:
    stop = {"max_tokens": 8, "ignore_eos": True}

    async def main() -> None:
        async with verifier(target) as (_, stub):
            alone = await generate(stub, PROMPT, stop=stop)
            off = await generate(stub, PROMPT, stop=stop, speculation=OFF)
        drafter = ScriptedDrafter(lambda tokens, session: None)
        async with scripted(drafter) as address, verifier(target, [address]) as (_, stub):
            empty = await generate(stub, PROMPT, stop=stop)
        assert reasons(alone) == {types_pb2.BLOCK_SIZE_REASON_NO_DRAFTER: 7}
        assert reasons(off) == {types_pb2.BLOCK_SIZE_REASON_OFF: 7}
        found = reasons(empty)
        assert sum(found.values()) == 7
        assert found[types_pb2.BLOCK_SIZE_REASON_MAX_TOKENS] == 1
        # An answer that the machine held up came too late, and is told apart too.
        assert found[types_pb2.BLOCK_SIZE_REASON_EMPTY] >= 1
        assert not found.keys() - {
            types_pb2.BLOCK_SIZE_REASON_MAX_TOKENS,
            types_pb2.BLOCK_SIZE_REASON_EMPTY,
            types_pb2.BLOCK_SIZE_REASON_NO_DRAFTER,
        }

    asyncio.run(main())


def test_a_verifier_that_ends_takes_leave_of_its_drafters(target: Path) -> None:
    async def main() -> None:
        drafter = ScriptedDrafter(lambda tokens, session: None)
        async with scripted(drafter) as address:
            async with verifier(target, [address]) as (_, stub):
                await generate(stub, PROMPT, stop={"max_tokens": 2})
            await eventually(lambda: drafter.closed == 1 and drafter.lanes == 0)

    asyncio.run(main())


def test_what_steps_cost_is_measured_at_the_start_and_told(target: Path) -> None:
    from draftwire.v1 import verifier_pb2

    async def main() -> None:
        async with verifier(target, profile_s=1.0) as (_, stub):
            info = await stub.GetInfo(verifier_pb2.VerifierGetInfoRequest())
            assert "4: " in info.config["effective_step_costs"]
            assert info.config["speculation"] == "fixed"

    asyncio.run(main())
