"""`draftwire health` and `draftwire info`: how a verifier is and what it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from draftwire_client.cli import output
from draftwire_client.cli.failures import NOT_SERVING, NoConnection
from draftwire_client.cli.options import connection_options, open_client
from draftwire_client.enums import HealthStatus
from draftwire_client.errors import DeadlineExceeded, describe
from draftwire_client.info import Info, LaneInfo


@click.command()
@click.option("--service", default="", help='Service asked for, as "draftwire.v1.Verifier".')
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@connection_options
def health(service: str, as_json: bool, **options: Any) -> None:
    """Exit 0 if the server (or --service) is SERVING, 4 if not, 3 if it cannot be reached.

    Fit for a container's health check; the standard gRPC health service is asked once.
    """
    with open_client(options) as client:
        try:
            with output.errors(as_json):
                status = client.health(service, timeout=options["timeout"])
        except DeadlineExceeded as error:
            raise NoConnection(describe(error)) from error
    word = status.name
    output.say(output.to_json({"service": service, "status": word}) if as_json else word)
    click.get_current_context().exit(0 if status is HealthStatus.SERVING else NOT_SERVING)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@connection_options
def info(as_json: bool, **options: Any) -> None:
    """Show the target model, load, drafter lanes, acceptance and configuration."""
    from draftwire.logs import printable  # needs more than the other commands do

    with open_client(options) as client, output.errors(as_json):
        found = client.info(timeout=options["timeout"])
    # What a server says must not move the cursor of who asked.
    lines = (printable(line) for line in info_lines(found))
    output.say(output.to_json(found) if as_json else "\n".join(lines))


def info_lines(info: Info) -> Iterator[str]:
    """Info for people."""
    model, load, totals = info.model, info.load, info.totals
    state = "draining" if info.draining else f"up {info.uptime_s:.0f} s"
    yield (
        f"verifier       draftwire {info.package_version}, protocol 1.{info.protocol_minor}, "
        f"{state}, instance {info.instance_id}"
    )
    yield (
        f"target         {model.name} ({model.dtype}): {model.num_layers} layers, "
        f"hidden {model.hidden_size}, vocabulary {model.vocab_size}, context {model.max_context}"
    )
    yield (
        f"load           {load.running} running, {load.waiting} waiting, "
        f"{load.free_pages} of {load.total_pages} pages free ({load.page_size} positions each)"
    )
    yield f"so far         {load.steps} steps, {load.tokens} tokens, {output.acceptance(totals)}"
    if totals.drafted_per_position:
        rates = " ".join(f"{rate:.2f}" for rate in totals.rate_per_position)
        yield f"by position    {rates}"
    if info.lanes:
        yield "lanes"
        yield from _table([_LANE_HEAD, *(_lane_row(lane) for lane in info.lanes)])
    else:
        yield "lanes          none: decoding is plain"
    yield from (
        f"               {lane.target}: {lane.last_error}" for lane in info.lanes if lane.last_error
    )
    for device in info.devices:
        busy = "-" if device.utilization is None else f"{device.utilization:.0%} busy"
        power = "" if device.power_watts is None else f", {device.power_watts:.0f} W"
        yield f"gpu {device.index:<10} {busy}{power}"
    if info.config:
        yield "configuration"
        yield from _table([(name, value) for name, value in sorted(info.config.items())])


_LANE_HEAD = ("TARGET", "STATE", "DRAFTER", "BLOCK", "SESSIONS", "ROUND TRIP", "MODEL", "LOST")


def _lane_row(lane: LaneInfo) -> tuple[str, ...]:
    return (
        lane.target,
        str(lane.state),
        (lane.drafter_name or "-") + ("" if lane.trained else " (random weights)"),
        str(lane.block_size),
        str(lane.sessions),
        f"{lane.round_trip_s * 1000:.2f} ms",
        f"{lane.model_time_s * 1000:.2f} ms",
        str(lane.losses),
    )


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()
