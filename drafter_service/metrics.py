"""Counters of the drafter, for GetInfo, logs and metrics.

The engine writes plain numbers; `readings` names them as in `draftwire.metric_table`. Does not know
Prometheus.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drafter_service.messages import FaultKind, Reason
from drafter_service.tree import Part
from draftwire.meters import BLOCK_SIZES, COUNTS, STEP_S, Distribution, Reading, by_label

if TYPE_CHECKING:
    from drafter_service.engine import Engine

STAGES = ("take_in", "extend", "draft", "answer")


@dataclass(slots=True)
class Counters:
    """Written by the engine thread only; readers may see a step half counted, never a wrong
    number.
    """

    steps: int = 0
    proposals: int = 0
    empty_proposals: int = 0
    opened: int = 0
    evicted: int = 0
    stale: int = 0
    feature_rows: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    model_ns: int = 0
    nonfinite: int = 0
    nodes: Counter[Part] = field(default_factory=Counter)
    faults: Counter[FaultKind] = field(default_factory=Counter)
    step_sessions: Distribution = field(default_factory=lambda: Distribution(COUNTS))
    stages: dict[str, Distribution] = field(
        default_factory=lambda: {stage: Distribution(STEP_S) for stage in STAGES}
    )
    block_sizes: dict[Reason, Distribution] = field(
        default_factory=lambda: {reason: Distribution(BLOCK_SIZES) for reason in Reason}
    )
    _mark: float = 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts a round, over all rounds with a proposal; 0 before the first."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else 0.0

    def begin(self) -> None:
        """A step begins."""
        self._mark = time.perf_counter()

    def lap(self, stage: str) -> None:
        """A stage of the step ends."""
        now = time.perf_counter()
        self.stages[stage].add(now - self._mark)
        self._mark = now


def readings(engine: Engine) -> Iterator[Reading]:
    """What the engine has counted and holds; may be called from any thread."""
    counted, name = engine.counters, "draftwire_drafter_".__add__
    plain: dict[str, float | Distribution] = {
        "steps_total": counted.steps,
        "model_seconds_total": counted.model_ns / 1e9,
        "proposals_total": counted.proposals,
        "empty_proposals_total": counted.empty_proposals,
        "rounds_total": counted.rounds,
        "accepted_tokens_total": counted.accepted_tokens,
        "feature_rows_total": counted.feature_rows,
        "sessions_opened_total": counted.opened,
        "sessions_evicted_total": counted.evicted,
        "stale_messages_total": counted.stale,
        "nonfinite_drafts_total": counted.nonfinite,
        "predictor_seconds_total": engine.predictor.time_ns / 1e9,
        "step_sessions": counted.step_sessions,
        "lanes": engine.lane_count,
        "sessions": engine.session_count,
        "sessions_limit": engine.settings.max_sessions,
        "moving": float(engine.progressing()),
    }
    for metric, value in plain.items():
        yield Reading(name(metric), value)
    yield from by_label(name("step_seconds"), counted.stages.items())
    yield from by_label(
        name("block_size"), ((r.name.lower(), d) for r, d in counted.block_sizes.items())
    )
    yield from by_label(
        name("nodes_total"), ((part.name.lower(), n) for part, n in dict(counted.nodes).items())
    )
    yield from by_label(
        name("session_faults_total"),
        ((kind.name.lower(), n) for kind, n in dict(counted.faults).items()),
    )
    asked = engine.predictor
    yield from by_label(
        name("predictions_total"), (("predicted", asked.predicted), ("no_input", asked.missed))
    )
    free, total = engine.pool.free_rows, engine.pool.total_rows
    yield from by_label(name("cache_rows"), (("free", free), ("used", total - free)))
