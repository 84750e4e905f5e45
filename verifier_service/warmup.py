"""Runs the shapes of real steps before the first request: so that it does not pay for them, and to
know what they cost.

Knows: which row counts occur. Does not know: requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from verifier_service.engine import Engine
from verifier_service.packing import Feed

_MOST_SESSIONS = 64  # of a profiled step; larger ones are learnt as they come
_REPEATS = 2  # of which the quicker counts


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


def profile(engine: Engine, seconds: float) -> None:
    """Measure what steps cost by their rows, plain ones and such with trees, smallest first, until
    the time is used up; the rest is extrapolated, and all of it corrected by real steps."""
    costs, size = engine.policy.costs, engine.pool.page_size
    end = time.monotonic() + seconds
    last = 0.0
    for rows in [int(point) for point in costs.plain.points]:
        count = min(rows, _MOST_SESSIONS)
        pages_needed = max(count, -(-(rows + size) // size))
        if rows > _MOST_SESSIONS or pages_needed > engine.pool.free_pages:
            return
        # What comes next takes at least what the last did.
        if time.monotonic() + 2 * _REPEATS * last > end:
            return
        pages = engine.pool.allocate(pages_needed)
        try:
            single = [_slots(engine, [page]) for page in pages[:count]]
            plain = [Feed([0], size - 1, slots, None, (0,)) for slots in single]
            tree = _comb(rows, size - 1, _slots(engine, pages))
            for feeds, drafted in ((plain, False), ([tree], True)):
                if drafted and rows < 2:
                    continue
                last = min(_run(engine, feeds) for _ in range(_REPEATS))
                costs.profile(rows, 1e3 * last, drafted=drafted)
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


def _run(engine: Engine, feeds: Sequence[Feed]) -> float:
    """Seconds of one step; reading a logit waits for the device."""
    start = time.monotonic()
    output = engine.host.step(feeds, engine.store)
    float(output.logits[0, 0])
    return time.monotonic() - start
