"""Shells complete the command with the script it prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import run


@pytest.fixture
def command(tmp_path: Path) -> dict[str, str]:
    """An environment in which `draftwire` is this source's command."""
    script = tmp_path / "draftwire"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m draftwire_client "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_for_each_shell(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert f"_DRAFTWIRE_COMPLETE={shell}_complete" in result.stdout
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=result.stdout, text=True, timeout=60)
        assert checked.returncode == 0


def test_another_shell_is_bad_usage() -> None:
    assert run("completion", "csh").exit_code == 2


def test_bash_completes_commands_options_and_values(command: dict[str, str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    typed = {
        "draftwire to": "top",
        "draftwire generate --max-n": "--max-nodes",
        "draftwire generate --speculation f": "fixed",
    }
    program = 'eval "$(draftwire completion bash)"\n'
    for words in typed:
        program += (
            f"COMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; COMPREPLY=()\n"
            "_draftwire_completion draftwire\n"
            'echo "${COMPREPLY[@]}"\n'
        )
    done = subprocess.run(
        [bash, "--norc", "-c", program], capture_output=True, text=True, timeout=120, env=command
    )
    assert done.stdout.splitlines() == list(typed.values()), done.stderr


@pytest.mark.parametrize(
    ("shell", "expected"), [("zsh", ["plain", "generate"]), ("fish", ["plain,generate"])]
)
def test_the_command_answers_the_scripts_of_zsh_and_fish(
    command: dict[str, str], shell: str, expected: list[str]
) -> None:
    asking = {"zsh": {"COMP_CWORD": "1"}, "fish": {"COMP_CWORD": "g"}}[shell]
    environment = {
        **command,
        "_DRAFTWIRE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "draftwire g",
        **asking,
    }
    done = subprocess.run(
        ["draftwire"], capture_output=True, text=True, timeout=120, env=environment
    )
    lines = done.stdout.splitlines()
    assert [line.split("\t")[0] for line in lines[: len(expected)]] == expected, done
