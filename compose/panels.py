"""The dashboard's panels: which queries show what. `generate` makes Grafana's JSON of them, tests
send every query to a real Prometheus.

Queries have Grafana's variables: `$__rate_interval` and `$instance`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_V, _D = "draftwire_verifier_", "draftwire_drafter_"
_SPEC = "draftwire_spec_decode_"
_AT = '{instance=~"$instance"}'


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: queries as (PromQL, legend). `gpu`: empty where there is none."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    width: int = 8
    stacked: bool = False
    gpu: bool = False


def _rate(metric: str, *by: str, **equal: str) -> str:
    labels = ",".join(['instance=~"$instance"', *(f'{k}="{v}"' for k, v in equal.items())])
    total = f"sum by ({', '.join(by)})" if by else "sum"
    return f"{total} (rate({metric}{{{labels}}}[$__rate_interval]))"


def _share(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def _mean(histogram: str, *by: str) -> str:
    return _share(_rate(f"{histogram}_sum", *by), _rate(f"{histogram}_count", *by))


def _quantiles(histogram: str, *quantiles: float) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({q}, {_rate(f'{histogram}_bucket', 'le')})", f"p{round(100 * q)}")
        for q in quantiles
    )


def _gauge(metric: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) ({metric}{_AT})" if by else f"sum ({metric}{_AT})"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Service": (
        Panel("Tokens", "tokens/s", ((_rate(f"{_V}generated_tokens_total"), "generated"),)),
        Panel(
            "Mean acceptance length",
            "none",
            (
                (
                    f"1 + {_rate(f'{_SPEC}num_accepted_tokens_total')}"
                    f" / {_rate(f'{_SPEC}num_drafts_total')}",
                    "tokens a round with proposal",
                ),
            ),
        ),
        Panel(
            "Requests",
            "none",
            (
                (_gauge(f"{_V}requests_running"), "running"),
                (_gauge(f"{_V}requests_waiting"), "waiting"),
            ),
        ),
        Panel(
            "Time to first token",
            "s",
            _quantiles(f"{_V}time_to_first_token_seconds", 0.5, 0.95, 0.99),
        ),
        Panel("Time per token", "s", _quantiles(f"{_V}time_per_token_seconds", 0.5, 0.95)),
        Panel("Queue time", "s", _quantiles(f"{_V}queue_seconds", 0.5, 0.95)),
        Panel(
            "Requests ended",
            "reqps",
            ((_rate(f"{_V}requests_total", "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Requests refused",
            "reqps",
            ((_rate(f"{_V}requests_refused_total", "reason"), "{{reason}}"),),
        ),
        Panel("KV pages", "none", ((_gauge(f"{_V}kv_pages", "state"), "{{state}}"),), stacked=True),
    ),
    "Speculation": (
        Panel(
            "Acceptance by position",
            "percentunit",
            (
                (
                    _share(
                        _rate(f"{_SPEC}num_accepted_tokens_per_pos_total", "position"),
                        _rate(f"{_SPEC}num_drafted_per_pos_total", "position"),
                    ),
                    "{{position}}",
                ),
            ),
        ),
        Panel(
            "Accepted tokens a round, by temperature",
            "none",
            (
                (
                    _share(
                        _rate(f"{_SPEC}accepted_by_request_total", "temperature"),
                        _rate(f"{_SPEC}drafts_by_request_total", "temperature"),
                    ),
                    "{{temperature}}",
                ),
            ),
        ),
        Panel(
            "Accepted tokens a round, by offset in the answer",
            "none",
            (
                (
                    _share(
                        _rate(f"{_SPEC}accepted_by_request_total", "offset"),
                        _rate(f"{_SPEC}drafts_by_request_total", "offset"),
                    ),
                    "{{offset}}",
                ),
            ),
        ),
        Panel(
            "Rounds by reason of their block size",
            "ops",
            ((_rate(f"{_V}block_size_count", "reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel("Mean block size", "none", ((_mean(f"{_V}block_size"), "all rounds"),)),
        Panel(
            "Fallbacks to plain rounds",
            "ops",
            ((_rate(f"{_V}fallback_rounds_total", "reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Accepted tokens by part",
            "tokens/s",
            ((_rate(f"{_SPEC}accepted_tokens_by_part_total", "part"), "{{part}}"),),
            stacked=True,
        ),
        Panel(
            "Drafted tokens",
            "tokens/s",
            (
                (_rate(f"{_SPEC}num_draft_tokens_total"), "drafted"),
                (_rate(f"{_SPEC}num_accepted_tokens_total"), "accepted"),
                (_rate(f"{_SPEC}num_discarded_tokens_total"), "discarded"),
            ),
        ),
        Panel(
            "What went other than planned",
            "ops",
            tuple(
                (_rate(f"{_V}{name}_total"), name.replace("_", " "))
                for name in (
                    *("late_proposals", "stale_proposals", "malformed_proposals"),
                    *("sessions_reopened", "lane_losses", "preemptions", "nonfinite_rows"),
                )
            ),
        ),
    ),
    "Rounds": (
        Panel(
            "Where a step's time goes",
            "s",
            (
                (
                    _share(
                        _rate(f"{_V}round_seconds_sum", "phase"),
                        f"scalar({_rate(f'{_V}steps_total')})",
                    ),
                    "{{phase}}",
                ),
            ),
            stacked=True,
        ),
        Panel("Steps", "ops", ((_rate(f"{_V}steps_total"), "steps"),)),
        Panel(
            "Batch of a step",
            "none",
            ((_mean(f"{_V}step_rows"), "rows"), (_mean(f"{_V}step_sessions"), "sessions")),
        ),
    ),
    "Drafters": (
        Panel(
            "Lanes by state", "none", ((_gauge(f"{_V}lanes", "state"), "{{state}}"),), stacked=True
        ),
        Panel("Lane round trip", "s", _quantiles(f"{_V}lane_round_trip_seconds", 0.5, 0.95, 0.99)),
        Panel(
            "Sessions",
            "none",
            ((_gauge(f"{_D}sessions"), "open"), (_gauge(f"{_D}sessions_limit"), "limit")),
        ),
        Panel(
            "Time of the drafting loop",
            "percentunit",
            ((_rate(f"{_D}step_seconds_sum", "stage"), "{{stage}}"),),
            stacked=True,
        ),
        Panel(
            "Proposals",
            "ops",
            (
                (_rate(f"{_D}proposals_total"), "proposals"),
                (_rate(f"{_D}empty_proposals_total"), "empty"),
            ),
        ),
        Panel(
            "Cache rows", "none", ((_gauge(f"{_D}cache_rows", "state"), "{{state}}"),), stacked=True
        ),
        Panel(
            "Bytes by carrier",
            "Bps",
            ((_rate("draftwire_carrier_bytes_total", "job", "carrier"), "{{job}} {{carrier}}"),),
        ),
        Panel("Session faults", "ops", ((_rate(f"{_V}session_faults_total", "kind"), "{{kind}}"),)),
        Panel("Batch of a draft", "none", ((_mean(f"{_D}step_sessions"), "sessions"),)),
    ),
    "Calls and processes": (
        Panel(
            "Calls by status",
            "reqps",
            ((_rate("draftwire_rpc_handled_total", "method", "code"), "{{method}} {{code}}"),),
        ),
        Panel("Open calls", "none", ((_gauge("draftwire_rpc_open", "method"), "{{method}}"),)),
        Panel(
            "Processor time",
            "percentunit",
            ((_rate("process_cpu_seconds_total", "job", "instance"), "{{job}} {{instance}}"),),
        ),
        Panel(
            "Resident memory",
            "bytes",
            ((_gauge("process_resident_memory_bytes", "job", "instance"), "{{job}} {{instance}}"),),
        ),
        Panel(
            "Serving",
            "none",
            ((_gauge("draftwire_serving", "job", "instance"), "{{job}} {{instance}}"),),
        ),
        Panel(
            "GPU utilisation",
            "percentunit",
            (
                (
                    _gauge("draftwire_gpu_utilization_ratio", "instance", "gpu"),
                    "{{instance}} {{gpu}}",
                ),
            ),
            gpu=True,
        ),
        Panel(
            "GPU memory",
            "bytes",
            (
                (
                    _gauge("draftwire_gpu_memory_bytes", "instance", "gpu", "state"),
                    "{{instance}} {{gpu}} {{state}}",
                ),
            ),
            gpu=True,
        ),
        Panel(
            "GPU power",
            "watt",
            ((_gauge("draftwire_gpu_power_watts", "instance", "gpu"), "{{instance}} {{gpu}}"),),
            gpu=True,
        ),
        Panel(
            "Energy per token",
            "joule",
            (
                (
                    _share(
                        _rate("draftwire_gpu_energy_joules_total"),
                        _rate(f"{_V}generated_tokens_total"),
                    ),
                    "all GPUs shown",
                ),
            ),
            gpu=True,
        ),
    ),
}


def panels() -> Iterator[Panel]:
    """All of them, in order."""
    for row in ROWS.values():
        yield from row
