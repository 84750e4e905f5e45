"""What the benchmarks share: facts of the machine, statistics, the result files, the services.

Knows: how a result looks on disk, how the demo target is prompted, how the services are started.
Does not know: what is measured. No result names the machine's paths or its host.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import os
import platform
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/fakes.py

import numpy as np
from fakes import Answer, generate

from draftwire import tether
from draftwire.models import resolve, unpacked
from draftwire_client.demo import TARGET as TARGET

RESULTS = Path(__file__).parent / "results"
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")
PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "numpy")

PROMPTS = (
    "Write a Python function that checks whether a string is a palindrome.",
    "A farmer has 17 sheep and buys 8 more each month. How many after 5 months?",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "What is the capital of Australia, and why is it not Sydney?",
    "Translate into French: The library opens at nine and closes at six.",
    "List five uses of a paper clip.",
    "Explain photosynthesis to a child.",
    "Repeat this line three times: the quick brown fox jumps over the lazy dog",
    "Write a SQL query that finds the three customers with the most orders.",
    "Summarise in one sentence: Rain fell all night, the river rose, and by morning the road "
    "to the village was under water.",
    "Is 91 a prime number? Think step by step.",
    "Write a polite e-mail that declines an invitation to a wedding.",
    "def fibonacci(n):\n    # complete this function",
    "Name three planets and say one thing about each.",
    "What rhymes with orange?",
    "Correct the spelling: I recieved you're adress yesterday.",
    "Give me a recipe for pancakes with exact amounts.",
    "Count from 1 to 20, separated by commas.",
    "Who wrote Pride and Prejudice?",
    'Turn into JSON: name Ada, age 36, languages English and French. Begin with {"name"',
)


def say(text: str) -> None:
    """A line for people."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def end_on_sigterm() -> None:
    """SIGTERM leaves the program by its `finally`, with what it has started stopped; call it first
    in `main`."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def options(
    description: str | None, extra: Callable[[argparse.ArgumentParser], None] | None = None
) -> argparse.Namespace:
    """The arguments every benchmark takes: --quick, --seed, --out."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds; writes no result")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    if extra is not None:
        extra(parser)
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """The processor and the versions that matter for a figure."""
    model, flags = platform.machine(), set[str]()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
                break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in FLAGS if flag in flags],
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def write(name: str, results: dict[str, Any], given: argparse.Namespace, load: float) -> None:
    """Write results/NAME.json; in quick form show it instead, since its figures mean nothing.
    `load`: the load average when the measurement began."""
    whole = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load_average_at_start": round(load, 2),
        "machine": machine(),
        "quick": given.quick,
        "seed": given.seed,
        "results": results,
    }
    text = json.dumps(whole, indent=1, sort_keys=True)
    if given.quick:
        say(text)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{name}.json").write_text(text + "\n")


def run_module(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """`python -m WORDS` to its end; it ends with this program, however that ends. `settings`: of
    Popen."""
    command = tether.command(words[0], words[1:])
    ours, held = os.pipe()
    try:
        process = subprocess.Popen(command, stdin=ours, text=True, **settings)
        try:
            output, errors = process.communicate()
        except BaseException:
            process.terminate()  # not killed, as subprocess.run would: it may have started others
            process.wait()
            raise
    finally:
        os.close(ours)
        os.close(held)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def distribution(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """p50, p90, p99, mean and n."""
    if not values:
        return {"n": 0}
    p50, p90, p99 = np.percentile(np.asarray(values), (50, 90, 99))
    found = {"p50": p50, "p90": p90, "p99": p99, "mean": float(np.mean(values))}
    return {"n": len(values)} | {k: round(float(v), digits) for k, v in found.items()}


def bootstrap(
    rows: Sequence[Any], statistic: Callable[[Sequence[Any]], float], seed: int, count: int = 2000
) -> dict[str, float]:
    """`statistic` of `rows` with its 95 % interval over resampled rows."""
    rng = random.Random(seed)
    drawn = [statistic(rng.choices(rows, k=len(rows))) for _ in range(count)]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return {
        "value": round(statistic(rows), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
    }


def demo_folder() -> Path:
    """The demo target as a folder that transformers loads."""
    return Path(unpacked(resolve(TARGET)).location)


def demo_tokenizer() -> Any:
    """Its tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_folder())


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one user message under the chat template."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def read_prompts(file: Path | None, count: int) -> list[str]:
    """The built-in prompts, or the first turns of a JSON-lines file (fields `turns` or
    `prompt`)."""
    if file is None:
        return list(PROMPTS[:count])
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows][:count]


async def many(
    stub: Any, requests: Iterable[tuple[Sequence[int], dict[str, Any]]], in_flight: int
) -> list[Answer]:
    """All requests to their ends, `in_flight` at a time; answers in the order of the requests."""
    gate = asyncio.Semaphore(in_flight)

    async def one(prompt: Sequence[int], fields: dict[str, Any]) -> Answer:
        async with gate:
            return await generate(stub, prompt, **{"timeout": 3600, **fields})

    return await asyncio.gather(*(one(prompt, fields) for prompt, fields in requests))


def equal(left: Iterable[Sequence[int]], right: Iterable[Sequence[int]]) -> dict[str, int]:
    """How many of the answers are the same tokens."""
    pairs = list(zip(left, right, strict=True))
    return {"same": sum(list(a) == list(b) for a, b in pairs), "of": len(pairs)}
