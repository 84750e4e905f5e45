"""Which questions are put to the target, and how its answers are drawn.

Knows prompt files (JSONL with `id` and `turns`), deduplication and the mixture of sampling
settings. Does not know models, tokenizers or where answers are kept.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwire.config import ConfigError

MAX_SEED = 2**53  # seeds stay exact in JSON readers that know only doubles


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question: `key` is unique over all files, `source` names the file."""

    key: str
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way of drawing answers, and the share of the prompts that it gets."""

    share: float
    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def name(self) -> str:
        """How the recipe is called in manifests and reports."""
        parts = [f"t{self.temperature:g}"]
        if self.temperature > 0 and self.top_k:
            parts.append(f"k{self.top_k}")
        if self.temperature > 0 and self.top_p < 1:
            parts.append(f"p{self.top_p:g}")
        return "-".join(parts)


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to be made. The same key always means the same prompt, recipe and seed."""

    key: str
    prompt: Prompt
    recipe: Recipe
    seed: int


def parse_recipe(text: str) -> Recipe:
    """`share:temperature[:top_k[:top_p]]`. Raises ConfigError naming what is wrong."""
    parts = text.split(":")
    wanted = "share:temperature[:top_k[:top_p]], for example 0.4:0.7:20:0.8"
    if not 2 <= len(parts) <= 4:
        raise ConfigError("--recipes", text, wanted)
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        raise ConfigError("--recipes", text, wanted) from None
    recipe = Recipe(
        numbers[0],
        numbers[1],
        int(numbers[2]) if len(numbers) > 2 else 0,
        numbers[3] if len(numbers) > 3 else 1.0,
    )
    if recipe.share <= 0 or recipe.temperature < 0 or recipe.top_k < 0 or not 0 < recipe.top_p <= 1:
        raise ConfigError("--recipes", text, "a positive share and a valid sampling setting")
    return recipe


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first turn of each line of `path`, in file order. Raises ConfigError naming the line."""
    prompts: list[Prompt] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError("--prompts", path, f"a readable file ({error.strerror})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) >= limit:
            break
        try:
            row = json.loads(line)
            text, key = row["turns"][0], str(row["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConfigError(
                "--prompts", f"{path.name} line {number}", "an object with id and turns"
            ) from None
        if not isinstance(text, str) or not text.strip():
            raise ConfigError("--prompts", f"{path.name} line {number}", "a text of some length")
        prompts.append(Prompt(key, path.stem, text))
    return prompts


def split_limit(text: str) -> tuple[Path, int | None]:
    """`FILE` or `FILE=N`: the file and how many of its prompts are wanted."""
    path, mark, count = text.rpartition("=")
    if mark and count.isdecimal():
        return Path(path), int(count)
    return Path(text), None


def collect(files: Sequence[str], *, seed: int, exclude: Iterable[Path] = ()) -> list[Prompt]:
    """The prompts of all files, each text once, none that occurs in the `exclude` files, mixed in
    an order that `seed` fixes. With `FILE=N` the N prompts are drawn from the file.
    """
    forbidden = {fingerprint(p.text) for path in exclude for p in read_prompts(path)}
    seen = set(forbidden)
    mixed: list[Prompt] = []
    for name in files:
        path, limit = split_limit(name)
        prompts = read_prompts(path)
        if limit is not None:
            random.Random(f"{seed} {path.stem}").shuffle(prompts)
        taken = 0
        for prompt in prompts:
            mark = fingerprint(prompt.text)
            if mark in seen or (limit is not None and taken >= limit):
                continue
            seen.add(mark)
            mixed.append(prompt)
            taken += 1
    random.Random(seed).shuffle(mixed)
    return mixed


def plan(prompts: Sequence[Prompt], recipes: Sequence[Recipe], *, seed: int) -> list[Job]:
    """One answer a prompt, the recipes in their shares; which prompt gets which is drawn from
    `seed` and the prompt's own key, so that more prompts do not change the ones there are.
    """
    total = sum(recipe.share for recipe in recipes)
    jobs = []
    for prompt in prompts:
        draw = random.Random(f"{seed} {prompt.source} {prompt.key}")
        place, chosen = draw.random() * total, recipes[-1]
        for recipe in recipes:
            place -= recipe.share
            if place < 0:
                chosen = recipe
                break
        own_seed = draw.randrange(MAX_SEED)
        jobs.append(Job(f"{prompt.key}|{chosen.name}|{own_seed}", prompt, chosen, own_seed))
    return jobs


def plan_all(prompts: Sequence[Prompt], recipes: Sequence[Recipe], *, seed: int) -> list[Job]:
    """One answer of every recipe to every prompt: what evaluation needs. Another `seed` asks for
    other answers, except at temperature 0, where there is only one.
    """
    jobs = []
    for prompt in prompts:
        for recipe in recipes:
            drawn = seed if recipe.temperature > 0 else 0
            own_seed = random.Random(f"{drawn} {prompt.key} {recipe.name}").randrange(MAX_SEED)
            jobs.append(Job(f"{prompt.key}|{recipe.name}|{own_seed}", prompt, recipe, own_seed))
    return jobs


def fingerprint(text: str) -> str:
    """Hash of a text that ignores case and spacing."""
    return hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()
