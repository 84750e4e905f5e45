"""The load tester against the real pair: counters, equality of arms, and a drafter that dies."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from draftwire_client.testing import LocalPair

from .conftest import run


@pytest.mark.timeout(400)  # three processes that import torch, one after the other
def test_the_pair_survives_the_death_of_its_drafter_under_load(tmp_path: Path) -> None:
    socket = f"unix:{tmp_path / 'drafter.sock'}"
    drafter = [sys.executable, "-m", "drafter_service", "--target", "random:tiny:0"]
    drafter += ["--random-weights-seed", "0", "--threads", "1", "--listen", socket]
    with LocalPair(drafters=0, verifier_options=["--drafters", socket]) as pair:
        ran = run(
            *("bench", "--target", pair.target, "--json", "--quiet", "--timeout", "120"),
            *("--arms", "plain,fixed:8", "--num-prompts", "12", "--output-len", "40"),
            *("--ignore-eos", "--max-concurrency", "4", "--drafter-command", shlex.join(drafter)),
            *("--fault", "drafter:kill@200ms", "--poll-interval", "0.05"),
        )
    assert ran.exit_code == 0, ran.output
    results = json.loads(ran.stdout)
    assert results["completed"] == 24
    assert results["total_output_tokens"] == 24 * 40
    fixed = results["arms"]["fixed:8"]
    assert (fixed["same_tokens"], fixed["different_tokens"]) == (12, 0)
    assert results["counters"]["agree"]
    assert results["counters"]["server"]["plain_rounds"] > 0
    assert "kill" in [event["name"] for event in results["events"]]
