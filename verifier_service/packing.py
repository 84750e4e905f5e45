"""Packs what all sessions feed into one target step.

Knows: rows, logical positions, slots, and how to lay attention out in groups of equal shape. Does
not know: models, sampling, or why a session feeds what it feeds.

A feed is a run of rows of one session: a piece of its prompt, its anchor alone, or its anchor and a
token tree. Row r has a logical position and lies in the slot of *physical* position base + r; for a
chain the two agree, for a tree they do not. Every query sums its keys in logical order over blocks
of BLOCK positions, wherever the rows lie, so its result does not depend on the shape of the tree it
came in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftwire_kernels.attention import AttentionPlan, plan
from verifier_service.cache import SCRATCH_PAGE

BLOCK = 64  # positions summed together; part of the arithmetic, so never changed at run time


@dataclass(frozen=True, slots=True)
class Feed:
    """Rows of one session. `slots` covers physical positions 0 .. base + len(tokens) - 1."""

    tokens: Sequence[int]
    base: int
    slots: np.ndarray  # int64
    parents: Sequence[int] | None = (
        None  # row of each row's parent, -1 for the first; None: a chain
    )
    logit_rows: Sequence[int] = ()  # rows whose logits are wanted

    @property
    def is_chain(self) -> bool:
        return self.parents is None or all(p == i - 1 for i, p in enumerate(self.parents))

    def depths(self) -> list[int]:
        """Logical position of each row less `base`."""
        if self.parents is None:
            return list(range(len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths


@dataclass(frozen=True, slots=True)
class Tail:
    """Keys of a tree's tail in physical order, the same for all rows of a session: slots [S, T];
    hidden bool [S, R, T]: those off a row's path; blocks [S, T]: the logical block of each from the
    tail's first on; order [S, R, W]: where each logical position of a row's path is among them;
    beyond bool [S, R, W]: positions past the row's own.
    """

    slots: torch.Tensor
    hidden: torch.Tensor
    blocks: torch.Tensor
    order: torch.Tensor
    beyond: torch.Tensor


@dataclass(frozen=True, slots=True)
class OwnTail:
    """Keys of each row's tail in logical order: slots [S, R, T], hidden bool [S, R, T]."""

    slots: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sessions whose attention runs as one batch; S sessions, R rows each (padded), L shared keys,
    T keys of the tail, which begins at the block that holds the first of the rows.

    rows [S, R] index into the packed rows (padding repeats row 0); positions [S, R] logical, -1 for
    padding; shared_slots [S, L] and shared_hidden bool [S, R, L]: keys a row must not look at; tail
    as `Tail` or `OwnTail` (invariant arithmetic, trees), or None; visible bool [S, R, L], or None
    for causal (fast arithmetic, trees: all rows are shared keys).
    """

    rows: torch.Tensor
    positions: torch.Tensor
    shared_slots: torch.Tensor
    shared_hidden: torch.Tensor
    tail: Tail | OwnTail | None
    visible: torch.Tensor | None
    real_rows: torch.Tensor  # flat index of the rows of [S * R] that are not padding
    targets: torch.Tensor  # packed row of each of them


@dataclass(frozen=True, slots=True)
class Packed:
    """One target step: N rows (padding included), what to keep, and the attention layout."""

    token_ids: torch.Tensor  # int64 [N]
    positions: torch.Tensor  # int64 [N]
    write_slots: torch.Tensor  # int64 [N]
    logit_rows: torch.Tensor  # int64 [M]
    offsets: tuple[int, ...]  # first row of each feed
    logit_offsets: tuple[int, ...]  # first logit row of each feed
    groups: tuple[AttentionGroup, ...]
    real_rows: int  # rows before padding
    plan: AttentionPlan | None = None  # layout for the device's kernels, instead of groups


def bucket(count: int, sizes: Sequence[int]) -> int:
    """Smallest of the ascending `sizes` that holds `count`, or the next multiple of the largest."""
    for size in sizes:
        if count <= size:
            return size
    return -(-count // sizes[-1]) * sizes[-1]


def pack(
    feeds: Sequence[Feed],
    row_buckets: Sequence[int],
    attention_rows: Sequence[int],
    device: torch.device,
    *,
    invariant: bool = True,
    share: bool = True,
    most_tail: int = 0,
    page_size: int = 0,
) -> Packed:
    """Lay `feeds` out as one step.

    `row_buckets`: row counts a step may have; `attention_rows`: rows a session may have in an
    attention group.
    `share=False` gives every row all its keys of its own (slow, for processors on which shared and
    own sums differ in bits). `most_tail`: keys up to which the rows of a tree may share its tail in
    physical order. `page_size`: lay attention out for the device's paged kernels.
    """
    layout = _Layout(tuple(attention_rows), device, invariant, share, most_tail)
    offsets: list[int] = []
    logit_offsets: list[int] = []
    logit_rows: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[np.ndarray] = []
    for feed in feeds:
        offsets.append(len(tokens))
        logit_offsets.append(len(logit_rows))
        logit_rows.extend(len(tokens) + row for row in feed.logit_rows)
        tokens.extend(feed.tokens)
        positions.extend(feed.base + depth for depth in feed.depths())
        slots.append(feed.slots[feed.base : feed.base + len(feed.tokens)])
    real = len(tokens)
    padding = bucket(real, row_buckets) - real
    tokens.extend([0] * padding)
    positions.extend([0] * padding)
    slots.append(np.full(padding, SCRATCH_PAGE, dtype=np.int64))
    return Packed(
        token_ids=_tensor(np.asarray(tokens, dtype=np.int64), device),
        positions=_tensor(np.asarray(positions, dtype=np.int64), device),
        write_slots=_tensor(np.concatenate(slots), device),
        logit_rows=_tensor(np.asarray(logit_rows, dtype=np.int64), device),
        offsets=tuple(offsets),
        logit_offsets=tuple(logit_offsets),
        groups=() if page_size else tuple(_groups(feeds, offsets, layout)),
        real_rows=real,
        plan=_plan(feeds, page_size, padding, device) if page_size else None,
    )


def _plan(
    feeds: Sequence[Feed], page_size: int, padding: int, device: torch.device
) -> AttentionPlan:
    """The kernels' view of the same rows: page tables instead of slots."""
    ends = [feed.base + len(feed.tokens) for feed in feeds]
    tables = np.zeros((len(feeds), -(-max(ends) // page_size)), dtype=np.int32)
    for table, feed, end in zip(tables, feeds, ends, strict=True):
        pages = feed.slots[:end:page_size] // page_size
        table[: len(pages)] = pages
    rows = [len(feed.tokens) if feed.is_chain else _parents(feed) for feed in feeds]
    base = [feed.base for feed in feeds]
    return plan(_tensor(tables, device), base, rows, page_size, pad_rows=padding)


def _parents(feed: Feed) -> Sequence[int]:
    assert feed.parents is not None  # a feed without parents is a chain
    return feed.parents


@dataclass(frozen=True, slots=True)
class _Layout:
    row_sizes: tuple[int, ...]
    device: torch.device
    invariant: bool
    share: bool
    most_tail: int

    def own(self, feed: Feed) -> bool:
        """Whether the rows of `feed` need keys of their own."""
        return self.invariant and not (self.share and feed.is_chain)


def _groups(feeds: Sequence[Feed], offsets: Sequence[int], layout: _Layout) -> list[AttentionGroup]:
    """Sessions of like shape together: the same padded rows, and lengths within a factor of two."""
    by_shape: dict[tuple[bool, bool, int, int], list[int]] = defaultdict(list)
    for index, feed in enumerate(feeds):
        blocks = -(-(feed.base + len(feed.tokens)) // BLOCK)
        rows = bucket(len(feed.tokens), layout.row_sizes)
        by_shape[layout.own(feed), feed.is_chain, rows, (blocks - 1).bit_length()].append(index)
    return [
        _group([feeds[i] for i in members], [offsets[i] for i in members], rows, own, layout)
        for (own, _, rows, _), members in sorted(by_shape.items())
    ]


def _group(
    feeds: Sequence[Feed], offsets: Sequence[int], rows: int, own: bool, layout: _Layout
) -> AttentionGroup:
    count, device = len(feeds), layout.device
    if own:
        limits = [feed.base // BLOCK * BLOCK if layout.share else 0 for feed in feeds]
    else:
        limits = [feed.base + len(feed.tokens) for feed in feeds]
    length = max(-(-limit // BLOCK) * BLOCK for limit in limits)
    row_index = np.zeros((count, rows), dtype=np.int64)
    positions = np.full((count, rows), -1, dtype=np.int64)
    shared = np.full((count, length), SCRATCH_PAGE, dtype=np.int64)
    for s, feed in enumerate(feeds):
        n = len(feed.tokens)
        row_index[s, :n] = np.arange(offsets[s], offsets[s] + n)
        row_index[s, n:] = offsets[s]
        positions[s, :n] = feed.base + np.asarray(feed.depths())
        shared[s, : limits[s]] = feed.slots[: limits[s]]
    tail: Tail | OwnTail | None = None
    visible = None
    if own:
        starts = np.asarray(limits)
        width = int((positions.max(axis=1) + 1 - starts).max())
        width = -(-width // BLOCK) * BLOCK
        own_keys = max(f.base + len(f.tokens) - at for f, at in zip(feeds, limits, strict=True))
        own_keys = -(-own_keys // BLOCK) * BLOCK
        if layout.share and own_keys <= layout.most_tail:
            tail = _tail(feeds, limits, rows, own_keys, width, device)
        else:
            own_slots = np.full((count, rows, width), SCRATCH_PAGE, dtype=np.int64)
            for s, feed in enumerate(feeds):
                own_slots[s, : len(feed.tokens)] = _paths(feed, limits[s], width)
            index = starts[:, None, None] + np.arange(width)
            tail = OwnTail(
                _tensor(own_slots, device), _tensor(index > positions[:, :, None], device)
            )
    elif not layout.invariant and not all(feed.is_chain for feed in feeds):
        visible = np.zeros((count, rows, length), dtype=np.bool_)
        for s, feed in enumerate(feeds):
            visible[s, : len(feed.tokens), : limits[s]] = _ancestors(feed)
        visible[:, :, 0] |= positions < 0
    real = np.flatnonzero(positions.reshape(-1) >= 0)
    last = np.minimum(positions, np.asarray(limits)[:, None] - 1)
    return AttentionGroup(
        rows=_tensor(row_index, device),
        positions=_tensor(positions, device),
        shared_slots=_tensor(shared, device),
        shared_hidden=_tensor(np.arange(length) > last[:, :, None], device),
        tail=tail,
        visible=None if visible is None else _tensor(visible, device),
        real_rows=_tensor(real, device),
        targets=_tensor(row_index.reshape(-1)[real], device),
    )


def _tail(
    feeds: Sequence[Feed],
    starts: Sequence[int],
    rows: int,
    width: int,
    logical_width: int,
    device: torch.device,
) -> Tail:
    count = len(feeds)
    slots = np.full((count, width), SCRATCH_PAGE, dtype=np.int64)
    hidden = np.ones((count, rows, width), dtype=np.bool_)
    blocks = np.zeros((count, width), dtype=np.int64)
    order = np.zeros((count, rows, logical_width), dtype=np.int64)
    beyond = np.ones((count, rows, logical_width), dtype=np.bool_)
    for s, (feed, start) in enumerate(zip(feeds, starts, strict=True)):
        n, before = len(feed.tokens), feed.base - start
        slots[s, : before + n] = feed.slots[start : feed.base + n]
        logical = np.concatenate([np.arange(before), before + np.asarray(feed.depths())])
        blocks[s, : before + n] = logical // BLOCK
        seen = _ancestors(feed)[:, start:]
        hidden[s, :n, : before + n] = ~seen
        row, column = np.nonzero(seen)
        order[s, row, logical[column]] = column
        beyond[s, row, logical[column]] = False
    return Tail(*(_tensor(array, device) for array in (slots, hidden, blocks, order, beyond)))


def _ancestors(feed: Feed) -> np.ndarray:
    """Bool [rows, base + rows]: the physical positions each row may look at."""
    seen = np.zeros((len(feed.tokens), feed.base + len(feed.tokens)), dtype=np.bool_)
    seen[:, : feed.base] = True
    parents = feed.parents if feed.parents is not None else range(-1, len(feed.tokens) - 1)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row, feed.base :] = seen[parent, feed.base :]
        seen[row, feed.base + row] = True
    return seen


def _paths(feed: Feed, start: int, width: int) -> np.ndarray:
    """Slots [rows, width] of each row's keys in logical order from position `start`: context, then
    the row's own path."""
    out = np.full((len(feed.tokens), width), SCRATCH_PAGE, dtype=np.int64)
    out[:, : feed.base - start] = feed.slots[start : feed.base]
    parents = feed.parents if feed.parents is not None else range(-1, len(feed.tokens) - 1)
    depths = feed.depths()
    for row, parent in enumerate(parents):
        column = feed.base - start + depths[row]
        if parent >= 0:
            out[row, feed.base - start : column] = out[parent, feed.base - start : column]
        out[row, column] = feed.slots[feed.base + row]
    return out


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
