"""Chances fitted to the target's draws: regimes of `drafter_service.calibration`, and how well they
hold.

A site is a slot below its true path, as a node of a tree would be. The target's kept distribution
there gives its draw at any temperature, with noise that the candidates share, so one set of answers
calibrates every regime. Does not know networks, trees or files.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from drafter_service.bed import Floats, Ints, Reals, log_softmax
from drafter_service.calibration import DEFAULTS, HIGHEST, NGRAM_LENGTHS, Regime, candidates
from drafter_service.growth import NGRAM_TOKENS
from draftwire_kernels.noise import gumbel_rows

RATIOS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15)
SPREADS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.4, 3.0)
BINS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0)
_ELSEWHERE = 1e-5  # chance of a single token outside the candidates
_SEED = 20_251


@dataclass(frozen=True, slots=True)
class Sampling:
    """A way of sampling to calibrate for."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def filtered(self) -> bool:
        """Whether the tail is cut."""
        return self.top_k > 0 or self.top_p < 1


# Without a filter nothing is kept of the tail beyond the stored tokens but its mass at temperature
# 1, so higher temperatures are measured with one.
SAMPLINGS = (
    Sampling(0.0),
    Sampling(0.7),
    Sampling(1.0),
    Sampling(0.7, 20, 0.8),
    Sampling(1.0, 20, 0.95),
    Sampling(1.5, 20, 0.95),
)


@dataclass(frozen=True, slots=True)
class Sites:
    """Slots below true paths, one a row. ids int64, logits float32 [n, width]: candidates;
    top_ids, top_logprobs [n, top]: the target's likeliest tokens at temperature 1; slot int64 [n];
    temperature [n]: of the answer; matched_tokens, matched_lengths int64 [n, 2]: what repetition
    says there, -1 and 0 for nothing.
    """

    ids: Ints
    logits: Floats
    top_ids: Ints
    top_logprobs: Floats
    slot: Ints
    temperature: Floats
    matched_tokens: Ints
    matched_lengths: Ints

    def take(self, chosen: Any) -> Sites:
        """Some rows."""
        return Sites(*(getattr(self, name)[chosen] for name in Sites.__slots__))

    def seen(self, sampling: Sampling) -> Sites:
        """With the candidates that are looked at under a way of sampling."""
        width = candidates(sampling.temperature)
        return replace(self, ids=self.ids[:, :width], logits=self.logits[:, :width])

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True)
class Draws:
    """The target's draw at each row: `noise` float32 [n, width] of the candidates, 0 where the
    order is not coupled; `tokens` int64 [n], -1 for one outside the kept tokens; `column`: of that
    token among the candidates, -1 if it is none.
    """

    noise: Floats
    tokens: Ints
    column: Ints


def draws(sites: Sites, sampling: Sampling, *, coupled: bool) -> Draws:
    """Draw as the target does, with noise of our own for each row."""
    n, width = sites.ids.shape
    if sampling.temperature <= 0:
        tokens = sites.top_ids[:, 0]
        noise = np.zeros((n, width), dtype=np.float32)
    else:
        both = torch.from_numpy(np.concatenate([sites.ids, sites.top_ids], axis=1))
        made = gumbel_rows([_SEED] * n, list(range(n)), both).numpy()
        noise = made[:, :width]
        logs = sites.top_logprobs / sampling.temperature
        logs = logs + np.where(_kept(logs, sampling), 0.0, -np.inf)
        scores = logs + made[:, width:]
        tokens = sites.top_ids[np.arange(n), scores.argmax(1)]
        if sampling.temperature == 1 and not sampling.filtered:
            # The tail is one more token with its whole mass.
            mass = np.maximum(1 - np.exp(sites.top_logprobs).sum(1), 1e-9)
            other = gumbel_rows([_SEED + 1] * n, list(range(n)), torch.zeros(n, 1).long()).numpy()
            tokens = np.where(np.log(mass) + other[:, 0] > scores.max(1), -1, tokens)
        if not coupled:
            noise = np.zeros_like(noise)
    same = sites.ids == tokens[:, None]
    column = np.where(same.any(1), same.argmax(1), -1)
    return Draws(noise, tokens, column)


def _kept(logs: Floats, sampling: Sampling) -> Any:
    """Which of the stored tokens, best first, pass top-k and then top-p."""
    chances = np.exp(log_softmax(logs))
    rank = np.arange(logs.shape[1])[None, :]
    kept = np.broadcast_to(rank < (sampling.top_k or logs.shape[1]), logs.shape)
    chances = np.where(kept, chances, 0.0)
    chances = chances / chances.sum(1, keepdims=True)
    return kept & (np.cumsum(chances, axis=1) - chances < sampling.top_p)


def fit(sites: Sites, sampling: Sampling, *, coupled: bool) -> Regime:
    """The regime under which the target's draws are likeliest. The model's part and repetition's
    are fitted in turn, each to the draws in the measure in which the other does not explain them.
    """
    start = next(r for r in DEFAULTS if (r.temperature <= 0) == (sampling.temperature <= 0))
    regime = replace(
        start,
        temperature=sampling.temperature,
        filtered=sampling.filtered,
        coupled=coupled and sampling.temperature > 0,
    )
    sites = sites.seen(sampling)
    drawn = draws(sites, sampling, coupled=coupled)
    owed = np.ones(len(sites))
    for _ in range(3):
        regime = _fit_model(sites, drawn, regime, owed)
        regime, owed = _fit_ngram(sites, drawn, regime)
    return regime


def _fit_model(sites: Sites, drawn: Draws, regime: Regime, owed: Reals) -> Regime:
    """Ratio, spread and reach; `owed` [n]: the share of each draw that is the model's."""
    inside = drawn.column >= 0
    slots = int(sites.slot.max()) + 1
    counts = np.bincount(sites.slot, weights=owed, minlength=slots)
    hits = np.bincount(sites.slot[inside], weights=owed[inside], minlength=slots)
    reach = tuple(np.minimum((hits + 1) / (counts + 1), 1.0).tolist())
    best: tuple[float, Regime] | None = None
    for ratio in RATIOS if regime.temperature > 0 else (1.0,):
        tried = replace(regime, ratio=ratio, reach=reach)
        scores = _scores(sites, drawn, tried)[inside]
        at, column, weight = sites.slot[inside], drawn.column[inside], owed[inside]
        table = np.zeros((len(SPREADS), slots))
        for number, spread in enumerate(SPREADS):
            logs = log_softmax(scores / spread)
            said = logs[np.arange(len(logs)), column] * weight
            table[number] = np.bincount(at, weights=said, minlength=slots)
        chosen = table.argmax(0)
        total = float(table.max(0).sum())
        if best is None or total > best[0]:
            best = (total, replace(tried, spread=tuple(SPREADS[i] for i in chosen.tolist())))
    assert best is not None
    return best[1]


def _scores(sites: Sites, drawn: Draws, regime: Regime) -> Reals:
    scores: Reals = log_softmax(sites.logits / regime.scale()) + drawn.noise
    return scores


def model_chances(sites: Sites, drawn: Draws, regime: Regime) -> Reals:
    """The model's chance of each candidate [n, width], before repetition has its share."""
    spread = np.array([_slot(regime.spread, j) for j in sites.slot.tolist()])
    reach = np.array([_slot(regime.reach, j) for j in sites.slot.tolist()])
    chances: Reals = np.exp(log_softmax(_scores(sites, drawn, regime) / spread[:, None]))
    reached: Reals = chances * reach[:, None]
    return reached


def _fit_ngram(sites: Sites, drawn: Draws, regime: Regime) -> tuple[Regime, Reals]:
    """Chances by length that make the draws likeliest (expectation maximisation): the target's
    token comes from the first match, or else from the second, or else from the model. Returns the
    share of each draw that came from the model, too.
    """
    chances = model_chances(sites, drawn, regime)
    rows = np.arange(len(sites))
    own = np.where(drawn.column >= 0, chances[rows, drawn.column], _ELSEWHERE)
    bucket = np.searchsorted(NGRAM_LENGTHS, sites.matched_lengths, side="right") - 1
    there = bucket >= 0
    said = (sites.matched_tokens == drawn.tokens[:, None]) & there
    start = np.array(regime.ngram)
    known = start.copy()
    owed_first, from_second, rest = np.zeros(len(sites)), np.zeros(len(sites)), own
    for _ in range(40):
        chance = np.where(there, known[np.maximum(bucket, 0)], 0.0)
        first, second = chance[:, 0], chance[:, 1]
        from_second = np.where(said[:, 1], second, 0.0)
        rest = from_second + (1 - second) * own
        owed_first = np.where(said[:, 0], first / (first + (1 - first) * rest + 1e-12), 0.0)
        owed_second = (1 - owed_first) * from_second / (rest + 1e-12)
        tried = np.zeros(len(NGRAM_LENGTHS))
        won = np.zeros(len(NGRAM_LENGTHS))
        for column, (weight, owed) in enumerate(
            ((np.ones(len(sites)), owed_first), (1 - owed_first, owed_second))
        ):
            at = there[:, column]
            np.add.at(tried, bucket[at, column], weight[at])
            np.add.at(won, bucket[at, column], owed[at])
        # Two trials' worth of the starting chance, for lengths that are rarely seen.
        known = np.minimum(_rising((won + 2 * start) / (tried + 2), tried + 2), HIGHEST)
    return replace(regime, ngram=tuple(known.tolist())), (1 - owed_first) * (
        1 - from_second / (rest + 1e-12)
    )


def _rising(values: Reals, weights: Reals) -> Reals:
    """The nearest values that do not fall (weighted squares, pool adjacent violators): a longer
    match is never worth less.
    """
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, mass, count = pools.pop()
            total = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / total, total, count + pool[2])
        pools.append(pool)
    return np.repeat([p[0] for p in pools], [p[2] for p in pools])


def reliability(sites: Sites, sampling: Sampling, regime: Regime) -> list[dict[str, float]]:
    """Nodes by the chance they carry: how many, the mean chance and the share that was drawn."""
    sites = sites.seen(sampling)
    drawn = draws(sites, sampling, coupled=regime.coupled)
    chances = model_chances(sites, drawn, regime)
    left = np.ones(len(sites))
    extra: list[tuple[Reals, Any]] = []
    for column in range(NGRAM_TOKENS):
        length = sites.matched_lengths[:, column]
        chance = left * np.array([regime.ngram_chance(n) for n in length.tolist()])
        left = left - chance
        extra.append((chance, sites.matched_tokens[:, column]))
    chances = chances * left[:, None]
    claims, outcomes = [], []
    for chance, token in extra:
        same = (sites.ids == token[:, None]) & (chance > 0)[:, None]
        chances = chances + same * chance[:, None]
        alone = ~same.any(1) & (chance > 0)
        claims.append(chance[alone])
        outcomes.append(token[alone] == drawn.tokens[alone])
    claims.append(chances.reshape(-1))
    outcomes.append((sites.ids == drawn.tokens[:, None]).reshape(-1))
    said, true = np.concatenate(claims), np.concatenate(outcomes)
    rows = []
    for low, high in itertools.pairwise(BINS):
        inside = (said > low) & (said <= high)
        if inside.any():
            rows.append(
                {
                    "nodes": float(inside.sum()),
                    "claimed": round(float(said[inside].mean()), 4),
                    "drawn": round(float(true[inside].mean()), 4),
                }
            )
    return rows


def _slot(values: Sequence[float], slot: int) -> float:
    return values[min(slot, len(values) - 1)]
