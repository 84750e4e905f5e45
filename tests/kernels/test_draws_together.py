"""Rows drawn together: each as alone and as the whole row of noise has it, bad rows contained."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from draftwire_kernels import noise, race
from draftwire_kernels.filters import Filtered
from draftwire_kernels.groups import in_groups
from draftwire_kernels.race import NonFiniteRow
from draftwire_kernels.rows import kept_scores, target_scores
from draftwire_kernels.sampling import Sampling
from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk import follow

FILTERS = [
    Sampling(),
    Sampling(top_p=0.9),
    Sampling(top_p=0.3),
    Sampling(min_p=0.05),
    Sampling(min_p=0.3, top_p=0.95),
    Sampling(top_k=30),
    Sampling(top_k=500, top_p=0.8, min_p=0.001),
    Sampling(temperature=0),
    Sampling(temperature=0.6, top_p=0.99),
]


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """numpy says nothing of overflows or NaN on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def some_rows(seed: int, rows: int, vocab_size: int) -> torch.Tensor:
    """Flat, peaked and tied rows, some with most tokens excluded, in one of three types."""
    generator = np.random.default_rng(seed)
    table = generator.normal(size=(rows, vocab_size)) * generator.choice([0, 0.3, 1, 4], (rows, 1))
    for row in table[:: 1 + seed % 3]:
        row[generator.random(vocab_size) < generator.choice([0.1, 0.99])] = generator.choice(
            [-np.inf, np.finfo(np.float32).min]
        )
        row[generator.integers(vocab_size)] = 0
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    return torch.from_numpy(table.astype("f4")).to(dtype)


@pytest.mark.parametrize("sampling", FILTERS, ids=range(len(FILTERS)))
def test_each_row_draws_what_the_whole_row_of_noise_gives(sampling: Sampling) -> None:
    for seed in range(12):
        vocab_size = (5, 64, 130, 2051, 2112, 49152)[seed % 6]
        rows, position = some_rows(seed, 1 + seed % 5, vocab_size), 10 * seed
        together = kept_scores(rows, sampling, position=position)
        for index in reversed(range(len(rows))):
            scores = target_scores(rows[index], sampling, position=position + index)
            assert np.array_equal(together.masked(index), scores)
            if not sampling.greedy:
                scores = scores + noise.gumbel(0, position + index, vocab_size).numpy()
            assert together.draw(index) == int(scores.argmax())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sampling", FILTERS, ids=range(len(FILTERS)))
def test_a_bad_row_made_with_others_harms_only_who_draws_from_it(
    sampling: Sampling, bad: float
) -> None:
    good = some_rows(1, 4, 700)
    rows = good.clone()
    rows[2] = bad
    together = kept_scores(rows, sampling, position=7)
    alone = kept_scores(good, sampling, position=7)
    for index in (0, 1, 3):
        assert together.draw(index) == alone.draw(index)
    with pytest.raises(NonFiniteRow):
        together.draw(2)


def test_the_walk_looks_ahead_on_the_likely_path_alone_and_ends_where_rows_alone_end() -> None:
    generator = np.random.default_rng(5)
    for trial in range(40):
        sampling = FILTERS[trial % len(FILTERS)]
        right, straight = generator.integers(0, 26), generator.random() < 0.5
        rows = some_rows(trial, 26, 300)
        path: list[int] = []
        tokens: list[int] = []
        parents: list[int] = []
        at = -1
        while len(tokens) < 25:  # the right token stands first, second or nowhere
            scores = kept_scores(rows[at + 1][None], sampling, position=50 + len(path))
            token = scores.draw(0)
            if not straight and len(path) < right and generator.random() < 0.5 and len(tokens) < 24:
                tokens.append((token + 1) % 300)
                parents.append(at)
            tokens.append(token if len(path) < right else (token + 1) % 300)
            parents.append(at)
            at = len(tokens) - 1
            path.append(at)
        verdict = follow(rows, TokenTree(tuple(tokens), tuple(parents)), sampling, position=50)
        assert verdict.path == tuple(path[: min(right, len(path))])


@pytest.mark.parametrize("top_p", [1e-6, 0.2, 0.7, 0.9, 0.999])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_what_is_surely_kept_is_kept_and_little_that_is_kept_is_unsure(
    top_p: float, min_p: float
) -> None:
    generator = np.random.default_rng(8)
    kept = sure = 0
    for seed in range(30):
        row = some_rows(3 * seed, 1, 9000).numpy()  # fp32
        filtered = Filtered(row[0], in_groups(row), 0, Sampling(top_p=top_p, min_p=min_p))
        ids = set(range(9000)) if filtered.ids is None else set(filtered.ids.tolist())
        tokens = [*generator.integers(0, 9000, 10).tolist(), *sorted(ids)[:10], *sorted(ids)[-10:]]
        for token in tokens:
            if row[0, token] == -np.inf:
                continue
            surely = filtered.surely_keeps(token)
            assert not surely or token in ids
            kept += token in ids
            sure += surely
    assert sure >= 0.5 * kept  # ties are where the rest is


def test_an_exponential_made_alone_is_the_rows_to_its_last_bits() -> None:
    seed, position, count = 9, 77, 1 << 17
    whole = noise.exponential(noise.uniform32(noise.token_halves(seed, position, count)))
    alone = noise.token_exponentials(seed, position)
    order = np.argsort(whole)
    for token in [*range(300), *order[:300].tolist(), *order[-300:].tolist()]:
        assert alone(token) == pytest.approx(float(whole[token]), rel=2.0**-18)


def test_a_flat_row_whose_bounds_are_many_is_settled_exactly() -> None:
    for seed in range(40):
        row = np.zeros(49152, dtype=np.float32)
        expected = int(noise.gumbel(seed, 3, row.size).argmax())
        assert race.perturbed_argmax(row, seed, 3) == expected
