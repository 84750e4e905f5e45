"""What every test can rely on: GPU tests skip themselves, the environment is as set here."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import pytest

# Before torch or grpc is imported, and for the processes that tests start.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
for name in [name for name in os.environ if name.startswith("DRAFTWIRE_")]:
    del os.environ[name]  # a developer's settings are not the tests'
# What a shell starts in the background ignores SIGINT, and so would what tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


with contextlib.suppress(ImportError):
    import hypothesis

    # A loaded machine is no reason to fail: pytest's own timeout bounds a test.
    hypothesis.settings.register_profile("unhurried", deadline=None)
    hypothesis.settings.load_profile("unhurried")


def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked gpu where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    """Results may depend on the number of threads: a test changes it for itself only."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    yield
    if torch and before and torch.get_num_threads() != before:
        torch.set_num_threads(before)
