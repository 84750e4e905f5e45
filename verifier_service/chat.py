"""Messages of a conversation to token ids, through the model's chat template.

Knows: which variables a template may be given. Pure. Does not know: limits of a request.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftwire.errors import InvalidArgument
from draftwire.v1 import verifier_pb2

# What the tokenizer's method itself takes is no variable of a template; these two it hands on.
_NOT_FOR_TEMPLATES = frozenset(
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
) - {"tools", "documents", "kwargs"}


def chat_ids(chat: verifier_pb2.Chat, tokenizer: Any) -> list[int]:
    """Token ids of the messages with the head of the answer. Raises InvalidArgument for what the
    template, or JSON, does not take."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidArgument("chat", "chat", "text or token_ids: this model has no chat template")
    if not chat.messages:
        raise InvalidArgument("chat.messages", "", "at least one message")
    variables = {
        name: _variable(f"chat.template_variables[{name}]", value)
        for name, value in chat.template_variables.items()
    }
    for name in sorted(_NOT_FOR_TEMPLATES & variables.keys()):
        raise InvalidArgument(
            f"chat.template_variables[{name}]",
            name,
            "a variable of the template, not of the tokenizer",
        )
    messages = [{"role": m.role, "content": m.content} for m in chat.messages]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **variables
        )
        text.encode()  # JSON can name half of a surrogate pair, which no tokenizer takes
    except Exception as error:
        raise InvalidArgument(
            "chat", type(error).__name__, f"messages that the chat template accepts ({error})"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _variable(field: str, value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidArgument(field, value, "a JSON value") from None
