"""What a verification round on the device knows of its rows: their owners and how they are drawn.

Knows Sampling and the layout of rows (row 0 of a session is the anchor's, row i + 1 node i's).
Knows no logits and no kernel. Made once a round on the host, with two copies to the device.
"""

import dataclasses
from collections.abc import Sequence

import torch

from draftwire_kernels.checks import expect
from draftwire_kernels.draft_probs import DraftProbs
from draftwire_kernels.sampling import Sampling
from draftwire_kernels.tree import TokenTree


@dataclasses.dataclass(frozen=True)
class RowParams:
    """Parameters of a round's draws; tensors on the device of the logits."""

    owner: torch.Tensor
    """[rows] int32: session of each row, -1 for padding rows (nothing is drawn for them)."""
    depth: torch.Tensor
    """[rows] int32: depth of each row below the anchor's."""
    temperature: torch.Tensor
    """[sessions] fp32; 0 is greedy."""
    top_p: torch.Tensor
    """[sessions] fp32."""
    min_p_log: torch.Tensor
    """[sessions] fp32: log of min_p, -inf is off."""
    top_k: torch.Tensor
    """[sessions] int64; 0 is off."""
    seed: torch.Tensor
    """[sessions] int64: the bits of the unsigned seed."""
    position: torch.Tensor
    """[sessions] int64: absolute position of the token drawn from row 0."""
    filtered: bool
    """Whether any session asks for top-k, top-p or min-p."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.owner.shape[0])


def row_params(
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    owner: torch.Tensor,
    depth: torch.Tensor,
) -> RowParams:
    """Pack the parameters of a round's sessions.

    positions[s]: absolute position of the first token drawn (base position + 1). owner and depth
    int32 [rows], as AttentionPlan.row_session and row_depth. Edits of logits (bias, penalties,
    masks) are not among these: they are made on the rows before. Raises KernelArgumentError.
    """
    expect(len(positions) == len(samplings), "positions", len(samplings), len(positions))
    for name, tensor in (("owner", owner), ("depth", depth)):
        expect(tensor.dtype == torch.int32, name, "int32", tensor.dtype)
    expect(owner.shape == depth.shape, "depth", tuple(owner.shape), tuple(depth.shape))
    device = owner.device
    floats = torch.tensor(
        [
            [0.0 if s.greedy else s.temperature for s in samplings],
            [1.0 if s.greedy else s.top_p for s in samplings],
            [0.0 if s.greedy else s.min_p for s in samplings],
        ],
        dtype=torch.float64,
    )
    floats[2].log_()
    whole = torch.tensor(
        [
            [0 if s.greedy else s.top_k for s in samplings],
            [s.seed - 2**64 if s.seed >= 2**63 else s.seed for s in samplings],
            list(positions),
        ],
        dtype=torch.int64,
    )
    floats, whole = (
        floats.float().to(device, non_blocking=True),
        whole.to(device, non_blocking=True),
    )
    return RowParams(
        owner=owner,
        depth=depth,
        temperature=floats[0],
        top_p=floats[1],
        min_p_log=floats[2],
        top_k=whole[0],
        seed=whole[1],
        position=whole[2],
        filtered=any(s.filters and not s.greedy for s in samplings),
    )


@dataclasses.dataclass(frozen=True)
class RoundTrees:
    """The trees of a round, on the device of the logits; rows as in AttentionPlan."""

    token: torch.Tensor
    """[rows] int32: token of each node; -1 for anchor rows and padding."""
    parent: torch.Tensor
    """[rows] int32: row of the parent within the session; -1 for anchor rows."""
    row_start: torch.Tensor
    """[sessions + 1] int32."""
    owner: torch.Tensor
    """[rows] int32: session of each row, -1 for padding."""
    depth: torch.Tensor
    """[rows] int32."""
    widest: int
    """Most rows of one session, or a bound on it."""
    deepest: int
    """Largest depth, or a bound on it."""
    lengths: tuple[int, ...]
    """Nodes of each session's tree, on the host."""
    chains: bool
    """Whether every tree is a chain."""

    @property
    def sessions(self) -> int:
        """Number of sessions."""
        return int(self.row_start.shape[0]) - 1


def round_trees(
    trees: Sequence[TokenTree],
    device: torch.device | str,
    *,
    pad_rows: int = 0,
    widest: int = 0,
    deepest: int = 0,
) -> RoundTrees:
    """Pack the trees of a round's sessions; `pad_rows` rows of no session follow.

    `widest` and `deepest` may be given larger than needed, so that a captured graph can be
    replayed. Raises KernelArgumentError.
    """
    token: list[int] = []
    parent: list[int] = []
    owner: list[int] = []
    depth: list[int] = []
    start = [0]
    for session, tree in enumerate(trees):
        token += [-1, *tree.tokens]
        parent += [-1, *(above + 1 for above in tree.parents)]
        depth += [0, *tree.depths()]
        owner += [session] * (len(tree) + 1)
        start.append(len(token))
    rows, deep = max(map(len, trees), default=0) + 1, max(depth, default=0)
    expect(widest in (0,) or widest >= rows, "widest", f">= {rows}", widest)
    expect(deepest in (0,) or deepest >= deep, "deepest", f">= {deep}", deepest)
    pad = [-1] * pad_rows
    packed = torch.tensor(
        [token + pad, parent + pad, owner + pad, depth + [0] * pad_rows], dtype=torch.int32
    ).to(device, non_blocking=True)
    return RoundTrees(
        token=packed[0],
        parent=packed[1],
        owner=packed[2],
        depth=packed[3],
        row_start=torch.tensor(start, dtype=torch.int32).to(device, non_blocking=True),
        widest=max(widest, rows),
        deepest=max(deepest, deep),
        lengths=tuple(map(len, trees)),
        chains=all(tree.parents == tuple(range(-1, len(tree) - 1)) for tree in trees),
    )


@dataclasses.dataclass(frozen=True)
class DraftRows:
    """draft_probs of a round of chains, on the device of the logits.

    Row i of a session is what its node i, the token of row i + 1, was sampled from; the last row of
    a session and rows of no session are zero.
    """

    ids: torch.Tensor | None
    """[rows, K] int32 ids of the entries, -1 where there is none; None: entry v is token v."""
    probs: torch.Tensor
    """[rows, K] or [rows, V] fp32."""


def draft_rows(drafts: Sequence[DraftProbs], trees: RoundTrees, vocab_size: int) -> DraftRows:
    """Pack draft_probs of a round's sessions: all dense, or all sparse (one-hot and mixture are).

    Raises KernelArgumentError for a mix, or a number of rows that is not the tree's.
    """
    expect(len(drafts) == trees.sessions, "drafts", trees.sessions, len(drafts))
    dense = [draft.ids is None for draft in drafts]
    expect(all(dense) or not any(dense), "drafts", "all dense or all sparse", dense)
    rows = trees.token.shape[0]
    wide = all(dense) and bool(drafts)
    width = vocab_size if wide else max((draft.probs.shape[1] for draft in drafts), default=1)
    probs = torch.zeros(rows, width)
    ids = None if wide else torch.full((rows, width), -1, dtype=torch.int32)
    first = 0
    for session, draft in enumerate(drafts):
        n, k = draft.probs.shape
        probs[first : first + n, :k] = torch.from_numpy(draft.probs)
        if ids is not None and draft.ids is not None:
            ids[first : first + n, :k] = torch.from_numpy(draft.ids)
        expect(n == trees.lengths[session], f"drafts[{session}]", trees.lengths[session], n)
        first += n + 1
    device = trees.token.device
    return DraftRows(None if ids is None else ids.to(device), probs.to(device))
