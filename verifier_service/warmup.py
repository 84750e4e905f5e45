"""Runs the shapes of real steps once before the first request, so that it does not pay for them.

Knows: which row counts occur. Does not know: requests.
"""

from __future__ import annotations

import time

import numpy as np

from verifier_service.engine import Engine
from verifier_service.packing import Feed


def warm(engine: Engine, max_nodes: int) -> None:
    """Run a plain step and a step with a full chain; sets the engine's first estimate of a step's
    time."""
    pages = engine.pool.allocate(engine.pool.pages_for(max_nodes + 1))
    try:
        size = engine.pool.page_size
        slots = np.concatenate(
            [np.arange(page * size, (page + 1) * size, dtype=np.int64) for page in pages]
        )
        taken = []
        for rows in (1, 1 + max_nodes, 1, 1, 1):
            feed = Feed([0] * rows, 0, slots, None, tuple(range(rows)))
            start = time.monotonic()
            engine.host.step([feed], engine.store)
            taken.append(time.monotonic() - start)
        # The quickest: one that the machine held up would have short deadlines refused, and with
        # nothing admitted no step would correct it.
        engine.step_time = engine.quickest_step = min(taken)
    finally:
        engine.pool.release(pages)
