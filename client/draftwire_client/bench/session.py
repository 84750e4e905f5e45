"""A whole run: ask what the server is, make the plan, warm up, load it, count, judge.

Knows the order of things. What is sent is in `plan`, how in `workers`, what it means in `results`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from draftwire_client.aio import AsyncClient
from draftwire_client.bench import counters, datasets, energy, texts
from draftwire_client.bench.arms import Arm
from draftwire_client.bench.datasets import Lengths, Sample
from draftwire_client.bench.faults import Drafter, Event, play
from draftwire_client.bench.limits import check_names
from draftwire_client.bench.measure import Record
from draftwire_client.bench.plan import Planned, make_plan
from draftwire_client.bench.results import Evidence, empty_results, make_results
from draftwire_client.bench.settings import Data, Settings
from draftwire_client.bench.watch import settled, watch
from draftwire_client.bench.workers import Job, asker, run_all
from draftwire_client.enums import LaneState
from draftwire_client.errors import DraftwireError, FailedPrecondition, InvalidArgument
from draftwire_client.info import Info

_CALIBRATION = 1200  # characters; short enough for a small context
_DEFAULT_PROMPTS, _DEFAULT_OUTPUT = 100, 128
_LANE_WAIT_S = 300.0


@dataclass(slots=True)
class Watched:
    """What the run tells while it runs; `live` shows it."""

    note: Callable[[str], None] = lambda text: None
    planned: Callable[[int], None] = lambda count: None
    told: Callable[[str, Record], None] = lambda what, record: None
    event: Callable[[Event], None] = lambda event: None


@dataclass(slots=True)
class Outcome:
    """Results as JSON, and every request."""

    results: dict[str, Any]
    records: list[Record]


async def run(settings: Settings, shown: Watched) -> Outcome:
    """The run. Raises DraftwireError if the server cannot be reached or refuses what is asked."""
    with contextlib.ExitStack() as stack:
        drafter = _drafter(settings, stack)
        async with AsyncClient.connect(**settings.connect) as client:
            if settings.drafter_command is not None:
                shown.note("starting the drafter …")
                await asyncio.to_thread(drafter.start)
                await _wait_for_lane(client)
            return await _measure(settings, client, drafter, shown)


async def _measure(
    settings: Settings, client: AsyncClient, drafter: Drafter, shown: Watched
) -> Outcome:
    info = await client.info()
    samples = await _samples(settings, client, info)
    arms = await _warm_up(settings, client, shown)
    check_names(settings.constraints, empty_results(settings, arms))
    plan = make_plan(samples, arms, settings.timing, options=_asked(settings), seed=settings.seed)
    before = (await settled(client, lambda info: info.load.running == 0)).totals
    shown.planned(len(plan))
    evidence = Evidence(arms=arms, samples=samples, info=info)
    records = await _load(settings, client, drafter, plan, evidence, shown)
    # An exact agreement ends the waiting; a disagreement that stays is reported. A server that does
    # not answer any more costs the counters, not the results.
    with contextlib.suppress(DraftwireError):
        after = await settled(
            client,
            lambda info: (
                not settings.check_counters
                or counters.agreement(before, info.totals, records).agree
            ),
        )
        evidence.agreement = counters.agreement(before, after.totals, records)
        evidence.info = after
    return Outcome(make_results(settings, records, evidence), records)


async def _load(
    settings: Settings,
    client: AsyncClient,
    drafter: Drafter,
    plan: Sequence[Planned],
    evidence: Evidence,
    shown: Watched,
) -> list[Record]:
    """Send the plan while faults play and the server is watched."""
    beside: list[asyncio.Task[None]] = []

    def tell(event: Event) -> None:
        evidence.events.append(event)
        shown.event(event)

    def begun(epoch: float) -> None:
        evidence.started_at = time.time() + epoch - time.monotonic()
        beside.append(asyncio.create_task(play(settings.faults, drafter, epoch, tell)))
        if settings.poll_s > 0:
            every, keep = settings.poll_s, evidence.readings.append
            beside.append(asyncio.create_task(watch(client, epoch, every, keep, tell)))

    meter = energy.read(await client.info())
    job = Job(plan, dict(settings.connect), settings.data.chat, settings.timing.max_concurrency)
    try:
        ran = await run_all(job, settings.workers, shown.told, begun)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    made = sum(record.output_len for record in ran.records if record.ok)
    with contextlib.suppress(DraftwireError):
        evidence.energy = energy.used(meter, energy.read(await client.info()), made)
    evidence.health = ran.health
    return ran.records


async def _samples(settings: Settings, client: AsyncClient, info: Info) -> list[Sample]:
    data, seed = settings.data, settings.seed
    path = data.path
    if data.name in ("custom", "sharegpt", "azure"):
        if path is None:
            raise InvalidArgument("--dataset-path", "", f"given with --dataset-name {data.name}")
    elif path is not None:
        raise InvalidArgument("--dataset-path", path, "left out: the data set has no file")
    lengths = _lengths(data, info)
    count = data.num_prompts
    if data.name == "random":
        found = datasets.random_ids(
            count or _DEFAULT_PROMPTS,
            vocab_size=info.model.vocab_size,
            input_len=lengths.fit(data.input_len, 1)[0],
            output_len=data.output_len or _DEFAULT_OUTPUT,
            spread=data.range_ratio,
            seed=seed,
        )
        return found
    if data.name == "azure":
        assert path is not None
        ratio = await _characters_per_token(client, info)
        found = datasets.azure(path, count or _DEFAULT_PROMPTS, lengths, ratio, seed)
        if count is not None and len(found) < count:
            raise InvalidArgument("--num-prompts", count, f"at most {len(found)}, the trace's rows")
        return datasets.with_lengths(found, data.output_len)
    if data.name == "builtin":
        pool = datasets.builtin(seed)
    elif data.name == "custom":
        assert path is not None
        pool = datasets.custom(path)
    else:
        assert path is not None
        pool = datasets.sharegpt(path, await _characters_per_token(client, info))
    default = min(len(pool), _DEFAULT_PROMPTS)
    chosen = datasets.choose(
        pool, count or default, shuffle=data.shuffle, oversample=data.oversample, seed=seed
    )
    plain = [
        sample if sample.max_tokens else replace(sample, max_tokens=_DEFAULT_OUTPUT)
        for sample in datasets.with_lengths(chosen, data.output_len)
    ]
    return [_clipped(sample, lengths) for sample in plain]


def _clipped(sample: Sample, lengths: Lengths) -> Sample:
    """The sample with its answer's length scaled and within the limits; prompts stay whole."""
    assert sample.max_tokens is not None
    _, made, _ = lengths.fit(1, sample.max_tokens)
    cut = made < round(sample.max_tokens * lengths.output_scale)
    return replace(sample, max_tokens=made, clipped=cut)


def _lengths(data: Data, info: Info) -> Lengths:
    context = info.model.max_context or 2048  # 0: a server that does not say
    most = info.config.get("max_tokens", "")
    return Lengths(
        max_context=context,
        max_tokens=int(most) if most.isdigit() else context,
        input_scale=data.input_scale,
        output_scale=data.output_scale,
        max_input=data.max_input_len,
        max_output=data.max_output_len,
    )


async def _characters_per_token(client: AsyncClient, info: Info) -> float:
    """Measured on prose like that of the prompts, with the server's own tokenizer."""
    text = texts.prose(_CALIBRATION, "calibration")
    result = await client.generate(text, max_tokens=1, temperature=0, speculation="off")
    return len(text) / max(1, result.usage.prompt_tokens)


def _asked(settings: Settings) -> dict[str, Any]:
    return {key: value for key, value in settings.sampling.items() if value is not None}


async def _warm_up(settings: Settings, client: AsyncClient, shown: Watched) -> list[Arm]:
    """Ask for each arm, which also shows whether it is served; those that are.

    None of it is counted. Raises InvalidArgument of the server, or FailedPrecondition when no arm
    is left.
    """
    arms: list[Arm] = []
    for arm in settings.arms:
        shown.note(f"warming up: {arm.name} …")
        item = _warm_item(settings, arm, len(arms))
        try:
            async with asker(client, chat=settings.data.chat)(item) as stream:
                await stream.result()
        except DraftwireError as error:
            if not (isinstance(error, InvalidArgument) and settings.skip_refused_arms):
                raise
            shown.note(f"arm {arm.name} is left out: {error.message}")
        else:
            arms.append(arm)
    if not arms:
        raise FailedPrecondition("NO_ARM", "the server serves none of the arms")
    more = max(0, (settings.num_warmups or 0) - len(settings.arms))
    items = [_warm_item(settings, arms[k % len(arms)], len(arms) + k) for k in range(more)]
    gate = asyncio.Semaphore(settings.timing.max_concurrency or 8)

    async def one(item: Planned) -> None:
        async with gate, asker(client, chat=settings.data.chat)(item) as stream:
            await stream.result()

    await asyncio.gather(*(one(item) for item in items))
    return arms


def _warm_item(settings: Settings, arm: Arm, number: int) -> Planned:
    asked = {**_asked(settings), "seed": number, "max_tokens": 8, **arm.options}
    return Planned(number, -1, arm.name, 0.0, texts.warm_up(number), asked)


def _drafter(settings: Settings, stack: contextlib.ExitStack) -> Drafter:
    log: IO[bytes] | None = None
    if settings.drafter_log is not None:
        try:
            log = stack.enter_context(settings.drafter_log.open("ab"))
        except OSError as error:
            where = str(settings.drafter_log)
            raise InvalidArgument("--drafter-log", where, f"writable ({error})") from error
    drafter = Drafter(command=settings.drafter_command, pid=settings.drafter_pid, log=log)
    stack.callback(drafter.close)
    return drafter


async def _wait_for_lane(client: AsyncClient) -> None:
    give_up = time.monotonic() + _LANE_WAIT_S
    while True:
        info = await client.info()
        if any(lane.state == LaneState.READY for lane in info.lanes):
            return
        if time.monotonic() > give_up:
            states = ", ".join(f"{lane.target} {lane.state}" for lane in info.lanes) or "none"
            raise FailedPrecondition(
                "NO_LANE", f"the verifier has no ready drafter after {_LANE_WAIT_S:g} s ({states})"
            )
        await asyncio.sleep(0.2)
