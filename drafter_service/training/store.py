"""Answers on disk: a journal that survives being killed, packed into safetensors shards.

Knows the layout of a data folder: `manifest.json`, `shard-NNNNN.safetensors` and `open.jsonl`, the
answers that no shard holds yet. Does not know how answers are made or used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from drafter_service.training.errors import TrainingError

FORMAT = "draftwire-data/1"
MANIFEST = "manifest.json"
JOURNAL = "open.jsonl"


class StoreError(TrainingError):
    """A data folder that cannot be used: says which file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Response:
    """One answer of the target. `logprobs` are natural, one for each answer token, under the
    sampling settings it was drawn with (at temperature 0: under the plain softmax).
    """

    key: str
    source: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    finished: bool

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + self.answer


class DataStore:
    """A data folder. One writer at a time; readers may come when no writer runs."""

    def __init__(self, folder: Path, target: Mapping[str, Any], *, shard_size: int = 256) -> None:
        """Open or make `folder`. `target` identifies the model; answers of another target are
        refused with StoreError.
        """
        self.folder = folder
        self.shard_size = shard_size
        folder.mkdir(parents=True, exist_ok=True)
        self.manifest = _read_manifest(folder) or {
            "format": FORMAT,
            "target": dict(target),
            "shards": [],
        }
        if self.manifest["target"] != dict(target):
            raise StoreError(f"{folder / MANIFEST}: answers of another target are kept there")
        self._open = _read_journal(folder / JOURNAL)
        packed = {key for shard in self.manifest["shards"] for key in shard["keys"]}
        # Killed between writing a shard and emptying the journal: the shard counts.
        self._open = [r for r in self._open if r.key not in packed]
        self.keys = packed | {r.key for r in self._open}
        _rewrite_journal(folder / JOURNAL, self._open)
        self._journal = (folder / JOURNAL).open("a", encoding="utf-8")
        if not (folder / MANIFEST).exists():
            self._write_manifest()

    @property
    def answer_tokens(self) -> int:
        """Answer tokens kept so far."""
        packed = sum(int(shard["answer_tokens"]) for shard in self.manifest["shards"])
        return packed + sum(len(r.answer) for r in self._open)

    def add(self, response: Response) -> bool:
        """Keep an answer; False if its key is there already. It is on disk when this returns."""
        if response.key in self.keys:
            return False
        self._journal.write(json.dumps(asdict(response)) + "\n")
        self._journal.flush()
        self.keys.add(response.key)
        self._open.append(response)
        if len(self._open) >= self.shard_size:
            self.pack()
        return True

    def pack(self) -> None:
        """Write the open answers into a shard."""
        if not self._open:
            return
        name = f"shard-{len(self.manifest['shards']):05d}.safetensors"
        temporary = self.folder / (name + ".partial")
        _write_shard(temporary, self._open)
        digest = hashlib.sha256(temporary.read_bytes()).hexdigest()
        temporary.replace(self.folder / name)
        self.manifest["shards"].append(
            {
                "file": name,
                "sha256": digest,
                "responses": len(self._open),
                "prompt_tokens": sum(len(r.prompt) for r in self._open),
                "answer_tokens": sum(len(r.answer) for r in self._open),
                "keys": [r.key for r in self._open],
            }
        )
        self._write_manifest()
        self._open = []
        self._journal.close()
        _rewrite_journal(self.folder / JOURNAL, [])
        self._journal = (self.folder / JOURNAL).open("a", encoding="utf-8")

    def close(self) -> None:
        """Let go of the journal; open answers stay in it."""
        self._journal.close()

    def _write_manifest(self) -> None:
        _replace(self.folder / MANIFEST, json.dumps(self.manifest, indent=1, sort_keys=True))


def read_responses(folder: Path) -> Iterator[Response]:
    """All answers of a folder, shards first. Raises StoreError for a damaged shard."""
    manifest = _read_manifest(folder)
    if manifest is None:
        raise StoreError(f"{folder / MANIFEST}: missing")
    seen: set[str] = set()
    for shard in manifest["shards"]:
        path = folder / shard["file"]
        if hashlib.sha256(path.read_bytes()).hexdigest() != shard["sha256"]:
            raise StoreError(f"{path}: not the file that the manifest describes")
        seen.update(shard["keys"])
        yield from _read_shard(path)
    for response in _read_journal(folder / JOURNAL):
        if response.key not in seen:
            yield response


def read_target(folder: Path) -> dict[str, Any]:
    """The identity of the target whose answers a folder holds."""
    manifest = _read_manifest(folder)
    if manifest is None:
        raise StoreError(f"{folder / MANIFEST}: missing")
    return dict(manifest["target"])


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise StoreError(f"{path}: not JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise StoreError(f"{path}: not of format {FORMAT}")
    return content


def _read_journal(path: Path) -> list[Response]:
    """The whole lines of a journal; a last line that was cut short is dropped."""
    if not path.exists():
        return []
    responses = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            for name in ("prompt", "answer", "logprobs"):
                row[name] = tuple(row[name])
            responses.append(Response(**row))
        except (ValueError, TypeError, KeyError):
            raise StoreError(f"{path}: line {number} is damaged") from None
    return responses


def _rewrite_journal(path: Path, responses: list[Response]) -> None:
    _replace(path, "".join(json.dumps(asdict(r)) + "\n" for r in responses))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _write_shard(path: Path, responses: list[Response]) -> None:
    lengths = [len(r.tokens) for r in responses]
    tensors = {
        "tokens": torch.tensor([t for r in responses for t in r.tokens], dtype=torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "prompt_lengths": torch.tensor([len(r.prompt) for r in responses], dtype=torch.int64),
        "logprobs": torch.tensor([p for r in responses for p in r.logprobs], dtype=torch.float32),
        "temperature": torch.tensor([r.temperature for r in responses], dtype=torch.float64),
        "top_k": torch.tensor([r.top_k for r in responses], dtype=torch.int64),
        "top_p": torch.tensor([r.top_p for r in responses], dtype=torch.float64),
        "seed": torch.tensor([r.seed for r in responses], dtype=torch.int64),
        "finished": torch.tensor([r.finished for r in responses], dtype=torch.bool),
    }
    names = {
        "keys": json.dumps([r.key for r in responses]),
        "sources": json.dumps([r.source for r in responses]),
    }
    save_file(tensors, path, metadata=names)


def _read_shard(path: Path) -> Iterator[Response]:
    with safe_open(path, framework="pt") as file:
        names = file.metadata()
        columns = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
    keys, sources = json.loads(names["keys"]), json.loads(names["sources"])
    token, logprob = 0, 0
    for index, key in enumerate(keys):
        prompt_end = token + columns["prompt_lengths"][index]
        end = token + columns["lengths"][index]
        answer = tuple(columns["tokens"][prompt_end:end])
        yield Response(
            key=key,
            source=sources[index],
            prompt=tuple(columns["tokens"][token:prompt_end]),
            answer=answer,
            logprobs=tuple(columns["logprobs"][logprob : logprob + len(answer)]),
            temperature=columns["temperature"][index],
            top_k=columns["top_k"][index],
            top_p=columns["top_p"][index],
            seed=columns["seed"][index],
            finished=columns["finished"][index],
        )
        token, logprob = end, logprob + len(answer)
