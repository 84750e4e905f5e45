"""Endings, counts, log-probabilities, bad input, cancellation: what clients see, through the real
services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
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

from draftwire.errors import DraftwireError, from_rpc_error
from draftwire.v1 import types_pb2, verifier_pb2

FINISH = verifier_pb2.FinishReason
CONTEXT = 128


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), context=CONTEXT)


@asynccontextmanager
async def pair(
    target: Path, texts: list[list[int]], **settings: Any
) -> AsyncIterator[tuple[Any, Any, ScriptedDrafter]]:
    drafter = ScriptedDrafter(always_right(texts))
    async with (
        scripted(drafter) as address,
        verifier(target, [address], draft_wait_ms=20000, **settings) as (service, stub),
    ):
        yield service, stub, drafter


async def _idle(service: Any) -> None:
    """Return when the engine has no session."""
    await eventually(lambda: not service.engine.sessions)


def test_a_stop_at_every_place_of_a_block_cuts_tokens_text_and_counts_alike(target: Path) -> None:
    prompt = next(prompts(1, 256, seed=1, low=20, high=20))

    async def main() -> None:
        async with verifier(target) as (_, stub):
            free = await generate(stub, prompt, stop={"max_tokens": 14, "ignore_eos": True})
        async with pair(target, [prompt + free.tokens]) as (_, stub, _drafter):
            for place, token in enumerate(free.tokens):
                cut = free.tokens.index(token) + 1
                for stop in ({"stop_token_ids": [token]}, {"max_tokens": place + 1}):
                    fields = {"max_tokens": 14, "ignore_eos": True, **stop}
                    fast = await generate(stub, prompt, stop=fields, output={"logprobs": True})
                    slow = await generate(
                        stub, prompt, stop=fields, output={"logprobs": True}, speculation=OFF
                    )
                    assert (fast.tokens, fast.text) == (slow.tokens, slow.text)
                    assert fast.finished.reason == slow.finished.reason
                    assert (
                        len(fast.logprobs)
                        == len(fast.tokens)
                        == fast.finished.usage.completion_tokens
                    )
                    assert len(fast.tokens) == (cut if "stop_token_ids" in stop else place + 1)
                    stats = fast.finished.acceptance
                    assert (
                        stats.drafted_tokens
                        == stats.accepted_tokens + stats.rejected_tokens + stats.discarded_tokens
                    )

    asyncio.run(main())


def test_logprobs_are_the_targets_for_accepted_recovered_and_bonus_tokens(target: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = next(prompts(1, 256, seed=2, low=20, high=20))

    async def main() -> None:
        async with verifier(target) as (_, stub):
            free = await generate(
                stub, prompt, sampling={"seed": 3}, stop={"max_tokens": 20, "ignore_eos": True}
            )
        async with pair(target, [prompt + free.tokens]) as (_, stub, _drafter):
            answer = await generate(
                stub,
                prompt,
                sampling={"seed": 3},
                stop={"max_tokens": 20, "ignore_eos": True},
                output={"logprobs": True, "top_logprobs": 3},
            )
        assert answer.tokens == free.tokens
        assert answer.finished.acceptance.accepted_tokens > 5
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.tokens])).logits[0].float()
        truth = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        for row, token, entry in zip(truth, answer.tokens, answer.logprobs, strict=True):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert [t.logprob for t in entry.top] == pytest.approx(
                row.topk(3).values.tolist(), abs=1e-3
            )

    asyncio.run(main())


def test_prompts_up_to_the_end_of_the_context_are_served_to_its_end(target: Path) -> None:
    async def main() -> None:
        async with verifier(target) as (_, stub):
            whole = {}
            for length in range(CONTEXT - 17, CONTEXT):
                prompt = next(prompts(1, 256, seed=length, low=length, high=length))
                answer = await generate(stub, prompt, stop={"max_tokens": 50, "ignore_eos": True})
                assert len(answer.tokens) == CONTEXT - length
                assert answer.finished.reason == FINISH.FINISH_REASON_CONTEXT
                whole[length] = prompt + answer.tokens
        async with pair(target, list(whole.values())) as (_, stub, drafter):
            for length, text in whole.items():
                answer = await generate(
                    stub, text[:length], stop={"max_tokens": 50, "ignore_eos": True}
                )
                assert text[:length] + answer.tokens == text
                assert answer.finished.reason == FINISH.FINISH_REASON_CONTEXT
            assert drafter.faults == []

    asyncio.run(main())


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
    ({"sampling": {"temperature": -1.0}}, "sampling.temperature"),
    ({"sampling": {"temperature": float("inf")}}, "sampling.temperature"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
    ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
    ({"sampling": {"min_p": 2.0}}, "sampling.min_p"),
    ({"sampling": {"top_k": 100000}}, "sampling.top_k"),
    ({"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
    ({"sampling": {"repetition_penalty": 1e-45}}, "sampling.repetition_penalty"),
    ({"sampling": {"repetition_penalty": 3e38}}, "sampling.repetition_penalty"),
    ({"sampling": {"presence_penalty": 3.0}}, "sampling.presence_penalty"),
    ({"sampling": {"frequency_penalty": float("nan")}}, "sampling.frequency_penalty"),
    ({"sampling": {"logit_bias": {9999: 1.0}}}, "sampling.logit_bias"),
    ({"sampling": {"logit_bias": {1: 1000.0}}}, "sampling.logit_bias[1]"),
    ({"stop": {"max_tokens": 0}}, "stop.max_tokens"),
    ({"stop": {"max_tokens": 100000}}, "stop.max_tokens"),
    ({"stop": {"max_tokens": 5, "min_tokens": 6}}, "stop.min_tokens"),
    ({"stop": {"stop_strings": [""]}}, "stop.stop_strings[0]"),
    ({"stop": {"stop_strings": ["a"] * 17}}, "stop.stop_strings"),
    ({"stop": {"stop_token_ids": [70000]}}, "stop.stop_token_ids[0]"),
    ({"speculation": {"max_block_size": 0}}, "speculation.max_block_size"),
    ({"speculation": {"max_block_size": 99}}, "speculation.max_block_size"),
    ({"speculation": {"max_nodes": 999}}, "speculation.max_nodes"),
    ({"speculation": {"mode": 77}}, "speculation.mode"),
    ({"speculation": {"rule": types_pb2.ACCEPTANCE_RULE_CHAIN}}, "speculation.rule"),
    ({"speculation": {"parts": [types_pb2.DRAFT_PART_SAMPLED]}}, "speculation.parts[0]"),
    ({"output": {"logprobs": True, "top_logprobs": 21}}, "output.top_logprobs"),
    ({"output": {"top_logprobs": 2}}, "output.top_logprobs"),
    ({"grammar": {"regex": "a+"}}, "grammar.regex"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"chat": {}}, "chat.messages"),
    (
        {
            "chat": {
                "messages": [{"role": "user", "content": "x"}],
                "template_variables": {"a": "{"},
            }
        },
        "chat.template_variables[a]",
    ),
    (
        {
            "chat": {
                "messages": [{"role": "user", "content": "x"}],
                "template_variables": {"tokenize": "1"},
            }
        },
        "chat.template_variables[tokenize]",
    ),
    ({"token_ids": {"ids": []}}, "token_ids.ids"),
    ({"token_ids": {"ids": [1, 258]}}, "token_ids.ids[1]"),
    ({"token_ids": {"ids": [1] * CONTEXT}}, "token_ids.ids"),
    ({"text": ""}, "text"),
    ({"text": "x" * 1000}, "text"),
    ({"text": "x" * 3_000_000}, "text"),
    ({}, "prompt"),
]


def test_each_bad_field_is_named_with_limit_and_value_and_the_next_request_is_served(
    target: Path,
) -> None:
    async def refusal(stub: Any, fields: dict[str, Any]) -> DraftwireError:
        needs_prompt = not {"chat", "token_ids", "text"} & fields.keys() and fields
        request = verifier_pb2.GenerateRequest(
            **({"text": "hello"} if needs_prompt else {}), **fields
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request, timeout=20):
                pass
        assert caught.value.details()
        return from_rpc_error(caught.value)

    async def main() -> None:
        async with verifier(target) as (service, stub):
            for fields, name in BAD:
                error = await refusal(stub, fields)
                assert error.code is grpc.StatusCode.INVALID_ARGUMENT, (fields, error)
                assert error.metadata["field"] == name
                assert error.metadata["limit"]
                assert "value" in error.metadata
            answer = await generate(stub, "hello", stop={"max_tokens": 3})
            assert len(answer.tokens) <= 3
            assert service.engine.pool.free_pages == service.engine.pool.num_pages - 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"\x0a\x02\xff\xfe", "text"),
        (b"\x12\x08\x0a\x06\x0a\x01u\x12\x01\xff", "chat.messages.content"),
        (b"\x4a\x01\x80", "request_id"),
        (b"\x0a\xff", "request"),
    ],
)
def test_bytes_that_are_no_request_are_refused_by_name_and_the_next_request_is_served(
    target: Path, raw: bytes, field: str
) -> None:
    async def main() -> None:
        async with verifier(target) as (_, stub):
            call = stub.channel.unary_stream(
                "/draftwire.v1.Verifier/Generate",
                request_serializer=bytes,
                response_deserializer=bytes,
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call(raw, timeout=20):
                    pass
            error = from_rpc_error(caught.value)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert error.metadata["field"] == field
            assert error.metadata["limit"]
            answer = await generate(stub, "hello", stop={"max_tokens": 3})
            assert answer.finished is not None

    asyncio.run(main())


def test_a_cancelled_client_frees_both_sides_within_a_step(target: Path) -> None:
    prompt = next(prompts(1, 256, seed=5, low=30, high=30))

    async def main() -> None:
        async with verifier(target) as (_, stub):
            whole = (
                prompt
                + (await generate(stub, prompt, stop={"max_tokens": 90, "ignore_eos": True})).tokens
            )
        async with pair(target, [whole], max_block_size=2) as (service, stub, drafter):
            engine = service.engine
            for read in range(0, 12):
                request = verifier_pb2.GenerateRequest(
                    token_ids=verifier_pb2.TokenIds(ids=prompt),
                    sampling=types_pb2.SamplingParams(temperature=0),
                    stop=types_pb2.StopConditions(max_tokens=90, ignore_eos=True),
                )
                call = stub.Generate(request)
                for _ in range(read):
                    await call.read()
                call.cancel()
                assert await call.code() is grpc.StatusCode.CANCELLED
            await _idle(service)
            assert engine.pool.free_pages == engine.pool.num_pages - 1
            engine.pool.check()
            engine.lanes.check()
            # The drafter is told with the next message; one more request makes sure that there is
            # one.
            await generate(stub, prompt, stop={"max_tokens": 10, "ignore_eos": True})
            await _idle(service)
            assert drafter.faults == []
            assert len(drafter.sessions) <= 1

    asyncio.run(main())


def test_a_thousand_cancels_leave_no_task_and_no_session(target: Path) -> None:
    async def main() -> None:
        async with verifier(target, max_sessions=8) as (service, stub):
            before = len(asyncio.all_tasks())
            for _ in range(20):
                calls = []
                for _ in range(50):
                    request = verifier_pb2.GenerateRequest(
                        text="hello", stop=types_pb2.StopConditions(max_tokens=50)
                    )
                    calls.append(stub.Generate(request))
                await calls[0].read()
                for call in calls:
                    call.cancel()
            answer = await generate(stub, "still here", stop={"max_tokens": 3})
            assert answer.finished is not None
            await service.servicer.wait_idle()
            await _idle(service)
            assert service.engine.pool.free_pages == service.engine.pool.num_pages - 1
            assert len(asyncio.all_tasks()) <= before + 3

    asyncio.run(main())


def test_a_full_queue_refuses_with_its_limit(target: Path) -> None:
    async def main() -> None:
        async with verifier(target, max_sessions=1, max_waiting=1) as (_, stub):
            fields = {"stop": {"max_tokens": 60, "ignore_eos": True}}
            results = await asyncio.gather(
                *(generate(stub, "hello", **fields) for _ in range(6)), return_exceptions=True
            )
            refused = [from_rpc_error(r) for r in results if isinstance(r, grpc.aio.AioRpcError)]
            assert refused
            assert all(
                e.code is grpc.StatusCode.RESOURCE_EXHAUSTED and e.metadata["limit"] == "1"
                for e in refused
            )
            assert sum(not isinstance(r, BaseException) for r in results) == 6 - len(refused) > 0

    asyncio.run(main())


def test_a_deadline_cuts_with_what_was_made_and_one_that_cannot_be_met_is_refused(
    target: Path,
) -> None:
    async def main() -> None:
        async with verifier(target) as (service, stub):
            engine = service.engine
            slow = engine.host.step

            def slower(*args: Any) -> Any:
                threading_wait(0.05)
                return slow(*args)

            engine.host.step = slower
            answer = await generate(
                stub, "hello", stop={"max_tokens": 100, "ignore_eos": True}, timeout=1.5
            )
            assert answer.finished.reason == FINISH.FINISH_REASON_DEADLINE
            assert 0 < len(answer.tokens) < 100
            engine.quickest_step = 2.0  # as if the target had never made a step in less
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(stub, "hello", timeout=2.5)
            error = from_rpc_error(caught.value)
            assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert (error.reason, error.metadata["field"]) == ("DEADLINE_TOO_SHORT", "deadline")

    def threading_wait(seconds: float) -> None:
        import threading

        threading.Event().wait(seconds)

    asyncio.run(main())


def test_a_row_that_is_not_finite_fails_that_request_alone(target: Path) -> None:
    async def main() -> None:
        async with verifier(target) as (service, stub):
            engine = service.engine
            honest = engine.host.step
            poisoned = [99] * 7

            def poison(feeds: Any, store: Any) -> Any:
                output = honest(feeds, store)
                for index, feed in enumerate(feeds):
                    if list(feed.tokens[:7]) == poisoned:
                        with torch.inference_mode():
                            output.of(index, len(feed.logit_rows)).fill_(float("nan"))
                return output

            engine.host.step = poison
            results = await asyncio.gather(
                generate(stub, [1, 2, 3], stop={"max_tokens": 10, "ignore_eos": True}),
                generate(stub, poisoned, stop={"max_tokens": 10}),
                generate(stub, [4, 5, 6], stop={"max_tokens": 10, "ignore_eos": True}),
                return_exceptions=True,
            )
            assert [type(r).__name__ for r in results] == ["Answer", "AioRpcError", "Answer"]
            error = from_rpc_error(results[1])
            assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "NONFINITE_LOGITS")
            assert engine.nonfinite_rows == 1

    asyncio.run(main())


def test_a_step_that_breaks_fails_its_requests_typed_and_the_next_is_served(target: Path) -> None:
    async def main() -> None:
        async with verifier(target) as (service, stub):
            engine = service.engine
            honest = engine.host.step

            def broken(*args: Any) -> Any:
                engine.host.step = honest
                raise RuntimeError("secret detail")

            engine.host.step = broken
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(stub, "hello", stop={"max_tokens": 5})
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in str(caught.value.details())
            assert (await generate(stub, "hello", stop={"max_tokens": 5})).finished is not None
            assert engine.pool.free_pages == engine.pool.num_pages - 1

    asyncio.run(main())


def test_started_echoes_what_is_in_force_and_trailers_carry_the_statistics(target: Path) -> None:
    async def main() -> None:
        async with verifier(target) as (_, stub):
            answer = await generate(
                stub,
                "hello",
                sampling={"top_k": 5},
                stop={"max_tokens": 4},
                speculation={"max_block_size": 3},
            )
            started = answer.started
            assert started.sampling.temperature == 1.0
            assert started.sampling.top_k == 5
            assert started.sampling.HasField("seed")
            assert started.stop.max_tokens == 4
            assert started.speculation.max_block_size == 3
            assert started.speculation.mode == types_pb2.SPECULATION_MODE_FIXED
            assert started.prompt_tokens == 5
            usage = types_pb2.Usage.FromString(answer.trailers["draftwire-usage-bin"])
            stats = types_pb2.AcceptanceStats.FromString(
                answer.trailers["draftwire-acceptance-bin"]
            )
            assert usage == answer.finished.usage
            assert stats == answer.finished.acceptance
            again = await generate(
                stub,
                "hello",
                sampling={"top_k": 5, "seed": started.sampling.seed},
                stop={"max_tokens": 4},
            )
            assert again.tokens == answer.tokens

    asyncio.run(main())
