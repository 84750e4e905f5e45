"""The command `draftwire`.

Knows its subcommands and how errors become exit codes. What they do is in a file each; those that
need more than the others are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from draftwire_client.cli import chat, generate, status
from draftwire_client.cli.failures import INTERRUPTED, failure
from draftwire_client.cli.options import check_environment
from draftwire_client.errors import DraftwireError

__all__ = ["app", "main"]

# Loaded when they are asked for: the others need not wait for what these import.
_LAZY = {
    "bench": "draftwire_client.bench.cli",
    "completion": "draftwire_client.cli.completion",
    "top": "draftwire_client.cli.top",
}


class _Application(click.Group):
    """A group whose errors become one line and a documented exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_LAZY])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _LAZY:
            command: click.Command = getattr(importlib.import_module(_LAZY[cmd_name]), cmd_name)
            return command
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            check_environment()
            return super().invoke(ctx)
        except DraftwireError as error:
            raise failure(error) from error
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Application, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="draftwire")
def app() -> None:
    """Text from a Draftwire verifier.

    \b
    Exit codes:
      0    done
      1    the request failed, or the server cut the answer short
      2    bad usage: options, variables, text that is not UTF-8
      3    no connection
      4    health: not serving
      5    bench: a --require does not hold
      130  interrupted; top ends with 0

    Connection options can also be set as DRAFTWIRE_CLIENT__NAME in the environment;
    DRAFTWIRE_TARGET, DRAFTWIRE_TOKEN and DRAFTWIRE_TLS_CA work too.
    """


for command in (generate.generate, chat.chat, status.health, status.info):
    app.add_command(command)


def main() -> None:
    """Run the command and exit with its code."""
    app.main(prog_name="draftwire")
