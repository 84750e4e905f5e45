"""The command `draftwire`.

Knows its subcommands and how errors become exit codes. What they do is in a file each.
"""

from __future__ import annotations

from typing import Any

import click

from draftwire_client.cli import chat, generate, status
from draftwire_client.cli.failures import INTERRUPTED, failure
from draftwire_client.cli.options import check_environment
from draftwire_client.errors import DraftwireError

__all__ = ["app", "main"]


class _Application(click.Group):
    """A group whose errors become one line and a documented exit code."""

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
      130  interrupted

    Connection options can also be set as DRAFTWIRE_CLIENT__NAME in the environment;
    DRAFTWIRE_TARGET, DRAFTWIRE_TOKEN and DRAFTWIRE_TLS_CA work too.
    """


for command in (generate.generate, chat.chat, status.health, status.info):
    app.add_command(command)


def main() -> None:
    """Run the command and exit with its code."""
    app.main(prog_name="draftwire")
