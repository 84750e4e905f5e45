"""Two readings of a verifier become what happened in between.

Knows counters and rates. Pure: the readings and the time between them are given.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest

from draftwire_client.info import DeviceInfo, Info, LaneInfo
from draftwire_client.types import Acceptance

_NOTHING = Acceptance()


@dataclass(frozen=True, slots=True)
class Sample:
    """A verifier over one interval. Rates are of the interval, `total_*` since the server began.

    Acceptance is None where nothing was drafted; positions count from the first drafted one.
    `block_sizes` are target steps of a session by block size, anchor included; 1 is a plain one.
    """

    instance_id: str
    uptime_s: float
    interval_s: float
    draining: bool
    running: int
    waiting: int
    free_pages: int
    total_pages: int
    tokens_per_s: float
    steps_per_s: float
    mean_acceptance_length: float | None
    acceptance_per_position: tuple[float | None, ...]
    block_sizes: dict[int, int]
    total_tokens: int
    total_mean_acceptance_length: float | None
    total_acceptance_per_position: tuple[float | None, ...]
    total_block_sizes: dict[int, int]
    lanes: tuple[LaneInfo, ...]
    devices: tuple[DeviceInfo, ...]


def difference(before: Info | None, after: Info, elapsed_s: float) -> Sample:
    """What happened in the `elapsed_s` seconds between two readings.

    Without the first, or where it is of another process (the server was restarted, or the target
    is several), it is what happened since that process was ready.
    """
    if before is None or before.instance_id != after.instance_id:
        tokens = steps = 0
        was, elapsed_s = _NOTHING, after.uptime_s
    else:
        was, tokens, steps = before.totals, before.load.tokens, before.load.steps
    elapsed_s = max(elapsed_s, 1e-9)
    now, load = after.totals, after.load
    return Sample(
        instance_id=after.instance_id,
        uptime_s=after.uptime_s,
        interval_s=elapsed_s,
        draining=after.draining,
        running=load.running,
        waiting=load.waiting,
        free_pages=load.free_pages,
        total_pages=load.total_pages,
        tokens_per_s=(load.tokens - tokens) / elapsed_s,
        steps_per_s=(load.steps - steps) / elapsed_s,
        mean_acceptance_length=_mean_length(was, now),
        acceptance_per_position=_per_position(was, now),
        block_sizes=_sizes(was, now),
        total_tokens=load.tokens,
        total_mean_acceptance_length=_mean_length(_NOTHING, now),
        total_acceptance_per_position=_per_position(_NOTHING, now),
        total_block_sizes=_sizes(_NOTHING, now),
        lanes=after.lanes,
        devices=after.devices,
    )


def _mean_length(was: Acceptance, now: Acceptance) -> float | None:
    rounds = now.rounds - was.rounds
    return 1 + (now.accepted - was.accepted) / rounds if rounds > 0 else None


def _per_position(was: Acceptance, now: Acceptance) -> tuple[float | None, ...]:
    counts = zip_longest(
        now.accepted_per_position,
        now.drafted_per_position,
        was.accepted_per_position,
        was.drafted_per_position,
        fillvalue=0,
    )
    return tuple(
        (accepted - accepted_before) / (drafted - drafted_before)
        if drafted > drafted_before
        else None
        for accepted, drafted, accepted_before, drafted_before in counts
    )


def _sizes(was: Acceptance, now: Acceptance) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for entry in now.block_sizes:
        counts[entry.block_size] += entry.rounds
    for entry in was.block_sizes:
        counts[entry.block_size] -= entry.rounds
    return {size: count for size, count in sorted(counts.items()) if count > 0}
