"""Text in: prompts from the command line and stdin.

Knows that text has to be UTF-8 and says where it is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from draftwire_client.cli.failures import BadUsage
from draftwire_client.errors import InvalidArgument, describe


def read_prompt(argument: str | None) -> str:
    """The argument, or stdin without its last line's end if there is none or it is "-"."""
    if argument is not None and argument != "-":
        return checked(argument)
    stream = sys.stdin.buffer
    if argument is None and stream.isatty():
        raise click.UsageError("no prompt: give one, or pipe text to stdin")
    return _decode(stream.read(), 0).removesuffix("\n")


def lines() -> Iterator[str]:
    """Lines of a stdin that is not a terminal."""
    offset = 0
    for line in sys.stdin.buffer:
        yield _decode(line, offset).rstrip("\r\n")
        offset += len(line)


def checked(text: str) -> str:
    """`text`, unless the shell gave bytes that are not UTF-8; Python keeps those as surrogates."""
    if text.isprintable():
        return text
    return _decode(text.encode("utf-8", "surrogateescape"), 0, "the text")


def is_terminal() -> bool:
    """Whether somebody types."""
    return sys.stdin.isatty()


def _decode(data: bytes, offset: int, source: str = "stdin") -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        position = offset + error.start
        wrong = InvalidArgument(
            "prompt",
            f"byte 0x{data[error.start]:02x} at offset {position}",
            "valid UTF-8",
            f"{source} is not UTF-8",
            "INVALID_UTF8",
        )
        raise BadUsage(describe(wrong)) from None
