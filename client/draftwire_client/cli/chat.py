"""`draftwire chat`: a conversation through the target's chat template."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import click

from draftwire_client.cli import output
from draftwire_client.cli.failures import Failure, failure
from draftwire_client.cli.generate import show
from draftwire_client.cli.options import (
    connection_options,
    open_client,
    read_request_options,
    request_options,
)
from draftwire_client.cli.texts import checked, is_terminal, lines
from draftwire_client.errors import DraftwireError
from draftwire_client.types import ChatMessage, Result

_HELP = "/reset forgets the conversation, /exit or the end of input leaves, Ctrl-C stops an answer."

Ask = Callable[[list[ChatMessage]], Result]


@click.command()
@click.argument("message", required=False)
@click.option("--system", help="System message at the head of the conversation.")
@request_options
@click.option("--json", "as_json", is_flag=True, help="Print each result as one JSON object.")
@connection_options
def chat(message: str | None, system: str | None, as_json: bool, **options: Any) -> None:
    """Answer MESSAGE, or converse: each line of input is a message.

    After each answer its tokens/s and acceptance are shown on stderr.
    """
    head = [ChatMessage("system", checked(system))] if system is not None else []
    with open_client(options) as client:
        timeout = options.pop("timeout")
        request = read_request_options(options)

        def ask(messages: list[ChatMessage]) -> Result:
            answer = client.chat_stream(messages, timeout=timeout, **request)
            return show(answer, as_json=as_json, streamed=not as_json)

        if message is not None:
            ask([*head, ChatMessage("user", checked(message))])
        else:
            _converse(ask, head)


def _converse(ask: Ask, head: list[ChatMessage]) -> None:
    """Ask line by line. Typed input outlives a failed answer; piped input ends at it."""
    typed = is_terminal()
    if typed:
        output.note(_HELP)
    said: list[ChatMessage] = []
    for line in _typed() if typed else lines():
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                said.clear()
                continue
            case "/help":
                output.note(_HELP)
                continue
        turn = ChatMessage("user", line)
        try:
            result = ask([*head, *said, turn])
        except (DraftwireError, Failure) as error:
            if not typed:
                raise
            (failure(error) if isinstance(error, DraftwireError) else error).show()
        except KeyboardInterrupt:
            if not typed:
                raise
            output.note("\n[stopped]")
        else:
            said += [turn, ChatMessage("assistant", result.text)]


def _typed() -> Iterator[str]:
    # Importing readline gives `input` line editing and history, where Python has it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            yield checked(input("> "))
        except EOFError:
            output.note("")
            return
