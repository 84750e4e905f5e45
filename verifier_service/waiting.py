"""When to step: now, or when proposals that are on their way have come; and who sits a step out.

Knows: which sessions could step at once, which await a proposal and about when it comes, what
either would bring. Pure: the time is an argument. Does not know: how arrival times are learnt
(`lane`), or what a proposal is.

A session of a changing length is never waited for longer than pays: the step goes on without it, as
a plain round for that session, or with the session held out of one step if its proposal comes
meanwhile and is worth more than the token it gives up. A session of a fixed length keeps waiting
for its own proposal until that is overdue, but others go on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from verifier_service.costs import Beside

_HOLD_GAIN = 1.2  # accepted tokens for which a session sits a step out; one would be even


@dataclass(frozen=True, slots=True)
class Awaited:
    """A proposal on its way. Times in seconds: when it is expected, and when it is overdue.

    gain: accepted tokens expected of it; nodes: rows it is expected to add. patient: the session
    takes no plain round before it is overdue.
    """

    session_id: int
    lane: int
    expected: float
    overdue: float
    gain: float
    nodes: float
    patient: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """What a step made at once would have: tokens expected, rows, and whether trees are in it."""

    tokens: float
    rows: int
    drafted: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """`until`: time to sleep to at most, None to step now without those in `hold`. `passed`: those
    that go on plainly although their proposals are on their way."""

    until: float | None
    hold: frozenset[int] = frozenset()
    passed: frozenset[int] = frozenset()


def decide(
    now: float,
    ready: Ready,
    awaited: Sequence[Awaited],
    costs: Beside,
    held: Collection[int] = (),
) -> Decision:
    """Step now, or wait for one more lane, two more, ...: whatever brings the most tokens per
    second. `held`: sessions that sat the last step out; they do not sit out another."""
    coming = [a for a in awaited if a.overdue > now]
    if not coming:
        return Decision(None)
    given_up = len(awaited) - len(coming)  # they step plainly
    ready = Ready(ready.tokens + given_up, ready.rows + given_up, ready.drafted)
    lanes: dict[int, list[Awaited]] = {}
    for item in coming:
        lanes.setdefault(item.lane, []).append(item)
    order = sorted(lanes, key=lambda lane: max(a.expected for a in lanes[lane]))
    best_rate, best = 0.0, len(order)
    for count in range(len(order) + 1):
        arrived = [a for lane in order[:count] for a in lanes[lane]]
        rate = _rate(now, ready, arrived, [a for a in coming if a not in arrived], costs)
        if rate > best_rate:
            best_rate, best = rate, count
    if best:
        last = [a for lane in order[:best] for a in lanes[lane]]
        return Decision(min(_until(now, a) for a in last))
    step = costs.ms(max(1, ready.rows), drafted=ready.drafted) / 1e3
    patient = {a.session_id for a in coming if a.patient}
    others = ready.rows + sum(not a.patient for a in coming)
    worth = {
        a.session_id
        for a in coming
        if a.gain > _HOLD_GAIN and a.expected <= now + step and a.session_id not in held
    }
    # Somebody has to be in the step.
    hold = frozenset(patient | worth if others > len(worth - patient) else patient)
    return Decision(None, hold, frozenset(a.session_id for a in coming) - hold)


def _rate(
    now: float,
    ready: Ready,
    arrived: Sequence[Awaited],
    missing: Sequence[Awaited],
    costs: Beside,
) -> float:
    """Tokens per ms of waiting for `arrived` and stepping without `missing`."""
    plain = sum(not a.patient for a in missing)
    rows = math.ceil(ready.rows + plain + sum(1 + a.nodes for a in arrived) - 1e-6)
    if not rows:
        return 0.0
    tokens = ready.tokens + plain + sum(1 + a.gain for a in arrived)
    wait = max((_remaining(now, a) for a in arrived), default=0.0)
    return tokens / (1e3 * wait + costs.ms(rows, drafted=ready.drafted or bool(arrived)))


def _remaining(now: float, item: Awaited) -> float:
    """Seconds it is expected to take yet; past its time, half of what it has left."""
    return item.expected - now if item.expected > now else (item.overdue - now) / 2


def _until(now: float, item: Awaited) -> float:
    """Everything is decided anew when the time it was expected at has passed."""
    return item.expected if item.expected > now else item.overdue
