"""target_probs on the host: one row of logits to the scores the next token is drawn from.

Knows the order of the steps: logit bias, penalties, banned ids and mask, temperature, top-k, top-p,
min-p. Knows neither noise nor trees. `reference.target_probs` is the same in plain torch, one step
a line.

Scores are log-probabilities up to a constant: drawing needs no more, so the pass over exp is left
out unless a filter or a caller wants probabilities.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch

from draftwire_kernels.filters import Filtered
from draftwire_kernels.groups import (
    Groups,
    Level0,
    argmax,
    check_finite,
    in_groups,
    make_level0,
)
from draftwire_kernels.noise import TARGET, Floats
from draftwire_kernels.race import Races, perturbed_argmax, winner_of
from draftwire_kernels.sampling import History, Sampling, SamplingError

_HOST = torch.device("cpu")
_FEW = 12288
"""Up to this many kept tokens are drawn from as a list; more, as a row."""


def target_scores(
    logits: torch.Tensor,
    sampling: Sampling,
    *,
    position: int,
    history: History | None = None,
    allowed: torch.Tensor | None = None,
) -> Floats:
    """Scores of a row, fp32 [V] on the host, -inf = excluded; maybe the row itself: read only.

    logits [V] bf16, fp16 or fp32 on any device; allowed bool [V]. Greedy rows stop before the
    temperature. Raises NonFiniteRow (here if the row is edited or filtered, else when it is drawn
    from), SamplingError for a missing history or ids outside the vocabulary.
    """
    return kept_scores(
        logits[None], sampling, position=position, history=history, allowed=allowed
    ).masked(0)


class KeptScores:
    """Scores of rows at consecutive positions and which of their tokens the filters keep.

    What a draw needs of every row is made for all at once, the rest for rows that are asked for.
    """

    def __init__(self, rows: Floats, sampling: Sampling, position: int) -> None:
        """rows fp32 [n, V], -inf = excluded before the filters; maybe the logits themselves.
        position: of the first row's token.
        """
        self._rows, self._sampling = rows, sampling
        self._key = sampling.seed, position, TARGET, 0
        self._filtered: dict[int, Filtered] = {}

    def masked(self, index: int) -> Floats:
        """A row with -inf for every token that may not be drawn: read only. Raises NonFiniteRow if
        it is filtered.
        """
        row = self._row(index)
        if self._sampling.greedy or not self._sampling.filters:
            return row
        ids = self._of(index).ids
        if ids is None:
            return row
        kept = np.full_like(row, -np.inf)
        kept[ids] = row[ids]
        return kept

    def draw(self, index: int) -> int:
        """The target's token: greedy argmax, else argmax(score + gumbel). Raises NonFiniteRow."""
        if self._sampling.greedy:
            return argmax(self._row(index))
        if not self._sampling.top_k and not self._of(index).few:
            # Drawn from all tokens, one that the filters keep is also drawn from those kept.
            token = self._races.winner(index)
            if not self._sampling.filters or self._of(index).surely_keeps(token):
                return token
        ids = self._of(index).ids
        seed, position, purpose, base = self._key
        key = seed, position + index, purpose, base
        if ids is None or ids.size > _FEW:
            return perturbed_argmax(self.masked(index), *key)
        level0 = self._level0.of_row(index, self._groups.maxima.shape[1])
        return winner_of(ids, self._row(index).take(ids), key, level0)

    @cached_property
    def _groups(self) -> Groups:
        return in_groups(self._rows)

    @cached_property
    def _level0(self) -> Level0:
        rows, groups = self._groups.maxima.shape
        return make_level0(self._key, groups, rows)

    @cached_property
    def _races(self) -> Races:
        return Races(self._groups, self._key, self._level0)

    def _row(self, index: int) -> Floats:
        row: Floats = self._rows[index]
        return row

    def _of(self, index: int) -> Filtered:
        if index not in self._filtered:
            row = self._row(index)
            self._filtered[index] = Filtered(row, self._groups, index, self._sampling)
        return self._filtered[index]


def kept_scores(
    logits: torch.Tensor,
    sampling: Sampling,
    *,
    position: int,
    history: History | None = None,
    allowed: torch.Tensor | None = None,
) -> KeptScores:
    """What the next tokens of rows [n, V] at consecutive positions are drawn from; one row if any
    is edited. Else arguments and errors as for `target_scores`.
    """
    rows, shared = _host_rows(logits, sampling, position, history, allowed)
    if sampling.temperature != 1 and not sampling.greedy:
        with np.errstate(over="ignore"):  # what a caller hides with a very low number stays hidden
            rows = np.divide(rows, np.float32(sampling.temperature), out=None if shared else rows)
    return KeptScores(rows, sampling, position)


def edited(sampling: Sampling, position: int, allowed: torch.Tensor | None = None) -> bool:
    """Whether bias, penalties, banned ids or a mask change the row of a position."""
    banned = sampling.banned.size > 0 and position < sampling.banned_before
    biased = sampling.needs_history or sampling.bias_ids.size > 0
    return banned or biased or allowed is not None


def normalise(scores: Floats) -> Floats:
    """Log-probabilities of scores, fp32 [V]. Raises NonFiniteRow."""
    largest = float(scores.max())
    check_finite(largest)
    shifted = torch.from_numpy(scores - np.float32(largest))
    total = float(shifted.exp().sum())
    return shifted.sub_(math.log(total)).numpy()


def _host_rows(
    logits: torch.Tensor,
    sampling: Sampling,
    position: int,
    history: History | None,
    allowed: torch.Tensor | None,
) -> tuple[Floats, bool]:
    """The rows with their edits, before the temperature; and whether they are the caller's own
    memory.
    """
    edit = edited(sampling, position, allowed)
    source = logits.detach()
    host = source.to(_HOST, torch.float32, copy=edit).contiguous()
    rows: Floats = host.numpy()
    if edit:
        if len(rows) != 1:
            raise ValueError(f"logits must be one row if it is edited, got {len(rows)}")
        _edit(rows[0], sampling, position, history, allowed)
    return rows, host is source


def _edit(
    row: Floats,
    sampling: Sampling,
    position: int,
    history: History | None,
    allowed: torch.Tensor | None,
) -> None:
    sampling.check_vocabulary(row.size)
    # A mask could hide a NaN, so it is looked for first.
    check_finite(float(torch.from_numpy(row).amax()))
    if sampling.bias_ids.size:
        row[sampling.bias_ids] += sampling.bias_values
    if sampling.needs_history:
        if history is None:
            raise SamplingError("history", "given when a penalty is on", None)
        _penalise(row, sampling, history)
    if position < sampling.banned_before:
        row[sampling.banned] = -np.inf
    if allowed is not None:
        row[~allowed.detach().cpu().numpy()] = -np.inf


def _penalise(row: Floats, sampling: Sampling, history: History) -> None:
    ids, counts = history.table()
    seen = row[ids]
    penalty = np.float32(sampling.repetition_penalty)
    if penalty != 1:
        seen = np.where(seen > 0, seen / penalty, seen * penalty)
    seen -= np.float32(sampling.frequency_penalty) * counts
    seen -= np.float32(sampling.presence_penalty) * (counts > 0)
    row[ids] = seen
