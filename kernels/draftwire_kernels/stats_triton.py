"""The statistics pass: one read of the logits of a round, for everything that follows.

Knows rows of logits and a temperature a session. Knows neither noise nor rules. What it leaves
behind is small: for each group of 64 tokens the largest logit, and for each span of SPAN tokens the
largest logit and the sum of exponentials relative to it. A NaN or +inf anywhere makes its span's
sum NaN, which is how such rows are found; no other row is touched by it.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import dataclasses

import torch
import triton
import triton.language as tl

from draftwire_kernels.checks import LOGIT_DTYPES, expect, expect_dtype, expect_shape
from draftwire_kernels.noise import GROUP
from draftwire_kernels.rounds import RowParams

SPAN = 16384
"""Tokens of one program; part of the arithmetic of log-sum-exp, so it does not follow the load."""
TILE = 4096


@dataclasses.dataclass(frozen=True)
class RowStats:
    """What one pass over the logits leaves behind."""

    group_max: torch.Tensor
    """[rows, ceil(V / 64) up to a multiple of 16] in the logits' dtype: largest logit of each group
    of tokens, -inf past the last one."""
    span_max: torch.Tensor
    """[rows, spans] fp32: largest logit of each span."""
    span_sum: torch.Tensor
    """[rows, spans] fp32: sum of exp((logit - span_max) / temperature), greedy rows' temperature
    taken as 1; NaN for a span with NaN or +inf."""


@triton.jit
def rescale(m, m_next, factor):
    """exp((m - m_next) / temperature), 0 where nothing was seen yet."""
    safe = tl.where(m_next == float("-inf"), 0.0, m_next)
    return tl.exp2((m - safe) * factor)


@triton.jit
def _statistics_kernel(
    X_ptr,
    Group_ptr,
    Max_ptr,
    Sum_ptr,
    Owner_ptr,
    Temperature_ptr,
    n_cols,
    row_stride,
    group_stride,
    spans,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    owner = tl.load(Owner_ptr + row)
    if owner >= 0:
        temperature = tl.load(Temperature_ptr + owner)
        factor = 1.4426950408889634 / tl.where(temperature > 0.0, temperature, 1.0)
        GROUPS: tl.constexpr = TILE // 64
        # Each group position of the tile keeps its own running maximum and sum: no warp waits for
        # another inside the loop.
        m = tl.full([GROUPS], float("-inf"), tl.float32)
        total = tl.zeros([GROUPS], tl.float32)
        group = tl.arange(0, GROUPS)
        lane = tl.arange(0, 64)
        for start in range(0, SPAN, TILE):
            at = span * SPAN + start + group[:, None] * 64 + lane[None, :]
            x = tl.load(X_ptr + row * row_stride + at, mask=at < n_cols, other=float("-inf"))
            x = x.to(tl.float32)
            group_max = tl.max(x, axis=1)
            here = (span * SPAN + start) // 64 + group
            tl.store(
                Group_ptr + row * group_stride + here,
                group_max.to(Group_ptr.dtype.element_ty),
                mask=here < group_stride,
            )
            m_next = tl.maximum(m, group_max)
            safe = tl.where(m_next == float("-inf"), 0.0, m_next)
            weights = tl.exp2((x - safe[:, None]) * factor)
            total = total * rescale(m, m_next, factor) + tl.sum(weights, axis=1)
            m = m_next
        top = tl.max(m, axis=0)
        total = tl.sum(total * rescale(m, top, factor), axis=0)
        tl.store(Max_ptr + row * spans + span, top)
        tl.store(Sum_ptr + row * spans + span, total)


def statistics(logits: torch.Tensor, params: RowParams) -> RowStats:
    """One pass over logits [rows, V] (bf16, fp16, fp32; any row stride), rows as in `params`.

    Reads the logits once and writes 1/64 of them and 8 bytes a span. Rows without an owner are
    skipped and their statistics undefined. Raises KernelArgumentError.
    """
    expect_dtype("logits", logits, LOGIT_DTYPES)
    expect_shape("logits", logits, (params.rows, None))
    rows, n_cols = logits.shape
    expect(n_cols > 0, "logits", "at least one column", n_cols)
    expect(logits.stride(1) == 1, "logits stride of columns", 1, logits.stride(1))
    groups, spans = -(-n_cols // GROUP), -(-n_cols // SPAN)
    # Whole vectors of 16 bytes: later kernels read all of a row's group maxima.
    padded = -(-groups // 16) * 16
    group_max = torch.empty(rows, padded, dtype=logits.dtype, device=logits.device)
    span_max = torch.empty(rows, spans, dtype=torch.float32, device=logits.device)
    span_sum = torch.empty_like(span_max)
    if rows:
        _statistics_kernel[(rows, spans)](
            logits,
            group_max,
            span_max,
            span_sum,
            params.owner,
            params.temperature,
            n_cols,
            logits.stride(0),
            group_max.stride(0),
            spans,
            SPAN=SPAN,
            TILE=TILE,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return RowStats(group_max, span_max, span_sum)
