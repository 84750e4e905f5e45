"""Rules that use draft_probs, on the device: `chain`, `mixture` (chain over branches) and `block`.

Knows rounds of chains, their draft_probs (sparse, one-hot, mixture or dense) and the statistics
pass. The rules are accept.py's: a coin for each drafted token, then one token from the residual or
the target, with noise keyed (seed, position, purpose) and the round's base. Only the row where a
session stops is opened for that token. Greedy sessions follow the argmax, as every rule does then.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import torch
import triton
import triton.language as tl

from draftwire_kernels import noise
from draftwire_kernels.accept import Rule
from draftwire_kernels.block_triton import block_masses
from draftwire_kernels.checks import expect, next_power_of_two
from draftwire_kernels.filters_triton import kept_tokens
from draftwire_kernels.noise_triton import coin
from draftwire_kernels.race_triton import OPEN, first_of_largest, row_status
from draftwire_kernels.resample_triton import resample_rows
from draftwire_kernels.rounds import DraftRows, RoundTrees, RowParams
from draftwire_kernels.scores_triton import divide, fold_spans, row_edges
from draftwire_kernels.stats_triton import statistics
from draftwire_kernels.walk_triton import Walks

_COIN = tl.constexpr(noise.COIN)


@triton.jit
def _judge_kernel(
    X_ptr,
    Group_ptr,
    Max_ptr,
    Sum_ptr,
    Pivot_ptr,
    Cut_ptr,
    Total_ptr,
    Ids_ptr,
    Probs_ptr,
    Token_ptr,
    Start_ptr,
    Owner_ptr,
    Depth_ptr,
    Temperature_ptr,
    Seed_ptr,
    Position_ptr,
    Ratio_ptr,
    Coin_ptr,
    Logprob_ptr,
    Status_ptr,
    n_cols,
    row_stride,
    group_stride,
    groups,
    spans,
    entries,
    G: tl.constexpr,
    SPANS: tl.constexpr,
    ENTRIES: tl.constexpr,
    FILTERED: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """A row's status, and of the token drafted there log target / draft and the log of its coin."""
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(Owner_ptr + row)
    if owner >= 0:
        temperature = tl.load(Temperature_ptr + owner)
        largest, total = fold_spans(Max_ptr, Sum_ptr, row, spans, temperature, SPANS)
        status = row_status(largest, total)
        tl.store(Status_ptr + row, status)
        if (status == 0) & (row + 1 < tl.load(Start_ptr + owner + 1)):
            token = tl.load(Token_ptr + row + 1)
            pivot, cut, log_total = row_edges(
                Pivot_ptr, Cut_ptr, Total_ptr, row, largest, total, temperature, FILTERED
            )
            x = tl.load(X_ptr + row * row_stride + token).to(tl.float32)
            s = divide(x, tl.where(temperature > 0.0, temperature, 1.0))
            kept = (s > pivot) | ((s == pivot) & (token <= cut))
            logprob = tl.where(kept, s - log_total, float("-inf"))
            ratio = logprob
            if temperature > 0.0:
                if SPARSE:
                    entry = tl.arange(0, ENTRIES)
                    at = row * entries + entry
                    ids = tl.load(Ids_ptr + at, mask=entry < entries, other=-1)
                    probs = tl.load(Probs_ptr + at, mask=entry < entries, other=0.0)
                    draft = tl.sum(tl.where(ids == token, probs, 0.0), axis=0)
                else:
                    draft = tl.load(Probs_ptr + row * n_cols + token)
                ratio = logprob - tl.log(draft)
            else:
                best = first_of_largest(
                    X_ptr + row * row_stride,
                    Group_ptr + row * group_stride,
                    largest,
                    groups,
                    n_cols,
                    G,
                )
                ratio = tl.where(token == best, 0.0, float("-inf"))
            first = tl.load(Position_ptr + owner)
            u = coin(first + tl.load(Depth_ptr + row), _COIN, first - 1, tl.load(Seed_ptr + owner))
            tl.store(Ratio_ptr + row, ratio)
            tl.store(Coin_ptr + row, tl.log(u))
            tl.store(Logprob_ptr + row, logprob)


@triton.jit
def _decide_kernel(
    X_ptr,
    Max_ptr,
    Sum_ptr,
    Pivot_ptr,
    Cut_ptr,
    Total_ptr,
    Ids_ptr,
    Probs_ptr,
    Token_ptr,
    Start_ptr,
    Temperature_ptr,
    Ratio_ptr,
    Coin_ptr,
    DraftLogprob_ptr,
    DraftStatus_ptr,
    Joint_ptr,
    Mass_ptr,
    Count_ptr,
    Out_ptr,
    Logprob_ptr,
    Path_ptr,
    Status_ptr,
    Row_ptr,
    Weight_ptr,
    row_stride,
    spans,
    entries,
    parts,
    deepest,
    SPANS: tl.constexpr,
    ENTRIES: tl.constexpr,
    PARTS: tl.constexpr,
    DEEP: tl.constexpr,
    FILTERED: tl.constexpr,
    SPARSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For each session: how much is accepted, and the log weight of the target in the residual."""
    session = tl.program_id(0)
    first = tl.load(Start_ptr + session).to(tl.int64)
    n = tl.load(Start_ptr + session + 1) - first - 1
    temperature = tl.load(Temperature_ptr + session)
    accepted = tl.zeros([], tl.int64)
    status = tl.zeros([], tl.int32)
    log_weight = tl.zeros([], tl.float32)
    if n >= 0:
        status = tl.load(DraftStatus_ptr + first)
    # How far the rows are read: a chain to its first refusal, a block to the first excluded token.
    going = (n > 0) & (status == 0)
    while going:
        ratio = tl.load(Ratio_ptr + first + accepted)
        going = ratio > float("-inf")
        if not BLOCK:
            going = tl.load(Coin_ptr + first + accepted) < ratio
        if going:
            accepted += 1
            status = tl.load(DraftStatus_ptr + first + accepted)
            going = (status == 0) & (accepted < n)
    if BLOCK:
        # The longest prefix whose coin succeeds; the empty one needs none.
        going = (accepted > 0) & (status == 0)
        while going:
            row = first + accepted
            joint = tl.load(Joint_ptr + row)
            weight = tl.exp(joint.to(tl.float64))
            succeeds = weight
            if (accepted < n) & (joint == 0.0):
                succeeds = weight * 0.0 + 1.0
            if (accepted < n) & (joint < 0.0):
                part = tl.arange(0, PARTS)
                spare = tl.sum(
                    tl.load(Mass_ptr + row * parts + part, mask=part < parts, other=0.0), axis=0
                )
                if SPARSE:
                    largest, total = fold_spans(Max_ptr, Sum_ptr, row, spans, temperature, SPANS)
                    pivot, cut, log_total = row_edges(
                        Pivot_ptr, Cut_ptr, Total_ptr, row, largest, total, temperature, FILTERED
                    )
                    entry = tl.arange(0, ENTRIES)
                    at = row * entries + entry
                    ids = tl.load(Ids_ptr + at, mask=entry < entries, other=-1)
                    probs = tl.load(Probs_ptr + at, mask=entry < entries, other=0.0)
                    there = (ids >= 0) & (probs > 0.0)
                    x = tl.load(X_ptr + row * row_stride + ids, mask=there, other=float("-inf"))
                    s = divide(x.to(tl.float32), tl.where(temperature > 0.0, temperature, 1.0))
                    kept = there & ((s > pivot) | ((s == pivot) & (ids <= cut)))
                    # The mass pass added the same fp32 numbers in fp64, so that these come off
                    # whole.
                    target = tl.where(kept, tl.exp(s - log_total), 0.0).to(tl.float64)
                    above = tl.maximum(weight * target - probs.to(tl.float64), 0.0)
                    rest = tl.maximum(spare - tl.sum(target, axis=0), 0.0)
                    spare = weight * rest + tl.sum(tl.where(there, above, 0.0), axis=0)
                succeeds = spare / (spare + 1.0 - weight)
            u = tl.exp(tl.load(Coin_ptr + row - 1).to(tl.float64))
            going = u >= succeeds
            if going:
                accepted -= 1
                going = accepted > 0
            else:
                log_weight = joint
    step = tl.arange(0, DEEP)
    drafted = tl.load(Token_ptr + first + 1 + step, mask=step < accepted, other=-1)
    tokens = tl.where(step < accepted, drafted, -1)
    logprobs = tl.load(DraftLogprob_ptr + first + step, mask=step < accepted, other=0.0)
    count = tl.minimum(accepted, n).to(tl.int32)
    tl.store(Count_ptr + session, count)
    tl.store(Status_ptr + session, status)
    tl.store(Row_ptr + session, accepted.to(tl.int32))
    tl.store(Weight_ptr + session, log_weight)
    out = session * (deepest + 1) + step
    tl.store(Out_ptr + out, tokens, mask=step <= deepest)
    tl.store(Logprob_ptr + out, logprobs, mask=step <= deepest)
    path = tl.where(step < accepted, step, -1)
    tl.store(Path_ptr + session * deepest + step, path, mask=step < deepest)


def accept_rows(
    logits: torch.Tensor, trees: RoundTrees, draft: DraftRows, params: RowParams, rule: Rule
) -> Walks:
    """accept.accept for a whole round of chains: logits [rows, V] in, committed tokens out.

    `mixture` is either rule over DraftProbs.mixture. CHAIN reads the logits once, BLOCK twice (the
    second time with draft_probs, where they are dense); both then open one row a session. Raises
    KernelArgumentError; bad rows are reported in Walks.status.
    """
    expect(trees.chains, "trees", "chains", "a tree that branches")
    sessions, rows, n_cols = trees.sessions, params.rows, logits.shape[1]
    sparse, block = draft.ids is not None, rule is Rule.BLOCK
    entries = draft.probs.shape[1] if sparse else 0
    expect(draft.probs.shape[0] == rows, "draft rows", rows, draft.probs.shape[0])
    stats = statistics(logits, params)
    kept = kept_tokens(logits, stats, params) if params.filtered else None
    groups, spans = stats.group_max.shape[1], stats.span_max.shape[1]
    device, deep = logits.device, trees.deepest

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    walks = Walks(
        count=ints(sessions),
        token=ints(sessions, deep + 1),
        logprob=floats(sessions, deep + 1),
        path=ints(sessions, deep),
        status=ints(sessions),
        row=ints(sessions),
    )
    if not rows or not sessions:
        return walks
    ratio, coins, logprob, status = floats(rows), floats(rows), floats(rows), ints(rows)
    weight = floats(sessions)
    row_data = (stats.span_max, stats.span_sum)
    edges = (ratio, status, ratio) if kept is None else (kept.pivot, kept.cut, kept.log_total)
    drafted = (status if draft.ids is None else draft.ids, draft.probs)
    same = {"SPANS": next_power_of_two(spans), "FILTERED": kept is not None, "SPARSE": sparse}
    room = next_power_of_two(max(entries, 1))
    _judge_kernel[(rows,)](
        logits,
        stats.group_max,
        *row_data,
        *edges,
        *drafted,
        trees.token,
        trees.row_start,
        params.owner,
        params.depth,
        params.temperature,
        params.seed,
        params.position,
        ratio,
        coins,
        logprob,
        status,
        n_cols,
        logits.stride(0),
        stats.group_max.stride(0),
        groups,
        spans,
        entries,
        G=max(OPEN, next_power_of_two(groups)),
        ENTRIES=room,
        num_warps=1,
        enable_fp_fusion=False,
        **same,
    )
    # Arguments that a rule does not use point anywhere.
    joint, mass = ratio, ratio
    if block:
        joint, mass = block_masses(logits, stats, kept, params, trees, draft, ratio, status)
    _decide_kernel[(sessions,)](
        logits,
        *row_data,
        *edges,
        *drafted,
        trees.token,
        trees.row_start,
        params.temperature,
        ratio,
        coins,
        logprob,
        status,
        joint,
        mass,
        walks.count,
        walks.token,
        walks.logprob,
        walks.path,
        walks.status,
        walks.row,
        weight,
        logits.stride(0),
        spans,
        entries,
        mass.shape[-1],
        deep,
        ENTRIES=room,
        PARTS=next_power_of_two(mass.shape[-1]),
        DEEP=next_power_of_two(deep + 1),
        BLOCK=block,
        num_warps=1,
        enable_fp_fusion=False,
        **same,
    )
    resample_rows(logits, stats, kept, params, trees, draft, walks, weight)
    return walks
