"""Sparse packing of draft rows against a plain sort, and what the wire needs of it."""

import numpy as np
import pytest
import torch

from draftwire_kernels import noise
from draftwire_kernels.checks import KernelArgumentError
from draftwire_kernels.rounds import row_params
from draftwire_kernels.sampling import Sampling
from draftwire_kernels.sparse_triton import SparseRows, pack_rows


def packed(
    logits: torch.Tensor, samplings: list[Sampling], positions: list[int], count: int, purpose: int
) -> SparseRows:
    owner = torch.arange(len(samplings), dtype=torch.int32)
    return pack_rows(logits, row_params(samplings, positions, owner, owner * 0), count, purpose)


@pytest.mark.parametrize("purpose", [noise.TARGET, noise.DRAFT])
@pytest.mark.parametrize(
    ("vocab", "count", "dtype"), [(3, 8, torch.float32), (1000, 20, torch.bfloat16)]
)
def test_rows_hold_the_likeliest_tokens_in_the_order_of_the_race(
    vocab: int, count: int, dtype: torch.dtype, purpose: int
) -> None:
    logits = (torch.randn(3, vocab, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    samplings = [
        Sampling(temperature=0.6, seed=2**64 - 9),
        Sampling(temperature=0),
        Sampling(seed=3),
    ]
    positions = [2**35, 4, 77]
    got = packed(logits, samplings, positions, count, purpose)
    count = min(count, vocab)
    assert got.ids.shape == (3, count)
    for row, sampling in enumerate(samplings):
        heat = 1.0 if sampling.greedy else sampling.temperature
        scores = logits[row].float() / heat
        likeliest = sorted(range(vocab), key=lambda t, s=scores: (-float(s[t]), t))[:count]
        kept = torch.tensor(sorted(likeliest))
        values = scores[kept]
        if not sampling.greedy:
            base = 0 if purpose == noise.TARGET else positions[row] - 1
            values = values + noise.gumbel_at(sampling.seed, positions[row], kept, purpose, base)
        order = sorted(range(count), key=lambda i, v=values: (-float(v[i]), i))
        assert got.ids[row].tolist() == kept[order].tolist()
        assert torch.allclose(got.values[row], values[order], atol=2e-6)
        probs = scores[kept].log_softmax(0)[order]
        assert torch.allclose(got.log_probs[row], probs, atol=3e-6)
        assert got.log_total[row] == pytest.approx(float(scores.logsumexp(0)), abs=1e-5)


def test_the_first_entry_of_a_coupled_row_is_what_the_target_draws_from_the_same_logits() -> None:
    from draftwire_kernels.walk import draw

    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(6)) * 6
    samplings = [Sampling(seed=s) for s in range(4)]
    got = packed(logits, samplings, [50] * 4, 64, noise.TARGET)
    want = [draw(logits[row].numpy(), samplings[row], 50) for row in range(4)]
    assert got.ids[:, 0].tolist() == want


def test_excluded_tokens_are_no_entries_and_bad_rows_have_none() -> None:
    logits = torch.full((3, 200), -torch.inf)
    logits[0, [5, 150]] = torch.tensor([1.0, 2.0])
    logits[1] = 0.0
    logits[1, 9] = torch.nan
    got = packed(logits, [Sampling(temperature=0)] * 3, [1] * 3, 4, noise.TARGET)
    assert got.ids.tolist() == [[150, 5, -1, -1], [-1] * 4, [-1] * 4]
    assert got.status.tolist() == [0, 1, 3]
    assert np.isneginf(got.values[0, 2:].numpy()).all()
    assert got.log_probs[0, :2].exp().sum() == pytest.approx(1.0)


def test_more_entries_than_a_row_may_have_are_refused_by_name() -> None:
    with pytest.raises(KernelArgumentError, match="count"):
        packed(torch.zeros(1, 10), [Sampling()], [1], 257, noise.TARGET)
