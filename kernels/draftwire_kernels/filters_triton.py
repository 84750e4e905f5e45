"""Top-k, top-p and min-p of a round's rows without a sort: the smallest score kept, by bisection.

Knows the statistics pass (group maxima) and the parameters of rows. The kept set of a row is
written as two numbers: every token whose score is above `pivot`, and those equal to it up to id
`cut`, since ties at the edge go to lower ids. Scores are logits / temperature, divided as IEEE
does, the same as on the CPU. A search reads only groups of 64 tokens whose maximum is in range: for
top-k those are the groups with the k largest maxima, a few KB of a row.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import dataclasses

import torch
import triton
import triton.language as tl

from draftwire_kernels.checks import next_power_of_two
from draftwire_kernels.rounds import RowParams
from draftwire_kernels.scores_triton import (
    NEAR,
    NO_CUT,
    divide,
    fold_spans,
    list_groups,
    order,
    read_groups,
    unorder,
)
from draftwire_kernels.stats_triton import RowStats

_NO_CUT = tl.constexpr(NO_CUT)
_LOWEST = tl.constexpr(-(2**31))


@dataclasses.dataclass(frozen=True)
class Kept:
    """The tokens a row may draw: score > pivot, or score == pivot and id <= cut."""

    pivot: torch.Tensor
    """[rows] fp32, -inf keeps all."""
    cut: torch.Tensor
    """[rows] int32."""
    log_total: torch.Tensor
    """[rows] fp32: log of the sum of exp(score) over kept tokens."""


@triton.jit
def _weight(key, top, COUNT: tl.constexpr):
    if COUNT:
        return tl.full(key.shape, 1.0, tl.float64)
    return tl.exp(unorder(key) - top).to(tl.float64)


@triton.jit
def _search(
    X_ptr,
    Group_ptr,
    List_ptr,
    n_cols,
    groups,
    temperature,
    top,
    need,
    low,
    edge,
    edge_cut,
    G: tl.constexpr,
    NEAR: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The shortest prefix (score down, then id up) of the tokens inside (edge, edge_cut) that
    weighs `need`.

    A token weighs 1 if COUNT, else exp(score - top). `low` is a key at or below the answer. Returns
    the prefix's own edge and cut.
    """
    high = order(top)
    low = tl.minimum(low, high)
    count = list_groups(Group_ptr, List_ptr, groups, temperature, low, G)
    while low < high:
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
        weight = tl.zeros([NEAR, 64], tl.float64)
        above = tl.full([NEAR, 64], 0x7FFFFFFF, tl.int32)
        below = tl.full([NEAR, 64], -0x80000000, tl.int32)
        for first in range(0, count, NEAR):
            token, key, there = read_groups(
                X_ptr, List_ptr, first, count, n_cols, temperature, NEAR
            )
            there = there & ((key > edge) | ((key == edge) & (token <= edge_cut)))
            reaches = there & (key >= middle)
            weight += tl.where(reaches, _weight(key, top, COUNT), 0.0)
            above = tl.minimum(above, tl.where(reaches, key, 0x7FFFFFFF))
            below = tl.maximum(below, tl.where(there & (key < middle), key, _LOWEST))
        if tl.sum(tl.sum(weight, axis=1), axis=0) >= need:
            # Step to keys that occur: a bracket of few values ends at once.
            low = tl.min(tl.min(above, axis=1), axis=0)
            if count > NEAR:
                count = list_groups(Group_ptr, List_ptr, groups, temperature, low, G)
        else:
            high = tl.maximum(tl.max(tl.max(below, axis=1), axis=0), low)
    # Of the tokens equal to the pivot, the lowest ids, as many as are still needed.
    weight = tl.zeros([NEAR, 64], tl.float64)
    for first in range(0, count, NEAR):
        token, key, there = read_groups(X_ptr, List_ptr, first, count, n_cols, temperature, NEAR)
        weight += tl.where(there & (key > low), _weight(key, top, COUNT), 0.0)
    rest = need - tl.sum(tl.sum(weight, axis=1), axis=0)
    each = tl.max(_weight(tl.zeros([1], tl.int32) + low, top, COUNT), axis=0)
    # A pivot too small to weigh anything can only come last: keep all of its equals.
    spare = tl.minimum(rest / tl.where(each > 0.0, each, 1.0), 2147483000.0)
    spare = tl.maximum(tl.ceil(tl.where(each > 0.0, spare, 2147483000.0)), 1.0).to(tl.int32)
    cut = tl.zeros([], tl.int32) + _NO_CUT
    passed = tl.zeros([], tl.int32)
    for first in range(0, count, NEAR):
        token, key, there = read_groups(X_ptr, List_ptr, first, count, n_cols, temperature, NEAR)
        equal = there & (key == low) & ((key > edge) | (token <= edge_cut))
        flat = tl.reshape(equal.to(tl.int32), [NEAR * 64])
        rank = tl.cumsum(flat, axis=0) + passed
        here = tl.reshape(token, [NEAR * 64])
        hit = (flat > 0) & (rank == spare)
        cut = tl.minimum(cut, tl.min(tl.where(hit, here, _NO_CUT), axis=0))
        passed += tl.sum(flat, axis=0)
    return low, cut


@triton.jit
def _filter_kernel(
    X_ptr,
    Group_ptr,
    Max_ptr,
    Sum_ptr,
    List_ptr,
    Pivot_ptr,
    Cut_ptr,
    Total_ptr,
    Owner_ptr,
    Temperature_ptr,
    TopK_ptr,
    TopP_ptr,
    MinP_ptr,
    n_cols,
    row_stride,
    group_stride,
    groups,
    spans,
    G: tl.constexpr,
    NEAR: tl.constexpr,
    SPANS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(Owner_ptr + row)
    if owner >= 0:
        given = tl.load(Temperature_ptr + owner)
        temperature = tl.where(given > 0.0, given, 1.0)
        top_k = tl.load(TopK_ptr + owner)
        top_p = tl.load(TopP_ptr + owner)
        min_p_log = tl.load(MinP_ptr + owner)
        largest, total = fold_spans(Max_ptr, Sum_ptr, row, spans, given, SPANS)
        top = divide(largest, temperature)
        # Rows that will be refused keep everything: nothing is searched among NaN.
        sound = (total == total) & (largest > float("-inf"))
        X_ptr += row * row_stride
        Group_ptr += row * group_stride
        List_ptr += row * G
        edge = tl.zeros([], tl.int32) + _LOWEST
        cut = tl.zeros([], tl.int32) + _NO_CUT
        weight = total.to(tl.float64)
        wanted = False
        if sound & (top_k > 0) & (top_k < n_cols):
            wanted = True
            # That many groups hold a token as large as the k-th largest maximum.
            group = tl.arange(0, G)
            high_of = tl.load(Group_ptr + group, mask=group < groups, other=float("-inf"))
            key_of = order(divide(high_of.to(tl.float32), temperature))
            low = tl.zeros([], tl.int32) + _LOWEST
            high = order(top)
            if top_k <= groups:
                while low < high:
                    middle = (low.to(tl.int64) + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
                    reaches = (key_of >= middle) & (group < groups)
                    if tl.sum(reaches.to(tl.int32), axis=0) >= top_k:
                        low = tl.min(tl.where(reaches, key_of, 0x7FFFFFFF), axis=0)
                    else:
                        rest = (key_of < middle) & (group < groups)
                        high = tl.maximum(tl.max(tl.where(rest, key_of, _LOWEST), axis=0), low)
            edge, cut = _search(
                X_ptr,
                Group_ptr,
                List_ptr,
                n_cols,
                groups,
                temperature,
                top,
                top_k.to(tl.float64),
                low,
                edge,
                cut,
                G,
                NEAR,
                True,
            )
            weight = _mass(
                X_ptr, Group_ptr, List_ptr, n_cols, groups, temperature, top, edge, cut, G, NEAR
            )
        if sound & (top_p < 1.0):
            wanted = True
            # Tokens below this line weigh less than 1 - top_p together, so the prefix ends above
            # it.
            least = top + tl.log((weight * (1.0 - top_p) / n_cols).to(tl.float32)) - 0.001
            edge, cut = _search(
                X_ptr,
                Group_ptr,
                List_ptr,
                n_cols,
                groups,
                temperature,
                top,
                weight * top_p.to(tl.float64),
                tl.maximum(edge, order(least)),
                edge,
                cut,
                G,
                NEAR,
                False,
            )
        if sound & (min_p_log > float("-inf")):
            wanted = True
            least_key = order(top + min_p_log)
            if least_key > edge:
                edge = least_key
                cut = tl.zeros([], tl.int32) + _NO_CUT
        if wanted:
            weight = _mass(
                X_ptr, Group_ptr, List_ptr, n_cols, groups, temperature, top, edge, cut, G, NEAR
            )
        tl.store(Pivot_ptr + row, tl.where(wanted, unorder(edge), float("-inf")))
        tl.store(Cut_ptr + row, cut)
        tl.store(Total_ptr + row, top + tl.log(weight.to(tl.float32)))


@triton.jit
def _mass(
    X_ptr,
    Group_ptr,
    List_ptr,
    n_cols,
    groups,
    temperature,
    top,
    edge,
    cut,
    G: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Sum of exp(score - top) of the tokens inside (edge, cut), fp64."""
    count = list_groups(Group_ptr, List_ptr, groups, temperature, edge, G)
    weight = tl.zeros([NEAR, 64], tl.float64)
    for first in range(0, count, NEAR):
        token, key, there = read_groups(X_ptr, List_ptr, first, count, n_cols, temperature, NEAR)
        inside = there & ((key > edge) | ((key == edge) & (token <= cut)))
        weight += tl.where(inside, _weight(key, top, False), 0.0)
    return tl.sum(tl.sum(weight, axis=1), axis=0)


def kept_tokens(logits: torch.Tensor, stats: RowStats, params: RowParams) -> Kept:
    """Edges of the kept sets of rows [rows, V] after `statistics` of the same rows.

    Order of the filters: top-k, then top-p of what is left, then min-p of the largest. Reads the
    group maxima and, a few times over, the groups in range: about 130 B a token kept by top-k (from
    L2); top-p alone on a flat row reads the row several times.
    """
    rows, n_cols = logits.shape
    groups, spans = stats.group_max.shape[1], stats.span_max.shape[1]
    device = logits.device
    kept = Kept(
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )
    width = max(NEAR, next_power_of_two(groups))
    scratch = torch.empty(rows, width, dtype=torch.int32, device=device)
    if rows:
        _filter_kernel[(rows,)](
            logits,
            stats.group_max,
            stats.span_max,
            stats.span_sum,
            scratch,
            kept.pivot,
            kept.cut,
            kept.log_total,
            params.owner,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p_log,
            n_cols,
            logits.stride(0),
            stats.group_max.stride(0),
            groups,
            spans,
            G=width,
            NEAR=NEAR,
            SPANS=next_power_of_two(spans),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return kept
