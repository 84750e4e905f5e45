"""Rule `follow` on the device: from what a round's rows draw to committed tokens, without the host.

Knows trees as arrays and what each row drew. Knows no logits of its own: `follow_rows` chains the
statistics pass, the filters, the draws of all rows and the walk. A row off the walked path may hold
NaN; only a row on it fails its session, and no other.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import dataclasses

import torch
import triton
import triton.language as tl

from draftwire_kernels.checks import expect_shape, next_power_of_two
from draftwire_kernels.filters_triton import kept_tokens
from draftwire_kernels.race_triton import Draws, draw_rows
from draftwire_kernels.rounds import RoundTrees, RowParams
from draftwire_kernels.stats_triton import statistics


@dataclasses.dataclass(frozen=True)
class Walks:
    """What each session commits; tensors on the device, D = RoundTrees.deepest."""

    count: torch.Tensor
    """[sessions] int32: committed tokens, accepted + 1; of a failed session those before the bad
    row."""
    token: torch.Tensor
    """[sessions, D + 1] int32: committed tokens, then -1."""
    logprob: torch.Tensor
    """[sessions, D + 1] fp32: log target_probs of each, then 0."""
    path: torch.Tensor
    """[sessions, D] int32: accepted nodes, then -1."""
    status: torch.Tensor
    """[sessions] int32: 0, or what the row that stopped the walk holds (see race_triton)."""
    row: torch.Tensor
    """[sessions] int32: the row last drawn from; the bad one where status is not 0."""


@triton.jit
def _walk_kernel(
    Token_ptr,
    Parent_ptr,
    Start_ptr,
    Drawn_ptr,
    DrawnLogprob_ptr,
    DrawnStatus_ptr,
    Count_ptr,
    Out_ptr,
    Logprob_ptr,
    Path_ptr,
    Status_ptr,
    Row_ptr,
    deepest,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
):
    session = tl.program_id(0)
    first = tl.load(Start_ptr + session)
    rows = tl.load(Start_ptr + session + 1) - first
    lane = tl.arange(0, WIDE)
    token = tl.load(Token_ptr + first + lane, mask=lane < rows, other=-1)
    parent = tl.load(Parent_ptr + first + lane, mask=lane < rows, other=-2)
    step = tl.arange(0, DEEP)
    tokens = tl.full([DEEP], -1, tl.int32)
    logprobs = tl.zeros([DEEP], tl.float32)
    path = tl.full([DEEP], -1, tl.int32)
    count = tl.zeros([], tl.int32)
    row = tl.zeros([], tl.int32)
    status = tl.zeros([], tl.int32)
    going = rows > 0
    while going:
        status = tl.load(DrawnStatus_ptr + first + row)
        going = status == 0
        if going:
            drawn = tl.load(Drawn_ptr + first + row)
            logprob = tl.load(DrawnLogprob_ptr + first + row)
            tokens = tl.where(step == count, drawn, tokens)
            logprobs = tl.where(step == count, logprob, logprobs)
            child = tl.min(tl.where((parent == row) & (token == drawn), lane, WIDE), axis=0)
            going = child < WIDE
            if going:
                path = tl.where(step == count, child - 1, path)
                row = child
            count += 1
    tl.store(Count_ptr + session, count)
    tl.store(Status_ptr + session, status)
    tl.store(Row_ptr + session, row)
    out = session * (deepest + 1) + step
    tl.store(Out_ptr + out, tokens, mask=step <= deepest)
    tl.store(Logprob_ptr + out, logprobs, mask=step <= deepest)
    tl.store(Path_ptr + session * deepest + step, path, mask=step < deepest)


def walk_trees(trees: RoundTrees, draws: Draws) -> Walks:
    """Walk every session's tree by what its rows drew, to the first child that bears the token."""
    sessions, device = trees.sessions, trees.token.device
    expect_shape("draws.token", draws.token, tuple(trees.token.shape))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    deep = trees.deepest
    walks = Walks(
        count=ints(sessions),
        token=ints(sessions, deep + 1),
        logprob=torch.empty(sessions, deep + 1, dtype=torch.float32, device=device),
        path=ints(sessions, deep),
        status=ints(sessions),
        row=ints(sessions),
    )
    if sessions:
        _walk_kernel[(sessions,)](
            trees.token,
            trees.parent,
            trees.row_start,
            draws.token,
            draws.logprob,
            draws.status,
            walks.count,
            walks.token,
            walks.logprob,
            walks.path,
            walks.status,
            walks.row,
            deep,
            WIDE=next_power_of_two(trees.widest),
            DEEP=next_power_of_two(deep + 1),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return walks


def follow_rows(logits: torch.Tensor, trees: RoundTrees, params: RowParams) -> Walks:
    """walk.follow for a whole round: logits [rows, V] in, committed tokens out, at most 4 launches.

    logits bf16, fp16 or fp32, rows laid out as `trees` and `params` say. One read of the logits,
    then about 2 % of it again. Raises KernelArgumentError; bad rows are reported in Walks.status.
    """
    stats = statistics(logits, params)
    kept = kept_tokens(logits, stats, params) if params.filtered else None
    return walk_trees(trees, draw_rows(logits, stats, params, kept))
