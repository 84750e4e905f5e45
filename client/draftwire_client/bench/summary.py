"""Records to figures, under the keys that `vllm bench serve` writes.

Knows which key is which figure and its unit: `_ms` milliseconds, throughputs a second, duration in
seconds, `spec_decode_acceptance_rate` percent. A figure that nothing was measured for is None.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from draftwire_client.bench.measure import Record
from draftwire_client.bench.stats import deviation, mean, percentile
from draftwire_client.types import Acceptance

METRICS = ("ttft", "tpot", "itl", "chunk_gap", "e2el", "queue")
_PER_REQUEST: Mapping[str, Callable[[Record], float | None]] = {
    "ttft": lambda r: r.ttft,
    "tpot": lambda r: r.tpot,
    "e2el": lambda r: r.e2el,
    "queue": lambda r: r.queue,
}
_PER_CHUNK: Mapping[str, Callable[[Record], list[float]]] = {
    "itl": lambda r: r.itls(),
    "chunk_gap": lambda r: r.gaps(),
}
SLO_METRICS = tuple(_PER_REQUEST)


def values(records: Iterable[Record], metric: str) -> list[float]:
    """Milliseconds of a metric over the complete answers, in no order.

    Queue time is over every request that was sent.
    """
    if metric in _PER_CHUNK:
        return [v * 1000 for r in records if r.ok for v in _PER_CHUNK[metric](r)]
    read = _PER_REQUEST[metric]
    chosen = (r for r in records if r.ok or metric == "queue")
    return [value * 1000 for r in chosen if (value := read(r)) is not None]


def percentile_key(percent: float) -> str:
    """`p99` for 99, `p99.9` for 99.9."""
    return f"p{percent:g}"


def summarise(
    records: Sequence[Record],
    *,
    duration: float,
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """Figures of the records of one run, or of one arm of it; `goodput` has limits in ms."""
    done = [r for r in records if r.ok]
    made = sum(r.output_len for r in done)
    read = sum(r.input_len for r in done)
    good = sum(meets(r, goodput) for r in done) if goodput else None
    found: dict[str, Any] = {
        "num_prompts": len(records),
        "completed": len(done),
        "failed": len(records) - len(done),
        "duration": duration,
        "total_input_tokens": read,
        "total_output_tokens": made,
        "total_cached_tokens": sum(r.cached_tokens for r in done),
        "request_throughput": per(len(done), duration),
        "request_goodput": None if good is None else per(good, duration),
        "goodput_share": None if good is None else per(good, len(records)),
        "output_throughput": per(made, duration),
        "total_token_throughput": per(made + read, duration),
        "max_output_tokens_per_s": peak_tokens(done),
        "max_concurrent_requests": most_at_once(records),
        "retries": sum(r.attempts - 1 for r in records),
    }
    for metric in METRICS:
        ordered = sorted(values(records, metric))
        found[f"mean_{metric}_ms"] = number(mean(ordered))
        found[f"median_{metric}_ms"] = number(percentile(ordered, 50))
        found[f"std_{metric}_ms"] = number(deviation(ordered))
        for percent in percentiles:
            key = f"{percentile_key(percent)}_{metric}_ms"
            found[key] = number(percentile(ordered, percent))
    found.update(acceptance_keys(total(r.acceptance for r in records)))
    return found


def meets(record: Record, limits: Mapping[str, float]) -> bool:
    """Whether a complete answer keeps every limit (ms). A metric it does not have is kept."""
    measured = ((_PER_REQUEST[name](record), limit) for name, limit in limits.items())
    return all(value is None or value * 1000 <= limit for value, limit in measured)


def total(parts: Iterable[Acceptance | None]) -> Acceptance:
    """Statistics of several answers as one; block sizes by size and reason."""
    found = [part for part in parts if part is not None]
    rounds, accepted = sum(a.rounds for a in found), sum(a.accepted for a in found)
    return Acceptance(
        rounds=rounds,
        plain_rounds=sum(a.plain_rounds for a in found),
        drafted=sum(a.drafted for a in found),
        accepted=accepted,
        rejected=sum(a.rejected for a in found),
        discarded=sum(a.discarded for a in found),
        accepted_per_position=columns(a.accepted_per_position for a in found),
        drafted_per_position=columns(a.drafted_per_position for a in found),
        mean_acceptance_length=1 + accepted / rounds if rounds else 0.0,
        stale_proposals=sum(a.stale_proposals for a in found),
        reopened=sum(a.reopened for a in found),
    )


def block_sizes(parts: Iterable[Acceptance | None]) -> list[dict[str, Any]]:
    """Rounds by block size and reason."""
    counted: Counter[tuple[int, str]] = Counter()
    for part in parts:
        for item in part.block_sizes if part else ():
            counted[item.block_size, str(item.reason)] += item.rounds
    return [
        {"block_size": size, "reason": reason, "rounds": rounds}
        for (size, reason), rounds in sorted(counted.items())
    ]


def acceptance_keys(stats: Acceptance) -> dict[str, Any]:
    """vLLM's keys, and ours for what it does not count.

    Per position: accepted tokens over rounds, as in vLLM; `…_where_offered` over the rounds that
    had a token at that depth.
    """
    rounds, drafted = stats.rounds, stats.drafted
    return {
        "spec_decode_num_drafts": rounds,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": stats.accepted,
        "spec_decode_acceptance_rate": 100 * stats.accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": stats.mean_acceptance_length if rounds else None,
        "spec_decode_per_position_acceptance_rates": [
            accepted / rounds for accepted in stats.accepted_per_position
        ]
        if rounds
        else [],
        "per_position_rates_where_offered": list(stats.rate_per_position),
        "plain_rounds": stats.plain_rounds,
        "rejected_tokens": stats.rejected,
        "discarded_tokens": stats.discarded,
        "stale_proposals": stats.stale_proposals,
        "reopened": stats.reopened,
    }


def peak_tokens(records: Iterable[Record]) -> float:
    """Most tokens that arrived in one second of the run."""
    seconds: Counter[int] = Counter()
    for record in records:
        for moment, tokens in zip(record.chunk_times, record.chunk_tokens, strict=True):
            seconds[math.floor(moment)] += tokens
    return float(max(seconds.values(), default=0))


def most_at_once(records: Iterable[Record]) -> int:
    """Most requests that were under way at the same time."""
    steps = []
    for record in records:
        if record.sent is not None and record.ended is not None:
            steps += [(record.sent, 1), (record.ended, -1)]
    most = now = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


def columns(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Sums by place of rows of different lengths."""
    found: list[int] = []
    for row in rows:
        found += [0] * (len(row) - len(found))
        for place, value in enumerate(row):
            found[place] += value
    return tuple(found)


def per(amount: float, of: float) -> float | None:
    """amount / of; None without anything to divide by."""
    return amount / of if of > 0 else None


def number(value: float) -> float | None:
    """None for what is not a finite number, as JSON wants it."""
    return value if math.isfinite(value) else None
