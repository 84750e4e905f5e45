"""Measures 32 concurrent requests of mixed lengths on the demo pair, and what a cancelled one
leaves.

Both services run as processes. All requests must finish; six of them are sent again alone and must
give the same tokens; free pages of the verifier and free cache rows of the drafter are read from
GetInfo before and after. The throughput of the batch is set against requests of like lengths (other
texts, so that nothing is found in the prefix cache) sent one at a time. For the cancelled client
both services run in this process, where their steps can be counted: a step counts if it ended after
the client's cancel while the session was still held. The verifier is told to draft at most 4 tokens
a round, since with 32 sessions a step's time grows with its rows.

Not measured: latency under a given rate of arrivals, or more requests than the verifier takes.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common import (
    PROMPTS,
    TARGET,
    chat_ids,
    demo_tokenizer,
    equal,
    load_average,
    many,
    options,
    say,
    write,
)
from fakes import Answer, eventually, running, verifier

from drafter_service.config import Config as DrafterConfig
from drafter_service.service import DrafterService
from draftwire.channel import ChannelConfig, open_channel
from draftwire.runtime import SWITCH_INTERVAL_S
from draftwire.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2, verifier_pb2, verifier_pb2_grpc
from draftwire_client.demo import drafter_arguments, service

SAMPLINGS = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
NODES = 4
Requests = list[tuple[Sequence[int], dict[str, Any]]]
History = list[tuple[float, frozenset[int]]]


def mixed(tokenizer: Any, count: int, seed: int, longest: tuple[int, int]) -> Requests:
    """Prompts of 5 to 300 tokens, answers of 8 to 64, three kinds of sampling, in any order."""
    rng = random.Random(seed)
    corpus: list[int] = []
    while len(corpus) < 8000:
        corpus.extend(chat_ids(tokenizer, rng.choice(PROMPTS)))
    requests: Requests = []
    for index in range(count):
        share = index / max(1, count - 1)
        length, tokens = 5 + int(share * (longest[0] - 5)), rng.randint(8, longest[1])
        start = rng.randrange(len(corpus) - length)
        fields = {
            "sampling": {**SAMPLINGS[index % 3], "seed": 1000 * seed + index},
            "stop": {"max_tokens": tokens, "ignore_eos": True},
        }
        requests.append((corpus[start : start + length], fields))
    rng.shuffle(requests)
    return requests


async def free(verifier_stub: Any, drafter_stub: Any) -> dict[str, int]:
    """What both services say is free."""
    load = (await verifier_stub.GetInfo(verifier_pb2.VerifierGetInfoRequest())).load
    drafter = await drafter_stub.GetInfo(drafter_pb2.DrafterGetInfoRequest())
    return {
        "verifier_free_pages": load.free_pages,
        "verifier_pages": load.total_pages,
        "verifier_sessions": load.running + load.waiting,
        "drafter_free_rows": drafter.free_cache_rows,
        "drafter_rows": drafter.total_cache_rows,
        "drafter_sessions": drafter.sessions,
    }


async def load_cell(given: Any, tokenizer: Any) -> dict[str, Any]:
    """The 32 requests."""
    count, longest = (6, (40, 8)) if given.quick else (32, (300, 64))
    sample, alone_count = (2, 2) if given.quick else (6, 6)
    arguments, trained = drafter_arguments()
    with (
        service(arguments, "the drafter") as drafter_address,
        service(
            [
                *("verifier_service", "--model", TARGET, "--drafters", drafter_address),
                *("--max-nodes", str(NODES)),
            ],
            "the verifier",
        ) as address,
    ):
        async with (
            open_channel(address, ChannelConfig()) as one,
            open_channel(drafter_address, ChannelConfig()) as other,
        ):
            stub = verifier_pb2_grpc.VerifierStub(one)
            drafter = drafter_pb2_grpc.DrafterStub(other)
            await many(stub, mixed(tokenizer, 2, given.seed + 3, (30, 8)), 2)  # both sides warm
            before = await _settled(stub, drafter)
            requests = mixed(tokenizer, count, given.seed + 1, longest)
            started = time.perf_counter()
            answers = await many(stub, requests, count)
            together = time.perf_counter() - started
            after = await _settled(stub, drafter)
            other_texts = mixed(tokenizer, alone_count, given.seed + 2, longest)
            started = time.perf_counter()
            singles = await many(stub, other_texts, 1)
            one_at_a_time = time.perf_counter() - started
            again = await many(stub, requests[:sample], 1)
    rates = (_tokens(answers) / together, _tokens(singles) / one_at_a_time)
    return {
        "requests": count,
        "max_nodes": NODES,
        "finished": sum(a.finished is not None for a in answers),
        "prompt_tokens": _range([len(prompt) for prompt, _ in requests]),
        "output_tokens": _range([len(a.tokens) for a in answers]),
        "same_tokens_alone": equal([a.tokens for a in again], [a.tokens for a in answers[:sample]]),
        "free_before": before,
        "free_after": after,
        "seconds": round(together, 2),
        "tokens_per_s": round(rates[0], 2),
        "one_at_a_time": {"requests": alone_count, "tokens_per_s": round(rates[1], 2)},
        "throughput_ratio": round(rates[0] / rates[1], 3),
        "trained_drafter": trained,
    }


async def _settled(stub: Any, drafter: Any) -> dict[str, int]:
    """Once no session is left on either side: the End of the last one is still on its way."""
    for _ in range(500):
        state = await free(stub, drafter)
        if not state["verifier_sessions"] and not state["drafter_sessions"]:
            break
        await asyncio.sleep(0.02)
    return state


def _tokens(answers: Sequence[Answer]) -> int:
    return sum(len(a.tokens) for a in answers)


def _range(values: Sequence[int]) -> dict[str, int]:
    return {"least": min(values), "most": max(values), "sum": sum(values)}


async def cancel_cell(given: Any, tokenizer: Any) -> dict[str, Any]:
    """Clients that go away in the middle, while three others keep the services stepping."""
    config = DrafterConfig(
        listen="127.0.0.1:0", target=TARGET, random_weights_seed=0, log_level="error"
    )
    drafting = DrafterService(replace(config))
    async with (
        running(drafting, config) as address,
        verifier(TARGET, [address], kv_tokens=16384) as (verifying, stub),
    ):
        engine, drafter = verifying.engine, drafting._engine
        assert engine is not None
        assert drafter is not None
        await eventually(lambda: engine.lanes.lanes)
        held: History = []  # sessions on the verifier after each target step
        drafted: History = []  # sessions on the drafter after each of its steps
        step, draft = engine.step, drafter.step

        def on_drafter() -> frozenset[int]:
            return frozenset(i for lane in drafter._lanes.values() for i in lane.table.sessions)

        def stepping() -> None:
            step()
            held.append((time.monotonic(), frozenset(engine.sessions)))

        def drafting_step(work: Any) -> Any:
            done = draft(work)
            drafted.append((time.monotonic(), on_drafter()))
            return done

        engine.step, drafter.step = stepping, drafting_step  # type: ignore[method-assign]
        pages = engine.pool.free_pages
        rows = drafter.pool.free_rows
        others = mixed(tokenizer, 3, given.seed + 5, (20, 8))
        for _, fields in others:
            fields["stop"] = {"max_tokens": 60 if given.quick else 1000, "ignore_eos": True}
        background = asyncio.gather(*(many(stub, [item], 1) for item in others))
        await eventually(lambda: drafter.session_count == 3)
        steps: list[tuple[int, int]] = []
        for index in range(1 if given.quick else 8):
            ids = chat_ids(tokenizer, PROMPTS[index])
            number, cancelled = await _start_and_cancel(stub, engine, ids, given)
            await eventually(lambda n=number: n not in engine.sessions)  # type: ignore[misc]
            await eventually(lambda n=number: n not in on_drafter())  # type: ignore[misc]
            steps.append((_still(held, number, cancelled), _still(drafted, number, cancelled)))
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
        await eventually(lambda: not engine.sessions and not drafter.session_count)
        return {
            "cancelled": len(steps),
            "others_running": len(others),
            "target_steps_still_held": [s for s, _ in steps],
            "drafter_steps_still_held": [s for _, s in steps],
            "free_pages": {"before": pages, "after": engine.pool.free_pages},
            "free_rows": {"before": rows, "after": drafter.pool.free_rows},
        }


def _still(history: History, number: int, since: float) -> int:
    """Steps that ended after `since` with session `number` still there."""
    return sum(number in sessions for at, sessions in list(history) if at > since)


async def _start_and_cancel(
    stub: Any, engine: Any, ids: Sequence[int], given: Any
) -> tuple[int, float]:
    """Read some tokens, go away; the session's number and when that was."""
    request = verifier_pb2.GenerateRequest(
        token_ids=verifier_pb2.TokenIds(ids=ids),
        sampling=types_pb2.SamplingParams(temperature=0),
        stop=types_pb2.StopConditions(max_tokens=400, ignore_eos=True),
    )
    call = stub.Generate(request, timeout=600)
    made = 0
    async for message in call:
        made += len(message.delta.token_ids)
        if made >= (2 if given.quick else 6):
            break
    number = max(engine.sessions)  # the youngest: numbers are given in order
    at = time.monotonic()
    call.cancel()
    return number, at


async def main() -> int:
    """Run both cells and write concurrency.json; 1 if tokens differ or something stays taken."""
    given, load = options(__doc__), load_average()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as draftwire.runtime.run does
    tokenizer = demo_tokenizer()
    cell = await load_cell(given, tokenizer)
    gone = await cancel_cell(given, tokenizer)
    write("concurrency", {"load": cell, "cancelled_client": gone}, given, load)
    same, finished = cell["same_tokens_alone"], cell["finished"] == cell["requests"]
    clean = cell["free_before"] == cell["free_after"] and all(
        gone[name]["before"] == gone[name]["after"] for name in ("free_pages", "free_rows")
    )
    say(
        f"concurrency: {cell['finished']} of {cell['requests']} finished, {same['same']} of "
        f"{same['of']} the same alone, everything free again: {clean}, throughput "
        f"{cell['throughput_ratio']:.2f} x one at a time; cancelled: target steps still held "
        f"{gone['target_steps_still_held']}, drafter steps {gone['drafter_steps_still_held']}"
    )
    return 0 if finished and same["same"] == same["of"] and clean else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
