"""At temperature 1 the pair draws from the target's own distribution: chi-square through the real
services.

One false alarm in 10,000 runs per test is allowed; the seeds are fixed, so a run that passes always
passes.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import DraftSession, ScriptedDrafter, generate, scripted, tiny_target, verifier
from scipy import stats

from draftwire_kernels.tree import TokenTree

FALSE_ALARM = 1e-4
REQUESTS = 1500
PROMPT = [17, 4, 99, 230, 5]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), hidden=24, layers=2)


@pytest.fixture(scope="module")
def exact(target: Path) -> tuple[np.ndarray, np.ndarray]:
    """Distribution of the first token, and of the second over all first ones."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        first = model(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1)
        contexts = torch.tensor([[*PROMPT, token] for token in range(len(first))])
        second = model(contexts).logits[:, -1].double().softmax(-1)
    return first.numpy(), (first[:, None] * second).sum(0).numpy()


def _p_value(drawn: Counter[int], truth: np.ndarray) -> float:
    """Chi-square over the tokens expected at least 8 times, and all others together."""
    total = sum(drawn.values())
    often = [t for t in range(len(truth)) if truth[t] * total >= 8]
    observed = [drawn[t] for t in often]
    expected = [truth[t] * total for t in often]
    observed.append(total - sum(observed))
    expected.append(total - sum(expected))
    return float(stats.chisquare(observed, expected).pvalue)


def _likely_trees(first: np.ndarray) -> Any:
    """Two likely tokens and a random one below the anchor, a likely one below each."""
    likely = np.argsort(-first)[:12].tolist()
    rng = random.Random(5)

    def propose(tokens: list[int], session: DraftSession) -> TokenTree:
        a, b = rng.sample(likely, 2)
        return TokenTree((a, b, rng.randrange(256), a, b), (-1, -1, -1, 0, 1))

    return propose


@pytest.mark.parametrize("speculate", [False, True])
def test_tokens_are_drawn_from_the_targets_distribution(
    target: Path, exact: tuple[np.ndarray, np.ndarray], speculate: bool
) -> None:
    first, second = exact
    drafter = ScriptedDrafter(_likely_trees(second), layers=(0, 1))

    async def main() -> list[list[int]]:
        async with scripted(drafter) as address:
            lanes = [address] if speculate else []
            async with verifier(target, lanes, draft_wait_ms=20000, max_sessions=64) as (_, stub):
                gate = asyncio.Semaphore(64)

                async def one(seed: int) -> list[int]:
                    async with gate:
                        stop = {"max_tokens": 4, "ignore_eos": True}
                        return (
                            await generate(stub, PROMPT, sampling={"seed": seed}, stop=stop)
                        ).tokens

                return await asyncio.gather(*(one(seed) for seed in range(REQUESTS)))

    drawn = asyncio.run(main())
    assert (drafter.steps > 0) == speculate
    for place, truth in enumerate((first, second)):
        p_value = _p_value(Counter(tokens[place] for tokens in drawn), truth)
        assert p_value > FALSE_ALARM, f"token {place}"


def test_the_test_would_notice_a_distribution_that_is_off(
    exact: tuple[np.ndarray, np.ndarray],
) -> None:
    first, _ = exact
    sharper = first**1.3 / (first**1.3).sum()
    rng = np.random.default_rng(1)
    drawn = Counter(rng.choice(len(first), size=REQUESTS, p=sharper).tolist())
    assert _p_value(drawn, first) < FALSE_ALARM
