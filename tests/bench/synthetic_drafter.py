"""A drafter whose acceptance is given, not learnt: at each depth it proposes the true next token
with a chance of its own, and a wrong one otherwise.

To test the length policy, or a load, apart from any model's quality. The outputs stay the target's
own, as with every drafter. The truth comes from the verifier itself: when a session opens, the same
prompt with the same sampling and seed is asked for again with speculation off, and until that has
answered the session gets empty proposals; so send each prompt once to warm up, and measure then.

    python tests/bench/synthetic_drafter.py --listen 127.0.0.1:7451 --verifier 127.0.0.1:7450 \\
        --synthetic-acceptance 0.8,0.6,0.4 --draft-ms 5

Depths past the last rate have the last rate. `--claim` is what it claims of each token (0: its
rate, honestly).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/fakes.py

from fakes import ScriptedDrafter, at_rates, scripted

from draftwire.channel import ChannelConfig, open_channel
from draftwire.v1 import drafter_pb2, types_pb2, verifier_pb2, verifier_pb2_grpc


@dataclass
class SyntheticDrafter(ScriptedDrafter):
    """Asks `stub` for the truth of every session it does not know."""

    stub: Any = None
    texts: list[list[int]] = field(default_factory=list)
    most_tokens: int = 512
    _asked: set[bytes] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def opening(self, message: drafter_pb2.OpenSession) -> None:
        """Find out how the session will go on, once for each prompt and sampling."""
        prompt = list(message.token_ids[: message.prompt_tokens])
        request = verifier_pb2.GenerateRequest(
            token_ids=verifier_pb2.TokenIds(ids=prompt),
            sampling=message.sampling,
            stop=types_pb2.StopConditions(max_tokens=self.most_tokens, ignore_eos=True),
            speculation=types_pb2.SpeculationOptions(mode=types_pb2.SPECULATION_MODE_OFF),
        )
        key = request.SerializeToString(deterministic=True)
        if key not in self._asked:
            self._asked.add(key)
            task = asyncio.create_task(self._learn(prompt, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _learn(self, text: list[int], request: verifier_pb2.GenerateRequest) -> None:
        self.texts.append(text)
        async for message in self.stub.Generate(request):
            if message.WhichOneof("event") == "delta":
                text.extend(message.delta.token_ids)


def rates(text: str) -> list[float]:
    """Numbers from 0 to 1, separated by commas."""
    found = [float(part) for part in text.split(",")]
    if not all(0 <= rate <= 1 for rate in found):
        raise argparse.ArgumentTypeError("rates lie between 0 and 1")
    return found


async def run(given: argparse.Namespace) -> None:
    """Serve until interrupted."""
    texts: list[list[int]] = []
    propose = at_rates(texts, given.synthetic_acceptance, given.vocabulary, given.seed)

    async def work() -> None:
        await asyncio.sleep(given.draft_ms / 1e3)

    def claim(response: drafter_pb2.StepResponse) -> None:
        for proposal in response.proposals:
            tree = proposal.tree
            del tree.log_probs[:]
            tree.log_probs.extend(claims(given, len(tree.token_ids)))

    async with open_channel(given.verifier, ChannelConfig()) as channel:
        drafter = SyntheticDrafter(
            propose,
            before_answer=work,
            change_response=claim,
            stub=verifier_pb2_grpc.VerifierStub(channel),
            texts=texts,
        )
        async with scripted(drafter, listen=given.listen) as address:
            sys.stdout.write(f"serving {address}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


def claims(given: argparse.Namespace, count: int) -> Sequence[float]:
    """Log-probabilities claimed of the nodes of a chain."""
    import math

    table = given.synthetic_acceptance
    chances = [given.claim or table[min(d, len(table) - 1)] for d in range(count)]
    return [math.log(max(chance, 1e-4)) for chance in chances]


def main() -> int:
    """Serve until interrupted; 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--synthetic-acceptance", type=rates, required=True, metavar="R,R,...")
    parser.add_argument("--verifier", required=True, help="address of the verifier it drafts for")
    parser.add_argument("--listen", default="127.0.0.1:7451")
    parser.add_argument("--draft-ms", type=float, default=0.0, help="time of each answer")
    parser.add_argument("--claim", type=float, default=0.0, help="chance claimed of each token")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--seed", type=int, default=0)
    try:
        asyncio.run(run(parser.parse_args()))
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
