"""`draftwire bench`: flags, where results go, and the exit code.

Knows vLLM's flag names and what each becomes. What a run does is `session`.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import click

from draftwire.tether import leaving_on_sigterm
from draftwire_client.bench.arms import parse_arms
from draftwire_client.bench.arrivals import Ramp
from draftwire_client.bench.faults import parse_faults
from draftwire_client.bench.flags import ManyValues, bench_options
from draftwire_client.bench.limits import parse_constraints, parse_goodput
from draftwire_client.bench.plan import Timing
from draftwire_client.bench.settings import Data, Reporting, Settings
from draftwire_client.bench.summary import METRICS
from draftwire_client.cli.failures import BadUsage, Failure, RequestFailed
from draftwire_client.cli.options import connect_arguments, connection_options
from draftwire_client.errors import DraftwireError, InvalidArgument, describe

CONSTRAINT_NOT_MET = 5
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)


class ConstraintNotMet(Failure):
    """A --require does not hold."""

    exit_code = CONSTRAINT_NOT_MET


@click.command(cls=ManyValues)
@bench_options
@connection_options
def bench(**options: Any) -> None:
    """Load a verifier and measure it.

    Open loop by default: every request has its time before the run, and latency counts from it.

    \b
    Exit codes:
      0    done, all checks hold
      1    requests failed, counters disagree, or arms differ in tokens
      2    bad usage
      3    no connection
      5    a --require does not hold
      130  interrupted
      143  ended by SIGTERM
    """
    try:
        settings = read_settings(options)
    except DraftwireError as error:
        raise BadUsage(describe(error)) from error
    reporting = settings.reporting
    # Loaded here, so that the rest of the command does not pay for it.
    from draftwire_client.bench import table
    from draftwire_client.bench.live import live
    from draftwire_client.bench.saving import prepare, save
    from draftwire_client.bench.session import run

    # Ended by SIGTERM it leaves as by Ctrl-C: the drafter that it started is its own to stop.
    with live(quiet=reporting.quiet) as shown, leaving_on_sigterm():
        try:
            if reporting.save_result:
                prepare(reporting)
            outcome = asyncio.run(run(settings, shown))
        except InvalidArgument as error:
            # Flags are named as they are typed; fields of a request are the server's to refuse.
            if str(error.metadata.get("field", "")).startswith("--"):
                raise BadUsage(describe(error)) from error
            raise
    results = outcome.results
    saved = save(outcome, reporting) if reporting.save_result else []
    if reporting.json:
        click.echo(json.dumps(results, ensure_ascii=False, allow_nan=False))
    else:
        table.show(results, reporting.shown, reporting.percentiles)
        for path in saved:
            click.echo(f"written: {path}")
    failures = results["failures"]
    if any(failure["kind"] != "constraint" for failure in failures):
        raise RequestFailed("; ".join(failure["text"] for failure in failures))
    if failures:
        raise ConstraintNotMet("not met: " + "; ".join(failure["text"] for failure in failures))


def read_settings(options: dict[str, Any]) -> Settings:
    """The flags as Settings. Raises InvalidArgument."""
    connect = connect_arguments(options)
    arms = parse_arms(options["arms"])
    strategy = options["ramp_up_strategy"]
    ends = (options["ramp_up_start_rps"], options["ramp_up_end_rps"])
    if (strategy is None) != (None in ends) or (strategy is None and any(ends)):
        raise InvalidArgument("--ramp-up-strategy", strategy, "given with both of its rates")
    shown = tuple(_words("--percentile-metrics", options["percentile_metrics"], METRICS))
    command, pid = options["drafter_command"], options["drafter_pid"]
    if command is not None and pid is not None:
        raise InvalidArgument("--drafter-pid", pid, "left out with --drafter-command")
    data = {name: options[name] for name in _DATA_FIELDS}
    return Settings(
        connect=connect,
        data=Data(
            name=options["dataset_name"],
            shuffle=not options["disable_shuffle"],
            chat=not options["skip_chat_template"],
            **data,
        ),
        arms=arms,
        timing=Timing(
            rate=options["request_rate"],
            burstiness=options["burstiness"],
            ramp=Ramp(strategy, *ends) if strategy is not None else None,
            max_concurrency=options["max_concurrency"],
            time_scale=options["time_scale"],
        ),
        sampling={name: options[name] for name in _SAMPLING},
        reporting=Reporting(
            percentiles=_percentiles(options["metric_percentiles"]),
            shown=shown,
            json=options["as_json"],
            metadata=dict(_pair(item) for item in options["metadata"]),
            **{name: options[name] for name in _REPORTING_FIELDS},
        ),
        goodput=parse_goodput(options["goodput"]),
        constraints=parse_constraints(options["require"], (arm.name for arm in arms)),
        faults=parse_faults(options["fault"], owned=command is not None, known=pid is not None),
        **{name: options[name] for name in _SETTINGS_FIELDS},
    )


_DATA_FIELDS = (
    "path",
    "num_prompts",
    "output_len",
    "input_len",
    "range_ratio",
    "oversample",
    "input_scale",
    "output_scale",
    "max_input_len",
    "max_output_len",
)
_REPORTING_FIELDS = (
    "quiet",
    "save_result",
    "save_detailed",
    "request_log",
    "html",
    "folder",
    "filename",
    "label",
)
_SETTINGS_FIELDS = (
    "seed",
    "num_warmups",
    "workers",
    "check_counters",
    "check_equal",
    "skip_refused_arms",
    "poll_s",
    "drafter_command",
    "drafter_pid",
    "drafter_log",
)


def _words(flag: str, text: str, known: tuple[str, ...]) -> list[str]:
    found = text.replace(",", " ").split()
    for word in found:
        if word not in known:
            raise InvalidArgument(flag, word, f"of {', '.join(known)}")
    return found


def _percentiles(text: str) -> tuple[float, ...]:
    found = []
    for word in text.replace(",", " ").split():
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 100:
            raise InvalidArgument("--metric-percentiles", word, "numbers from 0 to 100")
        found.append(value)
    return tuple(sorted(set(found)))


def _pair(item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not (key and equals):
        raise InvalidArgument("--metadata", item, "KEY=VALUE")
    return key, value
