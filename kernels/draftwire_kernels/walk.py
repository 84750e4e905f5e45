"""Rule `follow`: the target draws its own token at each node and walks to the child that bears it.

Knows rows of logits, a tree and how tokens are drawn; looks at the rows on the walked path and at a
few below that the walk is likely to meet. Knows neither sessions nor stops: the caller cuts the
tokens.

accepted: a drafted token the target drew too. recovered: the token drawn at the first node without
a matching child. bonus: the token drawn below a leaf. committed: the accepted tokens and then the
recovered or bonus token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from draftwire_kernels import noise
from draftwire_kernels.noise import Floats
from draftwire_kernels.race import NonFiniteRow, argmax, perturbed_argmax, perturbed_top
from draftwire_kernels.rows import KeptScores, edited, kept_scores, normalise, target_scores
from draftwire_kernels.sampling import History, Sampling
from draftwire_kernels.tree import TokenTree

__all__ = [
    "Grammar",
    "NonFiniteRow",
    "Verdict",
    "draw",
    "follow",
    "perturbed_top",
    "target_logprobs",
    "target_scores",
]

_AHEAD = 4
"""Rows made at once; more and more of them while the walk goes as expected."""


class Grammar(Protocol):
    """A constraint that moves along the path. `pop` undoes the last `append`."""

    def allowed(self) -> torch.Tensor | None:
        """Tokens allowed next, bool [V]; None if all are."""

    def append(self, token: int) -> None:
        """Move past a token."""

    def pop(self) -> object:
        """Undo the last append."""


@dataclass(frozen=True)
class Verdict:
    """What a round commits."""

    path: tuple[int, ...]
    """Accepted nodes, in order."""
    tokens: tuple[int, ...]
    """Committed tokens: the accepted ones, then the recovered or bonus token."""
    logprobs: tuple[float, ...] | None = None
    """Log target_probs of each committed token, if asked for."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each committed token the most likely (id, logprob), in order, if asked for."""


def target_logprobs(
    logits: torch.Tensor,
    sampling: Sampling,
    *,
    position: int,
    history: History | None = None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log target_probs of a row, fp32 [V] on the row's device, -inf = excluded.

    Greedy sampling: those of temperature 1 after bias, penalties and masks, without filters.
    Arguments and errors as for `target_scores`.
    """
    scores = target_scores(logits, sampling, position=position, history=history, allowed=allowed)
    return torch.from_numpy(normalise(scores)).to(logits.device)


def draw(scores: torch.Tensor | Floats, sampling: Sampling, position: int) -> int:
    """Token of a row: greedy argmax, else argmax(scores + gumbel); the lowest id among equals.

    scores fp32 [V]: of `target_scores`, then the token is exactly follow's; or log-probabilities,
    then it differs only where two tokens are equal to the last bits. Raises NonFiniteRow.
    """
    row = (
        scores.detach().float().cpu().contiguous().numpy()
        if isinstance(scores, torch.Tensor)
        else scores
    )
    if sampling.greedy:
        return argmax(row)
    return perturbed_argmax(row, sampling.seed, position, noise.TARGET)


def follow(
    logits: torch.Tensor,
    tree: TokenTree,
    sampling: Sampling,
    *,
    position: int,
    history: History | None = None,
    grammar: Grammar | None = None,
    want_logprobs: bool = False,
    top_logprobs: int = 0,
) -> Verdict:
    """Walk a tree. Whatever it holds, the tokens are those of empty trees, one round a token.

    logits [n + 1, V] bf16, fp16 or fp32: row 0 is the anchor's, row i + 1 node i's. position: of
    the first token drawn (base position + 1). history and grammar move along the path and are left
    as they were. Raises NonFiniteRow naming a row on the walked path, ValueError for a wrong number
    of rows.
    """
    if logits.ndim != 2 or logits.shape[0] != len(tree) + 1:
        raise ValueError(f"logits must be [{len(tree) + 1}, vocabulary], got {list(logits.shape)}")
    path: list[int] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    top: list[tuple[tuple[int, float], ...]] = []
    undo: list[Callable[[], object]] = []
    rows = _Rows(logits, tree, sampling, history, grammar)
    node: int | None = -1
    try:
        while node is not None:
            here = position + len(path)
            try:
                scores, index = rows.of(node, here)
                token = scores.draw(index)
            except NonFiniteRow as error:
                raise NonFiniteRow(node + 1, error.found) from None
            tokens.append(token)
            if want_logprobs or top_logprobs:
                row = normalise(scores.masked(index))
                logprobs.append(float(row[token]))
                top.append(most_likely(row, top_logprobs))
            node = tree.child(node, token)
            if node is not None:
                path.append(node)
                for state in (history, grammar):
                    if state is not None:
                        state.append(token)
                        undo.append(state.pop)
    finally:
        for pop in reversed(undo):
            pop()
    return Verdict(
        tuple(path),
        tuple(tokens),
        tuple(logprobs) if want_logprobs else None,
        tuple(top) if top_logprobs else (),
    )


class _Rows:
    """The rows of a walk. Some are made before they are met, since several at once cost less: those
    below a node by first children, for a drafter's best guess stands first.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        tree: TokenTree,
        sampling: Sampling,
        history: History | None,
        grammar: Grammar | None,
    ) -> None:
        self._logits, self._tree, self._sampling = logits, tree, sampling
        self._history, self._grammar = history, grammar
        self._made: dict[int, tuple[KeptScores, int]] = {}
        self._last = -1
        self._ahead = _AHEAD

    def of(self, node: int, position: int) -> tuple[KeptScores, int]:
        """Scores with the node's among them, and which they are; position: of its token."""
        if node not in self._made:
            nodes = [node]
            sampling, grammar = self._sampling, self._grammar
            if grammar is None and not edited(sampling, position):
                nodes = self._likely(node)
            first = node + 1
            consecutive = nodes[-1] - node == len(nodes) - 1
            logits = self._logits
            scores = kept_scores(
                logits[first : first + len(nodes)]
                if consecutive
                else logits[[other + 1 for other in nodes]],
                sampling,
                position=position,
                history=self._history,
                allowed=grammar.allowed() if grammar is not None else None,
            )
            self._made = {other: (scores, index) for index, other in enumerate(nodes)}
        self._last = node
        return self._made[node]

    def _likely(self, node: int) -> list[int]:
        # Twice as many if the last ones were all met.
        met = bool(self._made) and self._last == next(reversed(self._made))
        self._ahead = 2 * self._ahead if met else _AHEAD
        nodes = [node]
        while len(nodes) < self._ahead and (children := self._tree.children(nodes[-1])):
            nodes.append(children[0])
        return nodes


def most_likely(logprobs: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely (id, logprob), lower id first among equals, no excluded ones."""
    if count <= 0:
        return ()
    count = min(count, logprobs.size)
    ids = np.flatnonzero(logprobs >= np.partition(logprobs, -count)[-count])
    ids = ids[np.lexsort((ids, -logprobs[ids]))][:count]
    return tuple((int(i), float(logprobs[i])) for i in ids if logprobs[i] > -np.inf)
