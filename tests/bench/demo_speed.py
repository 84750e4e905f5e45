"""Measures what speculation and the invariant arithmetic are worth on the demo pair.

Ratios of tokens a second, measured in one run with the arms in turn on every prompt: plain and
speculative (at most 3, 7, 15 drafted tokens a round: steps of 4, 8, 16 rows), invariant and fast.
Two verifiers run as processes, one in each arithmetic, on one drafter, the one that the demo uses;
only one answers at a time. T=0, one request at a time, the time of the first token left out on all
arms. Intervals are 95 % over resampled prompts. The invariant arms must give the same tokens.

Not measured: many requests at a time, sampled text, other targets. Absolute figures belong to the
machine; the ratios are what is meant.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common import (
    TARGET,
    bootstrap,
    chat_ids,
    demo_tokenizer,
    load_average,
    options,
    read_prompts,
    say,
    write,
)
from fakes import OFF

from draftwire.channel import ChannelConfig, open_sync_channel
from draftwire.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from draftwire_client.demo import drafter_arguments, service

PLAIN, FAST = "plain, invariant", "plain, fast"
FIXED = {"mode": types_pb2.SPECULATION_MODE_FIXED}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    PLAIN: ("invariant", OFF),
    FAST: ("fast", OFF),
    "speculative, invariant, 3 nodes": ("invariant", FIXED | {"max_nodes": 3}),
    "speculative, invariant, 7 nodes": ("invariant", FIXED | {"max_nodes": 7}),
    "speculative, invariant, 15 nodes": ("invariant", FIXED | {"max_nodes": 15}),
    "adaptive, invariant": ("invariant", {"mode": types_pb2.SPECULATION_MODE_ADAPTIVE}),
    "speculative, fast, 15 nodes": ("fast", FIXED | {"max_nodes": 15}),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One answer; seconds from its first token to its last."""

    prompt: int
    tokens: tuple[int, ...]
    seconds: float
    stats: types_pb2.AcceptanceStats


def ask(stub: Any, prompt: int, ids: Sequence[int], tokens: int, speculation: Any) -> Run:
    """One request to its end."""
    request = verifier_pb2.GenerateRequest(
        token_ids=verifier_pb2.TokenIds(ids=ids),
        sampling=types_pb2.SamplingParams(temperature=0),
        stop=types_pb2.StopConditions(max_tokens=tokens),
        speculation=types_pb2.SpeculationOptions(**speculation),
    )
    made: list[int] = []
    first = last = 0.0
    stats = types_pb2.AcceptanceStats()
    for message in stub.Generate(request, timeout=600):
        kind = message.WhichOneof("event")
        if kind == "delta":
            last = time.perf_counter()
            first = first or last
            made.extend(message.delta.token_ids)
        elif kind == "finished":
            stats = message.finished.acceptance
    return Run(prompt, tuple(made), last - first, stats)


def speed(runs: Sequence[Run]) -> float:
    """Tokens a second after the first token of each answer."""
    return sum(len(r.tokens) - 1 for r in runs) / max(1e-9, sum(r.seconds for r in runs))


def ratio(arm: Sequence[Run], base: Sequence[Run], seed: int) -> dict[str, float]:
    """tokens/s of `arm` by that of `base`, resampled by prompt with all its repeats."""
    by_prompt: dict[int, tuple[list[Run], list[Run]]] = defaultdict(lambda: ([], []))
    for run in arm:
        by_prompt[run.prompt][0].append(run)
    for run in base:
        by_prompt[run.prompt][1].append(run)

    def statistic(rows: Sequence[tuple[list[Run], list[Run]]]) -> float:
        return speed([r for a, _ in rows for r in a]) / speed([r for _, b in rows for r in b])

    return bootstrap(list(by_prompt.values()), statistic, seed)


def acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """What the proposals were worth."""
    rounds = sum(r.stats.rounds for r in runs)
    accepted = sum(r.stats.accepted_tokens for r in runs)
    parts: dict[str, dict[str, int]] = {}
    for run in runs:
        for part in run.stats.accepted_per_part:
            name = types_pb2.DraftPart.Name(part.part).removeprefix("DRAFT_PART_").lower()
            counted = parts.setdefault(name, {"accepted": 0, "drafted": 0})
            counted["accepted"] += part.accepted
            counted["drafted"] += part.drafted
    return {
        "rounds": rounds,
        "plain_rounds": sum(r.stats.plain_rounds for r in runs),
        "drafted_tokens": sum(r.stats.drafted_tokens for r in runs),
        "accepted_tokens": accepted,
        "mean_acceptance_length": round(1 + accepted / rounds, 4) if rounds else None,
        "per_part": parts,
    }


def main() -> int:
    """Run the arms in turn and write demo_speed.json; 1 if invariant arms differ in tokens."""
    given, load = options(__doc__), load_average()
    arguments, trained = drafter_arguments()
    count, tokens, repeats = (1, 12, 1) if given.quick else (4, 48, 1)
    tokenizer = demo_tokenizer()
    prompts = [chat_ids(tokenizer, text) for text in read_prompts(None, count)]
    runs: dict[str, list[Run]] = {name: [] for name in ARMS}
    verify = ["verifier_service", "--model", TARGET]
    with (
        service(arguments, "the drafter") as drafter,
        service([*verify, "--drafters", drafter], "the invariant verifier") as invariant,
        service([*verify, "--drafters", drafter, "--numerics", "fast"], "the fast one") as fast,
        open_sync_channel(invariant, ChannelConfig()) as one,
        open_sync_channel(fast, ChannelConfig()) as other,
    ):
        stubs = {
            "invariant": verifier_pb2_grpc.VerifierStub(one),
            "fast": verifier_pb2_grpc.VerifierStub(other),
        }
        info = stubs["invariant"].GetInfo(verifier_pb2.VerifierGetInfoRequest())
        for stub in stubs.values():  # the prompts' pages, and both sides warm
            for index, prompt in enumerate(prompts):
                ask(stub, index, prompt, 4, {})
        names = list(ARMS)
        for repeat in range(repeats):
            for index, prompt in enumerate(prompts):
                turn = (repeat * len(prompts) + index) % len(names)
                for name in names[turn:] + names[:turn]:
                    numerics, speculation = ARMS[name]
                    runs[name].append(ask(stubs[numerics], index, prompt, tokens, speculation))
    expected = {run.prompt: run.tokens for run in runs[PLAIN]}
    arms: dict[str, Any] = {}
    wrong = 0
    for name, found in runs.items():
        same = sum(run.tokens == expected[run.prompt] for run in found)
        wrong += len(found) - same if ARMS[name][0] == "invariant" else 0
        arms[name] = {
            "tokens_per_s": round(speed(found), 3),
            "ratio_to_plain_invariant": ratio(found, runs[PLAIN], given.seed),
            "ratio_to_plain_fast": ratio(found, runs[FAST], given.seed),
            "same_tokens_as_plain_invariant": {"same": same, "of": len(found)},
            "acceptance": acceptance(found),
        }
    results = {
        "arms": arms,
        "trained_drafter": trained,
        "invariant_arithmetic": info.config["effective_numerics"],
        "prompts": count,
        "tokens": tokens,
        "repeats": repeats,
        "invariant_answers_that_differ": wrong,
    }
    write("demo_speed", results, given, load)
    for name, arm in arms.items():
        over = arm["ratio_to_plain_invariant"]
        say(
            f"demo_speed: {name}: {over['value']:.2f} x plain invariant "
            f"[{over['low']:.2f}, {over['high']:.2f}], {arm['ratio_to_plain_fast']['value']:.2f} x "
            f"plain fast, mean acceptance length {arm['acceptance']['mean_acceptance_length']}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
