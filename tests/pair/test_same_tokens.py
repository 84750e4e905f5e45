"""The text is the same with or without speculation, whatever the drafter, the tree, the batch and
the type of the weights.

Through the real services over real gRPC, on a small target with random weights (whose near-ties
make it a harder case than a trained one).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import (
    OFF,
    Answer,
    Propose,
    ScriptedDrafter,
    always_right,
    always_wrong,
    generate,
    prompts,
    random_trees,
    scripted,
    tiny_target,
    verifier,
)

TOKENS = 16
STOP = {"max_tokens": TOKENS, "ignore_eos": True}
SAMPLED = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def texts(target: Path) -> list[list[int]]:
    return list(prompts(20, 256, seed=3))


@pytest.fixture(scope="module")
def expected(target: Path, texts: list[list[int]]) -> list[list[int]]:
    """What transformers itself generates."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as ignore_eos
    answers = []
    for prompt in texts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


async def _many(
    stub: Any, requests: Sequence[tuple[Sequence[int], dict[str, Any]]], in_flight: int
) -> list[Answer]:
    gate = asyncio.Semaphore(in_flight)

    async def one(prompt: Sequence[int], fields: dict[str, Any]) -> Answer:
        async with gate:
            return await generate(stub, prompt, stop=STOP, **fields)

    return await asyncio.gather(*(one(prompt, fields) for prompt, fields in requests))


def _check_counts(answer: Answer) -> None:
    stats, usage = answer.finished.acceptance, answer.finished.usage
    assert (
        stats.drafted_tokens
        == stats.accepted_tokens + stats.rejected_tokens + stats.discarded_tokens
    )
    assert usage.completion_tokens == len(answer.tokens) == sum(answer.chunks)
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    # Each round gives its accepted tokens and one more, which the last one may have no room for;
    # the first token comes with the prompt.
    given = 1 + stats.rounds + stats.plain_rounds + stats.accepted_tokens
    assert 0 <= given - len(answer.tokens) <= 1


@pytest.mark.parametrize("in_flight", [1, 4, 16])
def test_greedy_fp32_equals_transformers_at_every_block_size(
    target: Path, texts: list[list[int]], expected: list[list[int]], in_flight: int
) -> None:
    whole = [p + e for p, e in zip(texts, expected, strict=True)]

    async def main() -> None:
        drafter = ScriptedDrafter(random_trees_on(whole))
        async with (
            scripted(drafter) as address,
            verifier(target, [address], max_nodes=16, draft_wait_ms=20000) as (_, stub),
        ):
            for block in (1, 2, 5, 8, 16):
                answers = await _many(
                    stub,
                    [(p, {"speculation": {"max_block_size": block}}) for p in texts],
                    in_flight,
                )
                assert [a.tokens for a in answers] == expected, f"block size {block}"
                for answer in answers:
                    _check_counts(answer)
                drafted = sum(a.finished.acceptance.drafted_tokens for a in answers)
                assert (drafted == 0) == (block == 1), "the option acts"
                depths = [len(a.finished.acceptance.drafted_per_position) for a in answers]
                assert max(depths) <= block - 1
                if block > 1:
                    assert sum(a.finished.acceptance.accepted_tokens for a in answers) > 0
        assert drafter.faults == []

    asyncio.run(main())


def random_trees_on(whole: Sequence[Sequence[int]], max_nodes: int = 64) -> Propose:
    """Random trees of which about half lies on the true path of whichever text the session is
    in."""

    def propose(tokens: list[int], session: Any) -> Any:
        for index, text in enumerate(whole):
            if list(text[: len(tokens)]) == tokens:
                return random_trees(256, max_nodes, seed=len(tokens) * 1000 + index, truth=text)(
                    tokens, session
                )
        return random_trees(256, max_nodes, seed=len(tokens))(tokens, session)

    return propose


def _requests(
    texts: Sequence[list[int]], speculate: bool
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    for index, prompt in enumerate(texts):
        for sampling in ({"temperature": 0.0}, *SAMPLED):
            fields: dict[str, Any] = {"sampling": {**sampling, "seed": 11 + index}}
            if not speculate:
                fields["speculation"] = OFF
            yield prompt, fields


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_do_not_depend_on_drafter_tree_or_batch(
    target: Path, texts: list[list[int]], dtype: str
) -> None:
    """T=0, T=1 and T=0.7/top-p/top-k with seeds: off and alone against random trees to 64 nodes,
    always right, always wrong."""
    chosen = texts[:8]

    async def main() -> None:
        async with verifier(target, dtype=dtype) as (_, stub):
            alone = [a.tokens for a in await _many(stub, list(_requests(chosen, False)), 1)]
            together = [a.tokens for a in await _many(stub, list(_requests(chosen, False)), 16)]
        assert together == alone, "batch of 16 against alone"
        whole = [p + a for (p, _), a in zip(_requests(chosen, False), alone, strict=True)]
        for name, propose in (
            ("random trees", random_trees_on(whole)),
            ("always right", always_right(whole)),
            ("always wrong", always_wrong(whole, 256)),
        ):
            drafter = ScriptedDrafter(propose)
            async with (
                scripted(drafter) as address,
                verifier(target, [address], dtype=dtype, max_nodes=64, draft_wait_ms=20000) as (
                    service,
                    stub,
                ),
            ):
                for in_flight in (1, 16):
                    answers = await _many(stub, list(_requests(chosen, True)), in_flight)
                    assert [a.tokens for a in answers] == alone, f"{name}, {in_flight} in flight"
                    accepted = [a.finished.acceptance.accepted_tokens for a in answers]
                    if name == "always right":
                        assert min(accepted) >= TOKENS // 3
                    elif name == "always wrong":
                        assert max(accepted) == 0
                assert service.engine is not None
                assert service.engine.lanes.counters.malformed == 0
            assert drafter.faults == []

    asyncio.run(main())


def test_tokens_are_the_same_when_sessions_are_preempted_for_lack_of_pages(
    target: Path, texts: list[list[int]]
) -> None:
    async def main() -> None:
        requests = list(_requests(texts[:6], True))
        async with verifier(target) as (_, stub):
            roomy = [a.tokens for a in await _many(stub, requests, 1)]
        whole = [p + a for (p, _), a in zip(requests, roomy, strict=True)]
        drafter = ScriptedDrafter(random_trees_on(whole))
        preempted = 0
        async with (
            scripted(drafter) as address,
            verifier(
                target, [address], kv_tokens=320, max_nodes=16, draft_wait_ms=20000, max_sessions=16
            ) as (service, stub),
        ):
            engine = service.engine
            assert engine is not None
            original = engine.scheduler._preempt

            def counting(session: Any) -> None:
                nonlocal preempted
                preempted += 1
                original(session)

            engine.scheduler._preempt = counting  # type: ignore[method-assign]
            tight = await _many(stub, requests, 18)
            assert engine.pool.free_pages == engine.pool.num_pages - 1
        assert preempted > 0, "the case did not arise"
        assert [a.tokens for a in tight] == roomy

    asyncio.run(main())


def test_a_prefix_found_in_the_cache_changes_nothing(target: Path, texts: list[list[int]]) -> None:
    shared = next(prompts(1, 256, seed=9, low=100, high=100))
    variants = [shared + tail[:5] for tail in texts[:4]]

    async def main() -> None:
        fresh = []
        for variant in variants:
            async with verifier(target) as (_, stub):
                fresh.append((await generate(stub, variant, stop=STOP)).tokens)
        whole = [v + f for v, f in zip(variants, fresh, strict=True)]
        drafter = ScriptedDrafter(always_right(whole))
        async with (
            scripted(drafter) as address,
            verifier(target, [address], draft_wait_ms=20000) as (_, stub),
        ):
            hits = []
            for variant, tokens in zip(variants, fresh, strict=True):
                answer = await generate(stub, variant, stop=STOP)
                assert answer.tokens == tokens
                hits.append(answer.finished.usage.cached_tokens)
                assert answer.finished.acceptance.accepted_tokens > 0
        assert hits[0] == 0
        assert all(h >= 96 for h in hits[1:])
        assert drafter.faults == []

    asyncio.run(main())


EVERY_PARAMETER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 1.3, "min_p": 0.05}, {}),
    ({"temperature": 0.8, "repetition_penalty": 1.4}, {}),
    ({"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5}, {}),
    ({"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": -0.5}, {}),
    ({"temperature": 0.0, "logit_bias": {7: 4.0, 9: -50.0}}, {}),
    ({"temperature": 1.0, "logit_bias": {7: 4.0}, "top_k": 10, "top_p": 0.8, "min_p": 0.01}, {}),
    ({"temperature": 1.0, "logit_bias": {257: 6.0}}, {"min_tokens": 9, "ignore_eos": False}),
    (
        {"temperature": 1.0},
        {"min_tokens": 8, "stop_token_ids": [3, 50, 90, 200], "ignore_eos": False},
    ),
]


def test_every_sampling_parameter_is_exact_with_speculation(
    target: Path, texts: list[list[int]]
) -> None:
    requests = [
        (
            prompt,
            {"sampling": {"seed": 3 + i, **sampling}, "stop": {**STOP, "max_tokens": 24, **stop}},
        )
        for i, prompt in enumerate(texts[:4])
        for sampling, stop in EVERY_PARAMETER
    ]

    async def main() -> None:
        async with verifier(target) as (_, stub):
            plain = [await generate(stub, prompt, **dict(fields)) for prompt, fields in requests]
        whole = [p + a.tokens for (p, _), a in zip(requests, plain, strict=True)]
        for propose in (random_trees_on(whole), always_right(whole)):
            drafter = ScriptedDrafter(propose)
            async with (
                scripted(drafter) as address,
                verifier(target, [address], draft_wait_ms=20000) as (_, stub),
            ):
                fast = await asyncio.gather(*(generate(stub, p, **dict(f)) for p, f in requests))
                assert [a.tokens for a in fast] == [a.tokens for a in plain]
                assert [a.text for a in fast] == [a.text for a in plain]
                assert [a.finished.reason for a in fast] == [a.finished.reason for a in plain]
                assert sum(a.finished.acceptance.accepted_tokens for a in fast) > 0
            assert drafter.faults == []
        for (_, fields), answer in zip(requests, plain, strict=True):
            made, lowest = len(answer.tokens), fields["stop"].get("min_tokens", 0)
            assert made >= lowest
        assert len({a.finished.reason for a in plain}) >= 3, "the cases end in different ways"

    asyncio.run(main())
