"""Counter noise: the same bits however they are asked for, the right law, never infinite."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from draftwire_kernels import noise, reference

SEEDS = [0, 1, 12345678901234567890, 2**64 - 1]
POSITIONS = [0, 1, 2**31 - 1, 2**31, 2**40]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", POSITIONS)
def test_scattered_blocks_are_numpys_own_philox_and_the_specifications(
    seed: int, position: int
) -> None:
    blocks = [1, 2, 3, 1000, 2**32, 2**63, 2**64 - 1]
    counters = np.array([blocks, [position] * 7, [1] * 7, [9] * 7], dtype=np.uint64)
    words = noise.philox(counters, np.full(7, seed, dtype=np.uint64), 3)
    for i, block in enumerate(blocks):
        counter = np.array([block - 1, position, 1, 9], dtype=np.uint64)
        key = np.array([seed, 3], dtype=np.uint64)
        native = np.random.Philox(counter=counter, key=key).random_raw(4)
        assert words[:, i].tolist() == native.tolist()
        assert tuple(words[:, i].tolist()) == reference.philox((block, position, 1, 9), (seed, 3))


@pytest.mark.parametrize("vocab_size", [1, 3, 7, 8, 63, 64, 65, 257, 1000, 49152])
def test_a_tokens_noise_alone_has_the_bits_it_has_in_the_whole_row(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    for seed, position in zip(SEEDS, POSITIONS, strict=False):
        row = noise.gumbel(seed, position, vocab_size)
        ids = torch.randint(0, vocab_size, (13,), generator=generator)
        assert torch.equal(noise.gumbel_at(seed, position, ids), row[ids])
        for token in ids[:3]:
            assert torch.equal(noise.gumbel_at(seed, position, token), row[token])
        shorter = max(1, vocab_size // 2)
        assert torch.equal(noise.gumbel(seed, position, shorter), row[:shorter])


def test_many_rows_at_once_are_the_rows_one_by_one() -> None:
    ids = torch.randint(0, 5000, (4, 5), generator=torch.Generator().manual_seed(1))
    rows = noise.gumbel_rows(SEEDS, [3, 4, 5, 2**31], ids, noise.DRAFT, [2, 2, 0, 9])
    for r, (seed, position, base) in enumerate(
        zip(SEEDS, [3, 4, 5, 2**31], [2, 2, 0, 9], strict=True)
    ):
        alone = noise.gumbel(seed, position, 5000, noise.DRAFT, base)
        assert torch.equal(rows[r], alone[ids[r]])


def test_no_ids_and_ids_of_any_shape_are_answered_in_kind() -> None:
    assert noise.gumbel_at(1, 1, torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert noise.gumbel_at(1, 1, torch.zeros(2, 3, 4, dtype=torch.int32)).shape == (2, 3, 4)


def test_fp32_noise_is_the_specifications_to_fp32_precision() -> None:
    row = noise.gumbel(77, 5, 300, noise.TARGET, 0)
    for token in range(300):
        exact = reference.gumbel(77, 5, token)
        assert float(row[token]) == pytest.approx(exact, abs=2e-6, rel=2e-6)


def test_extreme_bits_stay_strictly_inside_and_give_finite_noise() -> None:
    extremes58 = np.array([0, 1, 2**58 - 1, 2**64 - 1, 2**57], dtype=np.uint64)
    extremes32 = np.array([0, 1, 2**32 - 1, 2**31], dtype=np.uint32)
    for u in (noise.uniform58(extremes58), noise.uniform32(extremes32)):
        assert u.dtype == np.float32
        assert ((u > 0) & (u < 1)).all()
        energy = noise.exponential(u.copy())
        assert ((energy > 0) & np.isfinite(np.log(energy))).all()


def test_small_uniforms_keep_their_relative_precision() -> None:
    words = np.array([3, 1000, 12345], dtype=np.uint64)
    energy = noise.exponential(noise.uniform58(words))
    assert energy == pytest.approx((words + 0.5) / 2.0**58, rel=1e-6)


@pytest.mark.parametrize(
    ("field", "seed", "position"), [("seed", -1, 0), ("seed", 2**64, 0), ("position", 0, -1)]
)
def test_keys_outside_64_bits_are_refused_by_name(field: str, seed: int, position: int) -> None:
    with pytest.raises(ValueError, match=field):
        noise.gumbel(seed, position, 10)
    with pytest.raises(ValueError, match=field):
        noise.gumbel_at(seed, position, torch.tensor([1]))


def test_purposes_seeds_positions_and_bases_give_different_noise() -> None:
    keys = [(1, 1, 0, 0), (2, 1, 0, 0), (1, 2, 0, 0), (1, 1, 1, 0), (1, 1, 0, 1)]
    rows = [noise.gumbel(s, p, 64, purpose, base) for s, p, purpose, base in keys]
    for i, row in enumerate(rows):
        for other in rows[:i]:
            assert not (row == other).any()


# Each of the following fails for one in 10,000 choices of its seeds; the seeds are fixed.
ALARM = 1e-4


def test_the_noise_is_standard_gumbel() -> None:
    rows = torch.cat([noise.gumbel(seed, 9, 20_000) for seed in range(10)])
    assert scipy.stats.kstest(rows.numpy(), "gumbel_r").pvalue > ALARM


def test_the_64_exponentials_of_a_group_are_independent_although_made_smallest_first() -> None:
    rows = np.stack([noise.gumbel(seed, 4, 64).double().numpy() for seed in range(8000)])
    energy = np.exp(-rows)
    # The smallest of 64, the second smallest less it, and which of them is smallest.
    ordered = np.sort(energy, axis=1)
    assert scipy.stats.kstest(64 * ordered[:, 0], "expon").pvalue > ALARM
    assert scipy.stats.kstest(63 * (ordered[:, 1] - ordered[:, 0]), "expon").pvalue > ALARM
    assert scipy.stats.chisquare(np.bincount(energy.argmin(1), minlength=64)).pvalue > ALARM
    # A pair of tokens: quarters of the one against quarters of the other.
    uniform = np.exp(-energy)
    for a, b in [(0, 1), (5, 40), (62, 63)]:
        cells = (4 * uniform[:, a]).astype(int) * 4 + (4 * uniform[:, b]).astype(int)
        assert scipy.stats.chisquare(np.bincount(cells, minlength=16)).pvalue > ALARM


def test_single_uniforms_are_uniform_and_open() -> None:
    draws = [noise.uniform(seed, 3, noise.COIN, 2) for seed in range(5000)]
    assert 0 < min(draws) <= max(draws) < 1
    assert scipy.stats.kstest(draws, "uniform").pvalue > ALARM
