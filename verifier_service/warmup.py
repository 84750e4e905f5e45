"""Runs the shapes of real steps before the first request: so that it does not pay for them, and to
know what they cost.

Knows: which row counts occur. Does not know: requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from verifier_service.engine import Engine
from verifier_service.packing import Feed


class Step(Protocol):
    """`_step` of an engine."""

    def __call__(self, sessions: int, rows: int, context: int, *, tree: bool) -> float | None: ...


_MOST_ROWS = 128  # of a profiled step; larger ones are learnt as they come
_SESSIONS = 8  # of the steps that show what sessions and their contexts cost
_CONTEXT = 512  # positions of each of them, where there is room
_MOST_OVER_PLAIN = 2.0  # what a step with a tree is believed to cost at first, over one without
_PASSES = 3  # of which the quickest counts
_LEAST = 4  # shapes that are measured whatever the time: none can be told from the others
_SETTLED = 1.15  # a step that is not quicker than the one before by more is taken for a usual one
_SETTLING = 6  # steps made for that at most


def warm(engine: Engine, max_nodes: int) -> None:
    """Run a plain step and a step with a full chain; sets the engine's first estimate of a step's
    time."""
    pages = engine.pool.allocate(engine.pool.pages_for(max_nodes + 1))
    try:
        slots = _slots(engine, pages)
        taken = []
        for rows in (1, 1 + max_nodes, 1, 1, 1):
            feed = Feed([0] * rows, 0, slots, None, tuple(range(rows)))
            taken.append(_run(engine, [feed]))
        # The quickest: one that the machine held up would have short deadlines refused, and with
        # nothing admitted no step would correct it.
        engine.step_time = engine.quickest_step = min(taken)
    finally:
        engine.pool.release(pages)


def profile(engine: Engine, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Measure what steps cost until the time is used up: by sessions and context, then by rows,
    plain ones and such with trees. Sizes far apart come first, so that little time gives the shape
    already; what is missing is taken from its neighbours, and real steps correct all of it."""
    costs = engine.policy.costs
    # Paths of the trees below are half as long as they have rows.
    base = min(engine.pool.page_size, engine.max_context // 2) - 1
    most = min(_MOST_ROWS, engine.max_context)
    step = partial(_step, engine, clock)
    _settle(step, base)
    end = clock() + seconds
    costs.per_session, costs.per_position = _of_sessions(engine, step, lambda: clock() > end)
    shapes = [
        (rows, drafted)
        for rows in _far_apart([int(p) for p in costs.plain.points if p <= most])
        for drafted in (False, True)
        if rows > 1 or not drafted
    ]
    best: dict[tuple[int, bool], float] = {}
    for rows, drafted in shapes * _PASSES:
        # A size not seen yet takes about what the slowest one did.
        known = best.get((rows, drafted), max(best.values(), default=0.0))
        if len(best) >= _LEAST and clock() + known > end:
            continue
        taken = step(1 if drafted else rows, rows if drafted else 1, base, tree=drafted)
        if taken is not None:
            best[rows, drafted] = min(taken, best.get((rows, drafted), taken))
    for (rows, drafted), taken in best.items():
        if drafted:
            # Drafts too dear by mistake are never tried, so never found out; too cheap, at once.
            taken = min(taken, _MOST_OVER_PLAIN * best.get((rows, False), taken))
        sessions = 1 if drafted else rows
        costs.profile(
            rows, 1e3 * taken, drafted=drafted, sessions=sessions, context=sessions * base
        )


def _settle(step: Step, base: int) -> None:
    """Make steps until one is about as quick as the one before: the first ones after loading read
    the weights from wherever they lie."""
    last = float("inf")
    for _ in range(_SETTLING):
        taken = step(1, 1, base, tree=False)
        if taken is None or last < _SETTLED * taken:
            return
        last = taken


def _of_sessions(engine: Engine, step: Step, late: Callable[[], bool]) -> tuple[float, float]:
    """ms for a session more in a step of the same rows, and for a position more of its context;
    zeros where there is no room to measure it."""
    size = engine.pool.page_size
    room = engine.pool.free_pages // _SESSIONS * size
    longest = min(_CONTEXT, room - 1, engine.max_context - 1)
    shapes = ((1, _SESSIONS, size - 1), (_SESSIONS, 1, size - 1), (_SESSIONS, 1, longest))
    taken: list[list[float]] = [[], [], []]
    for _ in range(_PASSES):
        for found, shape in zip(taken, shapes, strict=True):
            seconds = step(*shape, tree=False)
            if seconds is None or longest < 2 * size:
                return 0.0, 0.0
            found.append(seconds)
        if late():
            break
    one, short, long = (1e3 * min(found) for found in taken)
    per_position = max(0.0, long - short) / (_SESSIONS * (longest - size + 1))
    per_session = (short - one) / (_SESSIONS - 1) - per_position * (size - 1)
    return max(0.0, per_session), per_position


def _far_apart(points: Sequence[int]) -> list[int]:
    """The same points in an order in which any first few lie far apart."""
    order = [0, len(points) - 1] if points else []
    gaps = [(0, len(points) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [points[i] for i in dict.fromkeys(order)]


def _step(
    engine: Engine,
    clock: Callable[[], float],
    sessions: int,
    rows: int,
    context: int,
    *,
    tree: bool,
) -> float | None:
    """Seconds of a step of `sessions`, each with `rows` rows, a tree or a chain, after `context`
    positions. None if there are no pages for it."""
    each = engine.pool.pages_for(context + rows)
    if each * sessions > engine.pool.free_pages:
        return None
    pages = engine.pool.allocate(each * sessions)
    try:
        feeds = []
        for first in range(0, len(pages), each):
            slots = _slots(engine, pages[first : first + each])
            chain = Feed([0] * rows, context, slots, None, tuple(range(rows)))
            feeds.append(_comb(rows, context, slots) if tree else chain)
        return _run(engine, feeds, clock)
    finally:
        engine.pool.release(pages)


def _comb(rows: int, base: int, slots: np.ndarray) -> Feed:
    """An anchor and a tree of `rows` - 1 nodes: a path with a leaf beside each node."""
    parents = [-1] + [max(0, row - 2 - (row + 1) % 2) for row in range(1, rows)]
    return Feed([0] * rows, base, slots, parents, tuple(range(rows)))


def _slots(engine: Engine, pages: Sequence[int]) -> np.ndarray:
    size = engine.pool.page_size
    return np.concatenate(
        [np.arange(page * size, (page + 1) * size, dtype=np.int64) for page in pages]
    )


def _run(
    engine: Engine, feeds: Sequence[Feed], clock: Callable[[], float] = time.monotonic
) -> float:
    """Seconds of one step; reading a logit waits for the device."""
    start = clock()
    output = engine.host.step(feeds, engine.store)
    float(output.logits[0, 0])
    return clock() - start
