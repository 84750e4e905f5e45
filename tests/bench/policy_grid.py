"""Measures the length policy on the demo pair: tokens a second of plain decoding, fixed blocks of 4
and of the drafter's size, predicted sizes and adaptive lengths, over a grid of load, temperature
and kind of text.

Cells: 1, 4, 16 and 32 requests at a time x T 0 and 1.0 x code and mathematics, chat and creative.
In a cell the arms run in turn, --turns times, forwards and backwards, each for --seconds in a
closed loop; each time all arms begin at the same prompt, and the next time further on. Counted are
the tokens after the step in which every worker had its first one, over the time from it to the last
step that ended in time, so prompts cost no arm anything but what their pages in the cache leave
over, and no window is cut within a step. A ratio is the geometric mean over the turns, its 95 %
interval from Student's t of the logarithms. One verifier and one drafter serve all of it, invariant
arithmetic, so the answers of all arms must begin alike: 1 is returned if any does not.

Prompts come from --data, a folder of JSON-lines files with `turns`; without it, built-in ones. Each
finished cell is kept in policy_grid.part.json in --out: run again, and only what is missing is
measured. Writes policy_grid.json, .md and .png. About --turns x (--seconds x 80 + 60 s) in all.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import (
    PROMPTS,
    TARGET,
    chat_ids,
    demo_tokenizer,
    load_average,
    options,
    read_prompts,
    say,
    write,
)
from fakes import OFF

from draftwire.channel import ChannelConfig, open_channel
from draftwire.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from draftwire_client.demo import drafter_arguments, service

PLAIN, ADAPTIVE = "plain", "adaptive"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: OFF,
    "fixed 4": {
        "mode": types_pb2.SPECULATION_MODE_FIXED,
        "max_block_size": 4,
        "max_nodes": 3,
    },
    "fixed B": {"mode": types_pb2.SPECULATION_MODE_FIXED},
    "predicted": {"mode": types_pb2.SPECULATION_MODE_PREDICTED},
    ADAPTIVE: {"mode": types_pb2.SPECULATION_MODE_ADAPTIVE},
}
KINDS = {
    "code and mathematics": ("humaneval", "gsm8k_test", "mbpp_test"),
    "chat and creative": ("mtbench", "train_gpteacher_roleplay"),
}
LOADS = (1, 4, 16, 32)
TEMPERATURES = (0.0, 1.0)
MAX_PROMPT, MAX_TOKENS = 120, 96
FLOOR = 0.97
SAME_STEP = 0.02  # seconds within which the sessions of a step get their tokens
# Student's t, two-sided 95 %, by degrees of freedom from 1 on.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass
class Run:
    """What one arm did in one turn."""

    tokens: int = 0
    seconds: float = 0.0
    answers: dict[int, list[int]] = field(default_factory=dict)  # prompt -> tokens
    before: types_pb2.AcceptanceStats = field(default_factory=types_pb2.AcceptanceStats)
    after: types_pb2.AcceptanceStats = field(default_factory=types_pb2.AcceptanceStats)


def prompts(folder: Path | None, tokenizer: Any, count: int) -> dict[str, list[list[int]]]:
    """Token ids of `count` prompts of each kind, none longer than MAX_PROMPT."""
    found: dict[str, list[list[int]]] = {}
    for kind, names in KINDS.items():
        texts: list[str] = list(PROMPTS)
        if folder is not None:
            files = [read_prompts(folder / f"{name}.jsonl", 6 * count) for name in names]
            texts = [text for row in itertools.zip_longest(*files) for text in row if text]
        ids = [chat_ids(tokenizer, text) for text in texts]
        found[kind] = [one for one in ids if len(one) <= MAX_PROMPT][:count]
    return found


def request(
    ids: Sequence[int], number: int, temperature: float, speculation: dict[str, Any]
) -> verifier_pb2.GenerateRequest:
    """The same request in every arm but for speculation."""
    return verifier_pb2.GenerateRequest(
        token_ids=verifier_pb2.TokenIds(ids=ids),
        sampling=types_pb2.SamplingParams(temperature=temperature, seed=number),
        stop=types_pb2.StopConditions(max_tokens=MAX_TOKENS, ignore_eos=True),
        speculation=types_pb2.SpeculationOptions(**speculation),
    )


async def totals(stub: Any) -> types_pb2.AcceptanceStats:
    """The server's counters of speculation, running requests included."""
    return (await stub.GetInfo(verifier_pb2.VerifierGetInfoRequest())).totals


async def turn(
    stub: Any,
    texts: Sequence[Sequence[int]],
    load: int,
    temperature: float,
    speculation: dict[str, Any],
    seconds: float,
    start: int = 0,
) -> Run:
    """`load` workers for `seconds` after each has had its first token, from prompt `start` on."""
    run, numbers = Run(), itertools.count(start)
    started: set[int] = set()
    begun = asyncio.Event()
    chunks: list[tuple[float, int]] = []

    async def worker(me: int) -> None:
        while True:
            number = next(numbers)
            index = number % len(texts)
            made: list[int] = []
            call = stub.Generate(request(texts[index], index, temperature, speculation))
            try:
                async for message in call:
                    kind = message.WhichOneof("event")
                    if kind == "delta":
                        made.extend(message.delta.token_ids)
                        chunks.append((time.perf_counter(), len(message.delta.token_ids)))
                        started.add(me)
                        if len(started) == load:
                            begun.set()
            finally:
                if len(made) > len(run.answers.get(index, ())):
                    run.answers[index] = made
                call.cancel()

    workers = [asyncio.create_task(worker(me)) for me in range(load)]
    try:
        await asyncio.wait(
            [asyncio.create_task(begun.wait()), *workers], return_when=asyncio.FIRST_COMPLETED
        )
        run.before = await totals(stub)
        first = time.perf_counter()
        await asyncio.wait(workers, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        run.after = await totals(stub)
    finally:
        for task in workers:
            task.cancel()
        results = await asyncio.gather(*workers, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    run.tokens, run.seconds = counted(chunks, first, first + seconds)
    return run


def counted(chunks: Sequence[tuple[float, int]], begin: float, end: float) -> tuple[int, float]:
    """Tokens and seconds of the whole steps between `begin`, when one ended, and `end`. `chunks`:
    time and tokens of what came."""
    inside = [(at, count) for at, count in chunks if begin + SAME_STEP < at <= end]
    while inside and end - inside[-1][0] < SAME_STEP:  # a step that others may get tokens of yet
        end, _ = inside.pop()
    if not inside:
        return 0, end - begin
    return sum(count for _, count in inside), inside[-1][0] - begin


def differing(runs: dict[str, list[Run]]) -> int:
    """Answers that do not begin like the plain one of the same prompt."""
    truth: dict[int, list[int]] = {}
    for run in runs[PLAIN]:
        for index, made in run.answers.items():
            if len(made) > len(truth.get(index, ())):
                truth[index] = made
    wrong = 0
    for run in itertools.chain(*runs.values()):
        for index, made in run.answers.items():
            known = truth.get(index, [])
            shared = min(len(known), len(made))
            wrong += made[:shared] != known[:shared]
    return wrong


def speed(run: Run) -> float:
    """Tokens a second; of a turn in which nothing came, as if half a token had."""
    return max(run.tokens, 0.5) / run.seconds


def against(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, Any]:
    """Speed of `runs` over that of `others`, turn by turn: geometric mean and 95 % interval."""
    logs = [math.log(speed(a) / speed(b)) for a, b in zip(runs, others, strict=True)]
    mean, found = statistics.mean(logs), {}
    if len(logs) > 1:
        t = T_95[min(len(logs) - 1, len(T_95)) - 1]
        half = t * statistics.stdev(logs) / math.sqrt(len(logs))
        found["interval"] = [round(math.exp(mean + side * half), 3) for side in (-1, 1)]
    return {"ratio": round(math.exp(mean), 3), **found}


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Speed of an arm in a cell, and what the server's counters say of speculation meanwhile."""

    def made(name: str) -> int:
        return sum(getattr(run.after, name) - getattr(run.before, name) for run in runs)

    rounds, plain, accepted = made("rounds"), made("plain_rounds"), made("accepted_tokens")
    reasons: dict[str, int] = {}
    for run in runs:
        for sign, stats in ((1, run.after), (-1, run.before)):
            for size in stats.block_sizes:
                name = types_pb2.BlockSizeReason.Name(size.reason)
                name = f"{name.removeprefix('BLOCK_SIZE_REASON_').lower()}, block {size.block_size}"
                reasons[name] = reasons.get(name, 0) + sign * size.rounds
    return {
        "tokens_per_s": round(sum(r.tokens for r in runs) / sum(r.seconds for r in runs), 3),
        "each_turn": [round(speed(r), 3) for r in runs],
        "mean_acceptance_length": round(1 + accepted / rounds, 3) if rounds else None,
        "share_of_rounds_plain": round(plain / (plain + rounds), 3) if plain + rounds else None,
        "rounds_by_reason": {name: count for name, count in sorted(reasons.items()) if count},
    }


async def cell(
    stub: Any,
    texts: Sequence[Sequence[int]],
    load: int,
    temperature: float,
    given: argparse.Namespace,
) -> dict[str, Any]:
    """All arms, `given.turns` times, forwards and backwards."""
    runs: dict[str, list[Run]] = {name: [] for name in ARMS}
    for number in range(given.turns):
        for name in ARMS if number % 2 == 0 else reversed(ARMS):
            start = number * load
            one = await turn(stub, texts, load, temperature, ARMS[name], given.seconds, start=start)
            runs[name].append(one)
    arms = {name: summary(found) for name, found in runs.items()}
    for name, arm in arms.items():
        arm["of_plain"] = against(runs[name], runs[PLAIN])
    return {
        "arms": arms,
        "adaptive_of": {n: against(runs[ADAPTIVE], runs[n]) for n in ARMS if n != ADAPTIVE},
        "answers_that_differ": differing(runs),
    }


def judged(cells: dict[str, Any]) -> dict[str, Any]:
    """The claims: adaptive against plain and the best arm of each cell, and all arms on average.
    `surely`: the whole interval lies below the floor."""
    ratios = {
        key: {name: arm["of_plain"]["ratio"] for name, arm in found["arms"].items()}
        for key, found in cells.items()
    }
    best = {
        key: max((name for name in found if name != ADAPTIVE), key=found.__getitem__)
        for key, found in ratios.items()
    }

    def below(other: dict[str, str], *, surely: bool) -> list[str]:
        found = {key: cells[key]["adaptive_of"][name] for key, name in other.items()}
        if surely:
            return [k for k, v in found.items() if "interval" in v and v["interval"][1] < FLOOR]
        return [k for k, v in found.items() if v["ratio"] < FLOOR]

    plain = dict.fromkeys(cells, PLAIN)
    return {
        "mean_of_plain": {
            name: round(statistics.geometric_mean(r[name] for r in ratios.values()), 3)
            for name in ARMS
        },
        "best_other_arm": best,
        "cells_adaptive_below_floor_of_plain": below(plain, surely=False),
        "cells_adaptive_surely_below_floor_of_plain": below(plain, surely=True),
        "cells_adaptive_below_floor_of_best": below(best, surely=False),
        "cells_adaptive_surely_below_floor_of_best": below(best, surely=True),
        "floor": FLOOR,
    }


def table(cells: dict[str, Any], verdict: dict[str, Any]) -> str:
    """Markdown: tokens a second against plain, a row a cell."""
    others = [name for name in ARMS if name != PLAIN]
    lines = [
        f"| cell | plain, tokens/s | {' | '.join(others)} | adaptive of the best other arm |",
        "|---|---|" + "---|" * (len(others) + 1),
    ]
    for key, found in cells.items():
        arms, best = found["arms"], verdict["best_other_arm"][key]
        ratios = [f"{arms[name]['of_plain']['ratio']:.2f}" for name in others]
        ratios[-1] = shown(arms[ADAPTIVE]["of_plain"])
        ratios.append(f"{shown(found['adaptive_of'][best])}, {best}")
        lines.append(f"| {key} | {arms[PLAIN]['tokens_per_s']:.1f} | {' | '.join(ratios)} |")
    means = verdict["mean_of_plain"]
    lines.append("| mean | | " + " | ".join(f"{means[a]:.2f}" for a in others) + " | |")
    return "\n".join(lines) + "\n"


def shown(ratio: dict[str, Any]) -> str:
    """A ratio with its interval."""
    low_high = ratio.get("interval")
    return f"{ratio['ratio']:.2f}" + (
        f" [{low_high[0]:.2f}, {low_high[1]:.2f}]" if low_high else ""
    )


def plot(cells: dict[str, Any], file: Path) -> None:
    """Bars of the ratios, a panel for each kind and temperature."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(len(KINDS), len(TEMPERATURES), figsize=(11, 7), sharey=True)
    width = 0.8 / len(ARMS)
    for (row, kind), (column, temperature) in itertools.product(
        enumerate(KINDS), enumerate(TEMPERATURES)
    ):
        panel = panels[row][column]
        for place, arm in enumerate(ARMS):
            found = [
                (at, cells[key]["arms"][arm]["of_plain"]["ratio"])
                for at, load in enumerate(LOADS)
                if (key := name_of(kind, temperature, load)) in cells
            ]
            at = [x + (place - len(ARMS) / 2 + 0.5) * width for x, _ in found]
            panel.bar(at, [y for _, y in found], width, label=arm)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_title(f"{kind}, T={temperature:g}")
        panel.set_xticks(range(len(LOADS)), [str(load) for load in LOADS])
        panel.set_xlabel("requests at a time")
        panel.set_ylabel("tokens/s against plain")
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def name_of(kind: str, temperature: float, load: int) -> str:
    """A cell's name."""
    return f"{kind}, T={temperature:g}, {load} at a time"


async def measure(given: argparse.Namespace, address: str, texts: dict[str, Any]) -> dict[str, Any]:
    """The cells that are missing, each written down when it is done."""
    part = given.out / "policy_grid.part.json"
    cells: dict[str, Any] = {}
    if part.is_file() and not given.quick:
        cells = json.loads(part.read_text())
    async with open_channel(address, ChannelConfig()) as channel:
        stub = verifier_pb2_grpc.VerifierStub(channel)
        for kind, found in texts.items():  # all pages in the cache, both sides warm
            for start in range(0, len(found), 8):
                some = found[start : start + 8]
                await turn(stub, some, len(some), 0.0, ARMS["fixed B"], 0.2)
            say(f"policy_grid: {kind}: {len(found)} prompts are warm")
        for load, temperature, kind in itertools.product(given.loads, TEMPERATURES, texts):
            key = name_of(kind, temperature, load)
            if key in cells:
                continue
            cells[key] = await cell(stub, texts[kind], load, temperature, given)
            if not given.quick:
                given.out.mkdir(parents=True, exist_ok=True)
                part.write_text(json.dumps(cells, indent=1))
            ratios = {n: a["of_plain"]["ratio"] for n, a in cells[key]["arms"].items()}
            say(f"policy_grid: {key}: {ratios}")
        info = await stub.GetInfo(verifier_pb2.VerifierGetInfoRequest())
    ordered = [
        name_of(kind, temperature, load)
        for kind, temperature, load in itertools.product(texts, TEMPERATURES, LOADS)
    ]
    return {
        "cells": {key: cells[key] for key in ordered if key in cells},
        "step_costs": info.config["effective_step_costs"],
        "arithmetic": info.config["effective_numerics"],
        "lanes": [
            {"block_size": lane.block_size, "round_trip_ms": lane.round_trip.ToMicroseconds() / 1e3}
            for lane in info.lanes
        ],
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes besides the common ones."""
    parser.add_argument("--data", type=Path, help="folder of the prompt files")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each arm and turn")
    parser.add_argument("--turns", type=int, default=4, help="of each arm in a cell")
    parser.add_argument(
        "--loads",
        type=lambda text: [int(x) for x in text.split(",")],
        default=list(LOADS),
        help="requests at a time, of 1,4,16,32",
    )
    parser.add_argument("--drafter", help="address of a running drafter instead of the demo's")


def main() -> int:
    """Measure, write, and say whether the claims hold; 1 if any answer differs."""
    given, load = options(__doc__, arguments), load_average()
    if given.quick:
        given.seconds, given.loads, given.turns = min(given.seconds, 1.0), given.loads[:1], 2
    tokenizer = demo_tokenizer()
    texts = prompts(given.data, tokenizer, max(*given.loads, 16))
    drafter, trained = drafter_arguments()
    verify = ["verifier_service", "--model", TARGET]
    with (
        service(drafter, "the drafter") as own,
        service([*verify, "--drafters", given.drafter or own], "the verifier") as address,
    ):
        results = asyncio.run(measure(given, address, texts))
    verdict = judged(results["cells"])
    results |= {"verdict": verdict, "trained_drafter": trained}
    results |= {"seconds_of_a_turn": given.seconds, "turns": given.turns}
    write("policy_grid", results, given, load)
    made = table(results["cells"], verdict)
    if not given.quick:
        (given.out / "policy_grid.md").write_text(made)
        plot(results["cells"], given.out / "policy_grid.png")
        (given.out / "policy_grid.part.json").unlink(missing_ok=True)
    say(made)
    for name, found in verdict.items():
        if name != "floor":
            say(f"policy_grid: {name}: {found}")
    wrong = sum(found["answers_that_differ"] for found in results["cells"].values())
    say(f"policy_grid: answers that differ: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
