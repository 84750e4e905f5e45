"""The command draftwire-verifier."""

from __future__ import annotations

import sys

from draftwire.runtime import run
from verifier_service.config import VerifierConfig
from verifier_service.service import VerifierService


def main() -> int:
    """Run the service until it is told to stop; the exit status."""
    return run(VerifierService, VerifierConfig, "draftwire-verifier")


if __name__ == "__main__":
    sys.exit(main())
