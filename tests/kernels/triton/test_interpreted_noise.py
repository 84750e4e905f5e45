"""The noise in Triton against noise.py: words and uniforms to the bit, logarithms to the last
place."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from draftwire_kernels import noise, noise_triton, reference

EXTREMES = [0, 1, 2**32 - 1, 2**58 - 1, 2**58, 2**63, 2**64 - 1]


@triton.jit
def _probe(In_ptr, U58_ptr, U32_ptr, E_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    word = tl.load(In_ptr + at).to(tl.uint64, bitcast=True)
    u = noise_triton.uniform58(word)
    tl.store(U58_ptr + at, u)
    tl.store(U32_ptr + at, noise_triton.uniform32(word & 0xFFFFFFFF))
    tl.store(E_ptr + at, noise_triton.exponential(u))


@triton.jit
def _rows(
    Words_ptr,
    Gumbel_ptr,
    Coin_ptr,
    seed_ptr,
    position,
    base,
    FOURTHS: tl.constexpr,
    N: tl.constexpr,
):
    seed = tl.load(seed_ptr)
    position = tl.load(seed_ptr + 1)
    base = tl.load(seed_ptr + 2)
    words = noise_triton.group_words(FOURTHS, position, base, seed, 3)
    tl.store(Words_ptr + tl.arange(0, 4 * FOURTHS), words.to(tl.int64, bitcast=True))
    group = tl.arange(0, N)
    gumbel = noise_triton.group_gumbel(group, N, position, base, seed, 3)
    tl.store(Gumbel_ptr + group[:, None] * 64 + tl.arange(0, 64)[None, :], gumbel)
    tl.store(Coin_ptr, noise_triton.coin(position, 1, base, seed))


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def test_uniforms_of_extreme_bits_are_the_cpus_and_strictly_inside_the_unit_interval() -> None:
    words = torch.tensor([signed(w) for w in EXTREMES] + [0] * (8 - len(EXTREMES)))
    wide, narrow, energy = torch.empty(3, 8)
    _probe[(1,)](words, wide, narrow, energy, 8)
    bits = np.array(words.numpy().view(np.uint64))
    assert (wide.numpy() == noise.uniform58(bits)).all()
    halves = (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    assert (narrow.numpy() == noise.uniform32(halves)).all()
    for u in (wide, narrow):
        assert (u > 0).all()
        assert (u < 1).all()
    assert energy.isfinite().all()
    assert (energy > 0).all()
    assert torch.allclose(energy, -torch.log1p(-wide.double()).float(), rtol=3e-7)


@pytest.mark.parametrize(
    ("seed", "position", "base"), [(0, 0, 0), (12345, 777, 776), (2**64 - 1, 2**40, 2**33)]
)
def test_words_groups_and_coins_are_the_cpus(seed: int, position: int, base: int) -> None:
    key = torch.tensor([signed(seed), position, base])
    words = torch.empty(32, dtype=torch.int64)
    gumbel, coin = torch.empty(16, 64), torch.empty(1)
    _rows[(1,)](words, gumbel, coin, key, 0, 0, 8, 16)
    want = [w for b in range(8) for w in reference.philox((b + 1, position, 0, base), (seed, 3))]
    assert [w % 2**64 for w in words.tolist()] == want
    cpu = noise.gumbel(seed, position, 1024, 3, base).view(16, 64)
    assert torch.allclose(gumbel, cpu, rtol=1e-6, atol=1e-6)
    assert coin.item() == noise.uniform(seed, position, 1, base)


def test_a_tokens_noise_computed_alone_is_the_rows() -> None:
    seeds, positions, bases = [3, 2**64 - 2], [5, 2**35], [0, 9]
    ids = torch.tensor([[0, 63, 64, 151_935, 2_000_000_000], [1, 2, 3, 4, 5]])
    got = noise_triton.gumbel_at(
        torch.tensor([signed(s) for s in seeds]),
        torch.tensor(positions),
        ids,
        0,
        torch.tensor(bases),
    )
    want = noise.gumbel_rows(seeds, positions, ids, 0, bases)
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-6)
