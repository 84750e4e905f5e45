"""Exit codes and the one line an error prints.

Knows which error is which code. Does not know commands.
"""

from __future__ import annotations

from typing import IO, Any

import click

from draftwire_client.errors import UNREACHABLE, DraftwireError, describe

NOT_SERVING = 4
INTERRUPTED = 130


class Failure(click.ClickException):
    """An error with its exit code; shown as one line on stderr."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(self.format_message(), file=file, err=file is None)


class RequestFailed(Failure):
    """The request failed, or its answer was cut short."""

    exit_code = 1


class BadUsage(Failure):
    """What was typed, or the environment, is wrong."""

    exit_code = 2


class NoConnection(Failure):
    """The server could not be reached."""

    exit_code = 3


def failure(error: DraftwireError) -> Failure:
    """The Failure of an error from a call."""
    kind = NoConnection if error.reason == UNREACHABLE else RequestFailed
    return kind(describe(error))
