"""The result of a run as one JSON object.

Knows its layout: vLLM's keys for the whole run at the top, the same for each arm under `arms`, then
what vLLM has no word for. Does not know how anything was measured.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwire_client.bench.arms import Arm
from draftwire_client.bench.compare import compare
from draftwire_client.bench.counters import Agreement
from draftwire_client.bench.datasets import Sample, distinct
from draftwire_client.bench.faults import ACTIONS, Event
from draftwire_client.bench.limits import judge
from draftwire_client.bench.measure import Record
from draftwire_client.bench.runner import LoopHealth
from draftwire_client.bench.settings import Settings
from draftwire_client.bench.summary import block_sizes, per, summarise
from draftwire_client.bench.watch import Reading
from draftwire_client.info import Info

_DIFFERENCES_SHOWN = 20


@dataclass(slots=True)
class Evidence:
    """All that was seen besides the requests themselves."""

    arms: Sequence[Arm]
    samples: Sequence[Sample]
    info: Info | None = None
    started_at: float = field(default_factory=time.time)
    agreement: Agreement | None = None
    health: list[LoopHealth] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    energy: dict[str, Any] = field(
        default_factory=lambda: {"energy_j": None, "energy_per_token_j": None, "energy_note": ""}
    )


def make_results(
    settings: Settings, records: Sequence[Record], evidence: Evidence
) -> dict[str, Any]:
    """The whole object, constraints judged."""
    ends = [r.ended for r in records if r.ended is not None]
    duration = max(ends, default=0.0)
    names = [arm.name for arm in evidence.arms]

    def figures(part: Sequence[Record]) -> dict[str, Any]:
        percentiles, goodput = settings.reporting.percentiles, settings.goodput
        return summarise(part, duration=duration, percentiles=percentiles, goodput=goodput)

    found = _heading(settings, evidence) | figures(records) | evidence.energy
    found["offered_rate"] = None if settings.timing.closed else _offered_rate(records)
    troubles = [text for health in evidence.health for text in health.troubles]
    found["client_bottleneck"] = int(bool(troubles))
    found["client"] = {
        "troubles": troubles,
        "loops": [dataclasses.asdict(health) for health in evidence.health],
    }
    found["arms"] = {
        name: figures([r for r in records if r.arm == name])
        | {"block_sizes": block_sizes(r.acceptance for r in records if r.arm == name)}
        for name in names
    }
    different = _compare(found, settings, records, names)
    found["different_tokens"] = different
    if evidence.agreement is not None:
        found["counters"] = evidence.agreement.keys()
    found["events"] = [dataclasses.asdict(event) for event in evidence.events]
    found["readings"] = [dataclasses.asdict(reading) for reading in evidence.readings]
    if settings.reporting.save_detailed:
        found |= _detailed(records)
    found["errors_by_text"] = _counts(r.error for r in records if r.error)
    verdicts = judge(settings.constraints, found)
    found["constraints"] = [dataclasses.asdict(verdict) for verdict in verdicts]
    found["failures"] = _failures(settings, found, evidence)
    finite: dict[str, Any] = _finite(found)
    return finite


def empty_results(settings: Settings, arms: Sequence[Arm]) -> dict[str, Any]:
    """The result of no requests: every key that a constraint may name."""
    unjudged = dataclasses.replace(settings, constraints=())
    return make_results(unjudged, [], Evidence(arms=arms, samples=()))


def _heading(settings: Settings, evidence: Evidence) -> dict[str, Any]:
    timing, data, info = settings.timing, settings.data, evidence.info
    date = datetime.datetime.fromtimestamp(evidence.started_at, datetime.UTC)
    return {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "backend": "draftwire",
        "endpoint_type": "draftwire",
        "label": settings.reporting.label,
        "model_id": info.model.name if info else None,
        "tokenizer_id": info.model.name if info else None,
        "draftwire_version": _package_version(),
        "server_version": info.package_version if info else None,
        "server_config": dict(info.config) if info else {},
        "request_rate": timing.rate,
        "burstiness": timing.burstiness,
        "max_concurrency": timing.max_concurrency,
        **(
            {
                "ramp_up_strategy": timing.ramp.strategy,
                "ramp_up_start_rps": timing.ramp.start,
                "ramp_up_end_rps": timing.ramp.end,
            }
            if timing.ramp
            else {}
        ),
        "load": "closed" if timing.closed else "open",
        "workers": settings.workers,
        "seed": settings.seed,
        "dataset_name": data.name,
        "dataset_file": data.path.name if data.path else None,
        "time_scale": timing.time_scale if data.name == "azure" else None,
        "distinct_prompts": distinct(evidence.samples),
        "clipped_prompts": sum(sample.clipped for sample in evidence.samples),
        "sampling": {k: v for k, v in settings.sampling.items() if v is not None},
        "goodput": dict(settings.goodput),
        **settings.reporting.metadata,
    }


def _offered_rate(records: Sequence[Record]) -> float | None:
    """Requests/s by the scheduled times: n gaps, the first from the start."""
    return per(len(records), max((r.scheduled for r in records), default=0.0))


def _compare(
    found: dict[str, Any], settings: Settings, records: Sequence[Record], names: Sequence[str]
) -> int:
    """Add every arm's comparison to its figures; how many answers differ."""
    different = 0
    found["baseline"] = names[0]
    found["differences"] = []
    for comparison in compare(records, names, seed=settings.seed):
        found["arms"][comparison.arm] |= comparison.keys()
        different += comparison.compared - comparison.same
        found["differences"] += [
            dataclasses.asdict(item) for item in comparison.differences[:_DIFFERENCES_SHOWN]
        ]
    return different


def _detailed(records: Sequence[Record]) -> dict[str, Any]:
    """vLLM's lists, one entry a request, in seconds."""
    return {
        "input_lens": [r.input_len for r in records],
        "output_lens": [r.output_len for r in records],
        "start_times": [r.sent for r in records],
        "scheduled_times": [r.scheduled for r in records],
        "ttfts": [r.ttft for r in records],
        "itls": [r.itls() for r in records],
        "arms_of_requests": [r.arm for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error for r in records],
    }


def _failures(
    settings: Settings, found: dict[str, Any], evidence: Evidence
) -> list[dict[str, str]]:
    """Why the run is no success: `kind` is requests, counters, tokens, faults or constraint."""
    failures = []
    # A constraint on the failures takes the place of "none".
    if found["failed"] and not any(c.key == "failed" for c in settings.constraints):
        failures.append({"kind": "requests", "text": f"{found['failed']} requests failed"})
    agreement = evidence.agreement
    if settings.check_counters and evidence.info is not None:
        if agreement is None:
            text = "the server did not tell its counters after the run"
            failures.append({"kind": "counters", "text": text})
        elif not agreement.agree:
            text = "; ".join(agreement.differences)
            failures.append({"kind": "counters", "text": f"acceptance disagrees: {text}"})
    if settings.check_equal and found["different_tokens"]:
        count = found["different_tokens"]
        failures.append({"kind": "tokens", "text": f"{count} answers differ between arms"})
    acted = sum(event.name in ACTIONS for event in evidence.events)
    if evidence.info is not None and acted < len(settings.faults):
        count = len(settings.faults) - acted
        text = f"{count} fault(s) not reached: the run ended after {found['duration']:.1f} s"
        failures.append({"kind": "faults", "text": text})
    for verdict in found["constraints"]:
        if not verdict["met"]:
            value = "nothing measured" if verdict["value"] is None else f"{verdict['value']:.6g}"
            failures.append({"kind": "constraint", "text": f"{verdict['text']}: {value}"})
    return failures


def _finite(value: Any) -> Any:
    """The same with what JSON has: None for not a number, "inf" as vLLM writes it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _counts(texts: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for text in texts:
        found[text] = found.get(text, 0) + 1
    return found


def _package_version() -> str:
    try:
        return importlib.metadata.version("draftwire")
    except importlib.metadata.PackageNotFoundError:  # run from the source tree
        return "unknown"
