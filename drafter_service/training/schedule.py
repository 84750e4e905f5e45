"""What changes over a run: the learning rate, and the running mean of the weights.

Knows step numbers and parameters. Does not know data, losses or files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drafter_service.model import DraftModel


def learning_rate(
    step: int, steps: int, highest: float, warmup: float, *, fall: float | None = None
) -> float:
    """Linear to `highest` over the warm-up, then a cosine to 0 at `steps`; with `fall` level, and a
    linear fall to 0 over the last `fall` of the steps.
    """
    rising = max(1, round(warmup * steps))
    if step < rising:
        return highest * (step + 1) / rising
    if fall is not None:
        falling = max(1, round(fall * steps))
        return highest * min(1.0, max(0.0, (steps - step) / falling))
    done = (step - rising) / max(1, steps - rising)
    return highest * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class RunningMean:
    """An exponential mean of a model's weights. `weights`: in the order of the parameters; empty if
    the decay is 0 and no mean is kept.
    """

    def __init__(self, model: DraftModel, decay: float) -> None:
        self._model, self._decay = model, decay
        self.weights = [p.detach().clone() for p in model.parameters()] if decay else []

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Take in the weights after step `step`, counted from 0."""
        if self.weights:
            # The first steps count less: a mean over few steps has no more to remember.
            decay = min(self._decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.weights, list(self._model.parameters()), 1 - decay)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within it the model has the mean weights, if a mean is kept."""
        if not self.weights:
            yield
            return
        parameters = list(self._model.parameters())
        own = [p.detach().clone() for p in parameters]
        self._put(self.weights)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._model.parameters(), values, strict=True):
            parameter.copy_(value)
