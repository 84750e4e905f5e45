"""Arms: the ways of asking that one run compares.

Knows the text of an arm and the request options it becomes. Whether a server serves them is the
server's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwire_client.enums import AcceptanceRule, DraftPart, SpeculationMode
from draftwire_client.errors import InvalidArgument

_MODES = {
    "default": None,
    "plain": SpeculationMode.OFF,
    "fixed": SpeculationMode.FIXED,
    "predicted": SpeculationMode.PREDICTED,
    "adaptive": SpeculationMode.ADAPTIVE,
}
_FORM = f"{'|'.join(_MODES)}[:BLOCK][+nodes=N][+parts=A/B][+rule=RULE]"


@dataclass(frozen=True, slots=True)
class Arm:
    """A name and the request options it stands for."""

    name: str
    options: Mapping[str, Any]


def parse_arms(text: str) -> tuple[Arm, ...]:
    """Arms of a comma-separated list; the first is the baseline. Raises InvalidArgument.

    `plain` is no speculation, `fixed:8` blocks of 8 (anchor included), `adaptive` and `predicted`
    the server's policies, `default` whatever the server does when nothing is asked.
    `fixed:8+nodes=7` and `fixed+parts=ngram/rank_tree` narrow it.
    """
    arms = tuple(_arm(item.strip()) for item in text.split(","))
    names = [arm.name for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument("--arms", name, "each arm once")
    return arms


def _arm(text: str) -> Arm:
    head, *extras = text.split("+")
    mode, _, block = head.partition(":")
    if mode not in _MODES:
        raise InvalidArgument("--arms", text, _FORM)
    options: dict[str, Any] = {}
    if (chosen := _MODES[mode]) is not None:
        options["speculation"] = str(chosen)
    if block or ":" in head:
        options["max_block_size"] = _number(text, block)
    for extra in extras:
        key, _, value = extra.partition("=")
        if key == "nodes":
            options["max_nodes"] = _number(text, value)
        elif key == "parts":
            options["draft_parts"] = [_word(text, part, DraftPart) for part in value.split("/")]
        elif key == "rule":
            options["rule"] = _word(text, value, AcceptanceRule)
        else:
            raise InvalidArgument("--arms", text, _FORM)
    return Arm(text, options)


def _number(text: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) >= 1):
        raise InvalidArgument("--arms", text, f"{_FORM}, numbers at least 1")
    return int(value)


def _word(text: str, value: str, words: type[DraftPart | AcceptanceRule]) -> str:
    known = [str(word) for word in words if word != "unspecified"]
    if value not in known:
        raise InvalidArgument("--arms", text, f"{value!r} to be one of {', '.join(known)}")
    return value
