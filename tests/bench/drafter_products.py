"""Measures what laying the drafter's weights out for oneDNN brings (`DraftModel.lay_out`).

The demo drafter twice in one process, one of them laid out: blocks of its size for 1, 4 and 16
sessions with CONTEXT positions each, hidden states and the candidates of all slots, without the
growth of trees. Arms in turn, each time in another order; the ratio is the median of the ratios of
neighbours, its interval from resampling them. Writes drafter_products.json; about a minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import TARGET, load_average, options, say, write

from drafter_service import checkpoint
from drafter_service.cache import ContextPool
from drafter_service.model import Block, DraftModel
from drafter_service.target import read_matrices
from draftwire_client.demo import drafter_arguments

SESSIONS = (1, 4, 16)
CONTEXT, CANDIDATES = 150, 256
PLAIN, LAID_OUT = "ordinary", "laid out"


def drafts(model: DraftModel, sessions: int, seed: int) -> Callable[[], Any]:
    """One draft for so many sessions."""
    config = model.config
    pool = ContextPool(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rows=sessions * (CONTEXT + 256),
        dtype=model.dtype,
        device=model.device,
    )
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for _ in range(sessions):
        context = pool.open(CONTEXT + config.block_size)
        rows = torch.randn(CONTEXT, config.hidden_size, generator=generator)
        model.extend(pool, [(context, rows)])
        blocks.append(Block(1, context, config.block_size))
    slots = torch.tensor([i for i in range(sessions * blocks[0].size) if i % blocks[0].size])

    def draft() -> Any:
        return model.candidates(model.draft(pool, blocks)[slots], CANDIDATES)

    return draft


def main() -> int:
    """Measure and write."""
    given, load = options(__doc__), load_average()
    folder = drafter_arguments()[0][2]
    matrices, models = read_matrices(TARGET), {}
    for arm in (PLAIN, LAID_OUT):
        loaded = checkpoint.load(folder, device=torch.device("cpu"), dtype=torch.float32)
        model = models[arm] = loaded.model
        model.attach_target(
            matrices.embedding, matrices.head, vocab_size=matrices.embedding.shape[0]
        )
    models[LAID_OUT].lay_out()
    results, rng = {}, np.random.default_rng(given.seed)
    with torch.inference_mode():
        for sessions in SESSIONS:
            arms = {arm: drafts(model, sessions, given.seed) for arm, model in models.items()}
            times: dict[str, list[float]] = {arm: [] for arm in arms}
            for number in range(3 if given.quick else 60):
                for arm in arms if number % 2 else reversed(arms):
                    started = time.perf_counter()
                    arms[arm]()
                    times[arm].append(1e3 * (time.perf_counter() - started))
            ratios = np.asarray(times[PLAIN]) / np.asarray(times[LAID_OUT])
            drawn = np.median(ratios[rng.integers(0, len(ratios), (2000, len(ratios)))], axis=1)
            results[f"{sessions} sessions"] = {
                "median_ms": {arm: round(float(np.median(ms)), 2) for arm, ms in times.items()},
                "speed_up": round(float(np.median(ratios)), 3),
                "interval_95": [round(float(q), 3) for q in np.quantile(drawn, [0.025, 0.975])],
            }
            say(f"drafter_products: {sessions} sessions: {results[f'{sessions} sessions']}")
    facts = {"block_size": models[PLAIN].config.block_size, "threads": torch.get_num_threads()}
    write("drafter_products", {**facts, "drafts": results}, given, load)
    return 0


if __name__ == "__main__":
    sys.exit(main())
