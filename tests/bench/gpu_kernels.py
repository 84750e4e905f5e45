"""The kernels on a GPU: agreement with the references, then bandwidth and time at production
shapes.

    python tests/bench/gpu_kernels.py [--out FILE]
    TRITON_INTERPRET=1 python tests/bench/gpu_kernels.py --dry-run

Knows the production cases (kernel_cases) and the host's references. Takes under four minutes, most
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
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "kernels")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from bench.kernel_cases import Case, Sizes, Step, acceptance_cases, attention_cases  # noqa: E402

from draftwire_kernels import (  # noqa: E402
    attention,
    attention_cpu,
    attention_triton,
    flash,
    noise,
    noise_triton,
    pages,
    pages_triton,
    rounds,
    sparse_triton,
    walk_triton,
)
from draftwire_kernels.accept import Rule, accept  # noqa: E402
from draftwire_kernels.accept_triton import accept_rows  # noqa: E402
from draftwire_kernels.draft_probs import DraftProbs  # noqa: E402
from draftwire_kernels.rows import normalise, target_scores  # noqa: E402
from draftwire_kernels.sampling import Sampling  # noqa: E402
from draftwire_kernels.tree import TokenTree  # noqa: E402
from draftwire_kernels.walk import draw, follow  # noqa: E402

TINY = Sizes(
    vocab=200, sessions=1, rows=2, keys=40, heads=2, kv_heads=1, head_dim=16, layers=1, top_k=5
)
SAMPLINGS = [
    Sampling(seed=2**64 - 7),
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, top_k=20, top_p=0.8, seed=3),
    Sampling(temperature=1.5, top_p=0.95, seed=4),
    Sampling(min_p=0.05, seed=5),
]


def say(text: str) -> None:
    """A line now, also when the output goes to a file."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# --- Agreement ------------------------------------------------------------------------------------


def a_round(
    samplings: list[Sampling], vocab: int, nodes: int, dtype: torch.dtype, seed: int
) -> tuple[list[torch.Tensor], list[TokenTree], list[int]]:
    """Logits [nodes + 1, V], a tree that is often right, and the first position, a session."""
    rng = np.random.default_rng(seed)
    logits, trees, positions = [], [], []
    for session, sampling in enumerate(samplings):
        rows = torch.from_numpy(rng.standard_normal((nodes + 1, vocab), dtype=np.float32) * 4)
        logits.append(rows.to(dtype))
        positions.append(int(rng.integers(1, 10_000)))
        parents = [int(rng.integers(max(-1, node - 3), node)) for node in range(nodes)]
        if session % 2:
            parents = list(range(-1, nodes - 1))
        depths = TokenTree((0,) * nodes, tuple(parents)).depths()
        tokens = []
        for parent, depth in zip(parents, depths, strict=True):
            here = positions[-1] + depth - 1
            scores = target_scores(logits[-1][parent + 1], sampling, position=here)
            right = draw(scores, sampling, here)
            tokens.append(right if rng.random() < 0.8 else int(rng.integers(vocab)))
        trees.append(TokenTree(tuple(tokens), tuple(parents)))
    return logits, trees, positions


def check_follow(device: str, samplings: list[Sampling], vocab: int, nodes: int) -> Iterator[str]:
    """follow_rows against walk.follow."""
    for dtype in (torch.bfloat16, torch.float32):
        logits, trees, positions = a_round(samplings, vocab, nodes, dtype, 1)
        packed = rounds.round_trees(trees, device)
        params = rounds.row_params(samplings, positions, packed.owner, packed.depth)
        device_logits = torch.cat(logits).to(device)
        got = walk_triton.follow_rows(device_logits, packed, params)
        again = walk_triton.follow_rows(device_logits, packed, params)
        if not torch.equal(got.token, again.token) or not torch.equal(got.logprob, again.logprob):
            yield f"follow {dtype}: two runs differ"
        for s, tree in enumerate(trees):
            want = follow(logits[s], tree, samplings[s], position=positions[s], want_logprobs=True)
            count = int(got.count[s])
            if got.token[s, :count].tolist() != list(want.tokens):
                yield f"follow {dtype} session {s}: {got.token[s].tolist()}, want {want.tokens}"
            elif not np.allclose(got.logprob[s, :count].tolist(), want.logprobs or (), atol=1e-4):
                yield f"follow {dtype} session {s}: log-probabilities differ"


def check_accept(device: str, samplings: list[Sampling], vocab: int, nodes: int) -> Iterator[str]:
    """accept_rows against accept.accept, sparse and dense, both rules."""
    rng = np.random.default_rng(2)
    logits, _, positions = a_round(samplings, vocab, nodes, torch.float32, 3)
    for dense in (False, True):
        tokens: list[list[int]] = []
        drafts = []
        for s, sampling in enumerate(samplings):
            laws = []
            for row in logits[s][:nodes]:
                law = np.exp(normalise(target_scores(row, sampling, position=0)).astype(np.float64))
                law = law**0.9 * np.exp(0.3 * rng.standard_normal(vocab))
                if not dense:
                    law[np.argsort(law)[:-8]] = 0
                laws.append(law / law.sum())
            tokens.append([int(rng.choice(vocab, p=law)) for law in laws])
            if dense:
                drafts.append(DraftProbs.dense(torch.from_numpy(np.array(laws))))
            else:
                ids = np.argsort(np.array(laws), axis=1)[:, -8:].copy()
                probs = np.take_along_axis(np.array(laws), ids, 1)
                drafts.append(DraftProbs.sparse(torch.from_numpy(ids), torch.from_numpy(probs)))
        packed = rounds.round_trees([TokenTree.chain(t) for t in tokens], device)
        params = rounds.row_params(samplings, positions, packed.owner, packed.depth)
        draft = rounds.draft_rows(drafts, packed, vocab)
        for rule in Rule:
            got = accept_rows(torch.cat(logits).to(device), packed, draft, params, rule)
            for s, sampling in enumerate(samplings):
                want = accept(
                    logits[s], tokens[s], drafts[s], sampling, rule=rule, position=positions[s]
                ).tokens
                found = got.token[s, : int(got.count[s])].tolist()
                if found != list(want):
                    yield f"{rule} dense={dense} session {s}: {found}, want {want}"


def check_noise_and_packing(device: str, vocab: int) -> Iterator[str]:
    """Noise of scattered tokens, and the order of packed rows."""
    seeds, positions = [5, 2**63 + 1], [9, 2**40]
    signed = torch.tensor([5, 2**63 + 1 - 2**64], device=device)
    ids = torch.randint(0, vocab, (2, 100), generator=torch.Generator().manual_seed(1))
    got = noise_triton.gumbel_at(
        signed, torch.tensor(positions, device=device), ids.to(device), noise.TARGET
    )
    want = noise.gumbel_rows(seeds, positions, ids)
    if not torch.allclose(got.cpu(), want, rtol=2e-6, atol=2e-6):
        yield f"noise differs by {float((got.cpu() - want).abs().max())}"
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(2)) * 4
    owner = torch.tensor([0, 1], dtype=torch.int32, device=device)
    samplings = [Sampling(seed=seed, temperature=0.8) for seed in seeds]
    params = rounds.row_params(samplings, positions, owner, owner * 0)
    packed = sparse_triton.pack_rows(logits.to(device), params, 16, noise.TARGET)
    for row, sampling in enumerate(samplings):
        scores = logits[row] / sampling.temperature
        kept = scores.topk(16).indices
        values = scores[kept] + noise.gumbel_at(seeds[row], positions[row], kept)
        order = kept[values.argsort(descending=True)]
        if packed.ids[row].tolist() != order.tolist():
            yield f"packing row {row}: {packed.ids[row].tolist()}, want {order.tolist()}"


def check_attention(device: str, sizes: Sizes) -> Iterator[str]:
    """Against fp32 on the host, and the bits of a row alone, in a batch, in a tree and when
    split."""
    torch.manual_seed(3)
    # Two keys short of a block's end, so that a path of five rows crosses it.
    block, page = attention.KEY_BLOCK, sizes.page
    base = sizes.keys // block * block + block - 2
    tree, on_path = (-1, 0, 0, 2, 2, 1, 3, 4, 6, 6), [0, 2, 3, 6, 9]
    pages_each = -(-(base + 16) // page)
    tables = torch.randperm(3 * pages_each).view(3, -1).int()
    shape = (3 * pages_each * page, sizes.kv_heads, sizes.head_dim)
    keys, values = torch.randn(2, *shape).to(sizes.dtype)
    query = torch.randn(len(on_path), sizes.heads, sizes.head_dim).to(sizes.dtype)

    def slots(positions: list[int]) -> torch.Tensor:
        where = torch.tensor(positions)
        return tables[0].long()[where // page] * page + where % page

    own = slots([base + i for i in range(len(on_path))])
    own_keys, own_values = keys[own].clone(), values[own].clone()

    def run(
        rows: torch.Tensor,
        plan_rows: list[int | tuple[int, ...]],
        bases: list[int],
        which: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        planned = attention.plan(tables[which].to(device), bases, plan_rows, page)
        inputs = (rows.to(device), keys.to(device), values.to(device), planned)
        whole = attention_triton.attend(*inputs, sizes.head_dim**-0.5, whole=True)
        split = attention_triton.attend(*inputs, sizes.head_dim**-0.5, whole=False)
        return whole.cpu(), split.cpu()

    chain, split = run(query, [len(on_path)], [base], [0])
    if not torch.equal(chain, split):
        yield "attention: split and whole differ"
    planned = attention.plan(tables[:1], [base], [len(on_path)], page)
    want = attention_cpu.attend(
        query.float(), keys.float(), values.float(), planned, sizes.head_dim**-0.5
    )
    error = float((chain.float() - want).abs().max())
    if not error < 2e-2:
        yield f"attention: off by {error}"
    for i in range(len(on_path)):
        alone, _ = run(query[i : i + 1], [1], [base + i], [0])
        if not torch.equal(alone[0], chain[i]):
            yield f"attention: row {i} alone has other bits"
    mixed = torch.randn(6 + len(on_path), sizes.heads, sizes.head_dim).to(sizes.dtype)
    mixed[2 : 2 + len(on_path)] = query
    batch, _ = run(mixed, [2, len(on_path), 4], [20, base, 3], [1, 0, 2])
    if not torch.equal(batch[2 : 2 + len(on_path)], chain):
        yield "attention: in a batch the bits are others"
    at = slots([base + row for row in on_path])
    keys[at], values[at] = own_keys, own_values
    wide = torch.randn(len(tree), sizes.heads, sizes.head_dim).to(sizes.dtype)
    wide[on_path] = query
    for branched in run(wide, [tree], [base], [0]):
        if not torch.equal(branched[on_path], chain):
            yield "attention: in a tree the bits are others"


def check_pages(device: str, sizes: Sizes) -> Iterator[str]:
    """Writes and compaction against plain indexing."""
    torch.manual_seed(4)
    rows = attention.row_parents([-1, -1, 0, 1, 2, 3])
    tables = torch.randperm(8).view(2, 4).int()
    shape = (2, 8 * sizes.page, sizes.kv_heads, sizes.head_dim)
    pools = torch.randn(shape).to(sizes.dtype)
    fresh = torch.randn(2 * len(rows), *shape[2:]).to(sizes.dtype)
    fresh[3, 0, 0] = torch.inf
    path = torch.tensor([[1, 3, 5], [0, 2, -1]], dtype=torch.int32)
    results = []
    for where, write, compact in (
        ("cpu", pages.write_rows, pages.compact_path),
        (device, pages_triton.write_rows, pages_triton.compact_path),
    ):
        planned = attention.plan(tables.to(where), [5, sizes.page - 2], [rows, rows], sizes.page)
        mine = pools.clone().to(where)
        write(fresh.to(where), fresh.to(where), mine[0], mine[1], planned.slots)
        compact(mine, planned, path.to(where))
        results.append(mine.cpu())
    if not torch.equal(results[0].nan_to_num(7.0), results[1].nan_to_num(7.0)):
        yield "pages: pools differ"


def failures(device: str, sizes: Sizes) -> list[str]:
    """Every disagreement with a reference."""
    # Interpreted, a row of a session takes a second.
    samplings, nodes = (SAMPLINGS, 7) if device == "cuda" else (SAMPLINGS[:3:2], 1)
    vocab = sizes.vocab
    found: list[str] = []
    for check in (
        check_noise_and_packing(device, vocab),
        check_follow(device, samplings, vocab, nodes),
        check_accept(device, samplings, min(vocab, 20_000), nodes),
        check_attention(device, sizes),
        check_pages(device, sizes),
    ):
        found += check
    return found


# --- Speed ----------------------------------------------------------------------------------------


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
    return {"copy_bytes_per_second": bandwidth, "cases": rows, "flash": against_flash(step)}


def against_flash(step: Step) -> dict[str, object]:
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
