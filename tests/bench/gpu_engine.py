"""Times the verifier's steps on a GPU: a Qwen3-like target with random weights, plain and with
trees.

    python tests/bench/gpu_engine.py [--out FILE]
    TRITON_INTERPRET=1 python tests/bench/gpu_engine.py --dry-run

Knows the host of the target and acceptance, and drives them as the engine does: a prompt, then
rounds of anchor and tree. Trees hold the plain run's tokens, each right with a given chance, so the
run also shows whether both give the same tokens. Random weights accept nothing by themselves: what
speculation is worth at another acceptance follows from the times of the two steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "protos"), str(ROOT / "kernels"), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from draftwire_kernels.sampling import History, Sampling  # noqa: E402
from draftwire_kernels.tree import TokenTree  # noqa: E402
from draftwire_kernels.walk import NonFiniteRow  # noqa: E402
from verifier_service import attention  # noqa: E402
from verifier_service.acceptance import Round, accept, compacts  # noqa: E402
from verifier_service.cache import PagedStore, PagePool  # noqa: E402
from verifier_service.model import TargetHost  # noqa: E402
from verifier_service.packing import Feed  # noqa: E402

PAGE = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """A target and a load; the defaults are Qwen3-0.6B's."""

    hidden: int = 1024
    intermediate: int = 3072
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151_936
    prompt: int = 256
    made: int = 64
    sessions: tuple[int, ...] = (1, 8, 32)
    depth: int = 7
    """Right tokens a tree offers at most; each has a wrong sibling."""
    right: float = 0.8
    dtype: torch.dtype = torch.bfloat16


TINY = Shape(32, 32, 1, 2, 1, 16, 100, 3, 3, (2,), 1, 1.0, torch.float32)


def a_target(shape: Shape, device: str, numerics: str) -> TargetHost:
    """The model, random but for its seed, on the Triton kernels."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    attention.register()
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
        attn_implementation=attention.IMPLEMENTATION,
    )
    torch.manual_seed(1)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(shape.dtype).requires_grad_(False)
    return TargetHost(model, invariant=numerics == "invariant", kernels="triton")


@dataclasses.dataclass
class Line:
    """A session: its tokens and where they lie."""

    tokens: list[int]
    slots: np.ndarray
    sampling: Sampling
    history: History | None
    computed: int = 0
    """Tokens that have their keys and values."""


@dataclasses.dataclass
class Outcome:
    """What a run made and took."""

    tokens: list[list[int]]
    rounds: int
    seconds: float
    step_ms: float


def samplings(count: int) -> list[Sampling]:
    """Sampled, filtered, greedy and penalised sessions in turn."""
    kinds = [
        Sampling(seed=1),
        Sampling(temperature=0.7, top_k=20, top_p=0.8, seed=2),
        Sampling(temperature=0.0),
        Sampling(repetition_penalty=1.1, presence_penalty=0.2, seed=3),
    ]
    return [dataclasses.replace(kinds[i % 4], seed=i) for i in range(count)]


def generate(
    host: TargetHost, shape: Shape, count: int, hints: Sequence[Sequence[int]] | None
) -> Outcome:
    """`made` tokens for `count` sessions, with trees around `hints` or without."""
    longest = shape.prompt + shape.made + 2 * shape.depth + 2
    pages = -(-longest // PAGE)
    pool = PagePool(count * pages + 1, PAGE)
    store = PagedStore(pool, host.cache_shape, host.dtype, host.device)
    rng = np.random.default_rng(7)
    lines = []
    for sampling in samplings(count):
        prompt = rng.integers(0, shape.vocab, shape.prompt).tolist()
        owned = np.array(pool.allocate(pages), dtype=np.int64)
        slots = (owned[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
        history = History(shape.vocab, prompt) if sampling.needs_history else None
        lines.append(Line(prompt, slots, sampling, history))
    none = [TokenTree()] * count
    for line in lines:  # prompts one by one, so that steps stay small
        a_step(host, store, [line], none[:1], shape.vocab)
    steps = []
    started = time.perf_counter()
    end = shape.prompt + shape.made
    while min(len(line.tokens) for line in lines) < end:
        trees = none
        if hints is not None:
            trees = [
                a_tree(hint[len(line.tokens) - shape.prompt :][: shape.depth], shape, rng)
                for line, hint in zip(lines, hints, strict=True)
            ]
        live = [i for i, line in enumerate(lines) if len(line.tokens) < end]
        before = time.perf_counter()
        a_step(host, store, [lines[i] for i in live], [trees[i] for i in live], shape.vocab)
        if len(live) == count:
            steps.append((time.perf_counter() - before) * 1e3)
    return Outcome(
        [line.tokens[shape.prompt : end] for line in lines],
        len(steps),
        time.perf_counter() - started,
        float(np.median(steps)),
    )


def a_tree(right: Sequence[int], shape: Shape, rng: np.random.Generator) -> TokenTree:
    """A path that is right as far as luck has it, each token behind a wrong sibling."""
    tokens: list[int] = []
    parents: list[int] = []
    above = -1
    for token in right:
        mine = token if rng.random() < shape.right else (token + 7) % shape.vocab
        tokens += [(token + 3) % shape.vocab, mine]
        parents += [above, above]
        above = len(tokens) - 1
    return TokenTree(tuple(tokens), tuple(parents))


def a_step(
    host: TargetHost,
    store: PagedStore,
    lines: Sequence[Line],
    trees: Sequence[TokenTree],
    vocab: int,
) -> None:
    """One target step and its acceptance; the lines' tokens grow."""
    feeds, rounds = [], []
    for index, (line, tree) in enumerate(zip(lines, trees, strict=True)):
        base, fresh = line.computed, line.tokens[line.computed :]
        feeds.append(
            Feed(
                [*fresh, *tree.tokens],
                base,
                line.slots,
                [-1, *(parent + 1 for parent in tree.parents)] if len(tree) else None,
                range(len(fresh) - 1, len(fresh) + len(tree)),
            )
        )
        rounds.append(Round(index, tree, line.sampling, len(line.tokens), line.history))
    output = host.step(feeds, store)
    for line, feed, verdict in zip(lines, feeds, accept(output, rounds, store, vocab), strict=True):
        if isinstance(verdict, NonFiniteRow):
            raise verdict
        if not compacts(output):
            rows = np.asarray(verdict.path, dtype=np.int64) + feed.base + 1
            places = feed.base + 1 + np.arange(len(rows))
            store.move(torch.from_numpy(line.slots[rows]), torch.from_numpy(line.slots[places]))
        line.computed = len(line.tokens) + len(verdict.path)
        line.tokens.extend(verdict.tokens)
        for token in verdict.tokens if line.history is not None else ():
            assert line.history is not None
            line.history.append(token)


def measure(shape: Shape, device: str) -> list[dict[str, object]]:
    """Plain against trees for each number of sessions and both arithmetics."""
    found: list[dict[str, object]] = []
    for numerics in ("invariant", "fast") if device == "cuda" else ("invariant",):
        host = a_target(shape, device, numerics)
        for count in shape.sessions:
            if device == "cuda":  # compiles
                generate(host, dataclasses.replace(shape, made=4), count, None)
            plain = generate(host, shape, count, None)
            if device == "cuda":
                generate(host, dataclasses.replace(shape, made=8), count, plain.tokens)
            drafted = generate(host, shape, count, plain.tokens)
            made = count * shape.made
            pairs = zip(plain.tokens, drafted.tokens, strict=True)
            found.append(
                {
                    "numerics": numerics,
                    "sessions": count,
                    "plain_step_ms": plain.step_ms,
                    "tree_step_ms": drafted.step_ms,
                    "tree_pays_from_tokens_a_round": drafted.step_ms / plain.step_ms,
                    "plain_tokens_per_s": made / plain.seconds,
                    "tree_tokens_per_s": made / drafted.seconds,
                    "same_tokens": sum(one == other for one, other in pairs),
                    "products": host.plan.describe(),
                }
            )
        del host
    return found


def main(arguments: list[str] | None = None) -> int:
    """0 unless the invariant arithmetic gave other tokens with trees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, interpreted")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        sys.stdout.write("no CUDA device: nothing measured\n")
        return 0
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        sys.stdout.write("--dry-run needs TRITON_INTERPRET=1 in the environment\n")
        return 2
    shape, device = (TINY, "cpu") if options.dry_run else (Shape(), "cuda")
    figures = measure(shape, device)
    for row in figures:
        sys.stdout.write(json.dumps(row) + "\n")
    if options.out is not None:
        described = {key: str(value) for key, value in vars(shape).items()}
        record = {"torch": torch.__version__, "shape": described, "runs": figures}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    broken = [
        row
        for row in figures
        if row["numerics"] == "invariant" and row["same_tokens"] != row["sessions"]
    ]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
