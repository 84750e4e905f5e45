"""Which row counts give the same bits: the invariant arithmetic, shown rather than assumed.

Knows: matrix products on this processor. A row of a product may change its bits with the number of
rows beside it, since libraries choose another kernel for another shape. Here each linear shape of
the model, and attention's batched products, are run with every row count a step may have, at every
place in it, and compared bit for bit. Row counts that agree are allowed; if none agree with each
other, one fixed count is used and products are cut into pieces of it. Does not know: sessions or
sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from verifier_service.packing import BLOCK

STEP_ROWS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ATTENTION_ROWS = (4, 8, 16, 32, 64, 128, 256)
FIXED_ROWS = (16, 32)
# Up to here a GPU's product is bound by its weights, and each further piece reads them again.
FIXED_ROWS_CUDA = (128, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Row counts of a step. `chunk` is None if products of every bucket agree, else the one count
    products are cut into."""

    buckets: tuple[int, ...]
    attention_rows: tuple[int, ...]
    chunk: int | None = None
    share_attention: bool = True
    certified: bool = True

    def describe(self) -> str:
        """One line for logs and GetInfo."""
        if not self.certified:
            return "fast"
        rows = (
            f"pieces of {self.chunk} rows"
            if self.chunk
            else f"steps of {', '.join(map(str, self.buckets))} rows"
        )
        return f"invariant: {rows}; {'shared' if self.share_attention else 'separate'} context sums"


FAST = RowPlan(buckets=(1,), attention_rows=(1,), certified=False)


def certify(
    model: nn.Module, heads: int, kv_heads: int, head_dim: int, *, seed: int = 0
) -> RowPlan:
    """Find the row plan under which every product of `model` is independent of the rows beside
    it."""
    weights = _distinct_weights(model)
    agreed: tuple[int, ...] = STEP_ROWS
    for weight in weights:
        agreed = tuple(_agreeing(weight, agreed, seed))
    attention = _attention_rows(heads, kv_heads, head_dim, weights[0].device, seed)
    share = len(attention) > 0
    if len(agreed) >= 2:
        return RowPlan(agreed, attention or (4,), None, share)
    for rows in FIXED_ROWS_CUDA if weights[0].is_cuda else FIXED_ROWS:
        if all(_position_free(weight, rows, seed) for weight in weights):
            return RowPlan((rows,), attention or (4,), rows, share)
    raise RuntimeError(
        "no row count gives rows independent of their place; start with --numerics fast"
    )


def cut_products(model: nn.Module, rows: int, *, pad: bool) -> None:
    """Make every linear layer of `model` work in pieces of at most `rows` rows; the weights stay in
    the processor's cache meanwhile. `pad`: every piece has exactly `rows`; otherwise smaller inputs
    are left alone, since their counts were shown to agree.
    """

    def cut(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.reshape(-1, inputs.shape[-1])
        if not pad and flat.shape[0] <= rows:
            return F.linear(inputs, layer.weight, layer.bias)
        missing = -flat.shape[0] % rows
        padded = F.pad(flat, (0, 0, 0, missing)) if missing else flat
        pieces = [F.linear(piece, layer.weight, layer.bias) for piece in torch.split(padded, rows)]
        return torch.cat(pieces)[: flat.shape[0]].view(*inputs.shape[:-1], -1)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = cut.__get__(module)  # type: ignore[method-assign]


def _distinct_weights(model: nn.Module) -> list[torch.Tensor]:
    found: dict[tuple[int, ...], torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found.setdefault(tuple(module.weight.shape), module.weight.detach())
    if not found:
        raise RuntimeError("the model has no linear layer")
    return list(found.values())


def _samples(rows: int, width: int, like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype=like.dtype, device=like.device)


def _agreeing(weight: torch.Tensor, candidates: Sequence[int], seed: int) -> Iterable[int]:
    """The candidates that give each row the bits that most of them give it, wherever the row
    stands."""
    if not candidates:
        return
    inputs = _samples(max(candidates), weight.shape[1], weight, seed)
    # The largest count is the reference: everything that agrees with it agrees with each other.
    reference = F.linear(inputs, weight)
    for rows in candidates:
        if torch.equal(
            F.linear(inputs[:rows].contiguous(), weight), reference[:rows]
        ) and torch.equal(
            F.linear(inputs[:rows].flip(0).contiguous(), weight), reference[:rows].flip(0)
        ):
            yield rows


def _position_free(weight: torch.Tensor, rows: int, seed: int) -> bool:
    inputs = _samples(rows, weight.shape[1], weight, seed)
    reference = F.linear(inputs, weight)
    return all(
        torch.equal(F.linear(inputs.roll(shift, 0).contiguous(), weight), reference.roll(shift, 0))
        for shift in range(rows)
    )


def _attention_rows(
    heads: int, kv_heads: int, head_dim: int, device: torch.device, seed: int
) -> tuple[int, ...]:
    """Row counts for which the shared products give a row the same bits as the rows' own products
    do."""
    per_kv = heads // kv_heads
    like = torch.empty(0, dtype=torch.float32, device=device)
    keys = _samples(BLOCK, head_dim, like, seed)
    agreed = []
    for rows in ATTENTION_ROWS:
        q = _samples(rows * per_kv, head_dim, like, seed + 1)
        w = _samples(rows * per_kv, BLOCK, like, seed + 2).abs()
        if all(_same_batched(a, b, rows, per_kv) for a, b in ((q, keys.T.contiguous()), (w, keys))):
            agreed.append(rows)
    return tuple(agreed)


def _same_batched(left: torch.Tensor, right: torch.Tensor, rows: int, per_kv: int) -> bool:
    padded = per_kv + (-per_kv % 4)
    own_left = F.pad(left.view(rows, per_kv, -1), (0, 0, 0, padded - per_kv))
    own = torch.bmm(own_left, right.expand(rows, *right.shape).contiguous())[:, :per_kv].reshape(
        rows * per_kv, -1
    )
    for batch in (1, 3, 24):
        shared = torch.bmm(
            left.expand(batch, *left.shape).contiguous(),
            right.expand(batch, *right.shape).contiguous(),
        )
        if not all(torch.equal(piece, own) for piece in shared):
            return False
    wide = (
        torch.bmm(left[None], torch.cat([right] * 5, dim=1)[None])
        if right.shape[0] != BLOCK
        else None
    )
    return wide is None or torch.equal(wide[0, :, : right.shape[1]], own)
