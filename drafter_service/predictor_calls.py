"""When the predictor is asked: once a session, at its first draft, for all such sessions at once.

Keeps what each session's call will need until then: the feature row of the last prompt position, or
the logits that came with the opening. A session without them drafts with the configured size and is
counted. Does not know lanes, trees or threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from drafter_service.messages import Open
from drafter_service.model import DraftModel
from drafter_service.predictor import (
    BlockSizePredictor,
    InputKind,
    expected_embedding,
    log_probabilities,
)
from drafter_service.session import Session


@dataclass(frozen=True, slots=True)
class _Clue:
    """One row; `raw`: a feature row that is not fused yet."""

    row: torch.Tensor
    raw: bool = False


@dataclass(slots=True)
class PredictorCalls:
    """The predictor's side of the engine; `predictor` None: no session is predicted.

    `calls` counts the passes, `predicted` the sessions they were for, `missed` the sessions that
    wanted a prediction and had no input for it, `time_ns` the time in all passes.
    """

    predictor: BlockSizePredictor | None
    model: DraftModel
    calls: int = 0
    predicted: int = 0
    missed: int = 0
    time_ns: int = 0
    # A session that goes away takes its row along.
    _clues: WeakKeyDictionary[Session, _Clue] = field(default_factory=WeakKeyDictionary)

    @property
    def largest(self) -> int:
        """The largest size it can ask for; 0 without a predictor."""
        return 0 if self.predictor is None else self.predictor.config.candidates[-1]

    def opened(self, session: Session, opening: Open) -> None:
        """A session has begun, or begun again: the prompt, and so the answer, is the same."""
        if self.predictor is None or not session.speculation.predict:
            return
        session.awaits_size = True
        if self.predictor.config.input.from_logits and opening.last_logits is not None:
            self._clues[session] = _Clue(opening.last_logits)

    def rows(self, session: Session, first: int, rows: torch.Tensor, *, raw: bool) -> None:
        """Feature rows of positions from `first` on have come."""
        if not session.awaits_size or self.predictor is None:
            return
        if self.predictor.config.input is not InputKind.CONTEXT:
            return
        at = session.last_prompt_position - first
        if 0 <= at < rows.shape[0]:
            self._clues[session] = _Clue(rows[at].clone(), raw)

    def run(self, sessions: Sequence[Session]) -> int:
        """Ask for those of `sessions` that wait for a size, in one pass; returns the nanoseconds
        that it took.
        """
        waiting = [session for session in sessions if session.awaits_size]
        if not waiting or self.predictor is None:
            return 0
        started = time.perf_counter_ns()
        for session in waiting:
            session.awaits_size = False
        usable = [(s, self._clues.pop(s)) for s in waiting if s in self._clues]
        usable = [(s, clue) for s, clue in usable if self._fits(clue)]
        self.missed += len(waiting) - len(usable)
        if usable:
            inputs = self._inputs([clue for _, clue in usable])
            temperatures = [session.sampling.temperature for session, _ in usable]
            for (session, _), size in zip(
                usable, self.predictor.sizes(inputs, temperatures), strict=True
            ):
                session.predicted_size = size
            self.calls += 1
            self.predicted += len(usable)
        taken = time.perf_counter_ns() - started
        self.time_ns += taken
        return taken

    def _fits(self, clue: _Clue) -> bool:
        """Whether logits are of the vocabulary that the network, or the embedding, has."""
        assert self.predictor is not None
        config, count = self.predictor.config, clue.row.shape[0]
        if config.input is InputKind.LOGITS:
            return count >= config.input_size
        if config.input is InputKind.EXPECTED_EMBEDDING:
            embedding = self.model.embedding
            return embedding is not None and 0 < count <= embedding.shape[0]
        return True

    def _inputs(self, clues: Sequence[_Clue]) -> torch.Tensor:
        """[n, input_size] of the network."""
        assert self.predictor is not None
        config, model = self.predictor.config, self.model
        if config.input is InputKind.LOGITS:
            logits = torch.stack([clue.row[: config.input_size].float() for clue in clues])
            return log_probabilities(logits.to(model.device), config.input_size)
        if config.input is InputKind.EXPECTED_EMBEDDING:
            assert model.embedding is not None
            # Targets of one drafter may pad their heads unlike each other.
            rows = [clue.row.to(model.device)[None] for clue in clues]
            same = len({row.shape for row in rows}) == 1
            groups = [torch.cat(rows)] if same else rows
            return torch.cat([expected_embedding(row, model.embedding) for row in groups])
        rows = [clue.row.to(model.device, model.dtype)[None] for clue in clues]
        fused = [model.fuse(r) if c.raw else r for r, c in zip(rows, clues, strict=True)]
        return torch.cat(fused)
