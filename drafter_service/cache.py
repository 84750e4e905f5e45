"""Keys and values of context features, per session and layer, in one pool of bounded rows.

A session's rows are one contiguous extent, position 0 first, so attention reads them as a view. The
block being drafted writes its keys and values just past the committed length and is forgotten by
not counting it: rewinding is cropping. Row accounting is exact: when every context is closed,
`free_rows` is `total_rows` again. Does not know sessions, lanes or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GRANULE = 32  # rows an extent is rounded up to


class NoRoom(Exception):
    """The pool has not that many rows left."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} feature rows wanted, {free} of the cache are free")
        self.wanted = wanted
        self.free = free


@dataclass(slots=True, eq=False)
class Context:
    """One session's extent: rows `start` .. `start + capacity`, of which `length` hold committed
    positions 0 .. length - 1.
    """

    start: int
    capacity: int
    length: int = 0


class ContextPool:
    """Fixed rows shared by all sessions. `keys[layer]` and `values[layer]` are [kv_heads,
    total_rows, head_dim].
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.total_rows = rows
        shape = (kv_heads, rows, head_dim)
        # torch.empty: on CPU the pages cost nothing until they are written.
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._gaps: list[tuple[int, int]] = [(0, rows)] if rows else []
        self._contexts: set[Context] = set()

    @property
    def free_rows(self) -> int:
        """Rows in no extent."""
        return sum(size for _, size in self._gaps)

    @property
    def open_contexts(self) -> int:
        """Number of extents in use."""
        return len(self._contexts)

    def open(self, rows: int) -> Context:
        """A new context with room for `rows`. Raises NoRoom and changes nothing if there are too
        few.
        """
        size = _rounded(rows)
        context = Context(self._take(size), size)
        self._contexts.add(context)
        return context

    def reserve(self, context: Context, rows: int) -> None:
        """Make room for `rows` in all, moving the extent if it must; asks for half as much again so
        that growth is rare. Raises NoRoom and changes nothing if even `rows` do not fit.
        """
        if rows <= context.capacity:
            return
        generous, exact = _rounded(max(rows, context.capacity * 3 // 2)), _rounded(rows)
        size = generous if generous <= self.free_rows else exact
        start = self._take(size)
        source = slice(context.start, context.start + context.length)
        target = slice(start, start + context.length)
        for tensor in (*self.keys, *self.values):
            tensor[:, target] = tensor[:, source]
        self._give(context.start, context.capacity)
        context.start, context.capacity = start, size

    def crop(self, context: Context, length: int) -> None:
        """Forget positions from `length` on."""
        context.length = min(context.length, length)

    def close(self, context: Context) -> None:
        """Give the rows back; closing twice is harmless."""
        if context in self._contexts:
            self._contexts.remove(context)
            self._give(context.start, context.capacity)
            context.capacity = context.length = 0

    def write(
        self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """keys, values [kv_heads, n, head_dim] to the pool rows int64 [n]."""
        self.keys[layer].index_copy_(1, rows, keys)
        self.values[layer].index_copy_(1, rows, values)

    def check_integrity(self) -> None:
        """Raises RuntimeError if extents and gaps do not tile the pool exactly."""
        spans = sorted([*self._gaps, *((c.start, c.capacity) for c in self._contexts)])
        at = 0
        for start, size in spans:
            if start != at or size <= 0:
                raise RuntimeError(f"cache rows {at} .. {start} are lost or used twice")
            at += size
        if at != self.total_rows:
            raise RuntimeError(f"cache has {self.total_rows} rows, {at} are accounted for")

    def _take(self, size: int) -> int:
        for attempt in range(2):
            for index, (start, gap) in enumerate(self._gaps):
                if gap >= size:
                    rest = [(start + size, gap - size)] if gap > size else []
                    self._gaps[index : index + 1] = rest
                    return start
            if attempt == 0:
                if self.free_rows < size:
                    break
                self._compact()
        raise NoRoom(size, self.free_rows)

    def _give(self, start: int, size: int) -> None:
        gaps = sorted([*self._gaps, (start, size)])
        merged: list[tuple[int, int]] = []
        for begin, length in gaps:
            if merged and merged[-1][0] + merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self._gaps = merged

    def _compact(self) -> None:
        """Push all extents to the front, so that the free rows are one gap."""
        at = 0
        for context in sorted(self._contexts, key=lambda c: c.start):
            if context.start != at:
                source = slice(context.start, context.start + context.length)
                for tensor in (*self.keys, *self.values):
                    # The two ranges may overlap: read all before writing.
                    tensor[:, at : at + context.length] = tensor[:, source].clone()
                context.start = at
            at += context.capacity
        self._gaps = [(at, self.total_rows - at)] if at < self.total_rows else []


def _rounded(rows: int) -> int:
    return max(GRANULE, -(-rows // GRANULE) * GRANULE)
