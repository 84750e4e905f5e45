"""target_probs on the host against the specification, and at its edges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftwire_kernels import race, reference
from draftwire_kernels.noise import gumbel
from draftwire_kernels.sampling import History, Sampling, SamplingError
from draftwire_kernels.walk import NonFiniteRow, draw, perturbed_top, target_logprobs, target_scores

SINGLE = {
    "plain": Sampling(),
    "greedy": Sampling(temperature=0),
    "cold": Sampling(temperature=0.3),
    "hot": Sampling(temperature=1.7),
    "top_k": Sampling(top_k=7),
    "top_k_1": Sampling(top_k=1),
    "top_k_all": Sampling(top_k=100_000),
    "top_p": Sampling(top_p=0.8),
    "top_p_tiny": Sampling(top_p=1e-6),
    "top_p_nearly_one": Sampling(top_p=0.9999),
    "min_p": Sampling(min_p=0.05),
    "min_p_1": Sampling(min_p=1.0),
    "repetition": Sampling(repetition_penalty=1.4),
    "repetition_below_one": Sampling(repetition_penalty=0.8),
    "presence": Sampling(presence_penalty=0.9),
    "frequency": Sampling(frequency_penalty=0.6),
    "frequency_negative": Sampling(frequency_penalty=-0.6),
    "bias": Sampling(logit_bias=((0, 3.0),)),
    "banned": Sampling(banned_ids=(0,), banned_before=10),
}
POSITION = 9


def random_sampling(generator: np.random.Generator, vocab_size: int) -> Sampling:
    """Each parameter on or off at random."""

    def maybe(value: float, off: float) -> float:
        return value if generator.random() < 0.5 else off

    biased = generator.choice(vocab_size, min(vocab_size, 3), replace=False)
    return Sampling(
        temperature=float(generator.choice([0.0, 0.4, 1.0, 1.0, 1.5])),
        top_k=int(maybe(int(generator.integers(1, vocab_size + 5)), 0)),
        top_p=maybe(float(generator.uniform(0.05, 1)), 1),
        min_p=maybe(float(generator.uniform(0, 0.3)), 0),
        repetition_penalty=maybe(float(generator.uniform(0.7, 1.6)), 1),
        presence_penalty=maybe(float(generator.uniform(-1, 1)), 0),
        frequency_penalty=maybe(float(generator.uniform(-1, 1)), 0),
        logit_bias=tuple((int(t), float(generator.normal() * 2)) for t in biased)
        if generator.random() < 0.5
        else (),
        banned_ids=(int(generator.integers(vocab_size)),) if vocab_size > 1 else (),
        banned_before=int(maybe(POSITION + 1, POSITION)),
        seed=int(generator.integers(2**63)),
    )


def drawn(row: torch.Tensor, sampling: Sampling) -> int:
    """The token of a row, with token 0 seen."""
    scores = target_scores(row, sampling, position=POSITION, history=History(len(row), [0]))
    return draw(scores, sampling, POSITION)


def compare(logits: torch.Tensor, sampling: Sampling, seen: tuple[list[int], list[int]]) -> None:
    vocab_size = logits.numel()
    history = History(vocab_size, seen[0])
    for token in seen[1]:
        history.append(token)
    fast = target_logprobs(logits, sampling, position=POSITION, history=history).double()
    asked = replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    exact = reference.target_probs(
        logits.double(),
        asked if sampling.greedy else sampling,
        position=POSITION,
        prompt_ids=seen[0],
        output_ids=seen[1],
    )
    assert torch.equal(fast > -torch.inf, exact > 0)
    assert torch.allclose(fast.exp(), exact, atol=1e-6, rtol=2e-5)
    assert float(fast.exp().sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SINGLE)
def test_each_parameter_alone_is_the_specifications(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for vocab_size in (2, 5, 64, 65, 333):
        logits = (3 * torch.randn(vocab_size, generator=generator)).to(dtype)
        seen = torch.randint(0, vocab_size, (2, 12), generator=generator).tolist()
        compare(logits, SINGLE[name], (seen[0], seen[1]))


@pytest.mark.parametrize("seed", range(4))
def test_random_combinations_are_the_specifications(seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(40):
        vocab_size = int(generator.choice([1, 3, 63, 64, 130, 1000]))
        logits = torch.from_numpy(generator.normal(size=vocab_size) * 3)
        logits = logits.to([torch.float32, torch.bfloat16, torch.float16][generator.integers(3)])
        seen = generator.integers(0, vocab_size, (2, 8)).tolist()
        compare(logits, random_sampling(generator, vocab_size), (seen[0], seen[1]))


def test_filters_break_ties_by_the_lower_id() -> None:
    flat = torch.zeros(200)
    for sampling, kept in [
        (Sampling(top_k=5), 5),
        (Sampling(top_p=0.1), 20),
        (Sampling(top_p=1e-9), 1),
    ]:
        scores = target_scores(flat, sampling, position=1)
        assert np.flatnonzero(scores > -np.inf).tolist() == list(range(kept))
    steps = torch.tensor([0.0, 1.0, 1.0, 2.0, 1.0, 0.0])
    scores = target_scores(steps, Sampling(top_k=3), position=1)
    assert np.flatnonzero(scores > -np.inf).tolist() == [1, 2, 3]


def test_top_p_is_taken_of_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    scores = target_scores(logits, Sampling(top_k=2, top_p=0.5), position=1)
    assert np.flatnonzero(scores > -np.inf).tolist() == [0]  # 0.4 / 0.7 reaches 0.5, 0.4 does not


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
def test_filters_of_a_large_row_keep_what_a_full_sort_keeps(spread: float) -> None:
    logits = spread * torch.randn(49152, generator=torch.Generator().manual_seed(1))
    for sampling in (Sampling(top_p=0.9), Sampling(top_k=700), Sampling(top_k=50, top_p=0.3)):
        scores = target_scores(logits, sampling, position=1)
        exact = reference.target_probs(logits.double(), sampling, position=1)
        different = int(((torch.from_numpy(scores) > -torch.inf) != (exact > 0)).sum())
        assert different <= 1  # one token at the rim of top-p may fall to either side in fp32


def test_a_mask_excludes_and_greedy_takes_the_best_of_the_rest() -> None:
    logits = torch.tensor([5.0, 4.0, 3.0])
    allowed = torch.tensor([False, True, True])
    for sampling in (Sampling(), Sampling(temperature=0)):
        logprobs = target_logprobs(logits, sampling, position=1, allowed=allowed)
        assert torch.equal(logprobs > -torch.inf, allowed)
        scores = target_scores(logits, sampling, position=1, allowed=allowed)
        assert draw(scores, sampling, 1) in (1, 2)
    assert draw(scores, Sampling(temperature=0), 1) == 1


def test_banned_ids_are_banned_only_before_their_position() -> None:
    sampling = Sampling(banned_ids=(1,), banned_before=20)
    logits = torch.zeros(3)
    assert target_logprobs(logits, sampling, position=19)[1] == -torch.inf
    assert target_logprobs(logits, sampling, position=20)[1] > -torch.inf


def test_the_callers_row_is_never_written() -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    history = History(100, [1, 2])
    everything = Sampling(
        temperature=0.5,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.5,
        presence_penalty=1,
        frequency_penalty=1,
        logit_bias=((3, 9.0),),
        banned_ids=(4,),
        banned_before=99,
    )
    target_logprobs(logits, everything, position=1, history=history, allowed=torch.ones(100).bool())
    target_logprobs(logits, Sampling(), position=1)
    assert torch.equal(logits, before)


def test_one_token_and_all_but_one_excluded_are_certain() -> None:
    assert target_logprobs(torch.tensor([3.0]), Sampling(top_p=0.5), position=1).tolist() == [0.0]
    assert draw(np.array([3.0], dtype=np.float32), Sampling(), 1) == 0
    row = torch.full((49152,), -torch.inf)
    row[40_000] = -5
    for sampling in (*SINGLE.values(), Sampling(temperature=1e-4)):
        history = History(49152, [40_000])
        logprobs = target_logprobs(row, sampling, position=POSITION, history=history)
        assert logprobs[40_000] == 0
        scores = target_scores(row, sampling, position=POSITION, history=history)
        assert draw(scores, sampling, POSITION) == 40_000


@pytest.mark.parametrize(
    ("bad", "found"), [(torch.nan, "NaN"), (torch.inf, "+inf"), (None, "no finite entry")]
)
@pytest.mark.parametrize("name", SINGLE)
def test_rows_that_are_not_finite_are_reported(name: str, bad: float | None, found: str) -> None:
    row = torch.zeros(150)
    if bad is None:
        row[:] = -torch.inf
    else:
        row[0] = bad  # also the banned and the biased id: a mask must not hide it
    with pytest.raises(NonFiniteRow) as caught:
        drawn(row, SINGLE[name])
    assert caught.value.found == found


def test_a_penalty_without_a_history_and_ids_outside_the_row_are_refused() -> None:
    with pytest.raises(SamplingError, match="history"):
        target_logprobs(torch.zeros(5), Sampling(presence_penalty=1), position=1)
    with pytest.raises(SamplingError, match="logit_bias"):
        target_logprobs(torch.zeros(5), Sampling(logit_bias=((5, 1.0),)), position=1)


@pytest.mark.parametrize("seed", range(5))
def test_the_race_finds_what_the_whole_row_of_noise_gives(seed: int) -> None:
    generator = np.random.default_rng(seed)
    for trial in range(30):
        vocab_size = int(generator.choice([1, 2, 63, 64, 65, 640, 3001, 49152]))
        row = (generator.normal(size=vocab_size) * generator.choice([0, 0.01, 1, 4, 1e5])).astype(
            "f4"
        )
        if generator.random() < 0.3:
            row = torch.from_numpy(row).bfloat16().float().numpy()
        if generator.random() < 0.4:
            row[generator.random(vocab_size) < generator.choice([0.1, 0.9, 0.999])] = -np.inf
            row[generator.integers(vocab_size)] = 0
        values = row + gumbel(trial, seed, vocab_size).numpy()
        assert race.perturbed_argmax(row, trial, seed) == int(values.argmax())
        kept = np.flatnonzero(row > -np.inf)
        assert race.perturbed_argmax_of(kept, row[kept], trial, seed) == int(values.argmax())
        count = int(generator.integers(1, 20))
        order = np.lexsort((np.arange(vocab_size), -values))[:count]
        expected = [(int(t), float(values[t])) for t in order if values[t] > -np.inf]
        assert perturbed_top(row, count, trial, seed) == expected


def test_a_draw_too_close_to_call_one_by_one_is_settled_by_the_bits_of_the_row() -> None:
    row = np.full(49152, -60, dtype=np.float32)
    noise = gumbel(3, 5, row.size).numpy()
    owners = race.noise.group_minima(3, 5, 768)[1]
    first, second = [t for t in range(640) if t % 64 != owners[t // 64]][4:600:500]
    row[first] = 0
    for last_bits in range(-6, 7):
        # The two values are equal, or differ in their last bits.
        row[second] = np.float32(noise[first] - noise[second]) + np.float32(last_bits * 2.0**-22)
        expected = int((row + noise).argmax())
        assert race.perturbed_argmax(row, 3, 5) == expected
        kept = np.array([first, second])
        assert race.perturbed_argmax_of(kept, row[kept], 3, 5) == expected


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0])
def test_a_long_prefix_is_found_without_sorting_the_row(top_p: float, spread: float) -> None:
    generator = np.random.default_rng(9)
    row = (spread * generator.normal(size=49152)).astype("f4")
    scores = target_scores(torch.from_numpy(row), Sampling(top_p=top_p), position=1)
    order = np.argsort(-row, kind="stable")
    sums = np.cumsum(np.exp(row[order].astype("f8")))
    edge = int(np.searchsorted(sums, top_p * sums[-1])) + 1
    kept = np.flatnonzero(scores > -np.inf)
    # The row's sum is taken in fp32.
    assert abs(kept.size - edge) <= 1 + edge // 1000
    assert set(kept.tolist()) == set(order[: kept.size].tolist())


def test_greedy_takes_the_lowest_id_among_equals_in_every_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        row = torch.zeros(49152, dtype=dtype)
        row[[700, 30_000]] = 2
        scores = target_scores(row, Sampling(temperature=0), position=1)
        assert draw(scores, Sampling(temperature=0), 1) == 700
