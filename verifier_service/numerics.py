"""Which row counts give the same bits: the invariant arithmetic, shown rather than assumed.

Knows: matrix products on this processor. A row of a product may change its bits with the number of
rows beside it, since libraries choose another kernel for another shape. Here each linear shape of
the model, and attention's batched products, are run with every row count a step may have, at every
place in it, and compared bit for bit. Row counts that agree are allowed; if none agree with each
other, one fixed count is used and products are cut into pieces of it. On a CPU, fp32 weights are
laid out anew for oneDNN where its products agree: they do from one row up, and small steps read the
weights faster. Does not know: sessions or sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from draftwire_kernels import products
from draftwire_kernels.products import Product
from verifier_service.packing import BLOCK

STEP_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ATTENTION_ROWS = (4, 8, 16, 32, 64, 128, 256)
TAIL_KEYS = (BLOCK, 2 * BLOCK, 3 * BLOCK)
FIXED_ROWS = (16, 32)
# Up to here a GPU's product is bound by its weights, and each further piece reads them again.
FIXED_ROWS_CUDA = (128, 64, 32, 16)
_PLACES = 16  # rows from the first on that each row count is tried at


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Row counts of a step. `chunk` is None if products of every bucket agree, else the one count
    products are cut into."""

    buckets: tuple[int, ...]
    attention_rows: tuple[int, ...]
    chunk: int | None = None
    share_attention: bool = True
    certified: bool = True
    most_tail: int = 0
    """Keys up to which a tree's rows may share its tail in physical order."""
    packed: bool = False
    """Whether weights are to be laid out for oneDNN (`products.pack`)."""

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


def fast(model: nn.Module) -> RowPlan:
    """The plan where bits may depend on the batch."""
    return replace(FAST, packed=_packable(model))


def certify(
    model: nn.Module, heads: int, kv_heads: int, head_dim: int, *, seed: int = 0
) -> RowPlan:
    """Find the row plan under which every product of `model` is independent of the rows beside
    it."""
    layers = _distinct_layers(model)
    device = layers[0].weight.device
    attention = _attention_rows(heads, kv_heads, head_dim, device, seed)
    tail = _most_tail(heads // kv_heads, head_dim, attention, device, seed)
    rest = RowPlan((), attention or (4,), None, len(attention) > 0, most_tail=tail)
    if _packable(model):
        agreed = _all_agreeing(layers, [_packed_product(layer) for layer in layers], seed)
        if len(agreed) >= 2:
            return replace(rest, buckets=agreed, packed=True)
    plain = [_plain_product(layer) for layer in layers]
    agreed = _all_agreeing(layers, plain, seed)
    if len(agreed) >= 2:
        return replace(rest, buckets=agreed)
    for rows in FIXED_ROWS_CUDA if device.type == "cuda" else FIXED_ROWS:
        pairs = zip(layers, plain, strict=True)
        if all(_position_free(layer, product, rows, seed) for layer, product in pairs):
            return replace(rest, buckets=(rows,), chunk=rows)
    raise RuntimeError(
        "no row count gives rows independent of their place; start with --numerics fast"
    )


def _packable(model: nn.Module) -> bool:
    return all(products.available(layer.weight) for layer in products.linear_layers(model))


def _packed_product(layer: nn.Linear) -> Product:
    return products.onednn(products.laid_out(layer.weight), layer.bias)


def _plain_product(layer: nn.Linear) -> Product:
    return lambda rows: F.linear(rows, layer.weight, layer.bias)


def cut_products(model: nn.Module, rows: int, *, pad: bool) -> None:
    """Make every linear layer of `model` work in pieces of at most `rows` rows; the weights stay in
    the processor's cache meanwhile. `pad`: every piece has exactly `rows`; otherwise smaller inputs
    are left alone, since their counts were shown to agree.
    """

    def cut(product: Product) -> Product:
        def pieces(inputs: torch.Tensor) -> torch.Tensor:
            flat = inputs.reshape(-1, inputs.shape[-1])
            if not pad and flat.shape[0] <= rows:
                return product(inputs)
            missing = -flat.shape[0] % rows
            padded = F.pad(flat, (0, 0, 0, missing)) if missing else flat
            made = torch.cat([product(piece) for piece in torch.split(padded, rows)])
            return made[: flat.shape[0]].view(*inputs.shape[:-1], -1)

        return pieces

    for layer in products.linear_layers(model):
        layer.forward = cut(layer.forward)  # type: ignore[assignment,method-assign]


def _distinct_layers(model: nn.Module) -> list[nn.Linear]:
    """One layer of each shape, with and without bias."""
    found: dict[tuple[int, int, bool], nn.Linear] = {}
    for layer in products.linear_layers(model):
        key = (layer.out_features, layer.in_features, layer.bias is not None)
        found.setdefault(key, layer)
    if not found:
        raise RuntimeError("the model has no linear layer")
    return list(found.values())


def _samples(rows: int, width: int, like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(dtype=like.dtype, device=like.device)


def _all_agreeing(
    layers: Sequence[nn.Linear], made_by: Sequence[Product], seed: int
) -> tuple[int, ...]:
    agreed: tuple[int, ...] = STEP_ROWS
    for layer, product in zip(layers, made_by, strict=True):
        agreed = tuple(_agreeing(layer, product, agreed, seed))
    return agreed


def _agreeing(
    layer: nn.Linear, product: Product, candidates: Sequence[int], seed: int
) -> Iterable[int]:
    """The candidates that give each row the bits that most of them give it, wherever the row
    stands."""
    if not candidates:
        return
    inputs = _samples(max(candidates), layer.in_features, layer.weight, seed)
    # The largest count is the reference: everything that agrees with it agrees with each other.
    reference = product(inputs)
    for rows in candidates:
        # Of few rows several are tried: one might agree by chance.
        if all(
            torch.equal(product(inputs[i : i + rows].contiguous()), reference[i : i + rows])
            and torch.equal(
                product(inputs[i : i + rows].flip(0).contiguous()), reference[i : i + rows].flip(0)
            )
            for i in range(0, min(_PLACES, max(candidates) - rows + 1), rows)
        ):
            yield rows


def _position_free(layer: nn.Linear, product: Product, rows: int, seed: int) -> bool:
    inputs = _samples(rows, layer.in_features, layer.weight, seed)
    reference = product(inputs)
    return all(
        torch.equal(product(inputs.roll(shift, 0).contiguous()), reference.roll(shift, 0))
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


def _most_tail(
    per_kv: int, head_dim: int, counts: Sequence[int], device: torch.device, seed: int
) -> int:
    """The longest of TAIL_KEYS up to which zero weights, anywhere between a row's others, leave its
    weighted sum the bits of a block by itself; 0 if none."""
    like = torch.empty(0, dtype=torch.float32, device=device)
    most = 0
    for keys in TAIL_KEYS if counts else ():
        if not all(_zeros_are_nothing(per_kv, head_dim, rows, keys, like, seed) for rows in counts):
            break
        most = keys
    return most


def _zeros_are_nothing(
    per_kv: int, head_dim: int, rows: int, keys: int, like: torch.Tensor, seed: int
) -> bool:
    generator = torch.Generator().manual_seed(seed + keys + rows)
    padded = per_kv + (-per_kv % 4)
    for some in (1, 5, BLOCK // 2, BLOCK - 1, BLOCK):
        weights = _samples(rows * per_kv, BLOCK, like, seed + some).abs()
        weights[:, some:] = 0
        values = _samples(keys, head_dim, like, seed + some + 1)
        places = torch.randperm(keys, generator=generator)[:some].sort().values.to(like.device)
        spread = weights.new_zeros(rows * per_kv, keys)
        spread[:, places] = weights[:, :some]
        block = values[:BLOCK].clone()
        block[:some] = values[places]
        own = F.pad(weights.view(rows, per_kv, BLOCK), (0, 0, 0, padded - per_kv))
        expected = torch.bmm(own, block.expand(rows, BLOCK, head_dim).contiguous())
        expected = expected[:, :per_kv].reshape(rows * per_kv, head_dim)
        for batch in (1, 3):
            made = torch.bmm(
                spread.expand(batch, -1, -1).contiguous(), values.expand(batch, -1, -1).contiguous()
            )
            if not all(torch.equal(piece, expected) for piece in made):
                return False
    return True
