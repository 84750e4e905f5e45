"""Counts answers of the demo target that are the same tokens, cell by cell.

Through the shipped verifier over real gRPC and a scripted drafter whose proposals are chains of
what will really come and random trees of which about half lies on the true path. Invariant
arithmetic: fp32 at T=0 against transformers' own generate at several block sizes and numbers of
requests in flight; fp32 and bf16, sampled and greedy, speculation on against off, alone and in a
batch of 16. Fast arithmetic: how many answers differ between plain and speculative, and between
plain alone and plain in a batch.

Not measured: time, and trained drafters (the tokens must not depend on the drafter).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    TARGET,
    chat_ids,
    demo_folder,
    demo_tokenizer,
    equal,
    load_average,
    many,
    options,
    read_prompts,
    say,
    write,
)
from fakes import OFF, DraftSession, ScriptedDrafter, eventually, random_trees, scripted, verifier

from draftwire_kernels.tree import TokenTree

BLOCKS = (1, 2, 5, 8, 16)
IN_FLIGHT = (1, 4, 16)
BATCH = 16
NODES = 15
GREEDY = {"temperature": 0.0}
SAMPLED = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40})
Requests = list[tuple[Sequence[int], dict[str, Any]]]


class Truth:
    """Whole texts by request id: what the drafter may know of what will come."""

    def __init__(self, vocab: int) -> None:
        self.texts: dict[str, list[int]] = {}
        self._vocab = vocab

    def learn(self, requests: Requests, answers: Sequence[Sequence[int]]) -> None:
        """Answers of `requests`, alone and without speculation."""
        for (prompt, fields), answer in zip(requests, answers, strict=True):
            self.texts[fields["request_id"]] = [*prompt, *answer]

    def propose(self, tokens: list[int], session: DraftSession) -> TokenTree | None:
        """One round in three a true chain, else a random tree."""
        text = self.texts.get(session.request_id)
        seed = f"{session.request_id} {len(tokens)}"
        if text is not None and random.Random(seed).random() < 1 / 3:
            chain = text[len(tokens) : len(tokens) + session.budget.max_depth]
            if chain and text[: len(tokens)] == tokens:
                return TokenTree.chain(chain[: session.budget.max_nodes])
        number = random.Random(seed).randrange(1 << 30)
        return random_trees(self._vocab, NODES, number, text)(tokens, session)


def build(
    prompts: Sequence[Sequence[int]], samplings: Sequence[dict[str, float]], tokens: int
) -> Requests:
    """Each prompt with each sampling, each with a seed of its own."""
    return [
        (
            prompt,
            {
                "sampling": {**sampling, "seed": 100 + index},
                "stop": {"max_tokens": tokens, "ignore_eos": True},
                "request_id": f"{index}/{number}",
            },
        )
        for number, sampling in enumerate(samplings)
        for index, prompt in enumerate(prompts)
    ]


async def run(
    stub: Any, requests: Requests, in_flight: int, speculation: dict[str, Any]
) -> tuple[list[list[int]], dict[str, int]]:
    """Tokens of each answer, and how much of the proposals was taken."""
    answers = await many(
        stub, [(p, {**fields, "speculation": speculation}) for p, fields in requests], in_flight
    )
    stats = [answer.finished.acceptance for answer in answers]
    return [answer.tokens for answer in answers], {
        "drafted": sum(s.drafted_tokens for s in stats),
        "accepted": sum(s.accepted_tokens for s in stats),
    }


def transformers_answers(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """What transformers itself generates, fp32, greedy."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
    model.generation_config.eos_token_id = None  # as ignore_eos
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


async def against_transformers(
    stub: Any, truth: Truth, prompts: Sequence[Sequence[int]], tokens: int, quick: bool
) -> dict[str, Any]:
    """fp32, T=0: every block size and number in flight."""
    expected = await asyncio.to_thread(transformers_answers, prompts, tokens)
    requests = build(prompts, [GREEDY], tokens)
    truth.learn(requests, expected)
    cells: dict[str, Any] = {}
    for block in BLOCKS[::4] if quick else BLOCKS:
        for in_flight in IN_FLIGHT[::2] if quick else IN_FLIGHT:
            found, taken = await run(
                stub, requests, in_flight, {"max_block_size": block, "max_nodes": NODES // 2}
            )
            cells[f"block {block}, {in_flight} in flight"] = equal(found, expected) | taken
    return cells


async def on_against_off(
    stub: Any,
    truth: Truth,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    samplings: Sequence[dict[str, float]],
) -> dict[str, Any]:
    """Each sampling: plain alone is the reference for plain in a batch, speculative alone and in a
    batch."""
    requests = build(prompts, samplings, tokens)
    alone, _ = await run(stub, requests, 1, OFF)
    truth.learn(requests, alone)
    cells: dict[str, Any] = {}
    arms: dict[str, tuple[int, dict[str, Any]]] = {
        "plain, batch of 16": (BATCH, OFF),
        "speculative, alone": (1, {"max_nodes": NODES}),
        "speculative, batch of 16": (BATCH, {"max_nodes": NODES}),
    }
    for name, (in_flight, speculation) in arms.items():
        found, taken = await run(stub, requests, in_flight, speculation)
        for number, sampling in enumerate(samplings):
            part = slice(number * len(prompts), (number + 1) * len(prompts))
            label = ", ".join(f"{k} {v:g}" for k, v in sampling.items())
            cells[f"{name}: {label}"] = equal(found[part], alone[part])
        cells[f"{name}: proposals"] = taken
    return cells


async def arithmetic(
    dtype: str, numerics: str, given: Any, prompts: Sequence[Sequence[int]], vocab: int
) -> dict[str, Any]:
    """All cells of one type and one arithmetic."""
    started = time.monotonic()
    truth = Truth(vocab)
    drafter = ScriptedDrafter(truth.propose)  # type: ignore[abstract]
    tokens = 4 if given.quick else given.tokens if dtype == "float32" else given.bf16_tokens
    cells: dict[str, Any] = {}
    async with (
        scripted(drafter) as address,
        verifier(
            TARGET,
            [address],
            dtype=dtype,
            numerics=numerics,
            kv_tokens=16384,
            draft_wait_ms=60000,
            lane_timeout_s=600,
        ) as (service, stub),
    ):
        engine = service.engine
        assert engine is not None
        await eventually(lambda: engine.lanes.lanes)
        if dtype == "float32" and numerics == "invariant":
            cells["against transformers"] = await against_transformers(
                stub, truth, prompts, tokens, given.quick
            )
            samplings: tuple[dict[str, float], ...] = SAMPLED
        else:
            samplings = (GREEDY, SAMPLED[0])
        some = prompts if dtype == "bfloat16" else prompts[:12]
        if dtype == "bfloat16":
            some = prompts[:2] if given.quick else prompts[: given.bf16_prompts]
        cells["against plain, alone"] = await on_against_off(stub, truth, some, tokens, samplings)
        cells["arithmetic"] = engine.host.plan.describe()
        cells["malformed_proposals"] = engine.lanes.counters.malformed
        cells["late_proposals"] = engine.lanes.counters.late
    cells["drafter_faults"] = len(drafter.faults)
    cells["tokens_each"] = tokens
    cells["seconds"] = round(time.monotonic() - started)
    return cells


async def main() -> int:
    """Run all cells and write same_tokens.json; 1 if an invariant cell is not all the same."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--prompts", type=Path, help="JSON lines with `turns` or `prompt`")
        parser.add_argument("--count", type=int, default=20, help="prompts used in fp32")
        parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer in fp32")
        parser.add_argument("--bf16-prompts", type=int, default=6)
        parser.add_argument("--bf16-tokens", type=int, default=16)

    given, load = options(__doc__, more), load_average()
    tokenizer = demo_tokenizer()
    texts = read_prompts(given.prompts, 2 if given.quick else given.count)
    prompts = [chat_ids(tokenizer, text) for text in texts]
    results: dict[str, Any] = {
        "prompts": "built in" if given.prompts is None else given.prompts.name,
        "max_nodes": {"against transformers": NODES // 2, "against plain, alone": NODES},
    }
    wrong = 0
    for numerics in ("invariant", "fast"):
        for dtype in ("float32", "bfloat16"):
            cells = await arithmetic(dtype, numerics, given, prompts, len(tokenizer))
            results[f"{dtype}, {numerics}"] = cells
            gc.collect()
            for group in ("against transformers", "against plain, alone"):
                counted = [c for c in cells.get(group, {}).values() if "of" in c]
                same, total = sum(c["same"] for c in counted), sum(c["of"] for c in counted)
                wrong += total - same if numerics == "invariant" else 0
                if total:
                    say(
                        f"same_tokens: {dtype}, {numerics}, {group}: {same} of {total} answers the "
                        f"same ({cells['seconds']} s)"
                    )
    results["invariant_answers_that_differ"] = wrong
    write("same_tokens", results, given, load)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
