"""What a sweep of block sizes leaves on disk: one line for each answer and size, and the
predictor's inputs of each prompt.

Knows the layout of a sweep's folder (`manifest.json`, `runs.jsonl`, `inputs/`) and how a run is
described. Does not know how runs are made or judged. A folder is continued where it was left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drafter_service.training.store import StoreError

FORMAT = "draftwire-block-sizes/1"
MANIFEST = "manifest.json"
RUNS = "runs.jsonl"
INPUTS = "inputs"
Step = tuple[int, int]
"""Drafted tokens accepted in a round, and drafted."""


@dataclass(frozen=True, slots=True)
class Regime:
    """How the answers were drawn."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def name(self) -> str:
        """As reports call it."""
        parts = [f"T={self.temperature:g}"]
        if self.temperature > 0 and self.top_k:
            parts.append(f"top-k {self.top_k}")
        if self.temperature > 0 and self.top_p < 1:
            parts.append(f"top-p {self.top_p:g}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Run:
    """One answer decoded with one block size. `key` is the answer's: prompt, recipe and seed.

    `tokens` come after the first one, which the prefill makes. A replay knows its rounds: `steps`
    are those that were taken, `everywhere` what a draft at every position of the answer would have
    given (empty unless asked for). A live run knows totals and `seconds` of decoding.
    """

    key: str
    prompt: str
    source: str
    temperature: float
    top_k: int
    top_p: float
    seed: int
    size: int
    tokens: int
    rounds: int
    accepted: int
    drafted: int
    seconds: float | None = None
    steps: tuple[Step, ...] = ()
    everywhere: tuple[Step, ...] = ()

    @property
    def regime(self) -> Regime:
        """How the answer was drawn."""
        return Regime(self.temperature, self.top_k, self.top_p)

    @property
    def acceptance_length(self) -> float:
        """Tokens a round, the bonus or recovered one included."""
        return 1.0 + self.accepted / max(self.rounds, 1)


def visited(everywhere: Sequence[Step]) -> tuple[Step, ...]:
    """The rounds that decoding takes, of the drafts at every position."""
    at, taken = 0, []
    while at < len(everywhere):
        taken.append(everywhere[at])
        at += everywhere[at][0] + 1
    return tuple(taken)


def prompt_of(key: str) -> str:
    """The prompt's own key in an answer's: what comes before recipe and seed."""
    return key.rsplit("|", 2)[0]


def short_hash(prompt: str) -> str:
    """Eight hexadecimal digits by which a predictor remembers the prompts it has seen."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


class SweepWriter:
    """A sweep's folder while it grows. One writer at a time."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """`facts` name drafter, target, sizes and the way of drafting; those of a folder that is
        continued must be the same, else StoreError.
        """
        self.folder = folder
        (folder / INPUTS).mkdir(parents=True, exist_ok=True)
        wanted: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **facts}))
        path = folder / MANIFEST
        if path.exists():
            found = _manifest(folder)
            for name in sorted(wanted.keys() | found.keys()):
                if found.get(name) != wanted.get(name):
                    raise StoreError(f"{path}: made with another {name}")
        else:
            path.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
        runs = list(_runs(folder))
        self.done = {(run.key, run.size) for run in runs}
        # A line that was cut short by a kill is written over.
        whole = "".join(_line(run) for run in runs)
        temporary = folder / (RUNS + ".partial")
        temporary.write_text(whole, encoding="utf-8")
        temporary.replace(folder / RUNS)
        self._file = (folder / RUNS).open("a", encoding="utf-8")

    def add(self, run: Run) -> None:
        """Keep a run; it is on disk when this returns."""
        if (run.key, run.size) in self.done:
            return
        self._file.write(_line(run))
        self._file.flush()
        self.done.add((run.key, run.size))

    def has_inputs(self, prompt: str) -> bool:
        """Whether the prompt's inputs are there."""
        return _inputs_file(self.folder, prompt).exists()

    def add_inputs(self, prompt: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep a prompt's inputs by kind, one row each: context and expected_embedding float32,
        logits (log-probabilities) float16.
        """
        path = _inputs_file(self.folder, prompt)
        temporary = path.with_name(path.name + ".partial")
        save_file({name: t.contiguous() for name, t in tensors.items()}, temporary)
        temporary.replace(path)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep as read: manifest and runs."""

    folder: Path
    facts: Mapping[str, Any]
    runs: tuple[Run, ...]

    @property
    def candidates(self) -> tuple[int, ...]:
        """The block sizes swept, rising."""
        return tuple(self.facts["candidates"])

    def inputs(self, prompt: str, kind: str) -> torch.Tensor:
        """The prompt's input, float32 [size]. Raises StoreError if the sweep did not keep it."""
        path = _inputs_file(self.folder, prompt)
        tensors = load_file(path) if path.exists() else {}
        if kind not in tensors:
            raise StoreError(f"{self.folder}: input {kind} was not kept for prompt {prompt}")
        return tensors[kind].float()


def read_sweep(folder: Path) -> Sweep:
    """A sweep's folder. Raises StoreError for one that cannot be used."""
    return Sweep(folder, _manifest(folder), tuple(_runs(folder)))


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: not readable ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise StoreError(f"{path}: not of format {FORMAT}")
    return content


def _runs(folder: Path) -> Iterator[Run]:
    path = folder / RUNS
    if not path.exists():
        return
    names = {field.name for field in fields(Run)}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            return
        try:
            row = json.loads(line)
            for name in ("steps", "everywhere"):
                row[name] = tuple((int(a), int(d)) for a, d in row.get(name, ()))
            yield Run(**{name: value for name, value in row.items() if name in names})
        except (ValueError, TypeError, KeyError):
            raise StoreError(f"{path}: line {number} is damaged") from None


def _line(run: Run) -> str:
    return json.dumps(asdict(run), separators=(",", ":")) + "\n"


def _inputs_file(folder: Path, prompt: str) -> Path:
    name = hashlib.sha256(prompt.encode()).hexdigest()[:24]
    return folder / INPUTS / f"{name}.safetensors"
