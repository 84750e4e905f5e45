"""The one row a session draws its recovered or bonus token from, after the draft-probability rules.

Knows where each session stopped and the log weight of the target in its residual. Knows no coins.
The residual (weight target - draft)+ is raced in log space over the same groups as the target
itself: draft_probs only take away, so a group's bound holds. Where they leave nothing, and below
the last drafted token, the race is over the target.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import torch
import triton
import triton.language as tl

from draftwire_kernels import noise
from draftwire_kernels.checks import next_power_of_two
from draftwire_kernels.filters_triton import Kept
from draftwire_kernels.race_triton import OPEN, first_of_largest, race
from draftwire_kernels.rounds import DraftRows, RoundTrees, RowParams
from draftwire_kernels.scores_triton import NO_CUT, fold_spans, row_edges
from draftwire_kernels.stats_triton import RowStats
from draftwire_kernels.walk_triton import Walks

_NO_CUT = tl.constexpr(NO_CUT)
_RECOVERED = tl.constexpr(noise.RECOVERED)


@triton.jit
def _resample_kernel(
    X_ptr,
    Group_ptr,
    Max_ptr,
    Sum_ptr,
    Pivot_ptr,
    Cut_ptr,
    Total_ptr,
    Ids_ptr,
    Probs_ptr,
    Start_ptr,
    Temperature_ptr,
    Seed_ptr,
    Position_ptr,
    Row_ptr,
    Weight_ptr,
    Status_ptr,
    Count_ptr,
    Out_ptr,
    Logprob_ptr,
    n_cols,
    row_stride,
    group_stride,
    groups,
    spans,
    width,
    deepest,
    G: tl.constexpr,
    OPEN: tl.constexpr,
    SPANS: tl.constexpr,
    FILTERED: tl.constexpr,
    SPARSE: tl.constexpr,
):
    session = tl.program_id(0)
    first = tl.load(Start_ptr + session).to(tl.int64)
    n = tl.load(Start_ptr + session + 1) - first - 1
    accepted = tl.load(Row_ptr + session)
    if (n >= 0) & (tl.load(Status_ptr + session) == 0):
        row = first + accepted
        temperature = tl.load(Temperature_ptr + session)
        largest, total = fold_spans(Max_ptr, Sum_ptr, row, spans, temperature, SPANS)
        pivot, cut, log_total = row_edges(
            Pivot_ptr, Cut_ptr, Total_ptr, row, largest, total, temperature, FILTERED
        )
        X_ptr += row * row_stride
        Group_ptr += row * group_stride
        token = tl.zeros([], tl.int32) + _NO_CUT
        if temperature > 0.0:
            position = tl.load(Position_ptr + session)
            seed = tl.load(Seed_ptr + session)
            log_scale = tl.load(Weight_ptr + session) - log_total
            score = tl.zeros([], tl.float32)
            used = tl.where(accepted < n, width, 0)
            kind: tl.constexpr = 1 if SPARSE else 2
            for _ in range(2):
                if token == _NO_CUT:
                    token, score = race(
                        X_ptr,
                        Group_ptr,
                        pivot,
                        cut,
                        temperature,
                        position + accepted,
                        position - 1,
                        seed,
                        _RECOVERED,
                        n_cols,
                        groups,
                        Ids_ptr + row * width,
                        Probs_ptr + row * width,
                        used,
                        log_scale,
                        G,
                        OPEN,
                        kind,
                    )
                    used = used * 0
            logprob = score - log_total
        else:
            token = first_of_largest(X_ptr, Group_ptr, largest, groups, n_cols, G)
            logprob = -tl.log(total)
        at = session * (deepest + 1) + accepted
        tl.store(Out_ptr + at, token)
        tl.store(Logprob_ptr + at, logprob)
        tl.store(Count_ptr + session, accepted + 1)


def resample_rows(
    logits: torch.Tensor,
    stats: RowStats,
    kept: Kept | None,
    params: RowParams,
    trees: RoundTrees,
    draft: DraftRows,
    walks: Walks,
    log_weight: torch.Tensor,
) -> None:
    """Draw each session's last token from row walks.row and append it to `walks`.

    log_weight [sessions] fp32: of the target in the residual. Sessions with a status are left
    alone. Reads one row's group maxima and 128 B for each group opened, a session.
    """
    sessions, n_cols = trees.sessions, logits.shape[1]
    groups, spans = stats.group_max.shape[1], stats.span_max.shape[1]
    anything = walks.logprob
    edges = (anything, walks.row, anything)
    _resample_kernel[(sessions,)](
        logits,
        stats.group_max,
        stats.span_max,
        stats.span_sum,
        *(edges if kept is None else (kept.pivot, kept.cut, kept.log_total)),
        walks.row if draft.ids is None else draft.ids,
        draft.probs,
        trees.row_start,
        params.temperature,
        params.seed,
        params.position,
        walks.row,
        log_weight,
        walks.status,
        walks.count,
        walks.token,
        walks.logprob,
        n_cols,
        logits.stride(0),
        stats.group_max.stride(0),
        groups,
        spans,
        draft.probs.shape[1],
        trees.deepest,
        G=max(OPEN, next_power_of_two(groups)),
        OPEN=OPEN,
        SPANS=next_power_of_two(spans),
        FILTERED=kept is not None,
        SPARSE=draft.ids is not None,
        num_warps=8,
        enable_fp_fusion=False,
    )
