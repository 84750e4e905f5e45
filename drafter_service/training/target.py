"""The frozen target as training sees it: loaded once, with its tokenizer and identity.

The one place where the drafter's code uses the verifier's target host. Does not know data folders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drafter_service.training.prompts import Prompt
from draftwire.models import resolve, unpacked
from verifier_service import model as hosting
from verifier_service.identity import eos_ids, model_identity
from verifier_service.model import TargetHost


@dataclass(frozen=True, slots=True)
class Target:
    """Model, host, tokenizer and the facts that data and checkpoints remember of them."""

    host: TargetHost
    tokenizer: Any
    identity: dict[str, Any]
    eos_ids: frozenset[int]
    vocab_size: int

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt as a chat, up to where the answer begins; as plain text if the model has no
        chat template.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            return tuple(self.tokenizer(prompt.text)["input_ids"])
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
        )
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def load_target(
    name: str, *, device: str = "cpu", dtype: str = "float32", invariant: bool = True
) -> Target:
    """Load `name` (folder, hub id, .gguf file or package:NAME)."""
    source = unpacked(resolve(name))
    tokenizer = hosting.load_tokenizer(source)
    model = hosting.load_model(source, getattr(torch, dtype), device)
    host = TargetHost(model, invariant=invariant)
    message = model_identity(source.name, host, tokenizer, host.max_context)
    identity = {
        "name": message.name,
        "tokenizer_sha256": message.tokenizer_sha256,
        "vocabulary_sha256": message.vocabulary_sha256,
        "template_sha256": message.template_sha256,
        "weights_sha256": message.weights_sha256,
        "hidden_size": message.hidden_size,
        "num_layers": message.num_layers,
        "embedding_rows": message.embedding_rows,
    }
    vocab_size = min(len(tokenizer), host.embedding_rows)
    return Target(host, tokenizer, identity, eos_ids(model, tokenizer), vocab_size)
