"""The kernels on a GPU: agreement with the references, then bandwidth and time at production
shapes.

    python tests/bench/gpu_kernels.py [--out FILE]
    TRITON_INTERPRET=1 python tests/bench/gpu_kernels.py --dry-run

Knows the production cases (kernel_cases); agreement is gpu_checks'. Takes under four minutes, most
of them compilation. Without a CUDA device it says so and ends well; --dry-run takes the same way
through the code on the CPU at tiny sizes, so that a machine with a GPU never meets it for the first
time.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "kernels")]

import torch  # noqa: E402
from bench.gpu_checks import failures  # noqa: E402
from bench.kernel_cases import Case, Sizes, Step, acceptance_cases, attention_cases  # noqa: E402

from draftwire_kernels import attention_triton, flash, walk_triton  # noqa: E402

TINY = Sizes(
    vocab=200, sessions=1, rows=2, keys=40, heads=2, kv_heads=1, head_dim=16, layers=1, top_k=5
)


def say(text: str) -> None:
    """A line now, also when the output goes to a file."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def timed(call: Callable[[], object], device: str) -> float:
    """Median microseconds of a call: replays of a CUDA graph, so that the host is not in it."""
    if device != "cuda":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e6
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return replayed(graph)


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Median microseconds of a graph's replay over 30 runs."""
    times = []
    for _ in range(35):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[5:])


def copy_bandwidth(device: str) -> float:
    """Bytes a second of a large device-to-device copy, read plus written."""
    size = 2**30 if device == "cuda" else 2**12
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (timed(lambda: target.copy_(source), device) * 1e-6)


def speed(device: str, sizes: Sizes) -> dict[str, object]:
    """Time and share of copy bandwidth of every case, and of whole steps."""
    bandwidth = copy_bandwidth(device)
    say(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    step = Step(sizes, device, seed=7)
    rows: list[dict[str, object]] = []

    def measure(case: Case) -> None:
        moved, took = sum(case.kernels.values()), timed(case.call, device)
        share = moved / (took * 1e-6) / bandwidth
        rows.append({"case": case.name, "us": took, "bytes": moved, "share": share})
        say(f"{case.name:45s} {took:9.1f} us  {moved / 1e6:9.1f} MB  {share:5.0%} of copy")

    statistics_only = Case(
        "statistics pass",
        lambda: walk_triton.statistics(step.logits, step.sampled),
        {"all": step.total_rows * sizes.vocab * sizes.dtype.itemsize * 65 // 64},
    )
    for params, name in ((step.sampled, "no filter"), (step.filtered, "top-k 20, top-p 0.95")):
        measure(
            Case(
                f"whole acceptance step, {name}",
                lambda p=params: walk_triton.follow_rows(step.logits, step.trees, p),
                statistics_only.kernels,
            )
        )
    measure(statistics_only)
    for case in acceptance_cases(step):
        if not case.name.startswith("follow"):
            moved = {**case.kernels, "statistics": sum(statistics_only.kernels.values())}
            measure(dataclasses.replace(case, kernels=moved))
    del step.logits
    for case in attention_cases(step):
        measure(case)
    figures: dict[str, Any] = {
        "copy_bytes_per_second": bandwidth,
        "cases": rows,
        "flash": against_flash(step),
        "sdpa": against_sdpa(step),
    }
    return {**figures, "aims": aims(figures)}


def aims(figures: dict[str, Any]) -> list[dict[str, object]]:
    """What was aimed at, what was found, and whether that is met; None where nothing was found."""
    case = {row["case"]: row for row in figures["cases"]}
    plain = case["whole acceptance step, no filter"]["us"]
    filtered = case["whole acceptance step, top-k 20, top-p 0.95"]["us"]
    other = figures["flash"] if figures["flash"].get("theirs_us") else figures["sdpa"]
    ratio = other["ours_us"] / other["theirs_us"] if other.get("theirs_us") else None
    found = [
        ("statistics pass, share of copy bandwidth", ">=", 0.8, case["statistics pass"]["share"]),
        ("whole acceptance step, no filter, us", "<=", 60.0, plain),
        ("whole acceptance step, top-k 20, top-p 0.95, us", "<=", 60.0, filtered),
        (f"chain attention against {other.get('backend')}", "<=", 1.3, ratio),
    ]
    lines = []
    for name, relation, aim, value in found:
        met = None if value is None else value >= aim if relation == ">=" else value <= aim
        lines.append({"aim": name, "relation": relation, "limit": aim, "found": value, "met": met})
        say(f"{name}: {value} ({relation} {aim}: {'met' if met else 'not met'})")
    return lines


def against_flash(step: Step) -> dict[str, Any]:
    """Our chain attention beside flash-attn's over the same pages."""
    module = flash.backend()
    if module is None:
        say("flash-attn: neither version can be imported, nothing to compare with")
        return {"backend": None}
    page = step.sizes.page if module.__name__ == "flash_attn_interface" else flash.FA2_PAGE
    other = Step(dataclasses.replace(step.sizes, page=page, vocab=64), step.device, seed=8)
    query, keys, values, planned = other.attention(tree=False)
    scale = step.sizes.head_dim**-0.5
    if not flash.takes(query, planned):
        return {"backend": module.__name__, "taken": False}
    ours = attention_triton.attend(query, keys, values, planned, scale)
    theirs = flash.attend(query, keys, values, planned, scale)
    error = float((ours.float() - theirs.float()).abs().max())
    took = timed(lambda: attention_triton.attend(query, keys, values, planned, scale), step.device)
    their = timed(lambda: flash.attend(query, keys, values, planned, scale), step.device)
    say(f"attention {took:.1f} us, {module.__name__} {their:.1f} us, ratio {took / their:.2f}")
    return {"backend": module.__name__, "ours_us": took, "theirs_us": their, "error": error}


def against_sdpa(step: Step) -> dict[str, Any]:
    """Our chain attention beside torch's quickest over the same keys without pages: the measure
    where flash-attn is not installed."""
    sizes = step.sizes
    query, keys, values, planned = step.attention(tree=False)
    scale, count = sizes.head_dim**-0.5, sizes.sessions
    long = sizes.keys + sizes.rows

    def dense(pool: torch.Tensor) -> torch.Tensor:
        slots = planned.page_tables.long()[:, :, None] * sizes.page
        slots = (slots + torch.arange(sizes.page, device=pool.device)).reshape(count, -1)[:, :long]
        return pool[slots].transpose(1, 2).contiguous()

    k, v = dense(keys), dense(values)
    q = query.view(count, sizes.rows, sizes.heads, sizes.head_dim).transpose(1, 2).contiguous()
    seen = torch.ones(sizes.rows, long, dtype=torch.bool, device=q.device).tril(sizes.keys)

    def theirs() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=True
        )

    def ours() -> torch.Tensor:
        return attention_triton.attend(query, keys, values, planned, scale)

    took, their = timed(ours, step.device), timed(theirs, step.device)
    mixed = theirs().transpose(1, 2).reshape(query.shape)
    error = float((ours().float() - mixed.float()).abs().max())
    say(f"attention {took:.1f} us, SDPA {their:.1f} us, ratio {took / their:.2f}, error {error}")
    return {"backend": "SDPA", "ours_us": took, "theirs_us": their, "error": error}


def main(arguments: list[str] | None = None) -> int:
    """0 if the kernels agree or there is nothing to run them on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, interpreted")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        say("no CUDA device: nothing checked, nothing measured")
        return 0
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        say("--dry-run needs TRITON_INTERPRET=1 in the environment")
        return 2
    device, sizes = ("cpu", TINY) if options.dry_run else ("cuda", Sizes())
    started = time.perf_counter()
    found = failures(device, sizes)
    for line in found:
        say("DISAGREES " + line)
    say(f"{len(found)} disagreements after {time.perf_counter() - started:.0f} s")
    result = {
        "device": "interpreter" if options.dry_run else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "disagreements": found,
        **speed(device, sizes),
        "seconds": time.perf_counter() - started,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
