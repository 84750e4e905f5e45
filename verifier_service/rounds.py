"""A target step from the sessions' side: what each of them draws in it, and where its KV ends up.

Knows: the work of a step, verdicts, slots. Does not know: how tokens are accepted (`acceptance`),
what is told of them to drafters and clients, how a session ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk import NonFiniteRow, Verdict
from verifier_service.acceptance import Round, accept
from verifier_service.cache import PagedStore
from verifier_service.model import StepOutput
from verifier_service.scheduler import Work

_NO_TREE = TokenTree()


def begin(work: Sequence[Work], store: PagedStore, now: float) -> None:
    """Note who starts, and of which layers features are kept for all that is computed."""
    layers = frozenset(store.features)
    for item in work:
        session = item.session
        if session.started_at is None:
            session.started_at = now
        session.captured = layers if session.captured is None else session.captured & layers


def verify(
    work: Sequence[Work], output: StepOutput, store: PagedStore, vocab_size: int
) -> list[Verdict | NonFiniteRow | None]:
    """Draw the tokens of every round; None for a piece of a prompt that draws nothing."""
    rounds = [
        Round(
            index,
            item.proposal.tree if item.proposal else _NO_TREE,
            item.session.request.sampling,
            len(item.session.tokens),
            item.session.history,
            item.session.request.logprobs,
            item.session.request.top_logprobs,
        )
        for index, item in enumerate(work)
        if item.draws
    ]
    found = iter(accept(output, rounds, store, vocab_size))
    verdicts: list[Verdict | NonFiniteRow | None] = []
    for index, item in enumerate(work):
        verdict = next(found) if item.draws else None
        if verdict is None:
            item.session.computed += len(item.feed.tokens)
        elif item.session.made == 0 and not isinstance(verdict, NonFiniteRow):
            last = output.of(index, len(item.feed.logit_rows))[-1, :vocab_size]
            item.session.last_logits = last.clone()
        verdicts.append(verdict)
    return verdicts


class Moves:
    """Brings the accepted paths of trees to consecutive slots: the only rollback there is."""

    def __init__(self, store: PagedStore) -> None:
        self._store = store
        self._moves: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, item: Work, path: Sequence[int]) -> None:
        """The nodes of `path` were accepted."""
        if path:
            slots = item.session.slots
            rows = np.asarray(path) + item.anchor + 1
            places = np.arange(item.anchor + 1, item.anchor + 1 + len(rows))
            if not np.array_equal(rows, places):
                self._moves.append((slots[rows], slots[places]))

    def make(self) -> None:
        """Move the rows of all paths at once."""
        if self._moves:
            source, target = (
                torch.from_numpy(np.concatenate(side)).to(self._store.device)
                for side in zip(*self._moves, strict=True)
            )
            self._store.move(source, target)
