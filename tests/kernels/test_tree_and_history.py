"""Token trees, histories and sampling parameters: what they hold and what they refuse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftwire_kernels.sampling import History, Sampling, SamplingError
from draftwire_kernels.tree import TokenTree, TreeError

PATHS = st.lists(st.lists(st.integers(0, 4), max_size=5), max_size=6)


@given(PATHS)
def test_the_prefix_tree_of_paths_has_each_prefix_once_and_every_path_can_be_walked(
    paths: list[list[int]],
) -> None:
    tree = TokenTree.from_paths(paths)
    prefixes = {tuple(path[: i + 1]) for path in paths for i in range(len(path))}
    assert len(tree) == len(prefixes)
    assert {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))} == prefixes
    for path in paths:
        node: int | None = -1
        for token in path:
            assert node is not None
            node = tree.child(node, token)
        assert node is not None
    assert max(tree.depths(), default=0) == max(map(len, paths), default=0)


@given(PATHS)
def test_leaf_paths_cover_the_tree(paths: list[list[int]]) -> None:
    tree = TokenTree.from_paths(paths)
    assert {node for path in tree.paths() for node in path} == set(range(len(tree)))
    for path in tree.paths():
        assert not tree.children(path[-1])
        assert [tree.parents[node] for node in path] == [-1, *path[:-1]]


def test_a_chain_is_one_path_and_an_empty_tree_has_none() -> None:
    chain = TokenTree.chain([7, 7, 8])
    assert chain.parents == (-1, 0, 1)
    assert chain.depths() == (1, 2, 3)
    assert chain.paths() == ((0, 1, 2),)
    assert TokenTree().paths() == ()
    assert len(TokenTree.chain([])) == 0


def test_the_first_of_two_siblings_with_the_same_token_is_the_child() -> None:
    tree = TokenTree((5, 5), (-1, -1))
    assert tree.child(-1, 5) == 0
    assert tree.children(-1) == (0, 1)


@pytest.mark.parametrize(
    ("tokens", "parents", "field"),
    [
        ((1,), (), "parents"),
        ((1,), (0,), "parents[0]"),
        ((1, 2), (-1, 1), "parents[1]"),
        ((1,), (-2,), "parents[0]"),
    ],
)
def test_malformed_trees_are_refused_by_field(
    tokens: tuple[int, ...], parents: tuple[int, ...], field: str
) -> None:
    with pytest.raises(TreeError) as caught:
        TokenTree(tokens, parents)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("limits", "field", "value"),
    [((10, 2, 9), "nodes", 3), ((10, 9, 2), "depth", 3), ((3, 9, 9), "tokens[2]", 3)],
)
def test_trees_over_a_verifiers_limits_are_refused_with_field_limit_and_value(
    limits: tuple[int, int, int], field: str, value: int
) -> None:
    tree = TokenTree.chain([1, 2, 3])
    tree.validate(4, 3, 3)
    with pytest.raises(TreeError) as caught:
        tree.validate(*limits)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert caught.value.limit in str(caught.value)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": ((1, 2.0), (1, 3.0))}, "logit_bias"),
        ({"logit_bias": ((-1, 2.0),)}, "logit_bias"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
        ({"banned_ids": (-5,)}, "banned_ids"),
    ],
)
def test_bad_sampling_parameters_are_refused_by_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(SamplingError) as caught:
        Sampling(**values)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("sampling", "field"),
    [(Sampling(logit_bias=((10, 1.0),)), "logit_bias"), (Sampling(banned_ids=(12,)), "banned_ids")],
)
def test_ids_outside_the_vocabulary_are_refused(sampling: Sampling, field: str) -> None:
    sampling.check_vocabulary(13)
    with pytest.raises(SamplingError) as caught:
        sampling.check_vocabulary(10)
    assert caught.value.field == field


def test_sampling_is_a_value() -> None:
    assert Sampling(logit_bias=((1, 2.0),)) == Sampling(logit_bias=((1, 2.0),))
    assert hash(Sampling(seed=3)) == hash(Sampling(seed=3))
    assert Sampling(seed=3) != Sampling(seed=4)


class HistoryMachine(RuleBasedStateMachine):
    """A History against a plain list."""

    VOCAB = 200

    @initialize(prompt=st.lists(st.integers(0, VOCAB - 1), max_size=150))
    def start(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.output: list[int] = []
        self.history = History(self.VOCAB, prompt)

    @rule(tokens=st.lists(st.integers(0, VOCAB - 1), max_size=90))
    def append(self, tokens: list[int]) -> None:
        for token in tokens:
            self.history.append(token)
            self.output.append(token)

    @precondition(lambda self: self.output)
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, len(self.output)))):
            assert self.history.pop() == self.output.pop()

    @rule(token=st.sampled_from([-1, VOCAB]))
    def append_outside(self, token: int) -> None:
        with pytest.raises(SamplingError):
            self.history.append(token)

    @invariant()
    def table_is_what_was_seen(self) -> None:
        ids, counts = self.history.table()
        expected = Counter(self.output)
        assert len(ids) == len(set(ids.tolist()))
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
            token: expected[token] for token in {*self.prompt, *self.output}
        }
        assert len(self.history) == len(self.output)


TestHistory = HistoryMachine.TestCase
TestHistory.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def test_a_prompt_outside_the_vocabulary_is_refused_and_an_empty_history_cannot_pop() -> None:
    with pytest.raises(SamplingError, match="prompt_ids"):
        History(10, [1, 10])
    with pytest.raises(IndexError):
        History(10, [1]).pop()
