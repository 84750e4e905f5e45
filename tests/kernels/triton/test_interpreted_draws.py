"""Statistics, filters and draws of rows against the host's rows.py, race.py and walk.draw."""

import numpy as np
import pytest
import torch

from draftwire_kernels.filters_triton import kept_tokens
from draftwire_kernels.race import NonFiniteRow
from draftwire_kernels.race_triton import Draws, draw_rows
from draftwire_kernels.rounds import row_params
from draftwire_kernels.rows import normalise, target_scores
from draftwire_kernels.sampling import Sampling
from draftwire_kernels.stats_triton import statistics
from draftwire_kernels.walk import draw

GREEDY = Sampling(temperature=0.0)


def logits_of(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Flat to peaked rows; in bf16 and fp16 with many equal values."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([0.2, 2.0, 5.0, 9.0]).repeat(-(-rows // 4))[:rows, None]
    return (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)


def drawn(logits: torch.Tensor, samplings: list[Sampling], positions: list[int]) -> Draws:
    rows = len(samplings)
    owner = torch.arange(rows, dtype=torch.int32)
    params = row_params(samplings, positions, owner, torch.zeros_like(owner))
    stats = statistics(logits, params)
    kept = kept_tokens(logits, stats, params) if params.filtered else None
    return draw_rows(logits, stats, params, kept)


def check(logits: torch.Tensor, samplings: list[Sampling], positions: list[int]) -> None:
    got = drawn(logits, samplings, positions)
    assert not got.status.any()
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        scores = target_scores(logits[row], sampling, position=position)
        token = draw(scores, sampling, position)
        assert got.token[row] == token, (row, sampling)
        assert got.logprob[row] == pytest.approx(normalise(scores)[token], abs=2e-5)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (1, torch.float32),
        (63, torch.float16),
        (65, torch.bfloat16),
        (1000, torch.bfloat16),
        (17_001, torch.float32),
    ],
)
def test_draws_are_the_hosts_for_every_vocabulary_and_dtype(vocab: int, dtype: torch.dtype) -> None:
    rows = 8
    samplings = [
        Sampling(temperature=(0.0, 0.3, 1.0, 1.7)[row % 4], seed=2**64 - 1 - row)
        for row in range(rows)
    ]
    check(logits_of(rows, vocab, dtype, vocab), samplings, list(range(0, 90_000, 11_250)))


def test_a_winner_behind_many_better_bounds_is_found() -> None:
    """One likely token a group, whose smallest exponential is nearly always another token's."""
    logits = torch.full((4, 6001), -8.0)
    logits[:, ::64] = torch.arange(94) % 3 * 0.1
    check(logits, [Sampling(seed=seed) for seed in range(4)], [5, 6, 7, 8])


def test_draws_from_a_flat_row_stay_below_the_cut() -> None:
    logits = torch.zeros(3, 4000, dtype=torch.bfloat16)
    samplings = [
        Sampling(top_k=70, top_p=0.5, seed=1),
        Sampling(top_p=0.01, seed=2),
        Sampling(min_p=0.5, seed=3),
    ]
    check(logits, samplings, [1, 2, 3])


FILTERS = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 400},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 5, "min_p": 0.3},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_filters_keep_the_hosts_tokens_ties_at_the_edge_included(dtype: torch.dtype) -> None:
    which = FILTERS if dtype == torch.bfloat16 else FILTERS[1::3]
    logits = logits_of(4, 500, dtype, 5)[[1 + row % 3 for row in range(len(which))]]
    samplings = [
        Sampling(temperature=(0.7, 1.0, 1.5)[seed % 3], seed=seed, **filters)
        for seed, filters in enumerate(which)
    ]
    rows = len(samplings)
    owner = torch.arange(rows, dtype=torch.int32)
    params = row_params(samplings, [9] * rows, owner, torch.zeros_like(owner))
    kept = kept_tokens(logits, statistics(logits, params), params)
    ids = torch.arange(logits.shape[1])
    for row, sampling in enumerate(samplings):
        scores = logits[row].float() / sampling.temperature
        got = (scores > kept.pivot[row]) | ((scores == kept.pivot[row]) & (ids <= kept.cut[row]))
        want = target_scores(logits[row], sampling, position=9)
        assert torch.equal(got, torch.from_numpy(want > -np.inf)), sampling
        total = torch.logsumexp(torch.from_numpy(want), 0)
        assert kept.log_total[row] == pytest.approx(float(total), abs=1e-5)
    check(logits[::3], samplings[::3], [9] * len(samplings[::3]))


@pytest.mark.parametrize("top_p", [0.24, 0.26, 0.5, 0.75, 1.0])
def test_a_flat_row_is_cut_by_id(top_p: float) -> None:
    logits = torch.zeros(1, 300)
    logits[0, 4:] = -torch.inf
    owner = torch.zeros(1, dtype=torch.int32)
    params = row_params([Sampling(top_p=top_p, top_k=299)], [0], owner, owner)
    kept = kept_tokens(logits, statistics(logits, params), params)
    assert min(int(kept.cut[0]), 3) == {0.24: 0, 0.26: 1, 0.5: 1, 0.75: 2, 1.0: 3}[top_p]


@pytest.mark.parametrize("only", [0, 299])
def test_a_row_with_one_token_left_draws_it_with_certainty(only: int) -> None:
    logits = torch.full((4, 300), -torch.inf)
    logits[:, only] = -3.0
    samplings = [GREEDY, Sampling(), Sampling(top_p=0.5), Sampling(top_k=7, temperature=2.0)]
    got = drawn(logits, samplings, [0, 1, 2, 3])
    assert got.token.tolist() == [only] * 4
    assert got.logprob.abs().max() < 1e-6


def test_bad_rows_are_named_and_their_neighbours_untouched() -> None:
    logits = logits_of(6, 200, torch.float32, 1)
    samplings = [Sampling(seed=i, top_k=20 * (i % 2)) for i in range(6)]
    clean = drawn(logits, samplings, [3] * 6)
    logits[1, 77] = torch.nan
    logits[3, 199] = torch.inf
    logits[4] = -torch.inf
    got = drawn(logits, samplings, [3] * 6)
    assert got.status.tolist() == [0, 1, 0, 2, 3, 0]
    assert got.token[[1, 3, 4]].tolist() == [-1, -1, -1]
    for row in (0, 2, 5):
        assert got.token[row] == clean.token[row]
        assert got.logprob[row] == clean.logprob[row]
    for row, found in ((1, "NaN"), (3, r"\+inf"), (4, "no finite")):
        with pytest.raises(NonFiniteRow, match=found):
            draw(target_scores(logits[row], samplings[row], position=3), samplings[row], 3)


def test_padding_rows_are_neither_read_nor_drawn() -> None:
    logits = logits_of(3, 100, torch.float32, 2)
    logits[1] = torch.nan
    owner = torch.tensor([0, -1, 0], dtype=torch.int32)
    depth = torch.tensor([0, 0, 1], dtype=torch.int32)
    params = row_params([Sampling(seed=4)], [10], owner, depth)
    got = draw_rows(logits, statistics(logits, params), params)
    assert got.status.tolist() == [0, 0, 0]
    assert got.token[1] == -1
    assert got.token[2] == draw(logits[2].numpy(), Sampling(seed=4), 11)


def test_rows_two_billion_elements_apart_are_found() -> None:
    """Offsets past 2^31: two rows of a view whose stride is 2^31, in memory that is never
    touched."""
    try:
        store = torch.empty(2**31 + 512, dtype=torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"no 4 GiB of address space: {error}")
    logits = store.as_strided((2, 500), (2**31, 1))
    logits.copy_(logits_of(2, 500, torch.bfloat16, 3))
    check(logits, [Sampling(seed=1, top_k=9), GREEDY], [0, 0])


def test_statistics_do_not_depend_on_the_other_rows() -> None:
    logits = logits_of(5, 16_500, torch.bfloat16, 6)
    owner = torch.arange(5, dtype=torch.int32)
    together = statistics(logits, row_params([Sampling()] * 5, [0] * 5, owner, owner * 0))
    alone = statistics(logits[3:4], row_params([Sampling()], [0], owner[:1], owner[:1]))
    assert torch.equal(together.span_sum[3], alone.span_sum[0])
    assert torch.equal(together.group_max[3], alone.group_max[0])
    sums = (together.span_max.double() + together.span_sum.double().log()).logsumexp(1)
    assert torch.allclose(sums, logits.double().logsumexp(1), rtol=1e-6)
