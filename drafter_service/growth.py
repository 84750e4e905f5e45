"""Trees grown level by level, for all sessions of a draft batch together.

A node's survival is the product of the chances along its path: how likely the target is to come
to it. The tree of a session is the set of its most surviving nodes within the node budget; since a
child never survives more often than its parent, that set is a tree, and so is each of its prefixes
in the order of survival. A level is one round of array operations: children of all nodes still in
the running, kept if they are among the best so far. This finds the same tree as a best-first search
and asks the path-conditioned head once a level, not once a node.

A node's children are the slot's candidates, with

    chance = reach * softmax((log q + g) / spread),

q the draft probabilities at the draft temperature (of the branches, each weighted by how well it
explains the path, or of the one there is), g the target's noise at that position (0 where the
order is not coupled), reach and spread calibrated by slot. A repetition of earlier text, found at
each node anew, takes its own calibrated chance off the model's and gives it to the token that
followed; past the model's slots it goes on alone.

Chances are estimates of conditional frequencies, made to be compared across nodes and sessions.
Knows arrays. Does not know models, sessions or the wire.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drafter_service.bed import Bed, Condition, Ints, Reals, log_softmax, logsumexp
from drafter_service.ngram import LONGEST
from drafter_service.tree import ANCHOR, Part, Tree

NGRAM_TOKENS = 2  # different continuations of one node that repetition may give
# Columns of the nodes' integers.
_SESSION, _NUMBER, _PARENT, _TOKEN, _DEPTH, _PART, _BRANCH, _ROW, _COLUMN = range(9)
# And of their reals.
_SURVIVAL, _CHANCE = range(2)


@dataclass(slots=True)
class _Frontier:
    """Nodes whose children come next: integers and reals as in the pool, the token before each,
    log weights of the branches [rows, branches], and each path's last tokens (None: no look-ups).
    """

    ints: Ints
    reals: Reals
    before: Ints
    weights: Reals
    tails: list[list[int] | None]

    def only(self, chosen: npt.NDArray[np.bool_]) -> _Frontier:
        if chosen.all():
            return self
        tails = [tail for tail, keep in zip(self.tails, chosen.tolist(), strict=True) if keep]
        return _Frontier(
            self.ints[chosen], self.reals[chosen], self.before[chosen], self.weights[chosen], tails
        )


@dataclass(slots=True)
class _Level:
    """Children offered: integers, reals and, for those from the model, the log probabilities that
    move the branches' weights [rows, branches, width].
    """

    ints: Ints
    reals: Reals
    log_q: Reals | None


class Grower:
    """Grows the trees of one bed."""

    def __init__(self, bed: Bed, condition: Condition | None = None) -> None:
        self.bed, self.condition = bed, condition
        slots = max(1, bed.logits.shape[2])
        regimes = bed.regimes
        self._scale = np.array([[[r.scale()]] for r in regimes], dtype=np.float32)
        self._spread = _by_slot([r.spread for r in regimes], slots)
        self._reach = np.log(_by_slot([r.reach for r in regimes], slots))
        self._ngram = [[r.ngram_chance(length) for length in range(LONGEST + 1)] for r in regimes]
        self._next_number = 0

    def grow(self) -> list[Tree]:
        """The tree of each session, nodes in the order of their survival."""
        bed, sessions = self.bed, len(self.bed.regimes)
        ints, reals = np.zeros((0, 9), dtype=np.int64), np.zeros((0, 2))
        frontier = self._roots()
        for level in range(int(bed.depth.max(initial=0))):
            frontier = frontier.only(level < bed.depth[frontier.ints[:, _SESSION]])
            if not len(frontier.ints):
                break
            made = self._children(frontier, level, _bars(ints, reals, bed.nodes))
            if not len(made.ints):
                break
            ints = np.concatenate([ints, made.ints])
            reals = np.concatenate([reals, made.reals])
            kept = _best(ints, reals, bed.nodes)
            ints, reals = ints[kept], reals[kept]
            frontier = self._advance(frontier, ints, reals, level, made.log_q)
        return _trees(ints, reals, sessions, self._next_number)

    def _roots(self) -> _Frontier:
        bed, n = self.bed, len(self.bed.regimes)
        ints = np.zeros((n, 9), dtype=np.int64)
        ints[:, _SESSION] = np.arange(n)
        ints[:, _NUMBER] = ANCHOR
        ints[:, _TOKEN] = bed.tokens[:, 0]
        tails = [None if gram is None else gram.tail() for gram in bed.grams]
        weights = bed.log_prior.astype(np.float64)
        return _Frontier(ints, np.zeros((n, 2)), bed.tokens[:, 1], weights, tails)

    def _children(self, frontier: _Frontier, level: int, bars: Reals) -> _Level:
        """The children of the frontier that may be among the best."""
        sessions = frontier.ints[:, _SESSION]
        matches = self._matches(frontier, sessions)
        rows = np.flatnonzero(level < self.bed.slots[sessions])
        found: list[tuple[Ints, Reals]] = []
        log_q = None
        if rows.size:
            chances, log_q = self._by_model(frontier, rows, level)
            matches, parts = _merge(matches, rows, chances, self.bed.ids[sessions[rows], level])
            survival = frontier.reals[rows, _SURVIVAL][:, None] + chances
            row, column = np.nonzero(survival > bars[sessions[rows]][:, None])
            ints = self._made(frontier, rows[row], level)
            ints[:, _TOKEN] = self.bed.ids[sessions[rows], level][row, column]
            ints[:, _PART] = parts[row, column]
            ints[:, _ROW], ints[:, _COLUMN] = row, column
            if log_q.shape[1] > 1:
                weighted = frontier.weights[rows][row] + log_q[row, :, column]
                ints[:, _BRANCH] = weighted.argmax(1)
            found.append((ints, np.stack([survival[row, column], chances[row, column]], 1)))
        if matches.size:
            at = matches["row"]
            survival = frontier.reals[at, _SURVIVAL] + matches["log_chance"]
            fits = survival > bars[sessions[at]]
            at = at[fits]
            ints = self._made(frontier, at, level)
            ints[:, _TOKEN] = matches["token"][fits]
            ints[:, _PART] = Part.NGRAM
            ints[:, _ROW], ints[:, _COLUMN] = at, -1
            found.append((ints, np.stack([survival[fits], matches["log_chance"][fits]], 1)))
        if not found:
            return _Level(np.zeros((0, 9), dtype=np.int64), np.zeros((0, 2)), log_q)
        ints = np.concatenate([part[0] for part in found])
        ints[:, _NUMBER] = self._next_number + np.arange(len(ints))
        self._next_number += len(ints)
        return _Level(ints, np.concatenate([part[1] for part in found]), log_q)

    def _made(self, frontier: _Frontier, rows: Ints, level: int) -> Ints:
        ints = np.zeros((rows.size, 9), dtype=np.int64)
        ints[:, _SESSION] = frontier.ints[rows, _SESSION]
        ints[:, _PARENT] = frontier.ints[rows, _NUMBER]
        ints[:, _DEPTH] = level
        return ints

    def _by_model(self, frontier: _Frontier, rows: Ints, level: int) -> tuple[Reals, Reals]:
        """Log chances [rows, width] and log draft probabilities [rows, branches, width]."""
        bed, sessions = self.bed, frontier.ints[rows, _SESSION]
        if self.condition is None:
            logits = bed.logits[sessions, :, level]
        else:
            tokens = frontier.ints[rows, _TOKEN]
            logits = self.condition(level, sessions, tokens, frontier.before[rows])
            logits = np.where(bed.logits[sessions, :, level] > -np.inf, logits, -np.inf)
        log_q = log_softmax(logits / self._scale[sessions])
        if log_q.shape[1] == 1:
            mixed = log_q[:, 0]
        else:
            weights = frontier.weights[rows]
            weights = weights - logsumexp(weights)[:, None]
            mixed = logsumexp((weights[:, :, None] + log_q).transpose(0, 2, 1))
        scores = (mixed + bed.noise[sessions, level]) / self._spread[sessions, level, None]
        chances = log_softmax(scores) + self._reach[sessions, level, None]
        return chances, log_q

    def _matches(self, frontier: _Frontier, sessions: Ints) -> npt.NDArray[np.void]:
        """What repetition says below each node: row, token, log chance."""
        rows: list[tuple[int, int, float]] = []
        for row, (session, tail) in enumerate(zip(sessions.tolist(), frontier.tails, strict=True)):
            gram = self.bed.grams[session]
            if gram is None or tail is None:
                continue
            left = 1.0
            for token, length in gram.next_tokens(tail, NGRAM_TOKENS):
                chance = left * self._ngram[session][length]
                if chance > 0:
                    rows.append((row, token, float(np.log(chance))))
                    left -= chance
        kinds = [("row", np.int64), ("token", np.int64), ("log_chance", np.float64)]
        return np.array(rows, dtype=kinds)

    def _advance(
        self,
        frontier: _Frontier,
        ints: Ints,
        reals: Reals,
        level: int,
        log_q: Reals | None,
    ) -> _Frontier:
        """The kept nodes of this level, ready to have children."""
        chosen = np.flatnonzero(ints[:, _DEPTH] == level)
        own, values = ints[chosen], reals[chosen]
        if level == 0:  # the roots all bear one number, but there is one a session
            at = np.searchsorted(frontier.ints[:, _SESSION], own[:, _SESSION])
        else:
            place = {number: row for row, number in enumerate(frontier.ints[:, _NUMBER].tolist())}
            at = np.array([place[p] for p in own[:, _PARENT].tolist()], dtype=np.int64)
        weights = frontier.weights[at]
        if log_q is not None and weights.shape[1] > 1:
            moved = own[:, _COLUMN] >= 0
            weights[moved] += log_q[own[moved, _ROW], :, own[moved, _COLUMN]]
        tails: list[list[int] | None] = []
        for parent, token in zip(at.tolist(), own[:, _TOKEN].tolist(), strict=True):
            tail = frontier.tails[parent]
            tails.append(None if tail is None else [*tail[-LONGEST:], token])
        return _Frontier(own, values, frontier.ints[at, _TOKEN], weights, tails)


def _merge(
    matches: npt.NDArray[np.void], rows: Ints, chances: Reals, ids: Ints
) -> tuple[npt.NDArray[np.void], Ints]:
    """Take the matches' chances off the model's, in place, and add them where the model has the
    token too. Returns the matches that no candidate took in, and which part each candidate owes
    most of its chance to.
    """
    parts = np.full(chances.shape, int(Part.RANK_TREE), dtype=np.int64)
    if not matches.size:
        return matches, parts
    place = np.full(int(max(rows.max(), matches["row"].max())) + 1, -1, dtype=np.int64)
    place[rows] = np.arange(rows.size)
    at = place[matches["row"]]
    inside = at >= 0
    shares = np.exp(matches["log_chance"])
    taken = np.zeros(rows.size)
    np.add.at(taken, at[inside], shares[inside])
    chances += np.log1p(-np.minimum(taken, 0.999))[:, None]
    same = np.zeros((matches.size, ids.shape[1]), dtype=bool)
    same[inside] = ids[at[inside]] == matches["token"][inside][:, None]
    hit = same.any(1)
    row, column = at[hit], same[hit].argmax(1)
    owed = matches["log_chance"][hit]
    parts[row, column] = np.where(owed > chances[row, column], int(Part.NGRAM), parts[row, column])
    chances[row, column] = np.minimum(np.logaddexp(chances[row, column], owed), 0.0)
    return matches[~hit], parts


def _bars(ints: Ints, reals: Reals, nodes: Ints) -> Reals:
    """What a node of each session must exceed to be among its best: -inf while there is room."""
    bars = np.full(len(nodes), -np.inf)
    if len(ints):
        counts = np.bincount(ints[:, _SESSION], minlength=len(nodes))
        lasts = np.cumsum(counts) - 1
        full = np.flatnonzero(counts >= nodes)
        bars[full] = reals[lasts[full], _SURVIVAL]
    return bars


def _best(ints: Ints, reals: Reals, nodes: Ints) -> Ints:
    """The rows of each session's most surviving nodes, session by session, best first; parents
    before children that survive as often.
    """
    order = np.lexsort((ints[:, _DEPTH], -reals[:, _SURVIVAL], ints[:, _SESSION]))
    sessions = ints[order, _SESSION]
    rank = np.arange(order.size) - np.searchsorted(sessions, sessions)
    finite = reals[order, _SURVIVAL] > -np.inf
    kept: Ints = order[(rank < nodes[sessions]) & finite]
    return kept


def _trees(ints: Ints, reals: Reals, sessions: int, numbers: int) -> list[Tree]:
    place = np.full(numbers + 1, ANCHOR, dtype=np.int64)
    starts = np.searchsorted(ints[:, _SESSION], np.arange(sessions + 1)).tolist()
    made = []
    for first, end in itertools.pairwise(starts):
        own = ints[first:end]
        place[own[:, _NUMBER]] = np.arange(end - first)
        parents = place[own[:, _PARENT]]  # ANCHOR is -1: the last entry, which stays ANCHOR
        made.append(
            Tree(
                own[:, _TOKEN].tolist(),
                parents.tolist(),
                reals[first:end, _CHANCE].tolist(),
                own[:, _PART].tolist(),
                own[:, _BRANCH].tolist(),
            )
        )
    return made


def _by_slot(values: Sequence[Sequence[float]], slots: int) -> Reals:
    return np.array([[v[min(j, len(v) - 1)] for j in range(slots)] for v in values])
