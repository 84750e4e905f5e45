"""Bias, penalties and bans of a round's rows, in place, before the statistics pass.

Knows the tables of `edits` and trees as arrays; a row walks up its own path to count what it adds
to the output. In fp32 and in the order of rows.target_scores, so that the scores are the CPU's
bits. A NaN or +inf is left as it is: no ban may hide it.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import torch
import triton
import triton.language as tl

from draftwire_kernels.checks import expect, expect_dtype, expect_shape
from draftwire_kernels.edits import RoundEdits
from draftwire_kernels.rounds import RoundTrees, RowParams
from draftwire_kernels.scores_triton import divide

BLOCK = 256


@triton.jit
def _edit_kernel(
    X_ptr,
    Owner_ptr,
    Depth_ptr,
    Node_ptr,
    Parent_ptr,
    First_ptr,
    Position_ptr,
    Start_ptr,
    Token_ptr,
    Flags_ptr,
    Bias_ptr,
    Count_ptr,
    Penalty_ptr,
    Before_ptr,
    row_stride,
    sessions,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(Owner_ptr + row)
    if owner >= 0:
        at = tl.load(Start_ptr + owner) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = at < tl.load(Start_ptr + owner + 1)
        token = tl.load(Token_ptr + at, mask=mask, other=0)
        flags = tl.load(Flags_ptr + at, mask=mask, other=0)
        bias = tl.load(Bias_ptr + at, mask=mask, other=0.0)
        count = tl.load(Count_ptr + at, mask=mask, other=0.0)
        first = tl.load(First_ptr + owner)
        here = (row - first).to(tl.int32)
        # Up to the anchor, whose own token the history holds.
        while here > 0:
            count += (tl.load(Node_ptr + first + here) == token).to(tl.float32)
            here = tl.load(Parent_ptr + first + here)
        seen = ((flags & 1) > 0) | (count > 0.0)
        repetition = tl.load(Penalty_ptr + owner)
        frequency = tl.load(Penalty_ptr + sessions + owner)
        presence = tl.load(Penalty_ptr + 2 * sessions + owner)
        x = tl.load(X_ptr + row * row_stride + token, mask=mask, other=0.0)
        y = x + bias
        y = tl.where(seen, tl.where(y > 0.0, divide(y, repetition), y * repetition), y)
        y -= frequency * count
        y -= tl.where(count > 0.0, presence, 0.0)
        position = tl.load(Position_ptr + owner) + tl.load(Depth_ptr + row)
        banned = ((flags & 2) > 0) & (position < tl.load(Before_ptr + owner))
        y = tl.where(banned, float("-inf"), y)
        tl.store(X_ptr + row * row_stride + token, tl.where(x < float("inf"), y, x), mask=mask)


def edit_rows(
    logits: torch.Tensor, trees: RoundTrees, params: RowParams, edits: RoundEdits
) -> None:
    """Edit fp32 logits [rows, V] in place, rows as in `trees` and `params`.

    Moves 8 bytes of logits an entry and row, and each session's table once. Raises
    KernelArgumentError.
    """
    expect_dtype("logits", logits, (torch.float32,))
    expect_shape("logits", logits, (params.rows, None))
    expect(logits.stride(1) == 1, "logits stride of columns", 1, logits.stride(1))
    expect_shape("edits.start", edits.start, (trees.sessions + 1,))
    if params.rows and edits.longest:
        _edit_kernel[(params.rows, -(-edits.longest // BLOCK))](
            logits,
            params.owner,
            params.depth,
            trees.token,
            trees.parent,
            trees.row_start,
            params.position,
            edits.start,
            edits.token,
            edits.flags,
            edits.bias,
            edits.count,
            edits.penalties,
            edits.banned_before,
            logits.stride(0),
            trees.sessions,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
