"""The plots of a run, from its results and records.

Knows what each plot shows. How one is drawn is `svg`, where it stands is `page`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from draftwire_client.bench.measure import Record
from draftwire_client.bench.stats import cdf, percentile
from draftwire_client.bench.summary import values
from draftwire_client.bench.svg import Plot, Point
from draftwire_client.bench.table import NAMES

_WIDE = 1140
_BINS = 120
_EVENT_ROWS = 3
_SMOOTH_S = 3.0


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn plot; `series` names its colours in order, empty without a legend."""

    title: str
    note: str
    svg: str
    series: tuple[str, ...] = ()
    wide: bool = False


def latency_cdfs(records: Sequence[Record], arms: Sequence[str]) -> list[Chart]:
    """One a metric: the share of values at or below each value, a line an arm."""
    found = []
    for metric in ("ttft", "tpot", "itl", "chunk_gap", "e2el", "queue"):
        by_arm = [values((r for r in records if r.arm == arm), metric) for arm in arms]
        # Nothing cannot stand on a logarithmic axis: below 10 µs all is at the left edge.
        pooled = sorted(max(value, 0.01) for part in by_arm for value in part)
        if not pooled:
            continue
        high = pooled[-1]
        low = max(next((v for v in pooled if v > 0.01), pooled[0]), high / 1e4)
        plot = Plot(f"{NAMES[metric]}, ms", "share", (low, high), (0.0, 1.0), log_x=True)
        for series, part in enumerate(by_arm):
            if part:
                plot.line([*_from_zero(cdf(part), low), (high, 1.0)], series, arms[series])
        found.append(Chart(NAMES[metric], _MEANING[metric], plot.render(), tuple(arms)))
    return found


_MEANING = {
    "ttft": "from the scheduled time to the first token",
    "tpot": "(E2EL - TTFT) / (tokens - 1), one value an answer",
    "itl": "before each token; a chunk's gap is shared by its tokens",
    "chunk_gap": "between neighbouring chunks, whatever their tokens",
    "e2el": "from the scheduled time to the last token",
    "queue": "from the scheduled time to the sending, spent at the client",
}


def timeline(
    records: Sequence[Record], results: Mapping[str, Any], arms: Sequence[str]
) -> list[Chart]:
    """The run over time: tokens, latency, acceptance, load; events are marked on each."""
    duration = results["duration"]
    if not duration:
        return []
    width = max(0.5, duration / _BINS)
    charts = [
        Chart(
            "Output tokens over time",
            f"tokens/s in bins of {width:.1f} s, by arm",
            _tokens(records, results, arms, duration, width),
            tuple(arms),
            wide=True,
        ),
        Chart(
            "Latency over time",
            "E2EL of each request at its scheduled time",
            _scatter(records, results, arms, duration),
            tuple(arms),
            wide=True,
        ),
    ]
    readings = results["readings"]
    if any(reading["rounds"] or reading["lanes_ready"] for reading in readings[1:]):
        charts.append(
            Chart(
                "Speculation over time",
                "from the server's counters",
                _speculation(readings, results, duration),
                ("mean acceptance length", "drafter lanes ready"),
                wide=True,
            )
        )
    if any(reading["running"] or reading["waiting"] for reading in readings[1:]):
        charts.append(
            Chart(
                "Load of the server",
                "requests, as the server says",
                _load(readings, results, duration),
                ("running", "waiting"),
                wide=True,
            )
        )
    return charts


def acceptance(results: Mapping[str, Any]) -> list[Chart]:
    """By position, and how many rounds had which block size."""
    arms: Mapping[str, Any] = results["arms"]
    rates = {
        name: figures["spec_decode_per_position_acceptance_rates"] for name, figures in arms.items()
    }
    found = []
    depth = max((len(part) for part in rates.values()), default=0)
    if depth:
        ends = (0.5, depth + 0.5)
        plot = Plot("position", "accepted / rounds", ends, (0.0, 1.0), whole_x=True)
        for series, (name, part) in enumerate(rates.items()):
            points = [(float(place), rate) for place, rate in enumerate(part, 1)]
            plot.line(points, series, name)
            plot.dots(points, series, radius=3.2)
        note = "share of rounds whose token at that depth was kept"
        found.append(Chart("Acceptance by position", note, plot.render(), tuple(arms)))
    sizes = {name: _by_size(figures["block_sizes"]) for name, figures in arms.items()}
    known = sorted({size for part in sizes.values() for size in part})
    if known:
        highest = max(max(part.values(), default=0.0) for part in sizes.values())
        names = [str(size) for size in known]
        plot = Plot("block size", "share of rounds", (-0.5, len(known) - 0.5), (0.0, highest))
        plot.x_names = names
        width = 0.8 / len(sizes)
        for series, (name, part) in enumerate(sizes.items()):
            for place, size in enumerate(known):
                if part.get(size):
                    x = place + width * (series - (len(sizes) - 1) / 2)
                    title = f"{name}: {100 * part[size]:.1f} %"
                    plot.bar(x, width * 0.92, part[size], series, title)
        note = "anchor included; 1 is a plain round"
        found.append(Chart("Block sizes", note, plot.render(), tuple(arms)))
    return found


def speedups(results: Mapping[str, Any]) -> list[Chart]:
    """Each arm against the baseline with its interval."""
    kinds = ("decode", "e2el", "ttft")
    arms = [name for name in results["arms"] if name != results["baseline"]]
    cells = {
        (arm, kind): [
            results["arms"][arm].get(f"speedup_{kind}{end}") for end in ("", "_low", "_high")
        ]
        for arm in arms
        for kind in kinds
    }
    known = {place: cell for place, cell in cells.items() if None not in cell}
    if not known:
        return []
    highest = max(1.0, *(cell[2] for cell in known.values())) * 1.12
    plot = Plot("", "speed-up", (-0.5, len(arms) - 0.5), (0.0, highest), x_names=arms)
    for a, arm in enumerate(arms):
        for k, kind in enumerate(kinds):
            if (arm, kind) in known:
                value, low, high = known[arm, kind]
                x = a + 0.28 * (k - 1)
                plot.bar(x, 0.25, value, k, f"{arm}, {kind}: {value:.3f} [{low:.3f}, {high:.3f}]")
                plot.whisker(x, low, high)
                plot.text(x, high, f"{value:.2f}")
    plot.across(1.0)
    note = f"against {results['baseline']}, over pairs; whiskers are 95 % bootstrap intervals"
    return [Chart("Speed-up by arm", note, plot.render(), ("decode tokens/s", "E2EL", "TTFT"))]


def _tokens(
    records: Sequence[Record],
    results: Mapping[str, Any],
    arms: Sequence[str],
    duration: float,
    width: float,
) -> str:
    bins = math.ceil(duration / width) + 1
    rates = {arm: [0.0] * bins for arm in arms}
    for record in records:
        for moment, tokens in zip(record.chunk_times, record.chunk_tokens, strict=True):
            if moment >= 0:
                rates[record.arm][min(bins - 1, int(moment / width))] += tokens / width
    highest = max(max(part) for part in rates.values())
    plot = Plot("seconds", "tokens/s", (0.0, duration), (0.0, highest * 1.15), width=_WIDE)
    for series, arm in enumerate(arms):
        points = [((i + 0.5) * width, rate) for i, rate in enumerate(rates[arm])]
        plot.line([p for p in points if p[0] <= duration], series, arm)
    return _marked(plot, results)


def _scatter(
    records: Sequence[Record], results: Mapping[str, Any], arms: Sequence[str], duration: float
) -> str:
    done = [(r.scheduled, r.e2el, r.arm) for r in records if r.ok and r.e2el is not None]
    highest = max((e2el for _, e2el, _ in done), default=1.0)
    plot = Plot("seconds", "E2EL, s", (0.0, duration), (0.0, highest * 1.15), width=_WIDE)
    for series, arm in enumerate(arms):
        plot.dots([(at, e2el) for at, e2el, whose in done if whose == arm], series)
    for record in records:
        if not record.ok:
            plot.dots([(record.scheduled, 0.0)], 9, radius=4)
    return _marked(plot, results)


def _speculation(
    readings: Sequence[Mapping[str, Any]], results: Mapping[str, Any], duration: float
) -> str:
    lengths: list[Point] = []
    start = 0
    for end in range(1, len(readings)):
        while readings[end]["at"] - readings[start + 1]["at"] >= _SMOOTH_S:
            start += 1
        rounds = readings[end]["rounds"] - readings[start]["rounds"]
        accepted = readings[end]["accepted"] - readings[start]["accepted"]
        # Without a proposal a step makes one token.
        lengths.append((readings[end]["at"], 1 + accepted / rounds if rounds > 0 else 1.0))
    lanes = [(r["at"], float(r["lanes_ready"])) for r in readings]
    highest = max(y for _, y in (*lengths, *lanes, (0.0, 2.0)))
    plot = Plot("seconds", "tokens, lanes", (0.0, duration), (0.0, highest * 1.15), width=_WIDE)
    plot.line(lengths, 0)
    plot.steps(lanes, 1)
    return _marked(plot, results)


def _load(
    readings: Sequence[Mapping[str, Any]], results: Mapping[str, Any], duration: float
) -> str:
    highest = max(max(r["running"], r["waiting"]) for r in readings)
    plot = Plot("seconds", "requests", (0.0, duration), (0.0, highest * 1.15 + 1), width=_WIDE)
    for series, name in enumerate(("running", "waiting")):
        plot.steps([(r["at"], float(r[name])) for r in readings], series, name)
    return _marked(plot, results)


def _marked(plot: Plot, results: Mapping[str, Any]) -> str:
    for number, event in enumerate(results["events"]):
        plot.mark(event["at"], f"{event['name']} {event['at']:.1f} s", number % _EVENT_ROWS)
    return plot.render()


def _by_size(counts: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    total = sum(item["rounds"] for item in counts)
    found: dict[int, float] = {}
    for item in counts:
        size = item["block_size"]
        found[size] = found.get(size, 0.0) + item["rounds"] / total
    return found


def _from_zero(points: list[Point], low: float) -> list[Point]:
    """The steps of a distribution, from the left edge of the plot."""
    found: list[Point] = [(low, 0.0)]
    for (_, before), (x, share) in pairwise([(low, 0.0), *points]):
        found += [(x, before), (x, share)]
    return found


def headline(results: Mapping[str, Any], records: Sequence[Record]) -> dict[str, str]:
    """The four figures at the top of the page."""
    ttft, e2el = sorted(values(records, "ttft")), sorted(values(records, "e2el"))

    def two(ordered: Sequence[float]) -> str:
        if not ordered:
            return "none"
        return f"{percentile(ordered, 50):,.0f} / {percentile(ordered, 99):,.0f}"

    return {
        "completed": f"{results['completed']} of {results['num_prompts']}",
        "output tokens/s": f"{results['output_throughput'] or 0:.1f}",
        "TTFT p50 / p99, ms": two(ttft),
        "E2EL p50 / p99, ms": two(e2el),
    }
