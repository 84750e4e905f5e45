"""Rule `block`'s second look at the rows: how much of each the target has left over its draft.

Knows chains, draft_probs and log target / draft of every drafted token. Knows no coins. Sums run in
fp64 over fp32 terms: sparse entries are taken off such a sum later, and must come off whole.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import torch
import triton
import triton.language as tl

from draftwire_kernels.checks import next_power_of_two
from draftwire_kernels.filters_triton import Kept
from draftwire_kernels.rounds import DraftRows, RoundTrees, RowParams
from draftwire_kernels.scores_triton import divide, fold_spans, row_edges
from draftwire_kernels.stats_triton import RowStats

TILE = 4096
"""Tokens of one program of the mass pass."""


@triton.jit
def _joint_kernel(Start_ptr, Ratio_ptr, Status_ptr, Joint_ptr):
    """A session's log P_i of every prefix (block rule), -inf from the first excluded token on."""
    session = tl.program_id(0)
    first = tl.load(Start_ptr + session)
    end = tl.load(Start_ptr + session + 1)
    joint = tl.zeros([], tl.float32)
    for row in range(first, end):
        tl.store(Joint_ptr + row, joint)
        if row + 1 < end:
            ratio = tl.load(Ratio_ptr + row)
            sound = tl.load(Status_ptr + row) == 0
            joint = tl.where(sound, tl.minimum(joint + ratio, 0.0), float("-inf"))


@triton.jit
def _mass_kernel(
    X_ptr,
    Max_ptr,
    Sum_ptr,
    Pivot_ptr,
    Cut_ptr,
    Total_ptr,
    Probs_ptr,
    Joint_ptr,
    Mass_ptr,
    Owner_ptr,
    Temperature_ptr,
    n_cols,
    row_stride,
    spans,
    parts,
    TILE: tl.constexpr,
    SPANS: tl.constexpr,
    FILTERED: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Part of a row's sum of target_probs, or of (weight target - draft)+ where draft is dense."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    owner = tl.load(Owner_ptr + row)
    if owner >= 0:
        temperature = tl.load(Temperature_ptr + owner)
        largest, total = fold_spans(Max_ptr, Sum_ptr, row, spans, temperature, SPANS)
        pivot, cut, log_total = row_edges(
            Pivot_ptr, Cut_ptr, Total_ptr, row, largest, total, temperature, FILTERED
        )
        token = part * TILE + tl.arange(0, TILE)
        x = tl.load(X_ptr + row * row_stride + token, mask=token < n_cols, other=float("-inf"))
        s = divide(x.to(tl.float32), tl.where(temperature > 0.0, temperature, 1.0))
        kept = (s > pivot) | ((s == pivot) & (token <= cut))
        mass = tl.where(kept, tl.exp(s - log_total), 0.0).to(tl.float64)
        if not SPARSE:
            draft = tl.load(Probs_ptr + row * n_cols + token, mask=token < n_cols, other=0.0)
            weight = tl.exp(tl.load(Joint_ptr + row).to(tl.float64))
            mass = tl.maximum(mass * weight - draft.to(tl.float64), 0.0)
        tl.store(Mass_ptr + row * parts + part, tl.sum(mass, axis=0))


def block_masses(
    logits: torch.Tensor,
    stats: RowStats,
    kept: Kept | None,
    params: RowParams,
    trees: RoundTrees,
    draft: DraftRows,
    ratio: torch.Tensor,
    status: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log P_i of the prefix before each row, fp32 [rows], and the row's mass in parts, fp64.

    ratio fp32 and status int32 [rows] as _judge_kernel leaves them. The mass is the sum of
    (P_i target - draft)+ where draft is dense, else the sum of target. Reads the logits once more,
    and dense draft_probs.
    """
    rows, n_cols = logits.shape
    spans, parts = stats.span_max.shape[1], -(-n_cols // TILE)
    joint = torch.empty_like(ratio)
    mass = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    edges = (ratio, status, ratio) if kept is None else (kept.pivot, kept.cut, kept.log_total)
    _joint_kernel[(trees.sessions,)](
        trees.row_start, ratio, status, joint, num_warps=1, enable_fp_fusion=False
    )
    _mass_kernel[(rows, parts)](
        logits,
        stats.span_max,
        stats.span_sum,
        *edges,
        draft.probs,
        joint,
        mass,
        params.owner,
        params.temperature,
        n_cols,
        logits.stride(0),
        spans,
        parts,
        TILE=TILE,
        SPANS=next_power_of_two(spans),
        FILTERED=kept is not None,
        SPARSE=draft.ids is not None,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return joint, mass
