"""The verifier's engine on the kernels makes the tokens that it makes on the reference.

A small real target, the shipped engine, trees that are partly right; interpreted, so few and short.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_target

from draftwire.models import resolve
from draftwire.v1 import types_pb2
from draftwire_kernels.sampling import Sampling
from draftwire_kernels.tree import TokenTree
from verifier_service import model as target
from verifier_service.cache import PagePool
from verifier_service.engine import Engine, EngineLimits
from verifier_service.model import Kernels, TargetHost
from verifier_service.reports import Emitted
from verifier_service.scheduler import Budgets
from verifier_service.session import Proposal, Request, Speculation

PROMPTS = [(5, 6, 7, 8, 9), tuple(range(40, 58)), (70, 71, 70, 72)]
SAMPLINGS = [
    Sampling(seed=3),
    Sampling(temperature=0.0, repetition_penalty=1.3, banned_ids=(1, 2), banned_before=22),
    Sampling(
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((70, 2.0), (9, -1.0)),
        seed=2**64 - 5,
    ),
]
MADE = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), layers=2)


class Run:
    """An engine with every session submitted, and what it says."""

    def __init__(self, folder: Path, kernels: Kernels) -> None:
        source = resolve(str(folder))
        host = TargetHost(target.load_model(source, torch.float32, "cpu"), kernels=kernels)
        self.said: list[Emitted] = []
        self.engine = Engine(
            host,
            target.load_tokenizer(source),
            PagePool(40, 16),
            Budgets(8, 256, 64, 8),
            EngineLimits(),
            vocab_size=250,
            max_context=200,
            clock=lambda: 0.0,
            emit=self.said.extend,
        )
        self.engine.host.capture(1)
        self.engine.store.add_feature_layer(1)
        fixed = types_pb2.SPECULATION_MODE_FIXED
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
            request = Request(
                str(index),
                prompt,
                sampling,
                MADE,
                Speculation(True, 8, 8, mode=fixed),
                logprobs=index != 1,
                top_logprobs=3 if index == 2 else 0,
            )
            self.engine.submit(index, request)

    def finish(self, hints: list[list[int]] | None = None) -> int:
        """Step to the end, with trees around the hints if there are any; how many steps."""
        steps = 0
        while self.engine.sessions:
            for index, session in self.engine.sessions.items():
                if hints and session.at_anchor:
                    right = hints[index][session.made :][:3]
                    session.proposal = a_tree(right, session.base, session.drafts_allowed(200))
            self.engine.step()
            steps += 1
        self.engine.roster.flush()
        self.engine.pool.check()
        return steps

    def tokens(self) -> list[list[int]]:
        """What each session was given."""
        made: list[list[int]] = [[] for _ in PROMPTS]
        for one in self.said:
            assert one.error is None
            made[one.session_id] += one.delta.tokens if one.delta else ()
        return made

    def logprobs(self) -> list[list[Any]]:
        """The log-probabilities each session was given."""
        made: list[list[Any]] = [[] for _ in PROMPTS]
        for one in self.said:
            made[one.session_id] += one.logprobs
        return made


def a_tree(right: list[int], base: int, depth: int) -> Proposal | None:
    """The right tokens, each behind a wrong sibling, so that a path must be moved."""
    right = right[:depth]
    if not right:
        return None
    tokens: list[int] = []
    parents: list[int] = []
    above = -1
    for token in right:
        tokens += [token ^ 1, token]
        parents += [above, above]
        above = len(tokens) - 1
    tree = TokenTree(tuple(tokens), tuple(parents))
    return Proposal(base, tree, (), len(right) + 1, types_pb2.BLOCK_SIZE_REASON_FIXED)


def test_trees_on_the_kernels_give_the_tokens_of_plain_decoding_on_the_reference(
    folder: Path,
) -> None:
    plain = Run(folder, "reference")
    assert plain.finish() == MADE
    kernels = Run(folder, "triton")
    assert kernels.finish(plain.tokens()) < MADE - 2  # or the trees were worth nothing
    assert kernels.tokens() == plain.tokens()
    assert kernels.engine.host.kernels
    assert not plain.engine.host.kernels
    for one, other in zip(kernels.logprobs(), plain.logprobs(), strict=True):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [t.token_id for t in mine.top] == [t.token_id for t in theirs.top]


def test_a_row_that_is_not_finite_fails_its_request_alone(folder: Path) -> None:
    run = Run(folder, "triton")
    run.engine.step()  # prompts
    victim = run.engine.sessions[1]
    # The key that its next row will read.
    run.engine.store.keys[0, victim.slots[0]] = torch.nan
    run.engine.step()
    run.engine.roster.flush()
    failed = [one for one in run.said if one.error is not None]
    assert [one.session_id for one in failed] == [1]
    assert failed[0].error is not None
    assert failed[0].error.reason == "NONFINITE_LOGITS"
    assert sorted(run.engine.sessions) == [0, 2]
