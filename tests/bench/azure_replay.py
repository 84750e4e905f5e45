"""Replays an Azure LLM trace on the demo pair: three arms, and a drafter that is killed meanwhile.

The trace's gaps are scaled to a rate that this pair serves on a small machine, its lengths are
scaled and cut. Arms: plain, fixed blocks of 8, adaptive; the same prompts and seeds for all, so
their tokens must be the same. The drafter is started by the load tester, killed with SIGKILL and
started again; no request may fail. Writes results/azure_replay.json and .html.

The trace is a file of the Azure Public Dataset (AzureLLMInferenceTrace_conv.csv; Patel et
al., Splitwise, ISCA 2024), which is not part of this project.
"""

from __future__ import annotations

import argparse
import shlex
import socket
import sys
from pathlib import Path

from common import RESULTS, TARGET, end_on_sigterm, run_module, say

from draftwire_client.demo import drafter_arguments, service


def free_address() -> str:
    """A port that nobody listens on; the drafter comes back to the same one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def main() -> int:
    """The load tester's exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens")
    parser.add_argument("--arms", default="plain,fixed:8,adaptive")
    parser.add_argument("--num-prompts", default="40", help="rows of the trace, each for each arm")
    parser.add_argument("--request-rate", default="0.5", help="requests/s over all arms")
    parser.add_argument("--fault", default="drafter:kill@60s,restart@80s", help="'' for none")
    parser.add_argument("--numerics", default="invariant", choices=("invariant", "fast"))
    parser.add_argument("--seed", default="0")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("more", nargs="*", help="further flags of draftwire bench, after --")
    given = parser.parse_args()
    end_on_sigterm()
    arguments, trained = drafter_arguments()
    address = free_address()
    command = [sys.executable, "-m", *arguments, "--listen", address, "--log-level", "warning"]
    verify = ["verifier_service", "--model", TARGET, "--drafters", address]
    say("azure_replay: starting the verifier")
    with service([*verify, "--numerics", given.numerics], "the verifier") as verifier:
        bench = ["draftwire_client", "bench", "--target", verifier]
        bench += ["--dataset-name", "azure", "--dataset-path", str(given.trace)]
        bench += ["--num-prompts", given.num_prompts, "--request-rate", given.request_rate]
        # Means of 720 and 120 tokens in the first minute of the conversations.
        bench += ["--input-len-scale", "0.1", "--max-input-len", "96"]
        bench += ["--output-len-scale", "0.12", "--max-output-len", "24"]
        bench += ["--arms", given.arms, "--skip-refused-arms", "--seed", given.seed]
        bench += ["--drafter-command", shlex.join(command)]
        bench += ["--fault", given.fault] if given.fault else []
        bench += ["--goodput", "ttft:5000", "tpot:1000"]
        bench += ["--label", f"azure replay on the demo pair, {given.numerics} arithmetic"]
        bench += ["--metadata", f"trained_drafter={trained}"]
        bench += ["--save-result", "--result-dir", str(given.out), "--no-request-log"]
        bench += ["--result-filename", "azure_replay.json", *given.more]
        return run_module(*bench).returncode


if __name__ == "__main__":
    sys.exit(main())
