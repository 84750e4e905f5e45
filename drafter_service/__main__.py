"""The command draftwire-drafter."""

from __future__ import annotations

import sys

from drafter_service.config import Config
from drafter_service.service import DrafterService
from draftwire.runtime import run


def main() -> int:
    """Serve until told to stop; returns the exit status."""
    return run(DrafterService, Config, "draftwire-drafter")


if __name__ == "__main__":
    sys.exit(main())
