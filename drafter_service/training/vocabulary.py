"""The part of the vocabulary a loss is computed over: the most used tokens, and some others by
chance.

Knows token counts and columns of a cut head. Does not know losses.

The other tokens matter: a head that is only ever compared over the most used tokens may rank the
rest anyhow, and serving looks at all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from drafter_service.training.features import Trajectory


@dataclass(frozen=True, slots=True)
class Columns:
    """A cut of the vocabulary: `ids` int64 [columns]; `column_of` int64 [vocabulary], -1 outside
    it. `shift` float32 [columns], added to the logits: each token drawn by chance stands for all
    those it was drawn from, so that the normaliser is that of the whole vocabulary on average; None
    where nothing was drawn.
    """

    ids: torch.Tensor
    column_of: torch.Tensor
    shift: torch.Tensor | None = None

    def columns(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The columns of token ids of any shape; -1 for those outside and for -1."""
        found = self.column_of[token_ids.clamp(min=0)]
        return torch.where(token_ids >= 0, found, -1)

    def to(self, device: torch.device) -> Columns:
        """The same cut on another device."""
        shift = None if self.shift is None else self.shift.to(device)
        return Columns(self.ids.to(device), self.column_of.to(device), shift)


class Vocabulary:
    """Makes the cut of each step."""

    def __init__(self, common: torch.Tensor, size: int, extra: int) -> None:
        """common int64: the tokens always there; `extra` others are drawn each step; `size`: the
        whole vocabulary.
        """
        self.common, self.size = common, size
        rest = torch.ones(size, dtype=torch.bool)
        rest[common] = False
        self._rest = rest.nonzero()[:, 0]
        self._extra = min(extra, len(self._rest))

    def cut(self, seed: int, needed: torch.Tensor) -> Columns:
        """The columns of a step: the common tokens, those `needed` (negative ones ignored) and the
        drawn ones; the same seed and needs give the same columns.
        """
        chosen = torch.zeros(self.size, dtype=torch.bool)
        chosen[self.common] = True
        chosen[needed[needed >= 0]] = True
        rest = len(chosen) - int(chosen.sum())
        shift = None
        if self._extra and rest:
            generator = torch.Generator().manual_seed(seed)
            picked = self._rest[torch.randint(len(self._rest), (self._extra,), generator=generator)]
            drawn = torch.zeros_like(chosen)
            drawn[picked] = True
            drawn &= ~chosen
            chosen |= drawn
            weight = math.log(rest / max(int(drawn.sum()), 1))
            shift = drawn[chosen].float() * weight
        ids = chosen.nonzero()[:, 0]
        column_of = torch.full((self.size,), -1, dtype=torch.int64)
        column_of[ids] = torch.arange(len(ids))
        return Columns(ids, column_of, shift)


def most_used(trajectories: Iterable[Trajectory], size: int, count: int) -> torch.Tensor:
    """The `count` tokens with most weight: occurrences and the target's own chances of them. int64,
    rising; all tokens if count is 0 or not less than `size`.
    """
    if not 0 < count < size:
        return torch.arange(size)
    weight = torch.zeros(size, dtype=torch.float64)
    for trajectory in trajectories:
        weight += torch.bincount(trajectory.tokens, minlength=size)
        chances = trajectory.top_logprobs.double().exp().reshape(-1)
        weight.index_add_(0, trajectory.top_ids.reshape(-1).long(), chances)
    return weight.topk(count).indices.sort().values
