"""The path-conditioned head at work while trees grow: logits of a slot's candidates below many
paths at once, for all sessions of a draft batch.

Knows the model's tensors and how slots of sessions lie in them. Does not know how trees grow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from drafter_service.bed import Floats, Ints
from drafter_service.model import DraftModel, LogitBias


class PathCondition:
    """Bound to one batch: hidden [slots * branches, hidden] of all sessions' slots one after
    another, branches of a slot side by side; ids int64 [slots, width]: their candidates; `first`
    int64 [sessions]: where each session's slots begin.
    """

    def __init__(
        self,
        model: DraftModel,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        first: Ints,
        biases: Sequence[LogitBias] = (),
    ) -> None:
        assert model.path_head is not None
        assert model.embedding is not None
        self._embedding = model.embedding
        self._model, self._head = model, model.path_head
        self._hidden, self._ids, self._first = hidden, ids, first
        self._branches = hidden.shape[0] // max(1, ids.shape[0])
        self._of_slots = self._head.of_slots(hidden)
        self._bias: torch.Tensor | None = None
        if biases:
            self._bias = torch.zeros(ids.shape, device=ids.device)
            for bias in biases:
                own = ids[bias.first : bias.end, :, None] == bias.ids
                self._bias[bias.first : bias.end] += (own * bias.values).sum(-1)

    @torch.no_grad()
    def __call__(self, slot: int, sessions: Ints, parents: Ints, before: Ints) -> Floats:
        """Logits float32 [rows, branches, width] of the candidates of `slot` below paths that end
        in the tokens `before`, `parents`. Rows of one session lie together.
        """
        device, branches = self._hidden.device, self._branches
        rows = torch.from_numpy(self._first[sessions] + slot).to(device)
        tokens = torch.from_numpy(np.stack([parents, before])).to(device)
        of_path = self._head.of_tokens(tokens[0], tokens[1], self._embedding)
        if branches > 1:
            of_path = of_path.repeat_interleave(branches, dim=0)
            wide = rows[:, None] * branches + torch.arange(branches, device=device)
            wide = wide.view(-1)
        else:
            wide = rows
        moved = self._hidden[wide] + self._head.correction(self._of_slots[wide], of_path)
        # One product a session: its rows are contiguous and share the slot's candidates.
        starts = [0, *(np.flatnonzero(sessions[1:] != sessions[:-1]) + 1).tolist(), len(sessions)]
        parts = []
        for start, end in itertools.pairwise(starts):
            row = int(self._first[sessions[start]]) + slot
            own = moved[start * branches : end * branches]
            parts.append(own @ self._model.head_rows(self._ids[row]).T)
        logits = self._model.shaped(parts[0] if len(parts) == 1 else torch.cat(parts)).float()
        logits = logits.view(len(rows), branches, -1)
        if self._bias is not None:
            logits = logits + self._bias[rows][:, None]
        found: Floats = logits.cpu().numpy()
        return found
