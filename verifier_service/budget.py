"""How much to verify now and how much to ask for: the most committed tokens per second of the whole
batch.

Knows: chances that drafted tokens survive, what rows cost, what a draft costs. Pure. Does not know:
tokens, lanes' streams, clocks.

A step of n sessions that verifies nodes with survivals s commits n + sum(s) tokens on average and
takes C(rows) + W: the step, and the wait for the next drafts. Nodes are ranked over all sessions by
survival, so the best choice of m nodes is the first m, and every m is looked at: costs come in
quanta and cliffs, and a greedy stop would end before the first of them. `follow` draws the same
tokens whatever is cut, so everything known may be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

DEPTHS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 63)  # longest paths that may be asked for
_TURN = 1.03  # how much better drafting must look before it begins again: no flapping on noise
_LOYALTY = 1.1  # the like, between sessions


class Costs(Protocol):
    """What `costs.StepCosts` has."""

    def curve(self, rows: Ints | Floats, *, drafted: bool) -> Floats:
        """Expected ms of a step for each of `rows`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Nodes of each offer to verify, ascending and parent-closed; what the step is expected to
    commit and to take."""

    keep: list[Ints]
    tokens: float
    ms: float


def choose(
    offers: Sequence[Floats],
    costs: Costs,
    *,
    anchors: float,
    rows: int,
    wait_ms: float = 0.0,
    most_nodes: int | None = None,
) -> Choice:
    """The nodes of this step. `offers`: survival of each node of each tree that may be cut.

    anchors: tokens that the step commits without them (sessions that draw, and what fixed trees
    add). rows: rows that the step has without them. wait_ms: what a round costs beside its step.
    most_nodes: bound of the sum.
    """
    sizes = [len(offer) for offer in offers]
    survivals = np.concatenate([np.empty(0), *offers])
    order = np.argsort(-survivals, kind="stable")
    if most_nodes is not None:
        order = order[: max(0, most_nodes)]
    gain = np.concatenate([[0.0], np.cumsum(survivals[order])])
    ms = wait_ms + _with_nodes(costs, rows, len(order))
    best = int(np.argmax((anchors + gain) / ms))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    firsts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    taken = np.sort(order[:best])
    keep = [taken[owners[taken] == i] - firsts[i] for i in range(len(sizes))]
    return Choice(keep, float(anchors + gain[best]), float(ms[best]))


def _with_nodes(costs: Costs, rows: int, most: int) -> Floats:
    """ms of a step with 0 .. most nodes beside `rows` other rows."""
    found = costs.curve(rows + np.arange(most + 1), drafted=True).copy()
    found[:1] = costs.curve(np.asarray([rows]), drafted=False)
    return found


@dataclass(frozen=True, slots=True)
class Hope:
    """What a session's next proposal may be like: nodes of its late ones, each with the share of a
    proposal it stands for (weights of one proposal sum to its nodes).

    `lane`: whose drafter would be asked. `drafting`: asked at present.
    """

    session_id: int
    lane: int
    survivals: Floats
    depths: Ints  # 1 for children of the anchor
    weights: Floats
    most_nodes: int
    most_depth: int
    drafting: bool
    warmth: int = 0  # temperature class

    @property
    def most(self) -> float:
        """Expected accepted tokens if everything were verified."""
        return float(self.survivals @ self.weights)


@dataclass(frozen=True, slots=True)
class Wish:
    """What to ask for in a session's name: most nodes and longest path; how many of the nodes are
    expected to be verified, and how many to be accepted. Means, not whole numbers: rounded up for
    each session, they would come to more rows than the plan has."""

    nodes: int
    depth: int
    gain: float
    verified: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Whom to ask for a proposal; who is not in `wishes` decodes plainly. `ms`: a round's step and
    `wait_ms`; `plain_ms`: a round without any draft."""

    wishes: dict[int, Wish]
    tokens: float
    ms: float
    plain_ms: float
    wait_ms: float = 0.0


def plan(
    hopes: Sequence[Hope],
    costs: Costs,
    wait: Callable[[int, float], float],
    *,
    anchors: float,
    rows: int,
    row_limit: int,
) -> Plan:
    """Whom to ask for how much, so that rounds of that kind bring the most tokens per second.

    `wait(lane, rows)`: ms that a draft of `rows` rows takes there. anchors, rows: sessions that
    draw, and rows of a step without drafts. Sets of sessions are tried in order of what they hope
    for, lanes that answer soon first; longest paths in steps, since a drafter's work grows with
    them.
    """
    anchors = max(1.0, anchors)
    plain_ms = float(costs.curve(np.asarray([rows]), drafted=False)[0])
    ranked = sorted(
        (hope for hope in hopes if hope.most_nodes > 0 and hope.most_depth > 0),
        key=lambda h: (wait(h.lane, 1 + h.most_depth), -h.most * (_LOYALTY if h.drafting else 1)),
    )
    turn = 1.0 if any(hope.drafting for hope in ranked) else _TURN
    best_rate, best = anchors / plain_ms * turn, Plan({}, float(anchors), plain_ms, plain_ms)
    deepest = max((hope.most_depth for hope in ranked), default=0)
    for depth in [d for d in DEPTHS if d < deepest] + [deepest] * (deepest > 0):
        for count in _counts(len(ranked)):
            found = _try(ranked[:count], depth, costs, wait, anchors, rows, row_limit)
            if found is not None and found.tokens / found.ms > best_rate * (1 + 1e-9):
                best_rate, best = found.tokens / found.ms, found
    return replace(best, plain_ms=plain_ms)


def _counts(most: int) -> list[int]:
    """How many sessions to try: powers of two, half as much again, and all."""
    tried = (c for power in range(most.bit_length()) for c in (1 << power, 3 << power >> 1))
    return sorted({c for c in tried if c < most} | ({most} if most else set()))


def _try(
    asked: Sequence[Hope],
    depth: int,
    costs: Costs,
    wait: Callable[[int, float], float],
    anchors: float,
    rows: int,
    row_limit: int,
) -> Plan | None:
    """The best round in which exactly `asked` are asked for paths of at most `depth`."""
    drafter_rows: dict[int, float] = {}
    pieces: list[tuple[Floats, Floats, Ints]] = []
    for index, hope in enumerate(asked):
        longest = min(depth, hope.most_depth)
        drafter_rows[hope.lane] = drafter_rows.get(hope.lane, 0.0) + 1 + longest
        near = hope.depths <= longest
        values = hope.survivals[near]
        pieces.append((values, hope.weights[near], np.full(len(values), index)))
    survivals, weights, owners = (np.concatenate(side) for side in zip(*pieces, strict=True))
    if not len(survivals):
        return None
    order = np.argsort(-survivals, kind="stable")
    nodes = np.cumsum(weights[order])
    gain = np.cumsum(survivals[order] * weights[order])
    fits = rows + nodes <= row_limit
    if not fits.any():
        return None
    waits = max(wait(lane, count) for lane, count in drafter_rows.items())
    ms = waits + costs.curve(rows + np.ceil(nodes - 1e-9), drafted=True)
    rate = np.where(fits, (anchors + gain) / ms, 0.0)
    at = int(np.argmax(rate))
    taken = order[: at + 1]
    wanted = np.bincount(owners[taken], weights[taken], len(asked))
    gains = np.bincount(owners[taken], survivals[taken] * weights[taken], len(asked))
    wishes = {
        hope.session_id: Wish(
            # Half as much again: what turns out well is seen, and may be verified, beyond the mean.
            min(hope.most_nodes, int(np.ceil(1.5 * wanted[i])) + 2),
            min(depth, hope.most_depth),
            float(gains[i]),
            float(wanted[i]),
        )
        for i, hope in enumerate(asked)
        if wanted[i] > 0
    }
    return Plan(wishes, float(anchors + gain[at]), float(ms[at]), 0.0, waits)


class PlainLook:
    """When a round goes without drafts although they seem to pay: what is always drafted for never
    shows what plain steps cost, and a profile that had them too dear would stand for ever.

    After 24 steps with drafts, then 48, then 96, so about one step in a hundred in the long run. A
    look is over with the first plain step that can be measured, or after `_TRIES` steps.
    """

    _FIRST, _RARELY, _TRIES = 24, 96, 3

    def __init__(self) -> None:
        self.looks = 0
        self._drafted = 0
        self._interval = self._FIRST
        self._left = 0

    @property
    def now(self) -> bool:
        """Whether nothing is to be asked for."""
        return self._left > 0

    def stepped(self, *, drafted: bool, measured: bool) -> None:
        """A step was made, with drafts or plain; `measured`: its time says something."""
        if self._left:
            self._left = 0 if measured and not drafted else self._left - 1
        elif measured and not drafted:
            self._drafted, self._interval = 0, self._FIRST
        elif drafted:
            self._drafted += 1
            if self._drafted >= self._interval:
                self.looks += 1
                self._drafted, self._left = 0, self._TRIES
                self._interval = min(2 * self._interval, self._RARELY)


class Prober:
    """When a session that decodes plainly may be asked all the same, to see whether drafts pay by
    now.

    Probes may cost a share of the time at most, and each one that changes nothing doubles the wait
    for the next, up to `_LONGEST` times. Knows no clock: it is told how long each round took.
    """

    _SHARE = 0.015
    _LONGEST = 4

    def __init__(self) -> None:
        self.probes = 0
        self._saved = 0.0
        self._patience = 1

    def earn(self, ms: float) -> None:
        """A round of `ms` passed without drafts."""
        self._saved += self._SHARE * ms

    def due(self, cost_ms: float) -> bool:
        """Whether a probe that costs `cost_ms` is paid for; if so it is begun."""
        if self._saved < max(cost_ms, 1e-6) * self._patience:
            return False
        self._saved = 0.0
        self.probes += 1
        self._patience = min(2 * self._patience, self._LONGEST)
        return True

    def promising(self) -> None:
        """A probe found more than was expected: the next one need not wait longer."""
        self._patience = 1

    def paid(self) -> None:
        """Drafts pay again."""
        self._patience, self._saved = 1, 0.0
