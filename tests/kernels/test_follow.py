"""Rule follow: the same tokens whatever the tree, only the walked rows read, bad rows contained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwire_kernels.sampling import History, Sampling
from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk import (
    NonFiniteRow,
    Verdict,
    draw,
    follow,
    target_logprobs,
    target_scores,
)

VOCAB = 150


class Model:
    """Logits that depend on the last two tokens, so that a wrong path shows."""

    def __init__(self, seed: int, vocab_size: int = VOCAB, spread: float = 2.5) -> None:
        self._seed, self._vocab, self._spread = seed, vocab_size, spread

    def row(self, context: list[int]) -> torch.Tensor:
        """Logits after a context, bf16 [V]."""
        key = hash((self._seed, *context[-2:])) % 2**31
        generator = torch.Generator().manual_seed(key)
        return (self._spread * torch.randn(self._vocab, generator=generator)).bfloat16()

    def tree_rows(self, context: list[int], tree: TokenTree) -> torch.Tensor:
        """Logits of the anchor and of every node."""
        paths = [[tree.tokens[i] for i in tree.path(node)] for node in range(-1, len(tree))]
        return torch.stack([self.row(context + path) for path in paths])


def plain(model: Model, prompt: list[int], sampling: Sampling, count: int) -> list[int]:
    """Decoding with empty trees."""
    context, history = list(prompt), History(VOCAB, prompt)
    while len(context) < len(prompt) + count:
        rows = model.tree_rows(context, TokenTree())
        verdict = follow(rows, TokenTree(), sampling, position=len(context), history=history)
        history.append(verdict.tokens[0])
        context.append(verdict.tokens[0])
    return context[len(prompt) :]


def random_tree(generator: np.random.Generator, hints: list[int], most: int) -> TokenTree:
    """A tree of random shape; some nodes continue the hints, some siblings are duplicates."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    for node in range(int(generator.integers(0, most + 1))):
        parent = int(generator.integers(-1, node))
        depth = depths[parent] + 1 if parent >= 0 else 0
        lucky = depth < len(hints) and generator.random() < 0.6
        tokens.append(hints[depth] if lucky else int(generator.integers(VOCAB)))
        parents.append(parent)
        depths.append(depth)
    return TokenTree(tuple(tokens), tuple(parents))


SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(seed=2**64 - 1),
    Sampling(temperature=0.7, top_p=0.9, top_k=40, seed=0),
    Sampling(temperature=1.5, top_k=20, top_p=0.95, presence_penalty=0.7, seed=5),
    Sampling(min_p=0.1, repetition_penalty=1.2, logit_bias=((3, 4.0),), seed=6),
    Sampling(banned_ids=(1, 2, 3), banned_before=12, frequency_penalty=1.0, seed=7),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_the_tokens_are_those_of_plain_decoding_whatever_the_trees(sampling: Sampling) -> None:
    generator = np.random.default_rng(11)
    prompt, count = [5, 6, 7], 20
    for trial in range(3):
        model = Model(trial)
        expected = plain(model, prompt, sampling, count)
        context, history, accepted = list(prompt), History(VOCAB, prompt), 0
        while len(context) < len(prompt) + count:
            tree = random_tree(generator, expected[len(context) - len(prompt) :], 64)
            rows = model.tree_rows(context, tree)
            verdict = follow(rows, tree, sampling, position=len(context), history=history)
            accepted += len(verdict.path)
            for token in verdict.tokens:
                history.append(token)
            context.extend(verdict.tokens)
        assert context[len(prompt) :][:count] == expected
        assert accepted > 5  # otherwise the trees would have shown nothing


@pytest.mark.parametrize("sampling", SAMPLINGS[:4], ids=range(4))
def test_a_committed_token_is_the_draw_from_its_own_row(sampling: Sampling) -> None:
    model = Model(2)
    prompt = [1, 2, 3]
    expected = plain(model, prompt, sampling, 5)
    history = History(VOCAB, prompt)
    tree = TokenTree.chain(expected)
    verdict = follow(
        model.tree_rows(prompt, tree),
        tree,
        sampling,
        position=3,
        history=history,
        want_logprobs=True,
    )
    assert verdict.tokens[:5] == tuple(expected)
    assert verdict.path == (0, 1, 2, 3, 4)
    assert verdict.logprobs is not None
    for i, token in enumerate(verdict.tokens):
        row = model.row([*prompt, *expected[:i]])
        scores = target_scores(row, sampling, position=3 + i, history=history)
        logprobs = target_logprobs(row, sampling, position=3 + i, history=history)
        assert draw(scores, sampling, 3 + i) == draw(logprobs, sampling, 3 + i) == token
        assert verdict.logprobs[i] == float(logprobs[token])
        history.append(token)


def test_always_right_and_always_wrong_trees_commit_all_and_one() -> None:
    model, sampling = Model(3), Sampling(seed=9)
    expected = plain(model, [1, 2], sampling, 7)
    right = TokenTree.chain(expected[:6])
    verdict = follow(model.tree_rows([1, 2], right), right, sampling, position=2)
    assert verdict == Verdict((0, 1, 2, 3, 4, 5), tuple(expected))
    wrong = TokenTree.from_paths([[t] for t in range(VOCAB) if t != expected[0]][:64])
    assert follow(model.tree_rows([1, 2], wrong), wrong, sampling, position=2).tokens == (
        expected[0],
    )


def test_of_duplicate_siblings_the_first_is_walked() -> None:
    rows = torch.full((4, 10), -torch.inf)
    rows[0, 4] = rows[1, 1] = rows[2, 2] = rows[3, 3] = 0
    tree = TokenTree((4, 4, 1), (-1, -1, 0))
    assert follow(rows, tree, Sampling(), position=1) == Verdict((0, 2), (4, 1, 3))


def test_only_the_walked_rows_are_read_and_a_bad_one_is_named() -> None:
    rows = torch.zeros(4, 10)
    rows[0, 4] = rows[1, 5] = 100
    rows[2:] = torch.nan
    tree = TokenTree((4, 6, 7), (-1, 0, -1))
    assert follow(rows, tree, Sampling(), position=1).tokens == (4, 5)
    rows[1] = torch.nan
    history = History(10, [1])
    with pytest.raises(NonFiniteRow, match="row 1") as caught:
        follow(rows, tree, Sampling(presence_penalty=0.1), position=1, history=history)
    assert (caught.value.row, caught.value.found) == (1, "NaN")
    assert len(history) == 0


def test_history_is_left_as_it_was() -> None:
    model, sampling = Model(4), SAMPLINGS[4]
    history = History(VOCAB, [1, 2])
    history.append(9)
    ids, counts = history.table()
    before = ids.tolist(), counts.tolist()
    tree = TokenTree.chain(plain(model, [1, 2], sampling, 3))
    follow(model.tree_rows([1, 2], tree), tree, sampling, position=2, history=history)
    ids, counts = history.table()
    assert (ids.tolist(), counts.tolist()) == before


def test_sessions_of_different_sampling_do_not_touch_each_other() -> None:
    model = Model(6)
    alone = [plain(model, [8], sampling, 6) for sampling in SAMPLINGS]
    contexts = [[8] for _ in SAMPLINGS]
    histories = [History(VOCAB, [8]) for _ in SAMPLINGS]
    for _ in range(6):  # one step of a mixed batch at a time
        rows = torch.cat([model.tree_rows(context, TokenTree()) for context in contexts])
        for i, sampling in enumerate(SAMPLINGS):
            verdict = follow(
                rows[i : i + 1],
                TokenTree(),
                sampling,
                position=len(contexts[i]),
                history=histories[i],
            )
            histories[i].append(verdict.tokens[0])
            contexts[i].append(verdict.tokens[0])
    assert [context[1:] for context in contexts] == alone


@pytest.mark.parametrize("position", [1, 2**31 - 1, 2**31])
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_extreme_seeds_and_positions_draw_and_repeat(seed: int, position: int) -> None:
    rows = torch.randn(1, 49152, generator=torch.Generator().manual_seed(1))
    tokens = {
        follow(rows, TokenTree(), Sampling(seed=seed), position=position).tokens for _ in "ab"
    }
    assert len(tokens) == 1


class OnlyRising:
    """A grammar: each token is larger than the one before."""

    def __init__(self) -> None:
        self.tokens = [0]

    def allowed(self) -> torch.Tensor:
        """Larger tokens, and the largest always."""
        mask = torch.arange(VOCAB) > self.tokens[-1]
        mask[-1] = True
        return mask

    def append(self, token: int) -> None:
        """Move on."""
        self.tokens.append(token)

    def pop(self) -> int:
        """Undo."""
        return self.tokens.pop()


def test_a_grammar_moves_along_the_path_and_is_rolled_back() -> None:
    model, sampling = Model(7), Sampling(seed=3)
    grammar = OnlyRising()
    context = [1, 2]
    while len(context) < 8:
        rows = model.tree_rows(context, TokenTree())
        verdict = follow(rows, TokenTree(), sampling, position=len(context), grammar=grammar)
        grammar.append(verdict.tokens[0])
        context.append(verdict.tokens[0])
    assert sorted(context[2:]) == context[2:]
    tree, again = TokenTree.chain(context[2:]), OnlyRising()
    rows = model.tree_rows([1, 2], tree)
    verdict = follow(rows, tree, sampling, position=2, grammar=again)
    assert list(verdict.tokens[:6]) == context[2:]
    assert again.tokens == [0]


def test_top_logprobs_are_ordered_and_leave_excluded_tokens_out() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, -torch.inf]])
    verdict = follow(logits, TokenTree(), Sampling(temperature=0), position=1, top_logprobs=9)
    assert verdict.logprobs is None
    assert [token for token, _ in verdict.top[0]] == [1, 2, 3, 0]
    exact = torch.log_softmax(logits[0], 0)
    for token, logprob in verdict.top[0]:
        assert logprob == pytest.approx(float(exact[token]), abs=1e-6)


@pytest.mark.parametrize("shape", [(2, 10), (10,), (1, 1, 10)])
def test_a_wrong_number_of_rows_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="logits"):
        follow(torch.zeros(shape), TokenTree(), Sampling(), position=1)
