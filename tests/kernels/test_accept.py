"""Rules chain, mixture and block on the vectorised path: decisions, residuals, edges, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from draftwire_kernels import noise, reference
from draftwire_kernels.accept import Rule, accept, residual
from draftwire_kernels.draft_probs import DraftProbs, DraftProbsError
from draftwire_kernels.sampling import History, Sampling
from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk import NonFiniteRow, follow

RULES = [Rule.CHAIN, Rule.BLOCK]
POSITION = 7


def random_probs(generator: torch.Generator, *shape: int, spread: float = 1.5) -> torch.Tensor:
    logits = spread * torch.randn(shape, generator=generator)
    return torch.softmax(logits, -1)


def sampled(generator: torch.Generator, probs: torch.Tensor) -> list[int]:
    tokens: list[int] = torch.multinomial(probs, 1, generator=generator).flatten().tolist()
    return tokens


@pytest.mark.parametrize("rule", RULES)
def test_acceptance_is_the_specifications_law_turned_into_a_decision_by_the_coins(
    rule: Rule,
) -> None:
    generator = torch.Generator().manual_seed(1)
    for trial in range(60):
        target = random_probs(generator, 5, 12)
        draft = random_probs(generator, 4, 12)
        tokens = sampled(generator, draft)
        sampling = Sampling(seed=trial)
        decide = reference.chain if rule is Rule.CHAIN else reference.block
        law = {len(o.path): o for o in decide(target.double(), tokens, draft.double())}
        # Thresholds from the law: chain stops at the first failure, block at the last success.
        coins = [noise.uniform(trial, POSITION + i, noise.COIN, POSITION - 1) for i in range(4)]
        reach, expected = 1.0, None
        order = range(4) if rule is Rule.CHAIN else range(4, 0, -1)
        for i in order:
            share = (law[i].probability / reach) if i in law and reach > 0 else 0.0
            if rule is Rule.CHAIN and coins[i] >= 1 - share:
                expected = i
            if rule is Rule.BLOCK and coins[i - 1] < share:
                expected = i
            if expected is not None:
                break
            reach -= law[i].probability if i in law else 0.0
        if expected is None:
            expected = 4 if rule is Rule.CHAIN else 0
        verdict = accept(
            target.log(), tokens, DraftProbs.dense(draft), sampling, rule=rule, position=POSITION
        )
        assert verdict.path == tuple(range(expected))
        assert verdict.tokens[:-1] == tuple(tokens[:expected])
        assert float(law[expected].next_probs[verdict.tokens[-1]]) > 0


@pytest.mark.parametrize("rule", RULES)
def test_sparse_dense_and_one_hot_forms_of_the_same_distribution_decide_alike(rule: Rule) -> None:
    generator = torch.Generator().manual_seed(2)
    for trial in range(12):
        target = random_probs(generator, 4, 300).log()
        ids = torch.stack([torch.randperm(300, generator=generator)[:8] for _ in range(3)])
        probs = random_probs(generator, 3, 8)
        picks = sampled(generator, probs)
        tokens = [int(ids[j, k]) for j, k in enumerate(picks)]
        dense = torch.zeros(3, 300).scatter_(1, ids, probs)
        forms = [DraftProbs.sparse(ids, probs), DraftProbs.dense(dense)]
        sampling = Sampling(seed=trial, temperature=0.9)
        first, second = (
            accept(target, tokens, form, sampling, rule=rule, position=POSITION) for form in forms
        )
        assert first == second
        hot = DraftProbs.dense(torch.eye(300)[tokens])
        assert accept(target, tokens, hot, sampling, rule=rule, position=POSITION) == accept(
            target, tokens, DraftProbs.one_hot(tokens), sampling, rule=rule, position=POSITION
        )


def test_the_mixtures_rows_are_the_specifications() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        branches = torch.randint(0, 3, (4, 5), generator=generator).tolist()
        prior = random_probs(generator, 4).double()
        for chosen in range(4):
            draft = DraftProbs.mixture(branches, prior.tolist(), chosen)
            draft.check(branches[chosen], 3)
            exact = reference.mixture_rows(branches, prior, branches[chosen], 3)
            for row in range(5):
                ids, probs = draft.entries(row)
                assert len(set(ids.tolist())) == len(ids)
                found = torch.zeros(3, dtype=torch.float64)
                found[torch.from_numpy(ids)] = torch.from_numpy(probs).double()
                assert torch.allclose(found, exact[row], atol=1e-6)


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_the_residual_is_the_specifications_normalised(weight: float) -> None:
    generator = torch.Generator().manual_seed(4)
    for spread in (0.1, 1.0, 4.0):
        target = random_probs(generator, 100, spread=spread)
        draft = random_probs(generator, 1, 100, spread=spread)
        log_target = target.log().numpy()
        left = residual(log_target, DraftProbs.dense(draft), 0, math.log(weight))
        exact = reference.residual(target.double(), draft[0].double(), weight)
        assert torch.allclose(torch.softmax(torch.from_numpy(left).double(), 0), exact, atol=1e-5)


def test_a_draft_nearly_equal_to_the_target_leaves_a_residual_without_cancellation() -> None:
    target = torch.tensor([0.5, 0.3, 0.2])
    draft = torch.tensor([[0.5 - 2e-6, 0.3 + 2e-6, 0.2]])
    left = residual(target.log().numpy(), DraftProbs.dense(draft), 0)
    assert int(left.argmax()) == 0
    assert left[1] == -np.inf


@pytest.mark.parametrize("rule", RULES)
def test_drafts_from_the_target_itself_are_all_accepted(rule: Rule) -> None:
    generator = torch.Generator().manual_seed(5)
    for trial in range(40):
        target = random_probs(generator, 5, 200)
        tokens = sampled(generator, target[:4])
        verdict = accept(
            target.log(), tokens, DraftProbs.dense(target[:4]), Sampling(seed=trial),
            rule=rule, position=POSITION,
        )  # fmt: skip
        # Rounding may turn an even ratio into 1 - 1e-6; nothing then is left but the target itself.
        assert len(verdict.path) == 4
        left = residual(target[0].log().numpy(), DraftProbs.dense(target[:1]), 0)
        assert np.isfinite(left.max())


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_draft_is_a_plain_draw(rule: Rule) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(6))
    draft = DraftProbs.one_hot([])
    verdict = accept(logits, [], draft, Sampling(seed=1), rule=rule, position=POSITION)
    assert verdict.path == ()
    assert len(verdict.tokens) == 1


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rounds_are_follows(rule: Rule) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(4, 40, generator=generator)
    best = logits.argmax(1).tolist()
    for tokens in (best[:3], [best[0], 39 - best[1], 0]):
        sampling = Sampling(temperature=0)
        verdict = accept(
            logits, tokens, DraftProbs.one_hot(tokens), sampling, rule=rule, position=POSITION
        )
        assert verdict == follow(logits, TokenTree.chain(tokens), sampling, position=POSITION)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_the_target_excludes_are_never_accepted_and_penalties_move_along(rule: Rule) -> None:
    logits = torch.zeros(4, 30)
    history = History(30, [1])
    tokens = [5, 4, 6]
    lengths = set()
    for seed in range(40):
        verdict = accept(
            logits,
            tokens,
            DraftProbs.one_hot(tokens),
            Sampling(
                seed=seed,
                banned_ids=(4,),
                banned_before=99,
                logit_bias=((5, 3.0),),
                repetition_penalty=1.5,
            ),
            rule=rule,
            position=POSITION,
            history=history,
            want_logprobs=True,
        )
        assert 4 not in verdict.tokens
        assert verdict.logprobs is not None
        assert len(verdict.logprobs) == len(verdict.tokens)
        lengths.add(len(verdict.path))
    assert lengths == {0, 1}
    assert len(history) == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_bad_row_is_named_and_history_is_rolled_back(rule: Rule) -> None:
    logits = torch.full((3, 10), -20.0)
    logits[0, 3] = 20
    logits[1] = torch.nan
    history = History(10, [])
    with pytest.raises(NonFiniteRow) as caught:
        accept(
            logits, [3, 4], DraftProbs.one_hot([3, 4]), Sampling(presence_penalty=0.5),
            rule=rule, position=POSITION, history=history,
        )  # fmt: skip
    assert caught.value.row == 1
    assert len(history) == 0


def test_draft_probs_the_tokens_cannot_come_from_are_refused_by_field() -> None:
    half = torch.tensor([[0.5, 0.5]])
    with pytest.raises(DraftProbsError, match="summing to one"):
        DraftProbs.dense(torch.tensor([[0.5, 0.6]]))
    with pytest.raises(DraftProbsError, match="finite"):
        DraftProbs.dense(torch.tensor([[torch.nan, 0.6]]))
    with pytest.raises(DraftProbsError, match="finite"):
        DraftProbs.dense(torch.tensor([[-0.5, 1.5]]))
    with pytest.raises(DraftProbsError, match="distinct"):
        DraftProbs.sparse(torch.tensor([[1, 1]]), half)
    with pytest.raises(DraftProbsError, match="token_ids"):
        DraftProbs.sparse(torch.tensor([[-1, 1]]), half)
    with pytest.raises(DraftProbsError, match="shape"):
        DraftProbs.sparse(torch.tensor([[1]]), half)
    for tokens, vocab_size, draft in [
        ([0, 1], 2, DraftProbs.dense(half)),
        ([0], 3, DraftProbs.dense(half)),
        ([2], 2, DraftProbs.one_hot([2])),
        ([0], 9, DraftProbs.sparse(torch.tensor([[1, 9]]), half)),
        ([7], 9, DraftProbs.sparse(torch.tensor([[1, 2]]), half)),
    ]:
        with pytest.raises(DraftProbsError):
            draft.check(tokens, vocab_size)
    with pytest.raises(DraftProbsError, match="prior"):
        DraftProbs.mixture([[1, 2], [3, 4]], [1.0], 0)
    with pytest.raises(DraftProbsError, match="chosen"):
        DraftProbs.mixture([[1, 2], [3, 4]], [1.0, 0.0], 1)
