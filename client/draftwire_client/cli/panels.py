"""A Sample as something rich can draw.

Knows tables and bars. What a server says goes through `printable`, and never through rich's markup:
neither can move the cursor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftwire.logs import printable
from draftwire_client.cli.monitor import Sample
from draftwire_client.info import DeviceInfo, Info, LaneInfo

_BAR = 20
_GIB = 1 << 30
_STATES = {"ready": "green", "draining": "yellow", "connecting": "yellow"}


def view(info: Info, sample: Sample, trouble: str = "") -> RenderableType:
    """Everything `top` shows; `trouble` is why it is not new."""
    parts: list[RenderableType] = [_head(info, sample), _load(sample)]
    if trouble:
        parts.insert(1, Text(printable(trouble), style="bold red"))
    shares = _positions(sample), _sizes(sample)
    parts.append(Columns([table for table in shares if table is not None], padding=(0, 4)))
    parts.append(_lanes(sample.lanes))
    if sample.devices:
        parts.append(_devices(sample.devices))
    return Group(*parts)


def _head(info: Info, sample: Sample) -> Text:
    model = info.model
    name = f"{model.name} ({model.dtype})" if model.name else "unknown target"
    state = "DRAINING" if sample.draining else f"up {sample.uptime_s:.0f} s"
    line = f"{name}  draftwire {info.package_version}  {state}  instance {sample.instance_id}"
    return Text(printable(line), style="bold")


def _load(sample: Sample) -> Table:
    table = _table("", "sessions", "queue", "tokens/s", "steps/s", "acceptance length", "KV pages")
    used = sample.total_pages - sample.free_pages
    _row(
        table,
        "now",
        str(sample.running),
        str(sample.waiting),
        f"{sample.tokens_per_s:.1f}",
        f"{sample.steps_per_s:.1f}",
        _number(sample.mean_acceptance_length),
        f"{used} of {sample.total_pages}",
    )
    mean = sample.total_tokens / sample.uptime_s if sample.uptime_s > 0 else 0.0
    length = _number(sample.total_mean_acceptance_length)
    _row(table, "since start", "", "", f"{mean:.1f}", "", length, "")
    return table


def _positions(sample: Sample) -> Table | None:
    if not sample.total_acceptance_per_position:
        return None
    table = _table("position", "accepted", "", "since start")
    rates = zip(sample.acceptance_per_position, sample.total_acceptance_per_position, strict=True)
    for position, (rate, total) in enumerate(rates, 1):
        _row(table, str(position), _number(rate), _bar(rate or 0.0), _number(total))
    return table


def _sizes(sample: Sample) -> Table | None:
    if not sample.total_block_sizes:
        return None
    table = _table("block", "steps", "", "since start")
    every = sum(sample.block_sizes.values()) or 1
    for size, total in sample.total_block_sizes.items():
        count = sample.block_sizes.get(size, 0)
        name = "plain" if size == 1 else str(size)
        _row(table, name, str(count), _bar(count / every), str(total))
    return table


def _lanes(lanes: Sequence[LaneInfo]) -> RenderableType:
    if not lanes:
        return Text("no drafters: decoding is plain", style="dim")
    table = _table("drafter", "state", "sessions", "block", "round trip", "model time", "lost", "")
    for lane in lanes:
        table.add_row(
            Text(printable(lane.target)),
            Text(str(lane.state), style=_STATES.get(lane.state, "red")),
            Text(str(lane.sessions)),
            Text(str(lane.block_size)),
            Text(f"{lane.round_trip_s * 1000:.1f} ms"),
            Text(f"{lane.model_time_s * 1000:.1f} ms"),
            Text(str(lane.losses)),
            Text(printable(lane.last_error), style="red"),
        )
    return table


def _devices(devices: Iterable[DeviceInfo]) -> Table:
    table = _table("GPU", "busy", "", "memory, GiB", "power")
    for device in devices:
        used, every = device.memory_used_bytes, device.memory_total_bytes
        memory = "-" if used is None or not every else f"{used / _GIB:.1f} of {every / _GIB:.1f}"
        busy = device.utilization
        power = "-" if device.power_watts is None else f"{device.power_watts:.0f} W"
        share = "-" if busy is None else f"{busy:.0%}"
        _row(table, str(device.index), share, _bar(busy or 0.0), memory, power)
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name)
    return table


def _row(table: Table, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in cells))


def _bar(share: float) -> str:
    return "█" * round(_BAR * min(1.0, max(0.0, share)))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
