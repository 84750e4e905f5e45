"""The target's draw of every row of a round: argmax of score + gumbel, without making all of the
noise.

Knows the statistics pass, the kept sets of filters and the counter noise. Knows no tree. As `race`
on the CPU: a group's best possible value is its largest score - log(its smallest exponential), so
that groups are opened best bound first, sixteen at a time, until no bound reaches the best value
found. A row of 151,936 tokens needs 594 Philox blocks for the bounds and about a hundred for the
groups opened.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import dataclasses

import torch
import triton
import triton.language as tl

from draftwire_kernels.checks import next_power_of_two
from draftwire_kernels.filters_triton import Kept
from draftwire_kernels.noise_triton import group_gumbel, group_words, minimum_of
from draftwire_kernels.rounds import RowParams
from draftwire_kernels.scores_triton import NO_CUT, divide, fold_spans
from draftwire_kernels.stats_triton import RowStats

_NO_CUT = tl.constexpr(NO_CUT)
OPEN = 16
"""Groups opened at once."""

SOUND, HAS_NAN, HAS_INF, HAS_NOTHING = 0, 1, 2, 3
"""Status of a row: fine, holds NaN, holds +inf, excludes every token."""


@dataclasses.dataclass(frozen=True)
class Draws:
    """What the target draws from each row."""

    token: torch.Tensor
    """[rows] int32; -1 where status is not 0."""
    logprob: torch.Tensor
    """[rows] fp32: log target_probs of the token (greedy rows: of temperature 1, unfiltered)."""
    status: torch.Tensor
    """[rows] int32: 0 sound, 1 NaN, 2 +inf, 3 no token left."""


@triton.jit
def row_status(largest, total):
    """0 sound, 1 NaN, 2 +inf, 3 nothing left, from a row's statistics."""
    bad = tl.where(largest == float("inf"), 2, 1)
    status = tl.where(total != total, bad, 0)
    return tl.where((status == 0) & (largest == float("-inf")), 3, status)


@triton.jit
def first_of_largest(X_ptr, Group_ptr, largest, groups, n_cols, G: tl.constexpr):
    """Lowest id among the tokens with the row's largest logit."""
    group = tl.arange(0, G)
    top = tl.load(Group_ptr + group, mask=group < groups, other=float("-inf")).to(tl.float32)
    first = tl.min(tl.where(top == largest, group, G), axis=0)
    token = first * 64 + tl.arange(0, 64)
    x = tl.load(X_ptr + token, mask=token < n_cols, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(x == largest, token, _NO_CUT), axis=0)


@triton.jit
def log_left(log_target, draft):
    """log of what draft leaves of exp(log_target), relative to it: log(1 - draft / target) or -inf.

    In log space: where the two are nearly equal, 1 - exp(r) by its series keeps every digit of r.
    """
    r = tl.log(draft) - log_target
    series = 0.5 + r * (0.16666667 + r * (0.041666668 + r * (0.008333334 + r * 0.0013888889)))
    gap = tl.where(r > -0.25, -r * (1.0 + r * series), 1.0 - tl.exp(r))
    left = tl.where(r < 0.0, tl.log(tl.maximum(gap, 1e-37)), float("-inf"))
    return tl.where(draft > 0.0, left, 0.0)


@triton.jit
def race(
    X_ptr,
    Group_ptr,
    pivot,
    cut,
    temperature,
    position,
    base,
    seed,
    purpose,
    n_cols,
    groups,
    Ids_ptr,
    Probs_ptr,
    entries,
    log_scale,
    G: tl.constexpr,
    OPEN: tl.constexpr,
    DRAFT: tl.constexpr,
):
    """Token with the largest score + gumbel among the kept ones, lowest id of equals; its score.

    DRAFT 1 (sparse) or 2 (dense): the race is over what the first `entries` of draft_probs leave of
    exp(score + log_scale); the token is NO_CUT where they leave nothing.
    """
    ROWS: tl.constexpr = G // OPEN
    group = tl.arange(0, ROWS)[:, None] * OPEN + tl.arange(0, OPEN)[None, :]
    word = tl.reshape(group_words(G // 4, position, base, seed, purpose), [ROWS, OPEN])
    luck = -tl.log(minimum_of(word))
    top = tl.load(Group_ptr + group, mask=group < groups, other=float("-inf")).to(tl.float32)
    score = divide(top, temperature)
    bound = score + luck
    # Two roundings lie between a token's value and its group's bound.
    bound += tl.where(tl.abs(bound) < float("inf"), tl.abs(bound) * 9.5367431640625e-07, 0.0)
    bound = tl.where((score >= pivot) & (score > float("-inf")), bound, float("-inf"))
    best = tl.full([], float("-inf"), tl.float32)
    best_token = tl.zeros([], tl.int32) + _NO_CUT
    best_score = tl.full([], float("-inf"), tl.float32)
    leader = tl.max(tl.max(bound, axis=1), axis=0)
    while (leader > float("-inf")) & (leader >= best):
        row_of = tl.argmax(bound, axis=0).to(tl.int32)
        reach = tl.max(bound, axis=0)
        opened = row_of * OPEN + tl.arange(0, OPEN)
        live = (reach > float("-inf")) & (reach >= best)
        token = opened[:, None] * 64 + tl.arange(0, 64)[None, :]
        x = tl.load(X_ptr + token, mask=live[:, None] & (token < n_cols), other=float("-inf")).to(
            tl.float32
        )
        s = divide(x, temperature)
        kept = ((s > pivot) | ((s == pivot) & (token <= cut))) & (s > float("-inf"))
        left = s
        if DRAFT != 0:
            if DRAFT == 1:
                draft = tl.zeros([OPEN, 64], tl.float32)
                for entry in range(entries):
                    prob = tl.load(Probs_ptr + entry)
                    draft = tl.where(token == tl.load(Ids_ptr + entry), prob, draft)
            else:
                draft = tl.load(Probs_ptr + token, mask=live[:, None] & (token < n_cols), other=0.0)
            left = s + log_left(s + log_scale, draft)
            kept = kept & (left > float("-inf"))
        value = left + group_gumbel(opened, OPEN, position, base, seed, purpose)
        value = tl.where(kept, value, float("-inf"))
        found = tl.max(tl.max(value, axis=1), axis=0)
        won = kept & (value == found)
        winner = tl.min(tl.min(tl.where(won, token, _NO_CUT), axis=1), axis=0)
        if (found > best) | ((found == best) & (winner < best_token)):
            best = found
            best_token = winner
            at = won & (token == winner)
            best_score = tl.max(tl.max(tl.where(at, s, float("-inf")), axis=1), axis=0)
        bound = tl.where(tl.arange(0, ROWS)[:, None] == row_of[None, :], float("-inf"), bound)
        leader = tl.max(tl.max(bound, axis=1), axis=0)
    return best_token, best_score


@triton.jit
def _draw_kernel(
    X_ptr,
    Group_ptr,
    Max_ptr,
    Sum_ptr,
    Pivot_ptr,
    Cut_ptr,
    Total_ptr,
    Token_ptr,
    Logprob_ptr,
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
    purpose,
    G: tl.constexpr,
    OPEN: tl.constexpr,
    SPANS: tl.constexpr,
    FILTERED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(Owner_ptr + row)
    token = tl.full([], -1, tl.int32)
    logprob = tl.zeros([], tl.float32)
    status = tl.zeros([], tl.int32)
    if owner >= 0:
        temperature = tl.load(Temperature_ptr + owner)
        largest, total = fold_spans(Max_ptr, Sum_ptr, row, spans, temperature, SPANS)
        status = row_status(largest, total)
        X_ptr += row * row_stride
        Group_ptr += row * group_stride
        if status == 0:
            if temperature > 0.0:
                pivot = tl.full([], float("-inf"), tl.float32)
                cut = tl.zeros([], tl.int32) + _NO_CUT
                log_total = divide(largest, temperature) + tl.log(total)
                if FILTERED:
                    pivot = tl.load(Pivot_ptr + row)
                    cut = tl.load(Cut_ptr + row)
                    log_total = tl.load(Total_ptr + row)
                position = tl.load(Position_ptr + owner) + tl.load(Depth_ptr + row)
                token, score = race(
                    X_ptr,
                    Group_ptr,
                    pivot,
                    cut,
                    temperature,
                    position,
                    tl.zeros([], tl.int64),
                    tl.load(Seed_ptr + owner),
                    purpose,
                    n_cols,
                    groups,
                    X_ptr,
                    X_ptr,
                    0,
                    0.0,
                    G,
                    OPEN,
                    0,
                )
                logprob = score - log_total
            else:
                token = first_of_largest(X_ptr, Group_ptr, largest, groups, n_cols, G)
                logprob = -tl.log(total)
    tl.store(Token_ptr + row, token)
    tl.store(Logprob_ptr + row, logprob)
    tl.store(Status_ptr + row, status)


def draw_rows(
    logits: torch.Tensor,
    stats: RowStats,
    params: RowParams,
    kept: Kept | None = None,
    purpose: int = 0,
) -> Draws:
    """Draw from every row [rows, V] after its statistics (and filters, where params.filtered).

    The token is walk.draw's of target_scores, up to values equal to the last bits. Reads the group
    maxima (1/64 of the logits) and 128 B for each of the 16 or 32 groups opened a row.
    """
    rows, n_cols = logits.shape
    groups, spans = stats.group_max.shape[1], stats.span_max.shape[1]
    device = logits.device
    draws = Draws(
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )
    if rows:
        nothing = draws.logprob
        _draw_kernel[(rows,)](
            logits,
            stats.group_max,
            stats.span_max,
            stats.span_sum,
            nothing if kept is None else kept.pivot,
            draws.token if kept is None else kept.cut,
            nothing if kept is None else kept.log_total,
            draws.token,
            draws.logprob,
            draws.status,
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
            purpose,
            G=max(OPEN, next_power_of_two(groups)),
            OPEN=OPEN,
            SPANS=next_power_of_two(spans),
            FILTERED=kept is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return draws
