"""`draftwire top`: a verifier at work, interval by interval."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from draftwire_client.cli import output, panels
from draftwire_client.cli.failures import BadUsage
from draftwire_client.cli.monitor import Sample, difference
from draftwire_client.cli.options import connection_options, open_client
from draftwire_client.client import Client
from draftwire_client.errors import DraftwireError, describe
from draftwire_client.info import Info

Reading = tuple[Info, Sample] | DraftwireError


@click.command()
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05, max=86400.0),
    default=2.0,
    show_default=True,
    help="Seconds between readings.",
)
@click.option("--once", is_flag=True, help="Show one interval and end.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each interval.")
@connection_options
def top(interval: float, once: bool, as_json: bool, **options: Any) -> None:
    """Watch sessions, queue, tokens/s, acceptance, block sizes, drafters and GPUs.

    Ctrl-C leaves, with exit code 0. A server that is lost meanwhile is waited for; one that is not
    there at the start, or with --once, is exit code 3. Rates are of the interval.
    """
    with (
        open_client(options) as client,
        output.errors(as_json),
        contextlib.suppress(KeyboardInterrupt),
    ):
        if not math.isfinite(interval):  # FloatRange lets nan through
            raise BadUsage("--interval takes a finite number of seconds")
        readings = watch(client, interval, options["timeout"])
        if once:
            reading = next(readings)
            if isinstance(reading, DraftwireError):
                raise reading
            _printer(as_json)(reading)
        elif as_json or not Console().is_terminal:
            for reading in readings:
                _printer(as_json)(reading)
        else:
            _live(readings)


def watch(client: Client, interval: float, timeout: float | None) -> Iterator[Reading]:
    """A reading each interval, endlessly: what happened in it, or why it is not known.

    Raises DraftwireError if the first, from which the others are counted, fails.
    """
    before, at = client.info(timeout=timeout), time.monotonic()
    tick = at
    while True:
        tick = max(tick + interval, time.monotonic())
        time.sleep(max(0.0, tick - time.monotonic()))
        try:
            after, now = client.info(timeout=timeout), time.monotonic()
        except DraftwireError as error:
            yield error
        else:
            yield after, difference(before, after, now - at)
            before, at = after, now


def _printer(as_json: bool) -> Callable[[Reading], None]:
    return _print_json if as_json else _print_text


def _print_json(reading: Reading) -> None:
    if isinstance(reading, DraftwireError):
        output.say(output.to_json({"event": "error", **output.error_object(reading)}))
    else:
        output.say(
            output.to_json({"event": "sample", "time": time.time(), **output.plain(reading[1])})
        )


def _print_text(reading: Reading) -> None:
    if isinstance(reading, DraftwireError):
        output.note(describe(reading))
    else:
        Console().print(panels.view(*reading))


def _live(readings: Iterator[Reading]) -> None:
    last: tuple[Info, Sample] | None = None
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        for reading in readings:
            trouble = ""
            if isinstance(reading, DraftwireError):
                trouble = describe(reading)
            else:
                last = reading
            live.update(panels.view(*last, trouble) if last else trouble, refresh=True)
