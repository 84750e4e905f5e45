"""Measures the length policy apart from any model's quality: the demo target with a drafter whose
acceptance is given (`synthetic_drafter.py`, in this process), adaptive against plain.

Cases: a drafter that is always right; the same one when it is never right and says so; and when it
is never right and claims 0.9. Each with 1 and 4 requests at a time, greedy, the same prompts in
both arms. Arms alternate, --turns of each, --seconds a turn; ratios and intervals are those of
`policy_grid.py`. Claims: what is never right costs less than 5 % of plain; what is always right is
drafted to the limit. Writes policy_synthetic.json; about 6 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from common import PROMPTS, TARGET, chat_ids, demo_tokenizer, load_average, options, say, write
from fakes import at_rates, scripted
from policy_grid import ADAPTIVE, ARMS, PLAIN, Run, against, differing, summary, turn
from synthetic_drafter import SyntheticDrafter, claims

from draftwire.channel import ChannelConfig, open_channel
from draftwire.v1 import verifier_pb2, verifier_pb2_grpc
from draftwire_client.demo import service

VOCABULARY = 49152
DRAFT_S = 0.005
CASES: dict[str, tuple[float, float]] = {  # rate, claim
    "always right": (1.0, 0.95),  # first: what was wrong for long is doubted for long
    "never right, honest": (0.0, 1e-4),
    "never right, claims 0.9": (0.0, 0.9),
}
LOADS = (1, 4)
MOST_NODES = 15


async def measure(given: argparse.Namespace, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """All cases against one verifier."""
    drafter = SyntheticDrafter(lambda tokens, session: None, before_answer=pause)
    results: dict[str, Any] = {}
    async with scripted(drafter) as own:
        # Starting a service blocks; nothing is served meanwhile.
        with service(
            ["verifier_service", "--model", TARGET, "--drafters", own], "the verifier"
        ) as at:
            async with open_channel(at, ChannelConfig()) as channel:
                drafter.stub = stub = verifier_pb2_grpc.VerifierStub(channel)
                await know(drafter, stub, texts)
                for name, (rate, claim) in CASES.items():
                    drafter.propose = at_rates(drafter.texts, [rate], VOCABULARY, given.seed)
                    drafter.change_response = claiming(claim)
                    for load in LOADS:
                        key = f"{name}, {load} at a time"
                        results[key] = await case(given, stub, texts, load)
                        say(f"policy_synthetic: {key}: {results[key]['ratio']}")
                info = await stub.GetInfo(verifier_pb2.VerifierGetInfoRequest())
    return {"cases": results, "step_costs": info.config["effective_step_costs"]}


async def pause() -> None:
    """The time of a draft."""
    await asyncio.sleep(DRAFT_S)


def claiming(claim: float) -> Any:
    """Writes the same claim into every node of a response."""
    given = argparse.Namespace(synthetic_acceptance=[claim], claim=claim)

    def change(response: Any) -> None:
        for proposal in response.proposals:
            del proposal.tree.log_probs[:]
            proposal.tree.log_probs.extend(claims(given, len(proposal.tree.token_ids)))

    return change


async def know(drafter: SyntheticDrafter, stub: Any, texts: Sequence[Sequence[int]]) -> None:
    """Have the drafter learn how every prompt goes on."""
    await turn(stub, texts, len(texts), 0.0, ARMS["fixed B"], 1.0)
    while len(drafter.texts) < len(texts) or drafter._tasks:
        await turn(stub, texts, len(texts), 0.0, ARMS["fixed B"], 1.0)


async def case(
    given: argparse.Namespace, stub: Any, texts: Sequence[Sequence[int]], load: int
) -> dict[str, Any]:
    """Both arms in turn."""
    runs: dict[str, list[Run]] = {PLAIN: [], ADAPTIVE: []}
    for number in range(given.turns):
        for arm in (PLAIN, ADAPTIVE) if number % 2 == 0 else (ADAPTIVE, PLAIN):
            one = await turn(stub, texts, load, 0.0, ARMS[arm], given.seconds, start=number * load)
            runs[arm].append(one)
    arms = {arm: summary(found) for arm, found in runs.items()}
    return {
        **against(runs[ADAPTIVE], runs[PLAIN]),
        "largest_block": largest(runs[ADAPTIVE][1:] or runs[ADAPTIVE]),
        "answers_that_differ": differing(runs),
        "arms": arms,
    }


def largest(runs: Sequence[Run]) -> int:
    """The most tokens, anchor included, that a round verified."""
    return max(
        (
            size.block_size
            for run in runs
            for size in run.after.block_sizes
            if size.rounds
            > sum(b.rounds for b in run.before.block_sizes if b.block_size == size.block_size)
        ),
        default=1,
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes besides the common ones."""
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=6, help="of each arm in a case")


def main() -> int:
    """Measure and write; 1 if an answer differs."""
    given, load = options(__doc__, arguments), load_average()
    if given.quick:
        given.seconds, given.turns = 1.0, 2
    tokenizer = demo_tokenizer()
    texts = [chat_ids(tokenizer, text) for text in PROMPTS[:8]]
    results = asyncio.run(measure(given, texts))
    results |= {"seconds_of_a_turn": given.seconds, "turns": given.turns, "draft_ms": 1e3 * DRAFT_S}
    write("policy_synthetic", results, given, load)
    wrong = sum(found["answers_that_differ"] for found in results["cases"].values())
    say(f"policy_synthetic: answers that differ: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
