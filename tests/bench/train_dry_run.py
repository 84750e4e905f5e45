"""From prompts to served tokens with the shapes of Qwen3-4B, random weights and a handful of data:
every command of the README's recipe for GPUs, here on the CPU.

The target has the real widths, heads and vocabulary and 2 of its 36 layers, so that a machine with
10 GB holds it; blocks, branches and objective are the recipe's. What comes out is nonsense; that
each command takes what the one before it made is the point.

    python tests/bench/train_dry_run.py --out tests/bench/results/train_dry_run.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from fakes import tiny_target

from draftwire import tether

FULL = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
SMALL = FULL | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}


def write_target(folder: Path, shapes: dict[str, Any], layers: int) -> None:
    """A Qwen3 with drawn weights and a tokenizer of bytes, as a Hugging Face folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tiny_target(folder)  # its tokenizer stays
    torch.manual_seed(0)
    config = Qwen3Config(**shapes, num_hidden_layers=layers, eos_token_id=257, bos_token_id=256)
    torch.set_default_dtype(torch.bfloat16)
    try:
        Qwen3ForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)


class Steps:
    """Runs the commands and keeps what each took."""

    def __init__(self, work: Path, threads: int) -> None:
        self.work = work
        self.done: list[dict[str, Any]] = []
        root = Path(__file__).parents[2]
        paths = [root, root / "protos", root / "kernels", root / "client", *sys.path]
        self.env = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(p) for p in paths if str(p)),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        """A service; returns when it says that it serves. Raises RuntimeError if it never does."""
        common.say("$ " + " ".join(words))
        began = time.monotonic()
        log = (self.work / f"{len(self.done)}.log").open("w")
        process = subprocess.Popen(
            tether.command(words[0], words[1:]), env=self.env, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("serving"):
                self._keep(words, began)
                return process
        raise RuntimeError(f"{words[0]} ended: {Path(log.name).read_text()[-2000:]}")

    def run(self, *words: str) -> str:
        """A command; its output. Raises RuntimeError if it fails."""
        common.say("$ " + " ".join(words))
        began = time.monotonic()
        result = common.run_module(
            *words, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(words)}: {result.stderr[-2000:]}")
        self._keep(words, began)
        return result.stdout

    def _keep(self, words: tuple[str, ...], began: float) -> None:
        text = " ".join(words).replace(str(self.work) + "/", "")
        self.done.append({"command": text, "seconds": round(time.monotonic() - began, 1)})


def dry_run(work: Path, shapes: dict[str, Any], *, layers: int, threads: int) -> dict[str, Any]:
    """All steps; the report. Raises RuntimeError naming the command that failed."""
    target, steps = work / "target", Steps(work, threads)
    write_target(target, shapes, layers)
    for name, count in (("prompts", 6), ("held-out", 2)):
        rows = [{"id": f"{name}/{i}", "turns": [f"{name} question {i}?"]} for i in range(count)]
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = "drafter_service.training"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    drawn = ("--recipes", "1:1:20:0.95", "--max-tokens", "24", "--sessions", "4")
    verifier = steps.start(
        "verifier_service", "--model", str(target), "--listen", address, "--max-context", "512"
    )
    try:
        for name, into in (("prompts", "answers"), ("held-out", "held-out-answers")):
            steps.run(
                train, "generate", "--verifier", address, "--target", str(target), "--prompts",
                str(work / f"{name}.jsonl"), "--out", str(work / into), *drawn,
            )  # fmt: skip
    finally:
        verifier.terminate()
        verifier.wait()
    for into in ("answers", "held-out-answers"):
        steps.run(
            train, "features", "--data", str(work / into), "--target", str(target),
            "--out", str(work / f"{into}-features"), "--count", "1",
        )  # fmt: skip
    features = str(work / "answers-features")
    common_words = (
        "--features", features, "--target", str(target), "--batch", "2", "--anchors", "4",
        "--validation", "0.2", "--validate-every", "2", "--save-every", "2",
    )  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = (
        "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1", "--master-addr",
        "127.0.0.1", "--master-port", port, "-m", train,
    )  # fmt: skip
    steps.run(
        *launch, "train", *common_words, "--out", str(work / "run"), "--layers", "1",
        "--block-size", "16", "--steps", "2", "--gamma", "7",
    )  # fmt: skip
    steps.run(
        *launch, "train", *common_words, "--out", str(work / "run-k4"), "--base",
        str(work / "run" / "last"), "--branches", "4", "--objective", "al", "--lr", "1e-4",
        "--block-size", "16", "--steps", "2",
    )  # fmt: skip
    steps.run(
        train, "export", "--run", str(work / "run-k4"), "--which", "last",
        "--out", str(work / "drafter"),
    )  # fmt: skip
    steps.run(
        train, "evaluate", "--features", str(work / "held-out-answers-features"),
        "--checkpoint", str(work / "drafter"), "--target", str(target),
        "--out", str(work / "offline.json"), "--budgets", "16", "--resamples", "20",
    )  # fmt: skip
    drafter = steps.start(
        "drafter_service", "--checkpoint", str(work / "drafter"), "--listen", "127.0.0.1:0"
    )
    drafter.terminate()
    drafter.wait()
    report = json.loads((work / "offline.json").read_text())
    return {
        "shapes": shapes,
        "target_layers": layers,
        "commands": steps.done,
        "modes_evaluated": len(report["results"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=common.RESULTS / "train_dry_run.json")
    parser.add_argument("--small", action="store_true", help="tiny shapes: minutes become seconds")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    common.end_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        report = dry_run(
            Path(folder), SMALL if args.small else FULL, layers=args.layers, threads=args.threads
        )
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    common.say(f"{len(report['commands'])} commands ran")


if __name__ == "__main__":
    main()
