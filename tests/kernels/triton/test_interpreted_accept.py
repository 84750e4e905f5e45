"""The rules that use draft_probs on the device against accept.accept, session by session."""

import numpy as np
import pytest
import torch

from draftwire_kernels.accept import Rule, accept
from draftwire_kernels.accept_triton import accept_rows
from draftwire_kernels.block_triton import block_masses
from draftwire_kernels.checks import KernelArgumentError
from draftwire_kernels.draft_probs import DraftProbs
from draftwire_kernels.resample_triton import resample_rows
from draftwire_kernels.rounds import draft_rows, round_trees, row_params
from draftwire_kernels.rows import normalise, target_scores
from draftwire_kernels.sampling import Sampling
from draftwire_kernels.stats_triton import statistics
from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk_triton import Walks

VOCAB = 130


class Sessions:
    """A round of chains drafted from blurred targets, so that some tokens are kept and some not."""

    def __init__(
        self, form: str, *, closeness: float, seed: int, lengths: list[int], plain: bool = False
    ) -> None:
        rng = np.random.default_rng(seed)
        kinds = [
            Sampling(temperature=0.8, seed=2**63 + seed),
            Sampling(temperature=0.0),
            Sampling(top_k=30, top_p=0.9, seed=seed),
            Sampling(temperature=1.4, seed=seed + 1),
        ]
        if plain:
            kinds = [Sampling(seed=seed + session) for session in range(len(lengths))]
        self.samplings = kinds[: len(lengths)]
        self.positions = [int(p) for p in rng.integers(1, 2**34, len(lengths))]
        self.logits, self.tokens, self.drafts = [], [], []
        for n, sampling in zip(lengths, self.samplings, strict=True):
            logits = torch.from_numpy(rng.standard_normal((n + 1, VOCAB), dtype=np.float32) * 3)
            self.logits.append(logits)
            laws = []
            for row in logits[:n]:
                law = np.exp(normalise(target_scores(row, sampling, position=0)).astype(np.float64))
                blur = np.exp(rng.standard_normal(VOCAB))
                law = law**closeness * blur ** (1 - closeness)
                if form == "sparse":
                    law[np.argsort(law)[:-12]] = 0
                laws.append(law / law.sum())
            sampled = form in ("dense", "sparse")
            tokens = [int(rng.choice(VOCAB, p=w) if sampled else w.argmax()) for w in laws]
            self.tokens.append(tokens)
            self.drafts.append(self._draft(form, tokens, np.array(laws).reshape(n, VOCAB), rng))

    @staticmethod
    def _draft(
        form: str, tokens: list[int], laws: np.ndarray, rng: np.random.Generator
    ) -> DraftProbs:
        if form == "dense":
            return DraftProbs.dense(torch.from_numpy(laws))
        if form == "sparse":
            ids = np.argsort(laws, axis=1)[:, -12:]
            probs = np.take_along_axis(laws, ids, 1)
            return DraftProbs.sparse(torch.from_numpy(ids.copy()), torch.from_numpy(probs))
        if form == "one-hot" or not tokens:
            return DraftProbs.one_hot(tokens)
        branches = [tokens, [*tokens[:1], *rng.integers(0, VOCAB, len(tokens) - 1)]]
        branches.append(list(rng.integers(0, VOCAB, len(tokens))))
        return DraftProbs.mixture(branches, [0.5, 0.2, 0.3], 0)

    def device(self, rule: Rule) -> Walks:
        """What the kernels commit."""
        trees = round_trees([TokenTree.chain(t) for t in self.tokens], "cpu", pad_rows=1)
        params = row_params(self.samplings, self.positions, trees.owner, trees.depth)
        logits = torch.cat([*self.logits, torch.full((1, VOCAB), torch.nan)])
        return accept_rows(logits, trees, draft_rows(self.drafts, trees, VOCAB), params, rule)

    def check(self, rule: Rule) -> int:
        """Compare with the host; returns how many drafted tokens were accepted."""
        got = self.device(rule)
        kept = 0
        for s, sampling in enumerate(self.samplings):
            want = accept(
                self.logits[s],
                self.tokens[s],
                self.drafts[s],
                sampling,
                rule=rule,
                position=self.positions[s],
                want_logprobs=True,
            )
            count = len(want.tokens)
            assert got.count[s] == count
            assert got.token[s, :count].tolist() == list(want.tokens)
            assert got.path[s, : count - 1].tolist() == list(want.path)
            assert (got.token[s, count:] == -1).all()
            assert got.logprob[s, :count].tolist() == pytest.approx(want.logprobs, abs=3e-5)
            kept += count - 1
        assert not got.status.any()
        return kept


@pytest.mark.parametrize(
    ("form", "rule", "lengths"),
    [
        ("dense", Rule.CHAIN, [2, 0, 1]),
        ("dense", Rule.BLOCK, [3, 1]),
        ("sparse", Rule.CHAIN, [1, 2]),
        ("sparse", Rule.BLOCK, [3, 0, 2, 3]),
        ("one-hot", Rule.CHAIN, [2, 2]),
        ("mixture", Rule.CHAIN, [2, 2]),
        ("mixture", Rule.BLOCK, [2, 0, 2]),
    ],
)
def test_a_mixed_round_commits_what_the_host_commits(
    form: str, rule: Rule, lengths: list[int]
) -> None:
    assert Sessions(form, closeness=0.8, seed=3, lengths=lengths).check(rule) > 0


@pytest.mark.parametrize(
    ("rule", "closeness"), [(Rule.CHAIN, 1 - 1e-6), (Rule.BLOCK, 1.0), (Rule.BLOCK, 1 - 1e-6)]
)
def test_drafts_equal_or_nearly_equal_to_the_target_are_kept_whole(
    rule: Rule, closeness: float
) -> None:
    assert Sessions("dense", closeness=closeness, seed=4, lengths=[4, 1]).check(rule) >= 4


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_block_decides_as_the_host_where_drafts_are_poor(form: str) -> None:
    sessions = Sessions(form, closeness=0.5, seed=9, lengths=[3] * 8, plain=True)
    kept = sessions.check(Rule.BLOCK)
    assert 0 < kept < 24


@pytest.mark.parametrize("sparse", [False, True])
def test_masses_are_what_the_weighted_target_has_over_the_draft(sparse: bool) -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.standard_normal((3, 5000), dtype=np.float32))
    trees = round_trees([TokenTree.chain([1, 2])], "cpu")
    params = row_params([Sampling(temperature=0.9)], [1], trees.owner, trees.depth)
    law = rng.dirichlet(np.ones(5000), 2)
    form = DraftProbs.one_hot([1, 2]) if sparse else DraftProbs.dense(torch.from_numpy(law))
    ratio = torch.tensor([-0.7, 0.3, 0.0])
    joint, mass = block_masses(
        logits,
        statistics(logits, params),
        None,
        params,
        trees,
        draft_rows([form], trees, 5000),
        ratio,
        torch.zeros(3, dtype=torch.int32),
    )
    assert joint.tolist() == pytest.approx([0.0, -0.7, -0.4])
    target = torch.softmax(logits.double() / 0.9, 1).numpy()
    if sparse:
        want = np.ones(3)
    else:
        weights = np.exp([0.0, -0.7, -0.4])[:, None]
        want = np.maximum(weights * target - np.vstack([law, np.zeros(5000)]), 0).sum(1)
    assert mass.sum(1).tolist() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(("log_weight", "left"), [(float(np.log(0.5)), {1}), (0.0, {0, 1})])
def test_the_recovered_token_comes_from_what_the_weighted_target_has_left(
    log_weight: float, left: set[int]
) -> None:
    count = 6
    law = DraftProbs.dense(torch.tensor([[0.3, 0.1, 0.6]]))
    trees = round_trees([TokenTree.chain([2])] * count, "cpu")
    samplings = [Sampling(seed=seed) for seed in range(count)]
    params = row_params(samplings, [3] * count, trees.owner, trees.depth)
    logits = torch.tensor([0.5, 0.25, 0.25]).log().repeat(2 * count, 1)
    none, nobody = torch.zeros(count, dtype=torch.int32), torch.full((count, 2), -1).int()
    walks = Walks(none.clone(), nobody, torch.zeros(count, 2), nobody[:, :1], none, none)
    resample_rows(
        logits,
        statistics(logits, params),
        None,
        params,
        trees,
        draft_rows([law] * count, trees, 3),
        walks,
        torch.full((count,), log_weight),
    )
    assert walks.count.tolist() == [1] * count
    assert set(walks.token[:, 0].tolist()) == left


def test_nan_in_a_row_that_is_read_fails_its_session_alone() -> None:
    sessions = Sessions("sparse", closeness=0.9, seed=5, lengths=[1, 1])
    clean = sessions.device(Rule.CHAIN)
    sessions.logits[0][0, 9] = torch.nan
    got = sessions.device(Rule.CHAIN)
    assert got.status.tolist() == [1, 0]
    assert got.count[0] == 0
    assert torch.equal(got.token[1], clean.token[1])


def test_trees_that_branch_are_refused_by_name() -> None:
    trees = round_trees([TokenTree((1, 2), (-1, -1))], "cpu")
    params = row_params([Sampling()], [1], trees.owner, trees.depth)
    draft = draft_rows([DraftProbs.one_hot([1, 2])], trees, VOCAB)
    with pytest.raises(KernelArgumentError, match="trees"):
        accept_rows(torch.zeros(3, VOCAB), trees, draft, params, Rule.CHAIN)
