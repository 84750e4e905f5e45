"""Counter noise in Triton: the generator and layout of `noise`, word for word.

Knows the layout written down in noise.py, and nothing of logits or rules. The 64-bit words and the
uniforms made of them are the CPU's bits; the logarithms that follow are the device's own and may
differ in the last place.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,no-any-return"

import torch
import triton
import triton.language as tl

from draftwire_kernels.checks import expect, expect_dtype
from draftwire_kernels.noise import GROUP

BLOCK = 1024


@triton.jit
def uniform58(word):
    """The low 58 bits of a word to fp32 in (0, 1); each product is exact, so fusing changes
    nothing."""
    u = (word & 0x3FFFFFFFFFFFFFF).to(tl.int64).to(tl.float32) * 3.469446951953614e-18
    return tl.minimum(u + 1.734723475976807e-18, 0.999999940395355224609375)


@triton.jit
def uniform32(half):
    """32 bits (in a 64-bit integer) to fp32 in (0, 1)."""
    u = half.to(tl.int64).to(tl.float32) * 2.3283064365386963e-10
    return tl.minimum(u + 1.1641532182693481e-10, 0.999999940395355224609375)


@triton.jit
def exponential(u):
    """-log(1 - u), accurate for small u too: log1p by the quotient that cancels the rounding of 1 -
    u."""
    keep = 1.0 - u
    lost = 1.0 - keep
    # For u below 2**-25, keep rounds to 1 and -log1p(-u) is u.
    return tl.where(keep == 1.0, u, -tl.log(keep) * (u / tl.where(lost == 0.0, 1.0, lost)))


@triton.jit
def philox4(block, position, level, base, seed, purpose):
    """One block of four 64-bit words for each element of `block`; scalars elsewhere."""
    zero = block.to(tl.uint64) * 0
    return tl.philox_impl(
        block.to(tl.uint64),
        zero + position.to(tl.uint64),
        zero + level,
        zero + base.to(tl.uint64),
        zero + seed.to(tl.uint64),
        zero + purpose,
        10,
    )


@triton.jit
def pick(w0, w1, w2, w3, which):
    """Word `which` (0..3) of blocks."""
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def group_words(QUARTERS: tl.constexpr, position, base, seed, purpose):
    """Level-0 words of groups 0 .. 4 * QUARTERS - 1, in order."""
    block = tl.arange(0, QUARTERS).to(tl.int64) + 1
    w0, w1, w2, w3 = philox4(block, position, 0, base, seed, purpose)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * QUARTERS])


@triton.jit
def group_words_at(group, position, base, seed, purpose):
    """Level-0 words of the groups named."""
    w0, w1, w2, w3 = philox4(group // 4 + 1, position, 0, base, seed, purpose)
    return pick(w0, w1, w2, w3, group % 4)


@triton.jit
def minimum_of(word):
    """A group's smallest exponential; its owner is word >> 58."""
    return exponential(uniform58(word)) * 0.015625


@triton.jit
def group_gumbel(group, N: tl.constexpr, position, base, seed, purpose):
    """Gumbel noise of all tokens of N groups: fp32 [N, 64]."""
    word = group_words_at(group, position, base, seed, purpose)
    least = minimum_of(word)
    owner = (word >> 58).to(tl.int32)
    block = (group.to(tl.int64) * 8)[:, None] + tl.arange(0, 8)[None, :] + 1
    w0, w1, w2, w3 = philox4(block, position, 1, base, seed, purpose)
    low, high = w0 & 0xFFFFFFFF, w0 >> 32
    h0 = tl.join(low, high)
    low, high = w1 & 0xFFFFFFFF, w1 >> 32
    h1 = tl.join(low, high)
    low, high = w2 & 0xFFFFFFFF, w2 >> 32
    h2 = tl.join(low, high)
    low, high = w3 & 0xFFFFFFFF, w3 >> 32
    h3 = tl.join(low, high)
    # join adds a last axis; even words and odd words are joined last so that the order is 0 1 2 3.
    quad = tl.join(tl.join(h0, h2), tl.join(h1, h3))
    # [N, 8, half, word >> 1, word & 1] -> [N, 8, word, half]
    half = tl.reshape(tl.permute(quad, (0, 1, 3, 4, 2)), [N, 64])
    energy = least[:, None] + exponential(uniform32(half))
    lane = tl.arange(0, 64)[None, :]
    energy = tl.where(lane == owner[:, None], least[:, None], energy)
    return -tl.log(energy)


@triton.jit
def token_gumbel(token, position, base, seed, purpose):
    """Gumbel noise of scattered tokens."""
    group = token // 64
    word = group_words_at(group, position, base, seed, purpose)
    least = minimum_of(word)
    w0, w1, w2, w3 = philox4(token // 8 + 1, position, 1, base, seed, purpose)
    half = token % 8
    both = pick(w0, w1, w2, w3, half // 2)
    bits = tl.where(half % 2 == 0, both & 0xFFFFFFFF, both >> 32)
    energy = least + exponential(uniform32(bits))
    owned = (word >> 58).to(tl.int32) == (token % 64).to(tl.int32)
    return -tl.log(tl.where(owned, least, energy))


@triton.jit
def coin(position, purpose, base, seed):
    """One uniform in (0, 1): word 0 of block 1 at level 2. `position` a block or a scalar."""
    one = position.to(tl.uint64) * 0 + 1
    word, _, _, _ = tl.philox_impl(
        one,
        position.to(tl.uint64),
        one * 2,
        (one - 1) + base.to(tl.uint64),
        (one - 1) + seed.to(tl.uint64),
        (one - 1) + purpose,
        10,
    )
    return uniform58(word)


@triton.jit
def _gumbel_at_kernel(
    Token_ptr, Out_ptr, Seed_ptr, Position_ptr, Base_ptr, n, purpose, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(Token_ptr + row * n + at, mask=at < n, other=0)
    noise = token_gumbel(
        token,
        tl.load(Position_ptr + row),
        tl.load(Base_ptr + row),
        tl.load(Seed_ptr + row),
        purpose,
    )
    tl.store(Out_ptr + row * n + at, noise, mask=at < n)


def gumbel_at(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    purpose: int,
    bases: torch.Tensor | None = None,
) -> torch.Tensor:
    """noise.gumbel_rows on the device: row r is (seeds[r], positions[r]).

    seeds (the bits of an unsigned 64-bit number), positions and bases int64 [rows]; token_ids int32
    or int64 [rows, k]. Returns fp32 [rows, k]. Moves token_ids and the result.
    """
    expect(token_ids.ndim == 2, "token_ids", "[rows, k]", tuple(token_ids.shape))
    expect_dtype("token_ids", token_ids, (torch.int32, torch.int64))
    out = torch.empty(token_ids.shape, dtype=torch.float32, device=token_ids.device)
    if out.numel():
        ids = token_ids.contiguous()
        n = ids.shape[1]
        zero = torch.zeros_like(positions) if bases is None else bases
        _gumbel_at_kernel[(ids.shape[0], -(-n // BLOCK))](
            ids, out, seeds, positions, zero, n, purpose, BLOCK=BLOCK, enable_fp_fusion=False
        )
    return out


assert GROUP == 64, "the kernels are written for groups of 64 tokens"
