"""Whether the running pair accepts what the offline replay says it would.

Starts drafter and verifier as processes, asks the held-out prompts whose answers are stored, with
the same seeds and sampling, and compares each answer's tokens, rounds and accepted tokens with
`training.offline`'s replay of the stored answer by the same checkpoint. Both draft by the same
functions in float32, but the one's products have other shapes than the other's, so single rounds
may differ where two candidates are nearly equal.

    python tests/bench/live_offline.py --checkpoint DRAFTER --features FEATURES [--each 2]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import common
import torch

from drafter_service import checkpoint
from drafter_service.training.features import Trajectory, read_features, read_manifest
from drafter_service.training.network import BlockNetwork
from drafter_service.training.offline import Mode, drafts_of, replay
from drafter_service.training.start import FrozenTarget
from drafter_service.tree import Part
from draftwire.channel import ChannelConfig, open_sync_channel
from draftwire.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from draftwire_client.demo import service

PARTS = (types_pb2.DRAFT_PART_RANK_TREE, types_pb2.DRAFT_PART_NGRAM)


def chosen(folder: Path, each: int) -> list[Trajectory]:
    """`each` answers of every benchmark and temperature."""
    taken: dict[tuple[str, float], int] = defaultdict(int)
    kept = []
    for trajectory in sorted(read_features(folder), key=lambda t: t.response.key):
        group = (trajectory.response.source, trajectory.response.temperature)
        if taken[group] < each and len(trajectory.response.answer) >= 8:
            taken[group] += 1
            kept.append(trajectory)
    return kept


def ask(stub: Any, trajectory: Trajectory, nodes: int) -> tuple[list[int], Any]:
    """The running pair's answer: tokens and acceptance."""
    answer = trajectory.response
    request = verifier_pb2.GenerateRequest(
        token_ids=verifier_pb2.TokenIds(ids=answer.prompt),
        sampling=types_pb2.SamplingParams(
            temperature=answer.temperature, top_k=answer.top_k, top_p=answer.top_p, seed=answer.seed
        ),
        stop=types_pb2.StopConditions(max_tokens=len(answer.answer)),
        speculation=types_pb2.SpeculationOptions(
            mode=types_pb2.SPECULATION_MODE_FIXED, max_nodes=nodes, parts=PARTS
        ),
    )
    made: list[int] = []
    stats = types_pb2.AcceptanceStats()
    for message in stub.Generate(request, timeout=600):
        kind = message.WhichOneof("event")
        if kind == "delta":
            made.extend(message.delta.token_ids)
        elif kind == "finished":
            stats = message.finished.acceptance
    return made, stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument(
        "--each", type=int, default=1, help="answers of a benchmark and temperature"
    )
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--out", type=Path, default=common.RESULTS / "live_offline.json")
    args = parser.parse_args()
    common.end_on_sigterm()
    answers = chosen(args.features, args.each)
    target = FrozenTarget.load(common.TARGET, read_manifest(args.features))
    drafter = checkpoint.load(args.checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    drafter.model.attach_target(target.embedding, target.head, vocab_size=target.vocab_size)
    network = BlockNetwork(drafter.model, target.embedding.float())
    size = drafter.config.block_size
    rows = []
    serve = ["drafter_service", "--checkpoint", args.checkpoint]
    with (
        service(serve, "the drafter") as peer,
        service(
            ["verifier_service", "--model", common.TARGET, "--drafters", peer], "the verifier"
        ) as address,
        open_sync_channel(address, ChannelConfig()) as channel,
    ):
        stub = verifier_pb2_grpc.VerifierStub(channel)
        for number, trajectory in enumerate(answers, 1):
            answer = trajectory.response
            mode = Mode(
                "live",
                frozenset({Part.RANK_TREE, Part.NGRAM}),
                args.nodes,
                coupled=answer.temperature > 0,
                path_head=drafter.model.path_head is not None,
            )
            drafts = drafts_of(network, trajectory, size)
            rounds = replay(drafter.model, [(trajectory, drafts)], mode)[0]
            made, stats = ask(stub, trajectory, args.nodes)
            rows.append(
                {
                    "key": answer.key,
                    "temperature": answer.temperature,
                    "same_tokens": made == list(answer.answer[: len(made)]),
                    "tokens": len(made),
                    "offline": [len(rounds), sum(r.accepted for r in rounds)],
                    "live": [stats.rounds, stats.accepted_tokens],
                }
            )
            common.say(f"{number}/{len(answers)} {rows[-1]}")
    same = [row for row in rows if row["same_tokens"]]
    totals = {
        name: [sum(row[name][i] for row in same) for i in range(2)] for name in ("offline", "live")
    }
    report = {
        "checkpoint_sha256": drafter.sha256,
        "nodes": args.nodes,
        "answers": len(rows),
        "same_tokens": len(same),
        "acceptance_length": {
            name: round(1 + accepted / max(rounds, 1), 4)
            for name, (rounds, accepted) in totals.items()
        },
        "rows": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    common.say(json.dumps({k: v for k, v in report.items() if k != "rows"}))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
