"""target_probs on the host: one row of logits to the scores the next token is drawn from.

Knows the order of the steps: logit bias, penalties, banned ids and mask, temperature, top-k, top-p,
min-p. Knows neither noise nor trees. `reference.target_probs` is the same in plain torch, one step
a line.

Scores are log-probabilities up to a constant: drawing needs no more, so the pass over exp is left
out unless a filter or a caller wants probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from draftwire_kernels.noise import Floats
from draftwire_kernels.race import (
    argmax,
    check_finite,
    group_maxima,
    in_groups,
    perturbed_argmax,
    perturbed_argmax_of,
)
from draftwire_kernels.sampling import History, Sampling, SamplingError

Ids = npt.NDArray[np.int64]

_FEW = 4096
"""Up to this many kept tokens are drawn from one by one; more, as a row."""
_SURELY = 1 + 1e-4
"""More than fp32 sums of a row's weights differ by."""


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
        logits, sampling, position=position, history=history, allowed=allowed
    ).masked()


@dataclass(frozen=True, slots=True)
class KeptScores:
    """Scores of a row and which of its tokens the filters keep."""

    row: Floats
    """fp32 [V], -inf = excluded before the filters; maybe the logits themselves: read only."""
    ids: Ids | None
    """The tokens kept, ascending; None: all that `row` does not exclude."""

    def masked(self) -> Floats:
        """The row with -inf for every token that may not be drawn."""
        if self.ids is None:
            return self.row
        kept = np.full_like(self.row, -np.inf)
        kept[self.ids] = self.row[self.ids]
        return kept

    def draw(self, sampling: Sampling, position: int) -> int:
        """The target's token: greedy argmax, else argmax(score + gumbel). Raises NonFiniteRow."""
        if sampling.greedy:
            return argmax(self.row)
        if self.ids is None or self.ids.size > _FEW:
            return perturbed_argmax(self.masked(), sampling.seed, position)
        return perturbed_argmax_of(self.ids, self.row[self.ids], sampling.seed, position)


def kept_scores(
    logits: torch.Tensor,
    sampling: Sampling,
    *,
    position: int,
    history: History | None = None,
    allowed: torch.Tensor | None = None,
) -> KeptScores:
    """What a row's next token is drawn from. Arguments and errors as for `target_scores`."""
    row = _host_row(logits, sampling, position, history, allowed)
    if sampling.greedy:
        return KeptScores(row, None)
    if sampling.temperature != 1:
        row = row / np.float32(sampling.temperature)
    return KeptScores(row, _filter(row, sampling) if sampling.filters else None)


def normalise(scores: Floats) -> Floats:
    """Log-probabilities of scores, fp32 [V]. Raises NonFiniteRow."""
    largest = float(scores.max())
    check_finite(largest)
    shifted = torch.from_numpy(scores - np.float32(largest))
    total = float(shifted.exp().sum())
    return shifted.sub_(math.log(total)).numpy()


def _host_row(
    logits: torch.Tensor,
    sampling: Sampling,
    position: int,
    history: History | None,
    allowed: torch.Tensor | None,
) -> Floats:
    banned = sampling.banned.size > 0 and position < sampling.banned_before
    edited = banned or allowed is not None or sampling.needs_history or sampling.bias_ids.size > 0
    source = logits.detach()
    row: Floats = source.to("cpu", torch.float32, copy=edited).contiguous().numpy()
    if not edited:
        return row
    sampling.check_vocabulary(row.size)
    # A mask could hide a NaN, so it is looked for first.
    check_finite(float(torch.from_numpy(row).amax()))
    if sampling.bias_ids.size:
        row[sampling.bias_ids] += sampling.bias_values
    if sampling.needs_history:
        if history is None:
            raise SamplingError("history", "given when a penalty is on", None)
        _penalise(row, sampling, history)
    if banned:
        row[sampling.banned] = -np.inf
    if allowed is not None:
        row[~allowed.detach().cpu().numpy()] = -np.inf
    return row


def _penalise(row: Floats, sampling: Sampling, history: History) -> None:
    ids, counts = history.table()
    seen = row[ids]
    penalty = np.float32(sampling.repetition_penalty)
    if penalty != 1:
        seen = np.where(seen > 0, seen / penalty, seen * penalty)
    seen -= np.float32(sampling.frequency_penalty) * counts
    seen -= np.float32(sampling.presence_penalty) * (counts > 0)
    row[ids] = seen


def _filter(row: Floats, sampling: Sampling) -> Ids | None:
    """Finite tokens that top-k, top-p and min-p keep, ascending; None: all of them."""
    maxima = group_maxima(in_groups(row))
    largest = maxima.max()
    check_finite(float(largest))
    ids: Ids | None = None
    if 0 < sampling.top_k < row.size:
        ids = _at_least(row, maxima, sampling.top_k)
        ids = ids[_first(row[ids], sampling.top_k)]
    if sampling.top_p < 1:
        ids = _top_p(row, ids, maxima, largest, sampling.top_p)
    if sampling.min_p > 0:
        least = largest + np.float32(math.log(sampling.min_p))
        ids = np.flatnonzero(row >= least) if ids is None else ids[row[ids] >= least]
    if ids is not None and float(row[ids].min()) == -np.inf:
        ids = ids[row[ids] > -np.inf]
    return ids


def _top_p(row: Floats, ids: Ids | None, maxima: Floats, largest: np.float32, top_p: float) -> Ids:
    """The shortest prefix, by score and then id, that reaches top_p among `ids` (None: all)."""
    if ids is not None:
        values = row[ids]
        need = top_p * float(_weights(values, largest).sum(dtype=np.float64))
        return ids[_first(values, _prefix(values, largest, need))]
    weights = _weights(row, largest)
    total = float(torch.from_numpy(weights).sum())
    need = top_p * total
    # Few tokens hold most of a model's row. Of any upper set that holds enough, the prefix is the
    # same.
    for count in (16, 128):
        ids = _at_least(row, maxima, count)
        if float(weights[ids].sum()) >= need:
            return ids[_first(row[ids], _prefix(row[ids], largest, need))]
    # Tokens less likely than this one have less than 1 - top_p together.
    lowest = (1 - top_p) * total / row.size
    ids = np.flatnonzero(weights >= np.float32(0.99 * lowest))
    held = weights[ids]
    for likely in (1 / 16, 1 / 256, 1 / 4096):
        # Any of these that holds enough leaves less to be sorted.
        some = np.flatnonzero(held >= np.float32(likely * need / 16))
        if some.size < ids.size and float(held[some].sum()) >= need * _SURELY:
            ids = ids[some]
            break
    if float(weights[ids].sum()) < need:
        ids = np.arange(row.size)
    return ids[_first(row[ids], _prefix(row[ids], largest, need))]


def _weights(values: Floats, largest: np.float32) -> Floats:
    weights: Floats = torch.from_numpy(values - largest).exp_().numpy()
    return weights


def _at_least(row: Floats, maxima: Floats, count: int) -> Ids:
    """Ids, ascending, of an upper set of the row: at least `count`, or all of it."""
    if count >= row.size:
        return np.arange(row.size)
    if count <= maxima.size // 2:
        # That many groups have a token as large as this one, hence that many tokens do.
        least = np.partition(maxima, -count)[-count]
    else:
        least = np.partition(row, -count)[-count]
    return np.flatnonzero(row >= least)


def _prefix(values: Floats, largest: np.float32, need: float) -> int:
    """How many of the values, largest first, it takes for exp(value - largest) to sum to `need`."""
    sums = np.cumsum(_weights(np.sort(values)[::-1], largest), dtype=np.float64)
    # A need just out of reach, by the last bits of the row's fp32 total, means all of them.
    return min(int(np.searchsorted(sums, need)) + 1, values.size)


def _first(values: Floats, count: int) -> Ids:
    """Places, ascending, of the `count` largest values, the first ones among equals."""
    if count >= values.size:
        return np.arange(values.size)
    least = np.partition(values, -count)[-count]
    above = values > least
    spare = count - int(above.sum())
    above[np.flatnonzero(values == least)[:spare]] = True
    return np.flatnonzero(above)
