"""The path-conditioned head: corrects a slot's hidden state for the tokens drafted just before it.

A block drafter gives every slot one distribution, whatever the slots before it became. With h the
slot's normed hidden state, p the token before it on the path and g the one before p,

    h' = h + W_out silu(W_slot norm(h) + W_parent norm(E[p]) + W_before norm(E[g])),

E the target's embedding, norm the root mean square norm without gains; the candidates of the slot
below that path are ranked by h' times the target's head. In the spirit of TreeFlash (arXiv
2606.03819: a gated layer on slot state and parent embedding) and of the Markov heads of DSpark;
the second token and the additive form are ours: W_slot norm(h) is made once a slot, so a node
costs two thin products and one row a candidate.

Knows tensors. Does not know trees or sessions.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

PREFIX = "path_head."


class PathHead(nn.Module):
    """`rank`: width of the inner layer. Starts as no correction at all: W_out is zero."""

    def __init__(self, size: int, rank: int, eps: float) -> None:
        super().__init__()
        self.slot = nn.Linear(size, rank, bias=False)
        self.parent = nn.Linear(size, rank, bias=False)
        self.before = nn.Linear(size, rank, bias=False)
        self.out = nn.Linear(rank, size, bias=False)
        self.eps = eps
        self._tables: _Tables | None = None

    def of_slots(self, hidden: torch.Tensor) -> torch.Tensor:
        """The slots' share of the inner layer: [rows, size] -> [rows, rank]."""
        made: torch.Tensor = self.slot(F.rms_norm(hidden, hidden.shape[-1:], eps=self.eps))
        return made

    def of_path(self, parent: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The path's share of the inner layer: [rows, size] each -> [rows, rank]. Embeddings of
        the last token of each path and of the one before it.
        """
        size = parent.shape[-1:]
        parent = F.rms_norm(parent, size, eps=self.eps)
        before = F.rms_norm(before, size, eps=self.eps)
        made: torch.Tensor = self.parent(parent) + self.before(before)
        return made

    def of_tokens(
        self, parents: torch.Tensor, before: torch.Tensor, embedding: torch.Tensor
    ) -> torch.Tensor:
        """`of_path` of token ids int64 [rows]; embedding [vocabulary, size]. What each token gives
        is kept: serving asks for the same tokens again and again. Weights must not change between
        calls.
        """
        tables = self._tables
        if tables is None or tables.embedding is not embedding:
            tables = self._tables = _Tables(embedding, self.parent.out_features)
        both = torch.cat([parents, before])
        new = both[~tables.known[both]]
        if new.numel():
            new = torch.unique(new)
            rows = F.rms_norm(embedding[new], embedding.shape[-1:], eps=self.eps)
            tables.parent[new], tables.before[new] = self.parent(rows), self.before(rows)
            tables.known[new] = True
        return tables.parent[parents] + tables.before[before]

    def correction(
        self, of_slots: torch.Tensor, of_path: torch.Tensor, factors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What to add to the hidden states: [rows, rank] each -> [rows, size]. `factors` [rows,
        rank]: on the inner layer, for training.
        """
        inner = F.silu(of_slots + of_path)
        made: torch.Tensor = self.out(inner if factors is None else inner * factors)
        return made


class _Tables:
    """What tokens give the inner layer, filled as they come: [vocabulary, rank] twice. Memory that
    no token has touched is not there yet on a CPU.
    """

    def __init__(self, embedding: torch.Tensor, rank: int) -> None:
        self.embedding = embedding
        count, device = embedding.shape[0], embedding.device
        with torch.inference_mode(False):  # or they could be filled in that mode only
            self.known = torch.zeros(count, dtype=torch.bool, device=device)
            self.parent = torch.zeros(count, rank, dtype=embedding.dtype, device=device)
            self.before = torch.zeros(count, rank, dtype=embedding.dtype, device=device)
