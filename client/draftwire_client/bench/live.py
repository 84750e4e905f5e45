"""Progress on the terminal while load runs.

Knows rich, which is imported only here and in `table`. Writes to stderr; where that is no terminal,
only notes and events are written, a line each.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

from draftwire_client.bench.faults import Event
from draftwire_client.bench.measure import Record
from draftwire_client.bench.session import Watched
from draftwire_client.bench.stats import percentile

_RECENT = 200


class _Counts:
    """What the line shows."""

    def __init__(self) -> None:
        self.running = self.done = self.failed = self.tokens = 0
        self.latest = 0.0
        self.waits: deque[float] = deque(maxlen=_RECENT)

    def told(self, what: str, record: Record) -> None:
        if what == "started":
            self.running += 1
            return
        self.running -= 1
        self.done += record.ok
        self.failed += not record.ok
        self.tokens += record.output_len
        self.latest = max(self.latest, record.ended or 0.0)
        if record.ttft is not None:
            self.waits.append(record.ttft * 1000)

    def line(self) -> str:
        rate = self.tokens / self.latest if self.latest > 0 else 0.0
        parts = [f"{self.running} in flight", f"{rate:.1f} tokens/s"]
        if self.waits:
            parts.append(f"TTFT p50 {percentile(sorted(self.waits), 50):.0f} ms")
        if self.failed:
            parts.append(f"{self.failed} failed")
        return ", ".join(parts)


@contextlib.contextmanager
def live(*, quiet: bool) -> Iterator[Watched]:
    """What `session.run` tells to; nothing is shown if `quiet`."""
    if quiet:
        yield Watched()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    progress = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        disable=not console.is_terminal,
    )
    counts = _Counts()
    with progress:
        task = progress.add_task("", total=None, start=False)

        def planned(count: int) -> None:
            progress.reset(task, total=count)

        def told(what: str, record: Record) -> None:
            counts.told(what, record)
            done = counts.done + counts.failed
            progress.update(task, completed=done, description=counts.line())

        def event(item: Event) -> None:
            console.print(f"{item.at:8.2f} s  {item.name} {item.detail}".rstrip(), highlight=False)

        yield Watched(
            note=lambda text: console.print(text, highlight=False),
            planned=planned,
            told=told,
            event=event,
        )
