"""Many prompts at once: order, bounds, errors of their own, and nothing left running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from draftwire_client import (
    AsyncClient,
    BatchItem,
    BatchProgress,
    BatchRequest,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    partial_of,
)
from draftwire_client.testing import Hold, ReceivedCall, Reply, Say, ScriptedVerifier

from .conftest import Either, Loop, eventually

Serve = Callable[..., ScriptedVerifier]
FULL = ResourceExhausted("QUEUE_FULL", "the queue is full", limit=1)
ENDLESS = Reply((Say("a", (97,)), Hold()))


def answering(request: Any) -> Reply:
    """The text again; "full" and "endless" as they say."""
    if request.text == "full":
        return Reply.failing(FULL)
    return ENDLESS if request.text == "endless" else Reply.of(request.text.upper())


def endless(server: ScriptedVerifier) -> ReceivedCall:
    return next(call for call in server.calls if call.request.text == "endless")


def as_completed(either: Either, target: str, prompts: Any, **options: Any) -> list[BatchItem]:
    if isinstance(either, Loop):

        async def main() -> list[BatchItem]:
            async with AsyncClient.connect(target) as client:
                return [item async for item in client.batch_as_completed(prompts, **options)]

        return asyncio.run(main())
    with Client.connect(target) as client:
        return list(client.batch_as_completed(prompts, **options))


def test_results_have_the_order_of_the_prompts_and_options_reach_each(
    either: Either, serve: Serve
) -> None:
    server = serve(answering)
    prompts = [f"p{index}" for index in range(23)]
    items = either.call(server.target, "batch", prompts, concurrency=4, seed=5, max_tokens=9)
    assert [item.index for item in items] == list(range(23))
    assert [item.unwrap().text for item in items] == [prompt.upper() for prompt in prompts]
    assert {call.request.sampling.seed for call in server.calls} == {5}
    assert {call.request.stop.max_tokens for call in server.calls} == {9}


def test_a_prompt_may_bring_its_own_options_token_ids_or_messages(
    either: Either, serve: Serve
) -> None:
    server = serve(Reply.of("ok"))
    either.call(
        server.target,
        "batch",
        [BatchRequest("a", {"seed": 1}), BatchRequest([7, 8], {"max_tokens": 3}), "c"],
        concurrency=1,
        seed=9,
    )
    seeds = [call.request.sampling.seed for call in server.calls]
    assert seeds == [1, 9, 9]
    assert list(server.calls[1].request.token_ids.ids) == [7, 8]
    assert server.calls[1].request.stop.max_tokens == 3
    either.call(server.target, "batch", ["hi", [("system", "s"), ("user", "u")]], chat=True)
    roles = {tuple(m.role for m in call.request.chat.messages) for call in server.calls[3:]}
    assert roles == {("user",), ("system", "user")}


def test_an_item_that_fails_keeps_its_typed_error_and_stops_no_other(
    either: Either, serve: Serve
) -> None:
    server = serve(answering)
    items = either.call(server.target, "batch", ["a", "full", "\udcff", "d"], concurrency=2)
    assert [item.result.text if item.result else None for item in items] == ["A", None, None, "D"]
    assert isinstance(items[1].error, ResourceExhausted)
    assert partial_of(items[1].error) is not None
    assert isinstance(items[2].error, InvalidArgument)
    assert items[2].error.reason == "INVALID_UTF8"
    with pytest.raises(ResourceExhausted, match="queue"):
        items[1].unwrap()
    assert len(server.calls) == 3


def test_each_item_has_the_deadline(either: Either, serve: Serve) -> None:
    server = serve(answering)
    items = either.call(server.target, "batch", ["endless", "b"], concurrency=2, timeout=0.5)
    assert isinstance(items[0].error, DeadlineExceeded)
    partial = partial_of(items[0].error)
    assert partial is not None
    assert partial.text == "a"
    assert items[1].unwrap().text == "B"


def test_no_more_run_at_once_than_allowed_and_as_many_do(either: Either, serve: Serve) -> None:
    lock = threading.Lock()
    together = threading.Barrier(3)
    running = most = 0

    def counting(request: Any) -> Reply:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(60)  # only three at once let one another go on
        with lock:
            running -= 1
        return Reply.of("ok")

    items = either.call(serve(counting).target, "batch", ["p"] * 12, concurrency=3)
    assert all(item.error is None for item in items)
    assert most == 3


def test_outcomes_come_as_they_finish_and_prompts_are_taken_as_there_is_room(
    either: Either, serve: Serve
) -> None:
    taken: list[int] = []

    def prompts() -> Iterator[str]:
        for index in range(1000):
            taken.append(index)
            yield "endless" if index == 0 else f"p{index}"

    server = serve(answering)
    seen: list[int] = []

    if isinstance(either, Loop):

        async def main() -> None:
            async with AsyncClient.connect(server.target) as client:
                async for item in client.batch_as_completed(prompts(), concurrency=3):
                    seen.append(item.index)
                    if len(seen) == 20:
                        break
                assert await asyncio.to_thread(endless(server).wait_ended)

        asyncio.run(main())
    else:
        with Client.connect(server.target) as client:
            for item in client.batch_as_completed(prompts(), concurrency=3):
                seen.append(item.index)
                if len(seen) == 20:
                    break
            assert endless(server).wait_ended()
    assert 0 not in seen
    assert len(taken) <= 20 + 2 * 3
    assert all(call.wait_ended() for call in list(server.calls))
    assert endless(server).cancelled


def test_progress_is_told_after_each_outcome(either: Either, serve: Serve) -> None:
    told: list[BatchProgress] = []
    either.call(
        serve(answering).target,
        "batch",
        ["ab", "full", "c"],
        concurrency=1,
        progress=told.append,
    )
    assert [(p.done, p.failed, p.total, p.tokens) for p in told] == [
        (1, 0, 3, 2),
        (2, 1, 3, 2),
        (3, 1, 3, 3),
    ]
    assert told[-1].tokens_per_s > 0
    assert told[0].elapsed_s <= told[-1].elapsed_s
    lengthless = iter(["a"])
    as_completed(either, serve(answering).target, lengthless, progress=told.append)


def test_true_as_progress_is_a_bar_on_stderr(
    either: Either, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    either.call(serve(answering).target, "batch", ["a", "full"], progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/2" in err
    assert "1 failed" in err


def test_a_progress_callback_that_raises_ends_the_batch(either: Either, serve: Serve) -> None:
    server = serve(answering)

    def broken(_: BatchProgress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        either.call(server.target, "batch", ["endless", "b"], concurrency=2, progress=broken)
    assert all(call.wait_ended() for call in server.calls)


@pytest.mark.parametrize(
    ("prompts", "options", "kind"),
    [
        ("one text", {}, TypeError),
        ([3], {}, TypeError),
        (["a"], {"temperature": "hot"}, TypeError),
        (["a"], {"concurrency": 0}, InvalidArgument),
        (["a"], {"concurrency": 1.5}, TypeError),
        (["a"], {"timeout": -1}, InvalidArgument),
    ],
)
def test_a_batch_that_cannot_be_meant_is_refused(
    either: Either, serve: Serve, prompts: Any, options: dict[str, Any], kind: type[Exception]
) -> None:
    server = serve(answering)
    with pytest.raises(kind):
        either.call(server.target, "batch", prompts, **options)
    assert server.calls == []


def test_an_empty_batch_is_no_outcome(either: Either, serve: Serve) -> None:
    assert either.call(serve().target, "batch", []) == []


def test_cancelling_the_task_of_a_batch_cancels_its_calls(serve: Serve) -> None:
    server = serve(ENDLESS)

    async def main() -> None:
        async with AsyncClient.connect(server.target) as client:
            before = asyncio.all_tasks()
            task = asyncio.create_task(client.batch(["x"] * 5, concurrency=5))
            await asyncio.to_thread(server.wait_for_calls, 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for call in server.calls:
                assert await asyncio.to_thread(call.wait_ended)
            # gRPC's own task of a call ends some turns of the loop after the call.
            await eventually(lambda: asyncio.all_tasks() == before)

    asyncio.run(main())
