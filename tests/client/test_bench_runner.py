"""The load tester's loop on a virtual clock: every figure is known exactly.

The event loop's time moves only by waiting, so minutes of load take no time, and a server whose
every delay is written down gives the truth that the measurement is compared with.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from draftwire_client import (
    Acceptance,
    Chunk,
    FinishReason,
    Internal,
    Result,
    Settings,
    Timing,
    Usage,
)
from draftwire_client.bench import arrivals
from draftwire_client.bench.arms import Arm
from draftwire_client.bench.datasets import Sample
from draftwire_client.bench.measure import Record
from draftwire_client.bench.plan import Planned, make_plan
from draftwire_client.bench.plan import Timing as Load
from draftwire_client.bench.runner import LAG_LIMIT_MS, LoopHealth, Runner, WallClock
from draftwire_client.bench.summary import summarise

T = TypeVar("T")
Step = tuple[float, int]
"""Seconds before a chunk, and its tokens."""


class _Selector(selectors.DefaultSelector):
    """Waits by moving the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits for ever")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the selector's."""

    def __init__(self) -> None:
        self.virtual = _Selector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


class LoopClock:
    """The running loop's time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self.now()))


def virtually(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class Answer:
    """A stream whose delays are known. It may be stalled, cut off, or end with an error."""

    def __init__(
        self, steps: Sequence[Step], *, error: Exception | None = None, until: float = 0.0
    ) -> None:
        self._steps, self._error, self._until = steps, error, until

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        clock = LoopClock()
        await clock.sleep_until(self._until)
        for delay, tokens in self._steps:
            await asyncio.sleep(delay)
            yield Chunk("x" * tokens, (7,) * tokens, (), clock.now())
        if self._error is not None:
            raise self._error

    async def result(self) -> Result:
        made = sum(tokens for _, tokens in self._steps)
        return Result(
            text="x" * made,
            token_ids=(7,) * made,
            logprobs=(),
            finish_reason=FinishReason.MAX_TOKENS,
            matched_stop="",
            usage=Usage(3, made, 0),
            acceptance=Acceptance(rounds=1, drafted=2, accepted=2),
            timing=Timing(),
            settings=Settings("id", 3),
        )


def serving(answer: Callable[[Planned], Answer]) -> Any:
    @asynccontextmanager
    async def ask(item: Planned) -> AsyncIterator[Answer]:
        yield answer(item)

    return ask


def planned(count: int, load: Load) -> list[Planned]:
    samples = [Sample(f"prompt {i}", 8) for i in range(count)]
    return make_plan(samples, [Arm("plain", {})], load, options={}, seed=0)


def measured(
    plan: Sequence[Planned], answer: Callable[[Planned], Answer], slots: int | None = None
) -> tuple[list[Record], LoopHealth]:
    async def work() -> tuple[list[Record], LoopHealth]:
        return await Runner(serving(answer), LoopClock(), max_concurrency=slots).run(plan)

    return virtually(work())


def test_every_latency_is_the_truth_also_with_chunks_of_several_tokens() -> None:
    def steps(item: Planned) -> list[Step]:
        first = 0.05 + 0.001 * (item.index % 40)
        return [(first, 1 + item.index % 3), *((0.01 + 0.002 * k, 1 + k % 4) for k in range(12))]

    plan = planned(500, Load(rate=50))
    records, health = measured(plan, lambda item: Answer(steps(item)))
    for item, record in zip(plan, records, strict=True):
        script = steps(item)
        first, decode = script[0][0], sum(delay for delay, _ in script[1:])
        tokens = sum(n for _, n in script)
        itls = [0.0] * (script[0][1] - 1) + [d / n for d, n in script[1:] for _ in range(n)]
        assert record.scheduled == item.at
        assert record.queue == pytest.approx(0, abs=1e-6)
        assert record.ttft == pytest.approx(first, abs=1e-6)
        assert record.e2el == pytest.approx(first + decode, abs=1e-6)
        assert record.tpot == pytest.approx(decode / (tokens - 1), abs=1e-6)
        assert record.itls() == pytest.approx(itls, abs=1e-6)
        assert record.gaps() == pytest.approx([d for d, _ in script[1:]], abs=1e-6)
    found = summarise(records, duration=10.0, percentiles=(50, 99), goodput={"ttft": 60.5})
    firsts = sorted(steps(item)[0][0] * 1000 for item in plan)
    assert found["p50_ttft_ms"] == pytest.approx((firsts[249] + firsts[250]) / 2, rel=1e-6)
    assert found["request_goodput"] == sum(first < 60.5 for first in firsts) / 10
    assert health.troubles == []


def test_a_stalled_server_shows_in_the_latency_of_every_request_it_held_up() -> None:
    # For ten seconds nothing is answered, while requests come ten times a second.
    stall_begins, stall_ends = 10.0, 20.0

    def answer(item: Planned) -> Answer:
        now = asyncio.get_running_loop().time()
        held = stall_begins <= now < stall_ends
        return Answer([(0.05, 1)], until=stall_ends if held else 0.0)

    plan = planned(400, Load(rate=10, burstiness=float("inf"), max_concurrency=4))
    records, _ = measured(plan, answer, slots=4)
    for record in records:
        if stall_begins + 0.5 < record.scheduled < stall_ends:
            # Its own answer took 50 ms; that is not what its user saw.
            assert record.ttft is not None
            assert record.ttft >= stall_ends - record.scheduled
            assert record.queue is not None
            assert record.queue >= stall_ends - record.scheduled - 1e-6
            assert record.late == pytest.approx(0, abs=1e-6)
    found = summarise(records, duration=40.0, percentiles=(90,), goodput={})
    assert found["p90_queue_ms"] > 5000
    from_sending = sorted((r.ttft or 0) - (r.queue or 0) for r in records)
    assert from_sending[int(0.98 * len(records))] < 0.1  # what omission would have shown


def test_without_slots_an_open_loop_sends_at_its_times_whatever_the_server_does() -> None:
    plan = planned(2000, Load(rate=200))
    records, _ = measured(plan, lambda item: Answer([(30.0, 1)]))
    assert [r.sent for r in records] == pytest.approx([item.at for item in plan], abs=1e-6)
    last = records[-1].sent
    assert last is not None
    assert 2000 / last == pytest.approx(200, rel=0.01)


def test_a_closed_loop_keeps_its_slots_full_and_has_no_queue() -> None:
    plan = planned(60, Load(max_concurrency=5))
    records, _ = measured(plan, lambda item: Answer([(0.1 + item.index * 0.01, 2)]), slots=5)
    assert [r.index for r in records] == list(range(60))
    assert all(r.queue == 0 for r in records)
    for moment in [r.sent for r in records[5:]]:
        assert moment is not None
        under_way = sum(r.sent <= moment < (r.ended or 0) for r in records if r.sent is not None)
        assert under_way == 5


def test_failures_keep_what_had_arrived_and_stop_nothing() -> None:
    def answer(item: Planned) -> Answer:
        error = Internal("BROKEN", "no more") if item.index % 2 else None
        return Answer([(0.1, 3)], error=error)

    seen: list[tuple[str, int]] = []

    async def work() -> list[Record]:
        runner = Runner(
            serving(answer),
            LoopClock(),
            started=lambda r: seen.append(("started", r.index)),
            done=lambda r: seen.append(("done", r.index)),
        )
        records, _ = await runner.run(planned(4, Load()))
        return records

    records = virtually(work())
    assert [r.ok for r in records] == [True, False, True, False]
    assert records[1].error == "BROKEN: no more"
    assert records[1].output_len == 3
    assert len(seen) == 8


def test_a_loop_that_is_busy_says_that_it_was_the_bottleneck() -> None:
    async def work() -> LoopHealth:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        def answer(item: Planned) -> Answer:
            loop.virtual.now += 0.05  # as if the client had computed for so long
            return Answer([(0.01, 1)])

        _, health = await Runner(serving(answer), LoopClock()).run(planned(100, Load(rate=30)))
        return health

    health = virtually(work())
    assert health.late_p99 > LAG_LIMIT_MS
    assert any("late" in text for text in health.troubles)


def test_planned_gaps_are_the_gaps_of_the_sending() -> None:
    times = arrivals.offsets(300, rate=20, burstiness=0.5, seed=0)
    records, _ = measured(planned(300, Load(rate=20, burstiness=0.5)), lambda i: Answer([(0.2, 1)]))
    assert [r.sent for r in records] == pytest.approx(list(times), abs=1e-6)


def test_the_wall_clock_never_wakes_early() -> None:
    async def work() -> list[float]:
        clock = WallClock(time.monotonic())
        early = []
        for k in range(20):
            await clock.sleep_until(0.005 * k)
            early.append(clock.now() - 0.005 * k)
        clock.close()
        return early

    assert min(asyncio.run(work())) >= 0
