"""Sparse draft_probs for the wire: the likeliest tokens of each drafted row, in a race's order.

Knows rows of draft logits and the counter noise. Knows neither trees nor messages. The k tokens
kept are a distribution of their own (truncated and renormalised), and the order is that of log
draft_probs + gumbel: with the target's noise it is the coupled rank order; with the drafter's own
noise its first entry is a sample of exactly the probabilities that are sent.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import dataclasses

import torch
import triton
import triton.language as tl

from draftwire_kernels.checks import expect, next_power_of_two
from draftwire_kernels.filters_triton import kept_tokens
from draftwire_kernels.noise_triton import token_gumbel
from draftwire_kernels.race_triton import row_status
from draftwire_kernels.rounds import RowParams
from draftwire_kernels.scores_triton import (
    NEAR,
    divide,
    fold_spans,
    list_groups,
    order,
    read_groups,
)
from draftwire_kernels.stats_triton import statistics

MOST = 256
"""Largest number of entries a row."""


@dataclasses.dataclass(frozen=True)
class SparseRows:
    """The k likeliest tokens of each row, best value first, lower id first among equals."""

    ids: torch.Tensor
    """[rows, k] int32; -1 where a row has fewer tokens."""
    values: torch.Tensor
    """[rows, k] fp32: logit / temperature + gumbel, in greedy rows the logit; then -inf."""
    log_probs: torch.Tensor
    """[rows, k] fp32: log draft_probs, those of a row adding up to one; then -inf."""
    log_total: torch.Tensor
    """[rows] fp32: log of the sum of exp(score) over the whole vocabulary."""
    status: torch.Tensor
    """[rows] int32: 0, or what is wrong with the row (race_triton); its entries are then -1."""


@triton.jit
def _pack_kernel(
    X_ptr,
    Group_ptr,
    Max_ptr,
    Sum_ptr,
    List_ptr,
    Pivot_ptr,
    Cut_ptr,
    Found_ptr,
    Ids_ptr,
    Value_ptr,
    Logprob_ptr,
    Total_ptr,
    Status_ptr,
    Owner_ptr,
    Depth_ptr,
    Temperature_ptr,
    Seed_ptr,
    Position_ptr,
    n_cols,
    row_stride,
    group_stride,
    groups,
    spans,
    entries,
    purpose,
    G: tl.constexpr,
    NEAR: tl.constexpr,
    SPANS: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(Owner_ptr + row)
    entry = tl.arange(0, K)
    out = row * entries + entry
    status = tl.zeros([], tl.int32)
    log_total = tl.zeros([], tl.float32)
    count = tl.zeros([], tl.int32)
    if owner >= 0:
        given = tl.load(Temperature_ptr + owner)
        temperature = tl.where(given > 0.0, given, 1.0)
        largest, total = fold_spans(Max_ptr, Sum_ptr, row, spans, given, SPANS)
        status = row_status(largest, total)
        log_total = divide(largest, temperature) + tl.log(total)
        X_ptr += row * row_stride
        Found_ptr += row * K
        if status == 0:
            pivot = order(tl.load(Pivot_ptr + row))
            cut = tl.load(Cut_ptr + row)
            listed = list_groups(
                Group_ptr + row * group_stride, List_ptr + row * G, groups, temperature, pivot, G
            )
            for first in range(0, listed, NEAR):
                token, key, there = read_groups(
                    X_ptr, List_ptr + row * G, first, listed, n_cols, temperature, NEAR
                )
                kept = there & ((key > pivot) | ((key == pivot) & (token <= cut)))
                # The key of -inf: tokens that cannot be drawn are not entries.
                kept = kept & (key > -2139095041)
                flag = tl.reshape(kept.to(tl.int32), [NEAR * 64])
                place = tl.cumsum(flag, axis=0) - flag + count
                here = tl.reshape(token, [NEAR * 64])
                tl.store(Found_ptr + place, here, mask=(flag > 0) & (place < entries))
                count += tl.sum(flag, axis=0)
            count = tl.minimum(count, entries)
            tl.debug_barrier()
            live = entry < count
            token = tl.load(Found_ptr + entry, mask=live, other=0)
            x = tl.load(X_ptr + token, mask=live, other=float("-inf")).to(tl.float32)
            score = divide(x, temperature)
            top = divide(largest, temperature)
            kept_total = top + tl.log(tl.sum(tl.exp(score - top), axis=0))
            value = score
            if given > 0.0:
                first_position = tl.load(Position_ptr + owner)
                base = first_position - 1
                if purpose == 0:
                    base = base * 0
                position = first_position + tl.load(Depth_ptr + row)
                value += token_gumbel(
                    token.to(tl.int64), position, base, tl.load(Seed_ptr + owner), purpose
                )
            value = tl.where(live, value, float("-inf"))
            tl.store(Ids_ptr + out, tl.where(live, token, -1), mask=entry < entries)
            tl.store(Value_ptr + out, tl.where(live, value, float("-inf")), mask=entry < entries)
            tl.store(Logprob_ptr + out, score - kept_total, mask=entry < entries)
    if (owner < 0) | (status != 0):
        nothing = tl.full([K], float("-inf"), tl.float32)
        tl.store(Ids_ptr + out, tl.full([K], -1, tl.int32), mask=entry < entries)
        tl.store(Value_ptr + out, nothing, mask=entry < entries)
        tl.store(Logprob_ptr + out, nothing, mask=entry < entries)
    tl.store(Total_ptr + row, log_total)
    tl.store(Status_ptr + row, status)


@triton.jit
def _order_kernel(
    Found_ptr,
    FoundValue_ptr,
    FoundLogprob_ptr,
    Ids_ptr,
    Value_ptr,
    Logprob_ptr,
    entries,
    K: tl.constexpr,
):
    """Put a row's entries in order; in _pack_kernel the noise would be made anew for each pair."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, K)
    there = entry < entries
    ids = tl.load(Found_ptr + row * entries + entry, mask=there, other=-1)
    value = tl.load(FoundValue_ptr + row * entries + entry, mask=there, other=float("-inf"))
    logprob = tl.load(FoundLogprob_ptr + row * entries + entry, mask=there, other=0.0)
    # Ties go to lower ids; entries of no token come last, in order.
    label = tl.where(ids >= 0, ids, 0x7FFFFF00 + entry)
    ahead = (value[None, :] > value[:, None]) | (
        (value[None, :] == value[:, None]) & (label[None, :] < label[:, None])
    )
    rank = row * entries + tl.sum(ahead.to(tl.int32), axis=1)
    tl.store(Ids_ptr + rank, ids, mask=there)
    tl.store(Value_ptr + rank, value, mask=there)
    tl.store(Logprob_ptr + rank, logprob, mask=there)


def pack_rows(logits: torch.Tensor, params: RowParams, count: int, purpose: int) -> SparseRows:
    """The `count` likeliest tokens of draft logits [rows, V], by score + gumbel of `purpose`.

    count 1 to MOST; params' filters are not applied, its temperature is the draft's own.
    noise.TARGET couples to the target's draw at the row's position; noise.DRAFT samples, with the
    round's base. Reads the logits once, then about 130 B a token kept; writes 12 B an entry. Raises
    KernelArgumentError.
    """
    expect(1 <= count <= MOST, "count", f"1 to {MOST}", count)
    rows, n_cols = logits.shape
    count = min(count, n_cols)
    device = logits.device
    only = dataclasses.replace(
        params,
        top_k=torch.full_like(params.top_k, count),
        top_p=torch.ones_like(params.top_p),
        min_p_log=torch.full_like(params.min_p_log, -torch.inf),
    )
    stats = statistics(logits, params)
    kept = kept_tokens(logits, stats, only)
    groups, spans = stats.group_max.shape[1], stats.span_max.shape[1]
    width, room = max(NEAR, next_power_of_two(groups)), max(16, next_power_of_two(count))

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    packed = SparseRows(
        ids=ints(rows, count),
        values=floats(rows, count),
        log_probs=floats(rows, count),
        log_total=floats(rows),
        status=ints(rows),
    )
    found = (ints(rows, count), floats(rows, count), floats(rows, count))
    if rows:
        _pack_kernel[(rows,)](
            logits,
            stats.group_max,
            stats.span_max,
            stats.span_sum,
            ints(rows, width),
            kept.pivot,
            kept.cut,
            ints(rows, room),
            *found,
            packed.log_total,
            packed.status,
            params.owner,
            params.depth,
            params.temperature,
            params.seed,
            params.position,
            n_cols,
            logits.stride(0),
            stats.group_max.stride(0),
            groups,
            spans,
            count,
            purpose,
            G=width,
            NEAR=NEAR,
            SPANS=next_power_of_two(spans),
            K=room,
            num_warps=8,
            enable_fp_fusion=False,
        )
        _order_kernel[(rows,)](
            *found,
            packed.ids,
            packed.values,
            packed.log_probs,
            count,
            K=room,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return packed
