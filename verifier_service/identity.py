"""What the target is, for the handshake and for GetInfo.

Knows: hashes of tokenizer, vocabulary and template. Does not know: drafters.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from draftwire.codec import element_type
from draftwire.v1 import types_pb2
from verifier_service.model import TargetHost, weights_digest


def sha256(text: str) -> str:
    """Hex SHA-256 of UTF-8 text."""
    return hashlib.sha256(text.encode()).hexdigest()


def model_identity(
    name: str, host: TargetHost, tokenizer: Any, max_context: int
) -> types_pb2.ModelIdentity:
    """The identity of a loaded target."""
    vocabulary = tokenizer.get_vocab()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(vocabulary, sort_keys=True)
    template = getattr(tokenizer, "chat_template", None) or ""
    return types_pb2.ModelIdentity(
        name=name,
        tokenizer_sha256=sha256(rules),
        vocabulary_sha256=sha256(json.dumps(sorted(vocabulary.items()))),
        template_sha256=sha256(template if isinstance(template, str) else json.dumps(template))
        if template
        else "",
        vocab_size=len(tokenizer),
        embedding_rows=host.embedding_rows,
        hidden_size=host.hidden_size,
        num_layers=host.num_layers,
        max_context=max_context,
        dtype=element_type(host.dtype),
        weights_sha256=weights_digest(host.model),
    )


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end an answer: of the generation configuration, the model's and the
    tokenizer's."""
    found: set[int] = set()
    for owner in (
        getattr(model, "generation_config", None),
        getattr(model, "config", None),
        tokenizer,
    ):
        value = getattr(owner, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    return frozenset(found)
