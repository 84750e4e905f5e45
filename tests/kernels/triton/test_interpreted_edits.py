"""Logits edited on the device are those of the host's rows, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwire_kernels.checks import KernelArgumentError
from draftwire_kernels.edits import edits_logits, round_edits
from draftwire_kernels.edits_triton import edit_rows
from draftwire_kernels.rounds import round_trees, row_params
from draftwire_kernels.rows import target_scores
from draftwire_kernels.sampling import History, Sampling, SamplingError
from draftwire_kernels.tree import TokenTree

VOCAB = 90
TREE = TokenTree((5, 7, 5, 9), (-1, 0, 1, -1))
SAMPLINGS = [
    Sampling(
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=-0.3,
        logit_bias=((5, 1.1), (80, -2.0)),
        banned_ids=(7, 30),
        banned_before=42,
    ),
    Sampling(temperature=0, banned_ids=(1, 2), banned_before=41),
]


def test_every_row_has_the_bits_of_the_hosts_scores_along_its_own_path() -> None:
    histories = [History(VOCAB, [3, 5, 60]), None]
    for token in (5, 8, 8):
        assert histories[0] is not None
        histories[0].append(token)
    trees = [TREE, TokenTree.chain([4])]
    rows = 3 * torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(1))
    packed = round_trees(trees, "cpu")
    params = row_params(SAMPLINGS, [40, 40], packed.owner, packed.depth)
    edited = rows.clone()
    edit_rows(edited, packed, params, round_edits(SAMPLINGS, histories, trees, VOCAB, "cpu"))
    row = 0
    for sampling, history, tree in zip(SAMPLINGS, histories, trees, strict=True):
        for node in range(-1, len(tree)):
            path = [tree.tokens[i] for i in tree.path(node)]
            for token in path if history is not None else ():
                history.append(token)
            want = target_scores(rows[row], sampling, position=40 + len(path), history=history)
            assert np.array_equal(edited[row].numpy(), want)
            for _ in path if history is not None else ():
                history.pop()
            row += 1


def test_no_edit_hides_a_row_that_is_not_finite() -> None:
    rows = torch.zeros(2, VOCAB)
    rows[0, 1], rows[1, 2] = torch.nan, torch.inf
    trees = [TokenTree.chain([4])]
    packed = round_trees(trees, "cpu")
    params = row_params(SAMPLINGS[1:], [3], packed.owner, packed.depth)
    edit_rows(rows, packed, params, round_edits(SAMPLINGS[1:], [None], trees, VOCAB, "cpu"))
    assert rows[0, 1].isnan()
    assert rows[1, 2] == torch.inf
    assert rows[0, 2] == rows[1, 1] == -torch.inf


def test_what_is_missing_or_of_the_wrong_type_is_refused_by_name() -> None:
    with pytest.raises(SamplingError, match="history"):
        round_edits(SAMPLINGS[:1], [None], [TREE], VOCAB, "cpu")
    with pytest.raises(SamplingError, match="banned_ids"):
        round_edits(SAMPLINGS[1:], [None], [TREE], 2, "cpu")
    packed = round_trees([TREE], "cpu")
    params = row_params(SAMPLINGS[1:], [3], packed.owner, packed.depth)
    edits = round_edits(SAMPLINGS[1:], [None], [TREE], VOCAB, "cpu")
    with pytest.raises(KernelArgumentError, match="logits"):
        edit_rows(torch.zeros(5, VOCAB, dtype=torch.bfloat16), packed, params, edits)


def test_only_sessions_that_ask_for_edits_have_any() -> None:
    assert all(edits_logits(sampling) for sampling in SAMPLINGS)
    assert not edits_logits(Sampling(temperature=0.5, top_k=3, min_p=0.1))
