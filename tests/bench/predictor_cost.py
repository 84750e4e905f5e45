"""What the block size predictor costs: its own call, and its share of a request's first draft.

Arms: no predictor, and one for each kind of input, width 2048 as the method has it, on the demo
target's shapes (vocabulary 49,152, hidden size 576). A step opens sessions with a prompt of 100
tokens on the drafter's engine and drafts their first block; the arms take turns in every round. For
the kinds made of logits, one session's logits are also put on the wire and taken off it.

The first token of a request does not wait for any of this: the verifier opens the session on the
drafter once that token is committed. What waits is the first draft, so `first_draft_ms` is what a
client may see between its first and second chunk.

Not measured: GPUs, networks.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from common import bootstrap, distribution, load_average, options, say, write

from drafter_service import checkpoint
from drafter_service.engine import Engine, EngineSettings, Lane, LaneLimits
from drafter_service.messages import DraftSampling, End, Features, Open, Speculation, Step
from drafter_service.predictor import BlockSizePredictor, InputKind, PredictorConfig, around
from drafter_service.target import read_matrices
from drafter_service.tree import Part
from draftwire.codec import decode, encode
from draftwire_client.demo import TARGET as DEMO_TARGET

DRAFTER = Path(checkpoint.__file__).parent / "checkpoints" / "smollm2-135m-demo"
PROMPT, SESSIONS = 100, (1, 4, 16)
NONE = "none"


def engines(threads: int) -> tuple[dict[str, tuple[Engine, Lane]], int, int]:
    """An engine an arm, the drafter's weights shared; vocabulary and width of a raw feature row."""
    torch.set_num_threads(threads)
    found = checkpoint.load(str(DRAFTER), device=torch.device("cpu"), dtype=torch.float32)
    matrices = read_matrices(DEMO_TARGET)
    vocabulary, hidden = matrices.embedding.shape
    found.model.attach_target(matrices.embedding, matrices.head, vocab_size=vocabulary)
    settings = EngineSettings(
        block_size=found.config.block_size,
        max_nodes=32,
        parts=frozenset({Part.RANK_TREE, Part.NGRAM}),
        cache_rows=16384,
        max_sessions=64,
        max_context=found.config.max_position_embeddings,
        max_tokens=4096,
    )
    made: dict[str, tuple[Engine, Lane]] = {}
    for kind in (None, *InputKind):
        asked = None
        if kind is not None:
            width = vocabulary if kind is InputKind.LOGITS else hidden
            sizes = around(found.config.block_size, 2)
            asked = BlockSizePredictor(PredictorConfig(kind, width, sizes, found.sha256))
            asked.initialise(0)
            asked.eval().requires_grad_(False)
            # Of equal work in every arm: the size is always the trained one.
            torch.nn.init.zeros_(asked.output.weight)
            asked.output.bias[sizes.index(found.config.block_size)] = 1.0
        engine = Engine(found.model, settings, asked)
        limits = LaneLimits(embedding_rows=vocabulary)
        made[NONE if kind is None else kind.value] = (
            engine,
            engine.add_lane(limits, lambda result: None),
        )
    return made, vocabulary, hidden


def opening(number: int, vocabulary: int, hidden: int, draw: torch.Generator) -> Step:
    """A session of PROMPT tokens and an anchor."""
    tokens = torch.randint(vocabulary - 2, (PROMPT + 1,), generator=draw).tolist()
    return Step(
        0,
        opens=[
            Open(
                number,
                1,
                PROMPT,
                tokens,
                PROMPT,
                DraftSampling(1.0, number),
                Speculation(predict=True),
                last_logits=torch.randn(vocabulary, generator=draw),
            )
        ],
        features=[Features(number, 1, 0, torch.randn(PROMPT, hidden, generator=draw))],
    )


def measure(given: Any) -> dict[str, Any]:
    """All arms at all numbers of sessions."""
    arms, vocabulary, hidden = engines(given.threads)
    draw = torch.Generator().manual_seed(given.seed)
    rounds = 3 if given.quick else given.rounds
    results: dict[str, Any] = {}
    number, sequence = 0, 0
    with torch.inference_mode():
        for sessions in SESSIONS:
            whole: dict[str, list[float]] = {name: [] for name in arms}
            own: dict[str, list[float]] = {name: [] for name in arms}
            for turn in range(rounds + 1):
                parts = [
                    opening(number + n, vocabulary, hidden, draw) for n in range(1, sessions + 1)
                ]
                number, sequence = number + sessions, sequence + 1
                step = Step(
                    sequence,
                    opens=[part.opens[0] for part in parts],
                    features=[part.features[0] for part in parts],
                )
                names = list(arms)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    engine, lane = arms[name]
                    started = time.perf_counter()
                    ((_, result),) = engine.step([(lane, step)])
                    taken = 1000 * (time.perf_counter() - started)
                    assert len(result.proposals) == sessions
                    ends = [End(opened.session_id, 1) for opened in step.opens]
                    engine.step([(lane, Step(sequence, ends=ends))])
                    if turn:  # the first turn warms
                        whole[name].append(taken)
                        own[name].append(result.predictor_ns / 1e6)
            results[f"{sessions} sessions"] = {
                name: {
                    "first_draft_ms": distribution(whole[name]),
                    "predictor_ms": distribution(own[name]),
                    "added_ms": bootstrap(
                        [a - b for a, b in zip(whole[name], whole[NONE], strict=True)],
                        lambda rows: sorted(rows)[len(rows) // 2],
                        given.seed,
                    ),
                }
                for name in arms
            }
    logits = torch.randn(vocabulary, generator=draw)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        message = encode(logits)
        decode(message, name="last_logits")
        times.append(1000 * (time.perf_counter() - started))
    results["logits on the wire"] = {
        "bytes": len(message.inline),
        "encode_decode_ms": distribution(times),
    }
    results["parameters"] = {
        name: sum(p.numel() for p in engine.predictor.predictor.parameters())
        for name, (engine, _) in arms.items()
        if engine.predictor.predictor is not None
    }
    return results


def main() -> None:
    """Measure, show, write."""

    def extra(parser: Any) -> None:
        parser.add_argument("--rounds", type=int, default=40, help="steps of each arm and size")
        parser.add_argument("--threads", type=int, default=2, help="torch threads")

    given = options(__doc__, extra)
    load = load_average()
    results = measure(given)
    for sessions in SESSIONS:
        for name, row in results[f"{sessions} sessions"].items():
            say(
                f"predictor_cost: {sessions:2d} sessions, {name:18s} "
                f"predictor {row['predictor_ms'].get('p50', 0):7.3f} ms, "
                f"first draft {row['first_draft_ms'].get('p50', 0):7.2f} ms, "
                f"added {row['added_ms']['value']:+.2f} ms"
            )
    write("predictor_cost", {"threads": given.threads, **results}, given, load)


if __name__ == "__main__":
    main()
