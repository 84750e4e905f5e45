"""draft_probs on the host: what each drafted token was sampled from, dense, sparse or one-hot.

Knows the forms and their checks; the rules that use them are in `accept`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from draftwire_kernels.noise import Floats

_SUM_TOLERANCE = 1e-3


class DraftProbsError(ValueError):
    """draft_probs the drafted tokens were not sampled from. Carries field, limit and value."""

    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field} must be {limit}, got {value!r}")
        self.field = field
        self.limit = limit
        self.value = value


@dataclass(frozen=True, eq=False)
class DraftProbs:
    """Row j is the distribution that drafted token j was sampled from; rows are normalised here.

    A rule is exact only if the tokens really were drawn from these rows, noise of purpose DRAFT or
    BRANCH and the round's base included.
    """

    ids: npt.NDArray[np.int64] | None
    """Token ids of the entries, [n, k], distinct in a row; None: entry v is token v."""
    probs: Floats
    """Probabilities, fp32 [n, k] or [n, V], each row summing to one."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.probs)

    @classmethod
    def dense(cls, probs: torch.Tensor) -> DraftProbs:
        """From [n, V]. Raises DraftProbsError."""
        return cls(None, _normalised(probs))

    @classmethod
    def sparse(cls, ids: torch.Tensor, probs: torch.Tensor) -> DraftProbs:
        """From ids [n, k] and their probabilities [n, k], all there is. Raises DraftProbsError."""
        if ids.shape != probs.shape:
            raise DraftProbsError(
                "sparse.token_ids", f"of shape {list(probs.shape)}", list(ids.shape)
            )
        table = ids.detach().cpu().numpy().astype(np.int64)
        if table.size and table.min() < 0:
            raise DraftProbsError("sparse.token_ids", ">= 0", int(table.min()))
        ordered = np.sort(table, axis=1)
        if (ordered[:, 1:] == ordered[:, :-1]).any():
            row = int(np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))[0])
            raise DraftProbsError(f"sparse.token_ids[{row}]", "distinct", table[row].tolist())
        return cls(table, _normalised(probs))

    @classmethod
    def one_hot(cls, tokens: Sequence[int]) -> DraftProbs:
        """Of a drafter that does not sample."""
        ids = np.asarray(tokens, dtype=np.int64).reshape(-1, 1)
        return cls(ids, np.ones(ids.shape, dtype=np.float32))

    @classmethod
    def mixture(
        cls, branches: Sequence[Sequence[int]], prior: Sequence[float], chosen: int
    ) -> DraftProbs:
        """Running weights of branch `chosen`, drawn with `prior` among K equally long branches.

        prior is the one really sampled from, category temperature included. Raises DraftProbsError.
        """
        weights = np.asarray(prior, dtype=np.float64)
        table = np.asarray(branches, dtype=np.int64)
        if table.ndim != 2 or weights.shape != table.shape[:1]:
            raise DraftProbsError(
                "prior", "one weight a branch of equal length", list(weights.shape)
            )
        if not 0 <= chosen < len(table) or not weights[chosen] > 0:
            raise DraftProbsError("chosen", "a branch with a positive prior", chosen)
        depth = table.shape[1]
        probs = np.zeros((depth, len(table)))
        ids = np.empty((depth, len(table)), dtype=np.int64)
        agree = weights > 0
        for j in range(depth):
            # Branches with the same token share one entry; the other entries get ids of their own
            # and no weight.
            distinct, entry = np.unique(table[:, j], return_inverse=True)
            np.add.at(probs[j], entry, weights * agree)
            probs[j] /= probs[j].sum()
            ids[j, : distinct.size] = distinct
            ids[j, distinct.size :] = -1
            agree &= table[:, j] == table[chosen, j]
        return cls(ids, probs.astype(np.float32))

    def check(self, tokens: Sequence[int], vocab_size: int) -> None:
        """Refuse rows that cannot belong to these tokens. Raises DraftProbsError."""
        if len(tokens) != len(self):
            raise DraftProbsError("draft_probs", f"{len(tokens)} rows", len(self))
        if self.ids is None and self.probs.shape[1] != vocab_size:
            raise DraftProbsError("dense", f"{vocab_size} wide", self.probs.shape[1])
        if self.ids is not None and self.ids.size and self.ids.max() >= vocab_size:
            raise DraftProbsError("sparse.token_ids", f"in [0, {vocab_size})", int(self.ids.max()))
        for row, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                raise DraftProbsError(f"tokens[{row}]", f"in [0, {vocab_size})", token)
            if not self.log_prob(row, token) > -np.inf:
                raise DraftProbsError(f"draft_probs[{row}]", "positive at the drafted token", token)

    def log_prob(self, row: int, token: int) -> float:
        """Log-probability that a row gives a token."""
        probs = self.probs[row]
        if self.ids is None:
            prob = float(probs[token])
        else:
            prob = float(probs[self.ids[row] == token].sum())
        return float(np.log(prob)) if prob > 0 else -np.inf

    def entries(self, row: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """Tokens with a positive probability in a row, and the probabilities."""
        probs = self.probs[row]
        kept = np.flatnonzero(probs > 0)
        return (kept if self.ids is None else self.ids[row][kept]), probs[kept]


def _normalised(probs: torch.Tensor) -> Floats:
    table = probs.detach().float().cpu().numpy()
    sums = table.sum(axis=-1, dtype=np.float64)
    for row in range(len(table)):
        if not np.isfinite(sums[row]) or table[row].min() < 0:
            raise DraftProbsError(f"draft_probs[{row}]", "finite and >= 0", float(table[row].min()))
        if abs(sums[row] - 1) > _SUM_TOLERANCE:
            raise DraftProbsError(f"draft_probs[{row}]", "summing to one", float(sums[row]))
    normalised: Floats = (table / sums[:, None]).astype(np.float32)
    return normalised
