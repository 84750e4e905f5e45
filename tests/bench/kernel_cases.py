"""The kernels' production shapes: what is launched, and the bytes each launch must move.

Knows launch functions and sizes. Knows neither compiler nor clock: sm90.py compiles these cases,
and gpu_kernels.py runs them where there is a GPU. On the host the tensors are never touched, so
that the case of 32 sessions x 16 rows x 151,936 tokens costs address space and no memory.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch

from draftwire_kernels import (
    accept_triton,
    attention,
    attention_triton,
    edits_triton,
    noise,
    pages_triton,
    race_triton,
    rounds,
    sparse_triton,
    stats_triton,
    walk_triton,
)
from draftwire_kernels.accept import Rule
from draftwire_kernels.edits import round_edits
from draftwire_kernels.sampling import History, Sampling
from draftwire_kernels.tree import TokenTree

H100_BYTES_PER_SECOND = 3.35e12


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One production step."""

    vocab: int = 151_936
    sessions: int = 32
    rows: int = 16
    """Rows a session, the anchor's included."""
    keys: int = 4096
    """Context of each session."""
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 16
    layers: int = 36
    branches: int = 4
    """Entries of sparse draft_probs: K of the branch mixture."""
    top_k: int = 20
    dtype: torch.dtype = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a launch function and the bytes that its kernels must move through memory."""

    name: str
    call: Callable[[], object]
    kernels: dict[str, int]
    """Kernel -> bytes it must read and write at least once."""
    note: str = ""


class Step:
    """The inputs of one step at some sizes, on a device."""

    def __init__(self, sizes: Sizes, device: str = "cpu", *, seed: int | None = None) -> None:
        """Inputs are left as memory has them, or drawn with `seed`."""
        self.sizes = sizes
        self.device = device
        self.generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        count, n = sizes.sessions, sizes.rows
        self.trees = rounds.round_trees([TokenTree.chain(range(n - 1))] * count, device)
        self.sampled = self.params(Sampling(seed=1))
        self.filtered = self.params(Sampling(seed=1, top_k=sizes.top_k, top_p=0.95))
        self.total_rows = count * n
        self.logits = self.random(self.total_rows, sizes.vocab) * (3 if seed is not None else 1)
        self.stats = stats_triton.RowStats(
            self.empty(self.total_rows, -(-sizes.vocab // 1024) * 16),
            self.empty(self.total_rows, -(-sizes.vocab // stats_triton.SPAN), dtype=torch.float32),
            self.empty(self.total_rows, -(-sizes.vocab // stats_triton.SPAN), dtype=torch.float32),
        )

    def params(self, sampling: Sampling) -> rounds.RowParams:
        """Every session drawing alike."""
        count = self.sizes.sessions
        return rounds.row_params(
            [sampling] * count, [self.sizes.keys] * count, self.trees.owner, self.trees.depth
        )

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory as it is."""
        return torch.empty(shape, dtype=dtype or self.sizes.dtype, device=self.device)

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers, or memory as it is without a seed."""
        if self.generator is None:
            return self.empty(*shape)
        return torch.randn(
            shape, generator=self.generator, device=self.device, dtype=self.sizes.dtype
        )

    def tree(self) -> tuple[int, ...]:
        """Parents of the rows of a tree: a chain of half the nodes, the others beside it."""
        nodes = self.sizes.rows - 1
        chain = max(1, nodes // 2)
        return attention.row_parents(
            [*range(-1, chain - 1), *(i % chain for i in range(nodes - chain))]
        )

    def attention(
        self, *, tree: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, attention.AttentionPlan]:
        """Query, pools and plan of one layer."""
        s = self.sizes
        pages = -(-(s.keys + s.rows) // s.page)
        tables = torch.randperm(s.sessions * pages).view(s.sessions, pages).int().to(self.device)
        shape: int | tuple[int, ...] = self.tree() if tree else s.rows
        planned = attention.plan(tables, [s.keys] * s.sessions, [shape] * s.sessions, s.page)
        pool = (s.sessions * pages * s.page, s.kv_heads, s.head_dim)
        query = self.random(self.total_rows, s.heads, s.head_dim)
        return query, self.random(*pool), self.random(*pool), planned


def acceptance_cases(step: Step) -> list[Case]:
    """Everything between logits and committed tokens."""
    s, rows = step.sizes, step.total_rows
    item = s.dtype.itemsize
    logits, maxima = rows * s.vocab * item, rows * -(-s.vocab // 1024) * 16 * item
    opened = rows * race_triton.OPEN * 64 * item
    near = rows * s.top_k * 64 * item
    once = s.sessions * (s.vocab // 64 + race_triton.OPEN * 64) * item
    sparse = rounds.DraftRows(
        step.empty(rows, s.branches, dtype=torch.int32),
        step.empty(rows, s.branches, dtype=torch.float32),
    )
    dense = rounds.DraftRows(None, step.empty(rows, s.vocab, dtype=torch.float32))

    def rule(draft: rounds.DraftRows, which: Rule) -> Callable[[], object]:
        return lambda: accept_triton.accept_rows(
            step.logits, step.trees, draft, step.filtered, which
        )

    cases = [
        Case(
            "follow, filtered",
            lambda: walk_triton.follow_rows(step.logits, step.trees, step.filtered),
            {
                "_statistics_kernel": logits + maxima,
                "_filter_kernel": maxima + near,
                "_draw_kernel": maxima + near,
                "_walk_kernel": rows * 20 + s.sessions * s.rows * 12,
            },
        ),
        Case(
            "follow, no filter",
            lambda: race_triton.draw_rows(step.logits, step.stats, step.sampled),
            {"_draw_kernel": maxima + opened},
        ),
    ]
    for name, draft, width in (("sparse", sparse, 0), ("dense", dense, s.vocab * 4)):
        entries = rows * s.branches * 8 if not width else rows * 32
        cases += [
            Case(
                f"chain, {name}",
                rule(draft, Rule.CHAIN),
                {
                    "_judge_kernel": entries + rows * 64,
                    "_decide_kernel": rows * 20,
                    "_resample_kernel": once
                    + (s.sessions * race_triton.OPEN * 256 if width else 0),
                },
            ),
            Case(
                f"block, {name}",
                rule(draft, Rule.BLOCK),
                {
                    "_joint_kernel": rows * 12,
                    "_mass_kernel": logits + rows * width,
                    "_decide_kernel": rows * 20 + entries,
                },
            ),
        ]
    seen = 512
    counted = [Sampling(repetition_penalty=1.1, presence_penalty=0.1)] * s.sessions
    shared = History(s.vocab, range(min(seen, s.vocab)))
    tables = round_edits(
        counted, [shared] * s.sessions, [TokenTree()] * s.sessions, s.vocab, step.device
    )
    edited = step.empty(rows, s.vocab, dtype=torch.float32)
    cases.append(
        Case(
            f"logit edits, {tables.longest} tokens seen",
            functools.partial(edits_triton.edit_rows, edited, step.trees, step.sampled, tables),
            # A logit alone in its sector of 32 bytes.
            {"_edit_kernel": rows * tables.longest * 64 + s.sessions * tables.longest * 16},
        )
    )
    cases.append(
        Case(
            "sparse packing, 64 entries",
            lambda: sparse_triton.pack_rows(step.logits, step.sampled, 64, noise.TARGET),
            {
                "_pack_kernel": maxima + rows * 64 * (64 * item + 12),
                "_order_kernel": rows * 64 * 24,
            },
        )
    )
    return cases


def attention_cases(step: Step) -> list[Case]:
    """One layer's attention and KV traffic."""
    s, item = step.sizes, step.sizes.dtype.itemsize
    query = step.total_rows * s.heads * s.head_dim * item
    context = s.sessions * (s.keys + s.rows) * s.kv_heads * s.head_dim * item * 2
    chunks = -(-(s.keys + s.rows) // attention.KEY_CHUNK)
    partial = chunks * step.total_rows * s.heads * (s.head_dim + 2) * 4
    row = s.kv_heads * s.head_dim * item
    cases = []
    for kind in ("chain", "tree"):
        inputs = step.attention(tree=kind == "tree")
        for whole in (True, False):
            kernels = {"_attend_kernel": context + query + (query if whole else partial)}
            if not whole:
                kernels["_fold_kernel"] = partial + query
            cases.append(
                Case(
                    f"attention, {kind}, one program a {'tile' if whole else 'chunk'}",
                    functools.partial(
                        attention_triton.attend, *inputs, s.head_dim**-0.5, whole=whole
                    ),
                    kernels,
                )
            )
    _, keys, values, planned = inputs
    rows = step.random(step.total_rows, s.kv_heads, s.head_dim)
    # Positions from 0 on, so that the pools of all layers can be short.
    short = dataclasses.replace(planned, base=torch.zeros_like(planned.base))
    pools = step.empty(2 * s.layers, 16 * s.page, s.kv_heads, s.head_dim)
    path = torch.arange(1, 5, dtype=torch.int32, device=step.device).repeat(s.sessions, 1)
    short = dataclasses.replace(short, page_tables=short.page_tables % 16)
    return [
        *cases,
        Case(
            "write of new keys and values",
            functools.partial(pages_triton.write_rows, rows, rows, keys, values, planned.slots),
            {"_write_kernel": step.total_rows * row * 4},
        ),
        Case(
            "compaction of 4 rows a session",
            functools.partial(pages_triton.compact_path, pools, short, path),
            {"_compact_kernel": 2 * s.layers * s.sessions * 4 * row * 2},
        ),
    ]
