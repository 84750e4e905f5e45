"""Scores of a row as every later kernel reads them, after the statistics pass.

Knows spans, group maxima and the edges of a kept set. Knows neither noise nor rules. A score is
logit / temperature, divided as IEEE does, the same as on the CPU.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import triton
import triton.language as tl

from draftwire_kernels.stats_triton import rescale

NO_CUT = 2**31 - 1
"""Cut of a row that keeps all tokens equal to its pivot; as a token, none."""
NEAR = 32
"""Groups read at once: a tile of 2,048 tokens."""
_NO_CUT = tl.constexpr(NO_CUT)
_LOWEST = tl.constexpr(-(2**31))


@triton.jit
def order(x):
    """fp32 to an int32 in the same order; -0 and 0 alike, NaN nowhere in particular."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unorder(key):
    """The fp32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def divide(x, temperature):
    """Correctly rounded quotient, so that scores are the CPU's bits."""
    return tl.div_rn(x, tl.zeros_like(x) + temperature)


@triton.jit
def fold_spans(Max_ptr, Sum_ptr, row, spans, temperature, SPANS: tl.constexpr):
    """A row's largest logit and sum of exp((logit - largest) / temperature), NaN if it has any."""
    span = tl.arange(0, SPANS)
    m = tl.load(Max_ptr + row * spans + span, mask=span < spans, other=float("-inf"))
    total = tl.load(Sum_ptr + row * spans + span, mask=span < spans, other=0.0)
    top = tl.max(m, axis=0)
    factor = 1.4426950408889634 / tl.where(temperature > 0.0, temperature, 1.0)
    return top, tl.sum(total * rescale(m, top, factor), axis=0)


@triton.jit
def row_edges(
    Pivot_ptr, Cut_ptr, Total_ptr, row, largest, total, temperature, FILTERED: tl.constexpr
):
    """Pivot, cut and log of the total weight of a row; of all its tokens unless FILTERED."""
    pivot = tl.full([], float("-inf"), tl.float32)
    cut = tl.zeros([], tl.int32) + _NO_CUT
    heat = tl.where(temperature > 0.0, temperature, 1.0)
    log_total = divide(largest, heat) + tl.log(total)
    # Two conditions: the outer one is a constant, without filters there are no such loads.
    if FILTERED:  # noqa: SIM102
        if temperature > 0.0:
            pivot = tl.load(Pivot_ptr + row)
            cut = tl.load(Cut_ptr + row)
            log_total = tl.load(Total_ptr + row)
    return pivot, cut, log_total


@triton.jit
def list_groups(Group_ptr, List_ptr, groups, temperature, low, G: tl.constexpr):
    """Write the groups whose maximum is at least `low`, ascending; returns how many."""
    group = tl.arange(0, G)
    top = tl.load(Group_ptr + group, mask=group < groups, other=float("-inf")).to(tl.float32)
    listed = (order(divide(top, temperature)) >= low) & (group < groups)
    flag = listed.to(tl.int32)
    place = tl.cumsum(flag, axis=0) - flag
    tl.debug_barrier()
    tl.store(List_ptr + place, group, mask=listed)
    tl.debug_barrier()
    return tl.sum(flag, axis=0)


@triton.jit
def read_groups(X_ptr, List_ptr, first, count, n_cols, temperature, NEAR: tl.constexpr):
    """Tokens and keys of NEAR listed groups; keys of no token are the lowest."""
    which = first + tl.arange(0, NEAR)
    group = tl.load(List_ptr + which, mask=which < count, other=0)
    token = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    there = (which < count)[:, None] & (token < n_cols)
    x = tl.load(X_ptr + token, mask=there, other=float("-inf")).to(tl.float32)
    score = divide(x, temperature)
    return token, tl.where(there, order(score), _LOWEST), there
