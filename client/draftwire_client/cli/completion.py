"""`draftwire completion`: the script that teaches a shell to complete the command."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from draftwire_client.cli import output

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  eval "$(draftwire completion bash)"       in ~/.bashrc
    zsh:   eval "$(draftwire completion zsh)"        in ~/.zshrc, after compinit
    fish:  draftwire completion fish > ~/.config/fish/completions/draftwire.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(ctx.find_root().command, {}, "draftwire", "_DRAFTWIRE_COMPLETE")
    # Not `source()`: for bash that would ask the bash of this machine for its version.
    output.say(made.source_template % made.source_vars(), end="")
