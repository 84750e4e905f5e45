"""The client stays light: what importing it pulls in."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "transformers", "triton", "draftwire_kernels", "rich", "opentelemetry"}


@pytest.mark.parametrize(
    "module", ["draftwire_client", "draftwire_client.cli", "draftwire_client.testing"]
)
def test_importing_the_client_pulls_in_nothing_heavy(module: str) -> None:
    code = f"import {module}, sys; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = set(done.stdout.split())
    assert "grpc" in loaded
    assert loaded & HEAVY == set()


def test_every_public_name_exists() -> None:
    import draftwire_client

    assert sorted(draftwire_client.__all__) == draftwire_client.__all__
    for name in draftwire_client.__all__:
        assert getattr(draftwire_client, name).__doc__
