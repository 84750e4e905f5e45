"""What one setting is: its type, bounds and text form.

Knows how a dataclass field becomes an option and how text becomes its value. Does not know where
the text came from.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

PREFIX = "DRAFTWIRE_"
SECRET = "***"  # shown instead of a secret
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_NAMES = {str: "text", int: "an integer", float: "a number", bool: "true or false", Path: "a path"}


class ConfigError(Exception):
    """A setting is wrong: names the field, what is allowed, and the value found."""

    def __init__(self, field: str, value: object, limit: object) -> None:
        self.field = field
        self.value = str(value)
        self.limit = str(limit)
        super().__init__(f"{field}: {self.value!r} is refused; it must be {limit}")


def setting(
    default: Any = ...,
    *,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field with what the loader needs; without a default the setting is required."""
    metadata = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": tuple(choices) if choices else None,
        "secret": secret,
    }
    if default is ...:
        return dataclasses.field(metadata=metadata, kw_only=True)
    return dataclasses.field(default=default, metadata=metadata, kw_only=True)


@dataclass(frozen=True, slots=True)
class Option:
    """One setting, its type taken apart."""

    name: str
    kind: type
    optional: bool
    choices: tuple[str, ...] | None
    field: dataclasses.Field[Any]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def required(self) -> bool:
        return self.field.default is dataclasses.MISSING and (
            self.field.default_factory is dataclasses.MISSING
        )

    @property
    def default(self) -> Any:
        if self.field.default_factory is not dataclasses.MISSING:
            return self.field.default_factory()
        return self.field.default

    def about(self, key: str) -> Any:
        return self.field.metadata.get(key)


def options_of(cls: type) -> dict[str, Option]:
    hints = typing.get_type_hints(cls)
    return {
        field.name: _option(field, hints[field.name])
        for field in dataclasses.fields(cls)
        if field.init
    }


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    optional = False
    if typing.get_origin(hint) in (Union, types.UnionType):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        optional = len(parts) < len(typing.get_args(hint))
        if len(parts) != 1:
            raise TypeError(f"{field.name}: {hint} has more than one type")
        hint = parts[0]
    choices = field.metadata.get("choices")
    if typing.get_origin(hint) is Literal:
        choices = tuple(str(choice) for choice in typing.get_args(hint))
        hint = str
    elif typing.get_origin(hint) is tuple:
        if typing.get_args(hint) != (str, ...):
            raise TypeError(f"{field.name}: only tuple[str, ...] can be loaded")
        hint = tuple
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        choices = tuple(str(member.value) for member in hint)
    elif hint not in (str, int, float, bool, Path):
        raise TypeError(f"{field.name}: {hint} cannot be loaded")
    return Option(field.name, hint, optional, choices, field)


def shown(option: Option, value: Any) -> str:
    if value is None:
        return ""
    if option.about("secret"):
        return SECRET
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    return ",".join(value) if isinstance(value, tuple) else str(value)


def wanted(option: Option) -> str:
    if option.choices:
        return "one of " + ", ".join(option.choices)
    return _NAMES.get(option.kind, "a list of words")


def parse(option: Option, where: str, text: str) -> Any:
    """Text to the option's type. Raises ConfigError naming `where` it came from."""
    seen = SECRET if option.about("secret") else text
    if option.optional and text == "":
        return None
    value: Any = None
    if "\0" in text or any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ConfigError(where, ascii(seen), "valid text without NUL")
    if option.kind is bool:
        value = True if text.lower() in _TRUE else False if text.lower() in _FALSE else None
    elif option.kind is int:
        value = int(text) if _INTEGER.fullmatch(text) else None
    elif option.kind is float:
        try:
            value = float(text)
        except ValueError:
            value = None
    elif option.kind is tuple:
        value = tuple(part.strip() for part in text.split(",") if part.strip())
    elif issubclass(option.kind, enum.Enum):
        value = next((member for member in option.kind if str(member.value) == text), None)
    else:
        value = Path(text).expanduser() if option.kind is Path and text else text or None
    if value is None:
        raise ConfigError(where, seen, wanted(option))
    check_bounds(option, where, value)
    return value


def check_bounds(option: Option, where: str, value: Any) -> None:
    if value is None:
        if not option.optional:
            raise ConfigError(where, "", wanted(option))
        return
    seen = SECRET if option.about("secret") else value
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(where, seen, "a finite number")
    if option.choices and not isinstance(value, enum.Enum):
        for item in value if isinstance(value, tuple) else (value,):
            if str(item) not in option.choices:
                raise ConfigError(where, seen, wanted(option))
    minimum, maximum = option.about("minimum"), option.about("maximum")
    if minimum is not None and value < minimum:
        raise ConfigError(where, seen, f"at least {minimum}")
    if maximum is not None and value > maximum:
        raise ConfigError(where, seen, f"at most {maximum}")
