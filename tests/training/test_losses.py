"""Losses against brute force: every block of a toy vocabulary enumerated."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from drafter_service.training import losses

VOCAB, SLOTS = 3, 3
BLOCKS = torch.tensor(list(itertools.product(range(VOCAB), repeat=SLOTS)))
ALL = torch.ones(len(BLOCKS), SLOTS, dtype=torch.bool)


def target_table(seed: int, spread: float = 1.0) -> torch.Tensor:
    """Conditionals of a random autoregressive target for every block: [27, SLOTS] log p."""
    generator = torch.Generator().manual_seed(seed)
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    table = torch.zeros(len(BLOCKS), SLOTS)
    for index, block in enumerate(BLOCKS.tolist()):
        for slot in range(SLOTS):
            prefix = tuple(block[:slot])
            if prefix not in rows:
                logits = spread * torch.randn(VOCAB, generator=generator)
                rows[prefix] = torch.log_softmax(logits, 0)
            table[index, slot] = rows[prefix][block[slot]]
    return table


def draft_table(logits: torch.Tensor) -> torch.Tensor:
    """Independent slots [SLOTS, VOCAB] -> log q of every block's tokens, [27, SLOTS]."""
    logprobs = torch.log_softmax(logits, -1)
    return torch.stack([logprobs[s, BLOCKS[:, s]] for s in range(SLOTS)], dim=1)


def expected_length(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The accepted length a sampled draft has under rejection, by enumeration of the drafts."""
    kept = torch.exp((target - draft).clamp(max=0)).cumprod(dim=1).sum(dim=1)
    return (draft.sum(dim=1).exp() * kept).sum()


def mean_surrogate(draft: torch.Tensor, target: torch.Tensor, tau: float) -> torch.Tensor:
    """The loss of every block, weighted by the target's chance of it."""
    chances = target.sum(dim=1).exp()
    each = torch.stack(
        [
            losses.accepted_length_loss(draft[i : i + 1], target[i : i + 1], ALL[:1], tau=tau)
            for i in range(len(BLOCKS))
        ]
    )
    return (chances * each).sum()


@pytest.mark.parametrize("seed", range(4))
def test_importance_weighted_prefixes_give_the_expected_accepted_length(seed: int) -> None:
    # The identity the surrogate starts from, in the terms that it uses.
    target = target_table(seed)
    draft = draft_table(torch.randn(SLOTS, VOCAB, generator=torch.Generator().manual_seed(seed)))
    log_r = (draft - target).cumsum(dim=1)
    log_a = (draft - target).clamp(min=0).neg().cumsum(dim=1)
    over_target = (target.sum(dim=1).exp()[:, None] * (log_r + log_a).exp()).sum()
    torch.testing.assert_close(over_target, expected_length(draft, target))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("tau", [1e-9, 0.1])
def test_a_step_down_the_surrogate_raises_the_expected_accepted_length(
    seed: int, tau: float
) -> None:
    target = target_table(seed)
    logits = 0.7 * torch.randn(SLOTS, VOCAB, generator=torch.Generator().manual_seed(100 + seed))
    logits.requires_grad_()
    (surrogate,) = torch.autograd.grad(mean_surrogate(draft_table(logits), target, tau), logits)
    (exact,) = torch.autograd.grad(-expected_length(draft_table(logits), target), logits)
    assert torch.nn.functional.cosine_similarity(surrogate.view(-1), exact.view(-1), 0) > 0.3
    before = expected_length(draft_table(logits), target)
    after = expected_length(draft_table(logits - 0.05 * surrogate / surrogate.norm()), target)
    assert after > before


def test_the_surrogate_of_a_perfect_draft_is_minus_log_factorial() -> None:
    target = target_table(0)[:5]
    loss = losses.accepted_length_loss(target, target, ALL[:5])
    assert float(loss) == pytest.approx(-5 * math.log(math.factorial(SLOTS)), rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_the_surrogate_lies_between_its_bounds(seed: int) -> None:
    # i * A_i <= l_i <= i, because A falls with i.
    target = target_table(seed)
    draft = draft_table(torch.randn(SLOTS, VOCAB, generator=torch.Generator().manual_seed(seed)))
    log_r = (draft - target).cumsum(dim=1)
    log_a = (draft - target).clamp(min=0).neg().cumsum(dim=1)
    log_i = torch.arange(1, SLOTS + 1).log()
    loss = float(losses.accepted_length_loss(draft, target, ALL, tau=1e-30))
    assert float(-(log_r + log_i).sum()) - 1e-3 <= loss
    assert loss <= float(-(log_r + log_i + log_a).sum()) + 1e-3


def test_prefixes_under_the_threshold_teach_nothing_but_the_first_always_does() -> None:
    draft = torch.tensor([[-5.0, -5.0, -5.0]], requires_grad=True)
    target = torch.tensor([[-0.1, -0.1, -0.1]])
    losses.accepted_length_loss(draft, target, ALL[:1], tau=0.1).backward()
    assert draft.grad is not None
    assert draft.grad[0].tolist() == [-1.0, 0.0, 0.0]


def test_slots_without_label_count_for_nothing_in_any_loss() -> None:
    mask = torch.tensor([[True, True, False]])
    target = torch.tensor([[-0.5, -0.6, -0.7]])
    for value in (-9.0, -0.01):
        draft = torch.tensor([[-0.4, -0.9, value]], requires_grad=True)
        al = losses.accepted_length_loss(draft, target, mask)
        short = losses.accepted_length_loss(draft[:, :2], target[:, :2], mask[:, :2])
        assert float(al.detach()) == pytest.approx(float(short.detach()))
        assert float(losses.chain_loss(draft, mask).detach()) == pytest.approx(
            float(losses.chain_loss(draft[:, :2], mask[:, :2]).detach())
        )
        (al + losses.weighted(-draft, torch.ones(1, 3), mask)).backward()
        assert draft.grad is not None
        assert float(draft.grad[0, 2]) == 0


@pytest.mark.parametrize("branches", [1, 2, 4])
def test_the_mixtures_likelihood_sums_to_one_and_its_conditionals_multiply_to_it(
    branches: int,
) -> None:
    generator = torch.Generator().manual_seed(branches)
    prior = torch.log_softmax(torch.randn(branches, generator=generator), 0)
    tables = torch.stack(
        [draft_table(torch.randn(SLOTS, VOCAB, generator=generator)) for _ in range(branches)]
    )
    mixture = losses.Mixture(
        prior.expand(len(BLOCKS), -1), tables.transpose(0, 1).contiguous(), ALL
    )
    whole = mixture.prefixes()[:, -1]
    assert float(whole.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    torch.testing.assert_close(mixture.conditionals().sum(dim=1), whole)
    naive = torch.logsumexp(prior + tables.sum(dim=2).T, dim=1)
    torch.testing.assert_close(whole, naive)
    assert float(mixture.nll()) == pytest.approx(-float(naive.sum()), rel=1e-5)


def test_responsibilities_are_bayes_rule() -> None:
    prior = torch.tensor([[0.25, 0.75]]).log()
    chances = torch.tensor([[[0.5, 0.2, 0.1], [0.1, 0.4, 0.3]]])
    mixture = losses.Mixture(prior, chances.log(), ALL[:1])
    joint = torch.tensor([0.25 * 0.5 * 0.2 * 0.1, 0.75 * 0.1 * 0.4 * 0.3])
    torch.testing.assert_close(mixture.responsibilities()[0], joint / joint.sum())


def test_a_branch_that_is_never_used_is_told() -> None:
    prior = torch.tensor([[0.999, 0.001]]).log().expand(4, -1)
    mixture = losses.Mixture(prior, torch.zeros(4, 2, 3), ALL[:4])
    assert losses.branch_use(mixture).dead == 1
    assert losses.balance_loss(mixture.responsibilities()) > 0.5
    even = torch.full((4, 2), 0.5)
    assert float(losses.balance_loss(even)) == pytest.approx(0.0, abs=1e-6)


def test_dpace_weights_are_the_sum_of_what_can_still_be_reached() -> None:
    logprobs = torch.tensor([[-0.1, -1.0, -2.0, -0.3]])
    mask = torch.tensor([[True, True, True, True]])
    got = losses.dpace_weights(logprobs, mask, 0.5)
    smoothed = [0.5 * math.exp(v) + 0.5 for v in logprobs[0].tolist()]
    reached = [math.prod(smoothed[: i + 1]) for i in range(4)]
    assert got[0].tolist() == pytest.approx([sum(reached[i:]) for i in range(4)], rel=1e-5)


def test_dpace_weights_are_the_slope_of_the_smoothed_length() -> None:
    logprobs = torch.tensor([[-0.1, -1.0, -2.0]])
    log_s = (0.5 * logprobs.exp() + 0.5).log().requires_grad_()
    (slope,) = torch.autograd.grad(log_s.cumsum(1).exp().sum(), log_s)
    torch.testing.assert_close(losses.dpace_weights(logprobs, ALL[:1], 0.5), slope)


def test_dpace_weights_stop_at_the_last_label() -> None:
    weights = losses.dpace_weights(torch.zeros(1, 3), torch.tensor([[True, True, False]]), 0.5)
    assert weights[0].tolist() == [2.0, 1.0, 0.0]


def test_decay_weights_fall_by_gamma() -> None:
    weights = losses.decay_weights(3, 4.0)
    assert weights.tolist() == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])


def test_the_distribution_loss_is_the_divergence_over_tokens_that_have_a_column() -> None:
    draft = torch.log_softmax(torch.tensor([[0.3, -0.2, 1.0, 0.1]]), -1)
    columns = torch.tensor([[2, 0, -1]])
    top = torch.tensor([[0.5, 0.3, 0.2]]).log()
    share = torch.tensor([0.5, 0.3]) / 0.8
    want = (share * (share.log() - draft[0, [2, 0]])).sum()
    assert float(losses.distribution_loss(draft, columns, top)[0]) == pytest.approx(float(want))
    none = losses.distribution_loss(draft, torch.tensor([[-1, -1, -1]]), top)
    assert none.tolist() == [0.0]
