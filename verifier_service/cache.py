"""Pages of KV and features: who owns which slot, and what can be shared.

Knows: pages with reference counts, the prefix cache (full pages found again by the hash of all
tokens up to their end), and the tensors the pages lie in. Does not know: models, sessions,
scheduling.

A slot is one position's place: slot = page * page_size + offset. Page 0 is scratch: padding rows
write there, nobody reads it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftwire.errors import ResourceExhausted

SCRATCH_PAGE = 0


class PagePool:
    """Hands out pages. `free_pages` counts pages that nobody holds, cached ones included: they are
    evicted when needed."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        self._references[SCRATCH_PAGE] = 1
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # hash -> page, oldest first
        self._hash_of: dict[int, bytes] = {}
        self._idle = 0  # cached pages nobody holds

    @property
    def free_pages(self) -> int:
        """Pages nobody holds; safe to read from any thread."""
        return len(self._free) + self._idle

    def pages_for(self, positions: int) -> int:
        """Pages that hold `positions` positions."""
        return -(-positions // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` fresh pages, evicting cached ones nobody holds. Raises ResourceExhausted and
        takes none if too few."""
        if count > self.free_pages:
            raise ResourceExhausted("KV_PAGES", f"{count} KV pages needed, {self.free_pages} free")
        while len(self._free) < count:
            self._evict_oldest()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference to each page."""
        for page in pages:
            if self._references[page] <= 0 or page == SCRATCH_PAGE:
                raise RuntimeError(f"page {page} released more often than taken")
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._hash_of:
                    self._idle += 1
                else:
                    self._free.append(page)

    def find_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Take a reference to each cached page that holds a full-page prefix of `tokens`; the pages
        in order."""
        pages: list[int] = []
        used: list[bytes] = []
        for digest in self._digests(tokens, len(tokens) // self.page_size):
            page = self._cached.get(digest)
            if page is None:
                break
            self._idle -= self._references[page] == 0
            self._references[page] += 1
            pages.append(page)
            used.append(digest)
        # The oldest goes first: a tail without its head could not be found again.
        for digest in reversed(used):
            self._cached.move_to_end(digest)
        return pages

    def keep_prefix(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make the full pages of `tokens` findable. Pages whose content is cached already stay
        private."""
        digests = self._digests(tokens, len(tokens) // self.page_size)
        for digest, page in reversed(list(zip(digests, pages, strict=False))):
            if digest not in self._cached and page not in self._hash_of:
                self._cached[digest] = page
                self._hash_of[page] = digest

    def forget_cached(self) -> None:
        """Drop the prefix cache: after a change of what pages must hold."""
        for digest in list(self._cached):
            self._drop(digest)

    def _digests(self, tokens: Sequence[int], count: int) -> list[bytes]:
        digests, state = [], b""
        for index in range(count):
            part = tokens[index * self.page_size : (index + 1) * self.page_size]
            state = hashlib.blake2b(
                state + b",".join(b"%d" % t for t in part), digest_size=16
            ).digest()
            digests.append(state)
        return digests

    def _evict_oldest(self) -> None:
        for digest, page in self._cached.items():
            if self._references[page] == 0:
                self._drop(digest)
                return
        raise RuntimeError("no page to evict")

    def _drop(self, digest: bytes) -> None:
        page = self._cached.pop(digest)
        del self._hash_of[page]
        if self._references[page] == 0:
            self._idle -= 1
            self._free.append(page)

    def check(self) -> None:
        """Raise RuntimeError if the books do not balance; called when the engine is idle."""
        held = sum(1 for count in self._references[1:] if count > 0)
        if held + self.free_pages != self.num_pages - 1:
            raise RuntimeError(
                f"{held} pages held + {self.free_pages} free != {self.num_pages - 1}"
            )


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one position needs: KV of every layer and the outputs of the feature layers."""

    num_layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int


class PagedStore:
    """The tensors behind the pages: keys and values [slots, kv_heads, head_dim] per layer, features
    [slots, hidden] per layer."""

    def __init__(
        self, pool: PagePool, shape: CacheShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        slots = pool.num_pages * pool.page_size
        self.shape, self.dtype, self.device, self.slots = shape, dtype, device, slots
        self.page_size = pool.page_size
        kv = (shape.num_layers, slots, shape.kv_heads, shape.head_dim)
        # Zeros, not empty: masked positions are multiplied by zero probabilities, and 0 * NaN would
        # leak.
        self.keys = torch.zeros(kv, dtype=dtype, device=device)
        self.values = torch.zeros(kv, dtype=dtype, device=device)
        self.features: dict[int, torch.Tensor] = {}

    def add_feature_layer(self, layer: int) -> None:
        """Keep the output of decoder layer `layer` (0-based) from now on."""
        if layer not in self.features:
            shape = (self.slots, self.shape.hidden_size)
            self.features[layer] = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def write_kv(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Write key and value [rows, kv_heads, head_dim] of `layer` at `slots` int64 [rows]."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)

    def read_features(self, layers: Sequence[int], slots: torch.Tensor) -> torch.Tensor:
        """Features [rows, layers * hidden] of the positions at `slots`, layers side by side in the
        order given."""
        return torch.cat([self.features[layer].index_select(0, slots) for layer in layers], dim=-1)

    def stacks(self) -> list[torch.Tensor]:
        """Everything a slot holds, as tensors [stacks, slots, heads, width] that share memory."""
        features = [rows[None, :, None, :] for rows in self.features.values()]
        return [self.keys, self.values, *features]

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy KV and features of slots `source` to slots `target` (int64 [rows]); overlap is safe,
        the copy is taken first."""
        self.keys.index_copy_(1, target, self.keys.index_select(1, source))
        self.values.index_copy_(1, target, self.values.index_select(1, source))
        for rows in self.features.values():
            rows.index_copy_(0, target, rows.index_select(0, source))
