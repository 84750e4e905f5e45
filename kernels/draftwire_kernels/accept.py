"""Acceptance rules that use draft_probs: `chain`, `mixture` (chain over branches), `block`.

Knows rows of logits, drafted tokens and what they were sampled from. Knows neither sessions nor
stops. The rule that needs no draft_probs, `follow`, is in `walk`; the terms and the specification
are in `reference`.

Coins and the recovered or bonus token come from noise keyed (seed, position, purpose) and the
round's base, so that a position looked at in two rounds meets fresh numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import torch

from draftwire_kernels import noise
from draftwire_kernels.draft_probs import DraftProbs
from draftwire_kernels.noise import Floats
from draftwire_kernels.race import NonFiniteRow, perturbed_argmax
from draftwire_kernels.rows import normalise, target_scores
from draftwire_kernels.sampling import History, Sampling
from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk import Grammar, Verdict, follow, most_likely


class Rule(Enum):
    """How draft_probs are used; `mixture` is CHAIN or BLOCK over DraftProbs.mixture."""

    CHAIN = "chain"
    """Accept each token with min(1, target / draft)."""
    BLOCK = "block"
    """Block verification: never accepts less than CHAIN."""


def accept(
    logits: torch.Tensor,
    tokens: Sequence[int],
    draft: DraftProbs,
    sampling: Sampling,
    *,
    rule: Rule,
    position: int,
    history: History | None = None,
    grammar: Grammar | None = None,
    want_logprobs: bool = False,
    top_logprobs: int = 0,
) -> Verdict:
    """Verify a drafted chain against draft_probs. Output distributed as the target's own.

    logits [n + 1, V], row 0 the anchor's; tokens, draft: the n drafted ones; position: of the first
    drafted token (base position + 1). Greedy sampling is `follow`, with which every rule agrees
    then. history and grammar are left as they were. CHAIN reads rows up to the first refusal, BLOCK
    up to the first token the target excludes. Raises NonFiniteRow naming a row that was read,
    DraftProbsError, ValueError for a wrong number of rows.
    """
    if logits.ndim != 2 or logits.shape[0] != len(tokens) + 1:
        raise ValueError(
            f"logits must be [{len(tokens) + 1}, vocabulary], got {list(logits.shape)}"
        )
    draft.check(tokens, logits.shape[1])
    rows = _Rows(logits, sampling, position, history, grammar)
    if sampling.greedy:
        return follow(
            logits,
            TokenTree.chain(tokens),
            sampling,
            position=position,
            history=history,
            grammar=grammar,
            want_logprobs=want_logprobs,
            top_logprobs=top_logprobs,
        )
    try:
        decide = _chain if rule is Rule.CHAIN else _block
        accepted, log_weight = decide(rows, tokens, draft, sampling, position)
    finally:
        rows.rewind()
    law = rows.logprobs[accepted]
    if accepted < len(tokens):
        law = residual(law, draft, accepted, log_weight)
    base = position - 1
    last = perturbed_argmax(law, sampling.seed, position + accepted, noise.RECOVERED, base)
    committed = (*tokens[:accepted], last)
    read = list(zip(rows.logprobs, committed, strict=False))
    return Verdict(
        tuple(range(accepted)),
        committed,
        tuple(float(row[token]) for row, token in read) if want_logprobs else None,
        tuple(most_likely(row, top_logprobs) for row, _ in read) if top_logprobs else (),
    )


def residual(target: Floats, draft: DraftProbs, row: int, log_weight: float = 0.0) -> Floats:
    """log (weight target - draft)+ up to a constant, fp32 [V]; log target if nothing is left.

    In log space: with draft close to target the plain difference cancels, log1p of the ratio does
    not.
    """
    left = _left(target, draft, row, log_weight)
    return left if left.max() > -np.inf else target


def _left(target: Floats, draft: DraftProbs, row: int, log_weight: float) -> Floats:
    left = target + np.float32(log_weight)
    ids, probs = draft.entries(row)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(probs) - left[ids]
        left[ids] = np.where(ratio < 0, left[ids] + np.log1p(-np.exp(ratio)), -np.inf)
    return left


class _Rows:
    """Log target_probs of the rows along the drafted chain, made when asked for."""

    def __init__(
        self,
        logits: torch.Tensor,
        sampling: Sampling,
        position: int,
        history: History | None,
        grammar: Grammar | None,
    ) -> None:
        self.logprobs: list[Floats] = []
        self._logits, self._sampling, self._position = logits, sampling, position
        self._history, self._grammar = history, grammar
        self._undo: list[Callable[[], object]] = []

    def read(self) -> Floats:
        """The next row."""
        row = len(self.logprobs)
        try:
            scores = target_scores(
                self._logits[row],
                self._sampling,
                position=self._position + row,
                history=self._history,
                allowed=self._grammar.allowed() if self._grammar is not None else None,
            )
            self.logprobs.append(normalise(scores))
        except NonFiniteRow as error:
            raise NonFiniteRow(row, error.found) from None
        return self.logprobs[-1]

    def step(self, token: int) -> None:
        """Move past a drafted token."""
        for state in (self._history, self._grammar):
            if state is not None:
                state.append(token)
                self._undo.append(state.pop)

    def rewind(self) -> None:
        """Leave history and grammar as they were."""
        while self._undo:
            self._undo.pop()()


def _coin(sampling: Sampling, position: int, drafted: int) -> float:
    """Log of the uniform number that decides on token `drafted` of the round at `position`."""
    return math.log(noise.uniform(sampling.seed, position + drafted, noise.COIN, position - 1))


def _chain(
    rows: _Rows, tokens: Sequence[int], draft: DraftProbs, sampling: Sampling, position: int
) -> tuple[int, float]:
    for i, token in enumerate(tokens):
        target = float(rows.read()[token])
        if target == -np.inf or _coin(sampling, position, i) >= target - draft.log_prob(i, token):
            return i, 0.0
        rows.step(token)
    rows.read()
    return len(tokens), 0.0


def _block(
    rows: _Rows, tokens: Sequence[int], draft: DraftProbs, sampling: Sampling, position: int
) -> tuple[int, float]:
    # 1. log P_i of every prefix that the target does not exclude.
    joint = [0.0]
    for i, token in enumerate(tokens):
        target = float(rows.read()[token])
        if target == -np.inf:
            break
        joint.append(min(0.0, joint[i] + target - draft.log_prob(i, token)))
        rows.step(token)
    if len(joint) > len(tokens):
        rows.read()
    # 2. The longest prefix whose coin succeeds; the empty one needs none.
    for i in range(len(joint) - 1, 0, -1):
        weight = math.exp(joint[i])
        if i == len(tokens):
            succeeds = weight
        else:
            spare = float(np.exp(_left(rows.logprobs[i], draft, i, joint[i])).sum())
            succeeds = 1.0 if weight == 1 else spare / (spare + 1 - weight)
        if math.exp(_coin(sampling, position, i - 1)) < succeeds:
            return i, joint[i]
    return 0, 0.0
