"""The category temperature Z_T of each way of sampling: what the prior over branches is divided by,
so that a branch drawn from it is accepted longest under the mixture rule.

Measured on answers to held-out prompts. Knows drafts and rules. Does not know files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from drafter_service.calibration import Regime
from drafter_service.training import rules
from drafter_service.training.features import Trajectory
from drafter_service.training.offline import Drafts

GRID = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)

Sampling = tuple[float, bool]


def category_temperatures(
    answers: Iterable[tuple[Trajectory, Drafts]],
) -> dict[Sampling, float]:
    """Z_T by (temperature, filtered) of the answers. The best of the grid, by the mean expected
    acceptance over all anchors; of equals the one nearest to 1.
    """
    sums: dict[Sampling, npt.NDArray[np.float64]] = defaultdict(lambda: np.zeros(len(GRID)))
    for trajectory, drafts in answers:
        answer = trajectory.response
        filtered = answer.temperature > 0 and (answer.top_k > 0 or answer.top_p < 1)
        for index, z in enumerate(GRID):
            chances = rules.accept_chances(
                trajectory,
                drafts.first,
                drafts.ids,
                drafts.logits,
                drafts.log_prior / z,
                rules.MIXTURE,
            )
            sums[answer.temperature, filtered][index] += np.cumprod(chances, axis=1).sum()
    return {sampling: _best(values) for sampling, values in sums.items()}


def _best(values: npt.NDArray[np.float64]) -> float:
    near = [i for i in range(len(GRID)) if values[i] >= values.max() * (1 - 1e-9)]
    return min((GRID[i] for i in near), key=lambda z: abs(np.log(z)))


def with_categories(regimes: Sequence[Regime], found: dict[Sampling, float]) -> tuple[Regime, ...]:
    """The regimes with the Z_T measured nearest to each; as they are if nothing was measured."""

    def nearest(regime: Regime) -> float:
        def distance(sampling: Sampling) -> tuple[bool, float, bool]:
            temperature, filtered = sampling
            greedy = (temperature <= 0) != (regime.temperature <= 0)
            return greedy, abs(temperature - regime.temperature), filtered != regime.filtered

        return found[min(found, key=distance)]

    return tuple(replace(r, category=nearest(r)) for r in regimes) if found else tuple(regimes)
