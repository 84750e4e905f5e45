"""Measures the load tester itself, against a scripted verifier whose delays are known.

A server in a process of its own answers with delays drawn from each request's seed, in chunks of 1
to 4 tokens; the truth is computed from the same seeds. Shown: every latency at p50 and p99 is
within 2 % or 1 ms of the truth; 200 requests/s are offered as 200 (within 1 %) with gaps that pass
a Kolmogorov-Smirnov test as they were sent; a server that stands still shows in the queue time.

Not measured: servers that are far away, and clients on busy machines; there the tester says that
it was the bottleneck.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from common import load_average, options, say, write
from scipy import stats as scipy_stats

from draftwire.v1 import verifier_pb2
from draftwire_client.bench.arms import Arm
from draftwire_client.bench.datasets import Sample
from draftwire_client.bench.measure import Record
from draftwire_client.bench.plan import Planned, Timing, make_plan
from draftwire_client.bench.stats import percentile
from draftwire_client.bench.summary import values
from draftwire_client.bench.workers import Job, Ran, run_all
from draftwire_client.testing import Reply, ScriptedVerifier
from draftwire_client.testing.script import Pause, Say, Start

Steps = list[tuple[float, int]]
QUICK, LATENCY, STALL = "quick", "latency", "stall"
STALL_S = 3.0
METRICS = ("ttft", "tpot", "itl", "chunk_gap", "e2el")


def steps(seed: int, kind: str) -> Steps:
    """Seconds before each chunk, and its tokens."""
    rng = random.Random(seed)
    if kind == QUICK:
        return [(0.0, 1)]
    if kind == STALL:
        return [(STALL_S if seed % 1000 == 50 else 0.02, 1)]
    first = (rng.uniform(0.06, 0.3), rng.randint(1, 4))
    return [first, *((rng.uniform(0.02, 0.06), rng.randint(1, 4)) for _ in range(12))]


def reply(request: verifier_pb2.GenerateRequest) -> Reply:
    """What the server says; the kind of script is the prompt's first word."""
    kind = request.text.partition(" ")[0]
    said: list[Any] = [Start()]
    for delay, tokens in steps(request.sampling.seed, kind):
        if delay:
            said.append(Pause(delay))
        said.append(Say("x" * tokens, (7,) * tokens))
    return Reply(tuple(said))


def serve(pipe: Any) -> None:
    """The server's process."""
    # The stalled calls must not take the others' threads, nor the others wait for one.
    with ScriptedVerifier(reply, max_calls=400) as server:
        pipe.send(server.target)
        pipe.recv()


@contextmanager
def server() -> Iterator[str]:
    """The address of a scripted verifier in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send("stop")
        process.join(10)
        process.kill()


def plan(kind: str, count: int, load: Timing, seed: int) -> list[Planned]:
    """Requests of one kind."""
    samples = [Sample(f"{kind} {i}", 64) for i in range(count)]
    return make_plan(samples, [Arm("default", {})], load, options={}, seed=seed)


def measure(target: str, planned: Sequence[Planned], slots: int | None = None) -> Ran:
    """Send the plan with the tester's own worker."""
    job = Job(planned, {"target": target}, chat=False, max_concurrency=slots)
    return asyncio.run(run_all(job, 1, lambda what, record: None, lambda epoch: None))


def truth(planned: Sequence[Planned]) -> list[Record]:
    """Records as a tester without any error would have them."""
    found = []
    for item in planned:
        at = now = item.at or 0.0
        record = Record(item.index, item.pair, item.arm, at, sent=at)
        for delay, tokens in steps(item.options["seed"], LATENCY):
            now += delay
            record.chunk(now, tokens)
        record.ended = now
        found.append(record)
    return found


def latencies(target: str, count: int, seed: int) -> dict[str, Any]:
    """Measured against true percentiles, ms; `within`: 2 % or 1 ms."""
    planned = plan(LATENCY, count, Timing(rate=20), seed)
    ran, true = measure(target, planned), truth(planned)
    found: dict[str, Any] = {}
    for metric in METRICS:
        measured, expected = (sorted(values(part, metric)) for part in (ran.records, true))
        for percent in (50, 99):
            is_, should = percentile(measured, percent), percentile(expected, percent)
            found[f"p{percent}_{metric}_ms"] = {
                "measured": round(is_, 3),
                "true": round(should, 3),
                "within": abs(is_ - should) <= max(1.0, 0.02 * should),
            }
    found["client_troubles"] = [text for h in ran.health for text in h.troubles]
    found["answers"] = sum(record.ok for record in ran.records)
    return found


def offered(target: str, count: int, seed: int) -> dict[str, Any]:
    """200 requests/s as they were sent."""
    planned = plan(QUICK, count, Timing(rate=200), seed)
    ran = measure(target, planned)
    sent = sorted(record.sent for record in ran.records if record.sent is not None)
    # As planned, the first request comes one gap after the start.
    rate = len(sent) / sent[-1]
    gaps = [b - a for a, b in pairwise((0.0, *sent))]
    test = scipy_stats.kstest(gaps, "expon", args=(0, 1 / 200))
    late = sorted(1000 * record.late for record in ran.records)
    return {
        "requests": len(sent),
        "rate": round(rate, 3),
        "within": abs(rate - 200) <= 2,
        "kolmogorov_smirnov_p": round(float(test.pvalue), 4),
        "gaps_are_exponential": bool(test.pvalue > 0.001),
        "late_ms": {"p50": round(percentile(late, 50), 3), "p99": round(percentile(late, 99), 3)},
    }


def stalled(target: str, seed: int) -> dict[str, Any]:
    """One call stands still for 3 s on the only slot while 20 requests/s come."""
    planned = plan(STALL, 200, Timing(rate=20, burstiness=float("inf"), max_concurrency=1), seed)
    ran = measure(target, planned, slots=1)
    (stop,) = [item.at for item in planned if item.options["seed"] % 1000 == 50]
    assert stop is not None
    # Whoever came meanwhile waited at least until the end of the stall.
    held = [r for r in ran.records if stop + 0.1 < r.scheduled < stop + STALL_S - 0.1]
    least = [stop + STALL_S - record.scheduled for record in held]
    waited = [record.queue or 0.0 for record in held]
    return {
        "requests_held_up": len(held),
        "longest_queue_s": round(max(waited), 3),
        "all_waits_are_in_the_queue_time": all(
            w >= a - 0.001 for w, a in zip(waited, least, strict=True)
        ),
    }


def main() -> int:
    """Write loadtest_selftest.json; 1 if a figure is not within its limits."""

    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--check", action="store_true", help="short, judged, not written")

    given, load = options(__doc__, extra), load_average()
    short = given.quick or given.check
    with server() as target:
        measure(target, plan(LATENCY, 5, Timing(rate=20), 1))  # both sides warm
        results = {
            "latencies": latencies(target, 60 if short else 600, given.seed),
            "offered": offered(target, 600 if short else 2000, given.seed),
            "stalled": stalled(target, 0),
        }
    if not given.check:
        write("loadtest_selftest", results, given, load)
    figures = {k: v for k, v in results["latencies"].items() if isinstance(v, dict)}
    wrong = [k for k, v in figures.items() if not v["within"]]
    if not (results["offered"]["within"] and results["offered"]["gaps_are_exponential"]):
        wrong.append("offered")
    if not results["stalled"]["all_waits_are_in_the_queue_time"]:
        wrong.append("stalled")
    for name, value in figures.items():
        say(f"loadtest_selftest: {name}: {value['measured']} measured, {value['true']} true")
    say(f"loadtest_selftest: offered {results['offered']}")
    say(f"loadtest_selftest: stalled {results['stalled']}")
    say(f"loadtest_selftest: {'all within limits' if not wrong else 'NOT within: ' + str(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
