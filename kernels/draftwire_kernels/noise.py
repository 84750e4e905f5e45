"""Counter noise: every random number, computable alone from (seed, position, purpose, token).

Knows the generator's layout, the same on CPU and in Triton. Knows neither logits nor rules.

Generator
---------
Philox4x64-10 (Salmon et al. 2011), key = (seed, purpose), counter = (block, position, level, base),
each an unsigned 64-bit word; one block is 4 words of 64 bits. numpy steps its counter before the
first block, so `Philox(counter=[b - 1, ...]).random_raw(4)` is the block of counter b; Triton's
`philox_impl(b, position, level, base, seed, purpose)` is the same block without that step. `base`
is 0 for TARGET. For the other purposes it is the anchor's position: a round may look at coins and
drafts of positions that it does not commit, and the next round must not meet them again.

Layout
------
Tokens stand in groups of 64: group = token // 64. Every token has an exponential E ~ Exp(1), and
gumbel = -log(E). The 64 exponentials of a group are independent, but they are *made* smallest first
(the exponential has no memory):

    m = Exp(1) / 64 is the group's smallest, its owner is uniform in 0..63,
    and each of the other 63 tokens has E = m + Exp(1).

Where the bits come from, all in fp32, f32() rounding to nearest even:

    level 0   block = group // 4 + 1, word group % 4 =: w;  owner = w >> 58
              u = f32(w & (2**58 - 1)) * 2**-58 + 2**-59
    level 1   block = token // 8 + 1, 32-bit half token % 8 (in word half // 2, even ones low)
              u = f32(half) * 2**-32 + 2**-33
    both      u = min(u, 1 - 2**-24);  Exp(1) = -log1p(-u)

A race argmin E / p then needs one number a group to leave out nearly all of the vocabulary
(`race`), on a CPU as in a statistics pass that should stay bound by memory. It is fair to rare
tokens too: one that wins is as good as always the owner of its group, and m resolves 2**-65.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

TARGET = 0
"""The target's own draw at a position: rule follow, plain decoding, and drafts coupled to it."""
COIN = 1
"""Acceptance coins of the draft-probability rules."""
RECOVERED = 2
"""The recovered or bonus token of the draft-probability rules."""
DRAFT = 3
"""Tokens a drafter samples on its own, for the draft-probability rules."""
BRANCH = 4
"""The branch of the latent mixture a drafter samples."""

GROUP = 64
"""Tokens that share a level-0 word."""
BELOW_ONE = np.float32(1 - 2**-24)
_CLOSE_TO_ONE = 0.99
"""Uniforms above this lose digits of 1 - u, hence of their exponential, to rounding."""
_FEW_GROUPS = 80
"""Up to this many scattered groups are made one by one; beyond, as part of one run from token 0."""

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW32 = np.uint64(0xFFFFFFFF)
_LOW58 = np.uint64(2**58 - 1)
_S32, _S58 = np.uint64(32), np.uint64(58)
_MINUS_58, _HALF_STEP = np.float32(-(2.0**-58)), np.float32(2.0**-59)
_MINUS_GROUP = np.float32(-1 / GROUP)
_local = threading.local()


def gumbel(
    seed: int, position: int, vocab_size: int, purpose: int = TARGET, base: int = 0
) -> torch.Tensor:
    """Standard Gumbel noise of tokens 0 .. vocab_size - 1 at a position, fp32 [vocab_size]."""
    groups = -(-vocab_size // GROUP)
    minima, owners = group_minima(seed, position, groups, purpose, base)
    halves = token_halves(seed, position, vocab_size, purpose, base)
    spread = np.repeat(minima, GROUP)[:vocab_size]
    energy = spread + exponential(uniform32(halves))
    owned = np.arange(groups) * GROUP + owners
    inside = owned < vocab_size
    energy[owned[inside]] = minima[inside]
    return torch.from_numpy(energy).log_().neg_()


def gumbel_at(
    seed: int, position: int, token_ids: torch.Tensor, purpose: int = TARGET, base: int = 0
) -> torch.Tensor:
    """The same numbers as gumbel(...)[token_ids], of these tokens alone; fp32, their shape."""
    rows = gumbel_rows([seed], [position], token_ids.reshape(1, -1), purpose, [base])
    return rows.reshape(token_ids.shape)


def gumbel_rows(
    seeds: Sequence[int],
    positions: Sequence[int],
    token_ids: torch.Tensor,
    purpose: int = TARGET,
    bases: Sequence[int] | None = None,
) -> torch.Tensor:
    """gumbel_at for many rows in one call: row r is that of (seeds[r], positions[r], bases[r]).

    token_ids [rows, k] -> fp32 [rows, k] on its device. Raises ValueError for negative ids.
    """
    ids = token_ids.detach().cpu().numpy().astype(np.int64)
    if ids.size == 0:
        return torch.empty(token_ids.shape, device=token_ids.device)
    if int(ids.min()) < 0:
        raise ValueError(f"token_ids must be >= 0, got {int(ids.min())}")
    tokens = ids.astype(np.uint64)
    groups = tokens // np.uint64(GROUP)
    level0 = _counters(groups // np.uint64(4), positions, 0, bases)
    level1 = _counters(tokens // np.uint64(8), positions, 1, bases)
    keys = np.array([_word(seed, "seed") for seed in seeds], dtype=np.uint64)[:, None]
    keys = np.broadcast_to(keys, ids.shape)
    blocks = philox(
        np.concatenate([level0.reshape(4, -1), level1.reshape(4, -1)], axis=1),
        np.concatenate([keys.reshape(-1)] * 2),
        purpose,
    )
    where = np.arange(ids.size)
    flat = tokens.reshape(-1)
    group_words = blocks[(groups.reshape(-1) % np.uint64(4)).astype(np.int64), where]
    minima, owners = _split(group_words)
    half = (flat % np.uint64(8)).astype(np.int64)
    words = blocks[half // 2, where + ids.size]
    halves = np.where(half % 2 == 0, words & _LOW32, words >> _S32).astype(np.uint32)
    energy = minima + exponential(uniform32(halves))
    owned = owners == (flat % np.uint64(GROUP)).astype(np.int64)
    energy[owned] = minima[owned]
    return torch.from_numpy(energy).log_().neg_().reshape(token_ids.shape).to(token_ids.device)


def uniform(seed: int, position: int, purpose: int, base: int = 0) -> float:
    """One number in the open interval (0, 1): word 0 of block 1, level 2, made like level 0's u."""
    return float(uniform58(_generator(seed, (1, position, 2, base), purpose).words(1))[0])


def group_minima(
    seed: int, position: int, groups: int, purpose: int = TARGET, base: int = 0, rows: int = 1
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Level 0 of groups 0 .. groups - 1 of `rows` positions from `position` on: the smallest
    exponentials, fp32 [rows * groups], and their owners.
    """
    generator = _generator(seed, (1, position, 0, base), purpose)
    words = [generator.words(groups)]
    for _ in range(1, rows):
        generator.counter[1] += 1
        words.append(generator.words(groups))
    return _split(np.concatenate(words) if rows > 1 else words[0])


def token_halves(
    seed: int, position: int, count: int, purpose: int = TARGET, base: int = 0
) -> npt.NDArray[np.uint32]:
    """Level 1 of tokens 0 .. count - 1."""
    return _halves(_generator(seed, (1, position, 1, base), purpose).words(-(-count // 2)))[:count]


def group_halves(
    seed: int,
    position: int,
    groups: npt.NDArray[np.int64],
    purpose: int = TARGET,
    base: int = 0,
) -> npt.NDArray[np.uint32]:
    """Level 1 of the tokens of some groups, ascending: [groups, 64]."""
    if groups.size > _FEW_GROUPS:
        row = token_halves(seed, position, (int(groups[-1]) + 1) * GROUP, purpose, base)
        return row.reshape(-1, GROUP)[groups]
    generator = _generator(seed, (1, position, 1, base), purpose)
    runs = []
    for group in groups.tolist():
        generator.counter[0] = group * (GROUP // 8)
        runs.append(generator.words(GROUP // 2))
    return _halves(np.concatenate(runs)).reshape(-1, GROUP)


def token_exponentials(
    seed: int, position: int, purpose: int = TARGET, base: int = 0
) -> Callable[[int], float]:
    """Level 1 of single tokens: their Exp(1), in fp64. The way to a few scattered ones.

    Farther from the fp32 number than its last bits only where the uniform is close to one, and
    there it is rounded as that is. The function serves until this thread asks for other noise.
    """
    generator = _generator(seed, (1, position, 1, base), purpose)
    counter, log1p = generator.counter, math.log1p
    philox, state = generator.philox, generator.state
    words = philox.random_raw

    def of(token: int) -> float:
        counter[0] = token >> 3
        philox.state = state
        word = words(4).item(token >> 1 & 3)
        half = word >> 32 if token & 1 else word & 0xFFFFFFFF
        u = half * 2.0**-32 + 2.0**-33
        if u > _CLOSE_TO_ONE:
            u = float(uniform32(np.array([half], dtype=np.uint32))[0])
        return -log1p(-u)

    return of


def uniform32(halves: npt.NDArray[np.uint32]) -> Floats:
    """32 random bits to fp32 in (0, 1)."""
    u = halves.astype(np.float32)
    u *= np.float32(2**-32)
    u += np.float32(2**-33)
    return np.minimum(u, BELOW_ONE, out=u)


def uniform58(words: Words) -> Floats:
    """The low 58 of 64 random bits to fp32 in (0, 1)."""
    u = (words & _LOW58).astype(np.float32)
    u *= np.float32(2**-58)
    u += np.float32(2**-59)
    return np.minimum(u, BELOW_ONE, out=u)


def exponential(u: Floats) -> Floats:
    """-log1p(-u) in fp32, in place. torch's log1p everywhere: it is vectorised and gives a value
    the same bits alone.
    """
    torch.from_numpy(u).neg_().log1p_().neg_()
    return u


def philox(counters: Words, seeds: Words, purpose: int) -> Words:
    """Philox4x64-10 over counters [4, n] with key (seeds[n], purpose): words [4, n].

    Plain numpy, for scattered blocks; runs of blocks come from numpy's native generator instead.
    """
    even, odd = counters[0::2], counters[1::2]
    keys = np.stack([seeds, np.full_like(seeds, purpose)])
    weyl = np.array(_WEYL, dtype=np.uint64)[:, None]
    m_low, m_high = _MULTIPLIERS & _LOW32, _MULTIPLIERS >> _S32
    for _ in range(10):
        low, high = even & _LOW32, even >> _S32
        cross = low * m_high
        middle = (low * m_low >> _S32) + (cross & _LOW32) + high * m_low
        upper = high * m_high + (middle >> _S32) + (cross >> _S32)
        # The products change places: counter word 0 is made from word 2 and the other way round.
        even, odd = upper[::-1] ^ odd ^ keys, (even * _MULTIPLIERS)[::-1]
        keys = keys + weyl
    return np.stack([even[0], odd[0], even[1], odd[1]])


def _split(words: Words) -> tuple[Floats, npt.NDArray[np.int64]]:
    # exponential(uniform58(words)) / 64 in fewer steps: signs and powers of two are folded, which
    # is exact, and 58 bits fit a signed word, whose conversion is native.
    less = (words & _LOW58).view(np.int64).astype(np.float32)
    less *= _MINUS_58
    less -= _HALF_STEP
    torch.from_numpy(np.maximum(less, -BELOW_ONE, out=less)).log1p_()
    less *= _MINUS_GROUP
    return less, (words >> _S58).view(np.int64)


def _halves(words: Words) -> npt.NDArray[np.uint32]:
    return words.astype("<u8", copy=False).view("<u4")


def _counters(
    blocks: Words, positions: Sequence[int], level: int, bases: Sequence[int] | None
) -> Words:
    rows = np.empty((4, *blocks.shape), dtype=np.uint64)
    rows[0] = blocks + np.uint64(1)
    rows[1] = np.array([_word(p, "position") for p in positions], dtype=np.uint64)[:, None]
    rows[2] = level
    rows[3] = np.array([_word(b, "base") for b in bases or [0] * len(positions)], dtype=np.uint64)[
        :, None
    ]
    return rows


def _generator(seed: int, counter: tuple[int, int, int, int], purpose: int) -> _Native:
    """This thread's native generator at a counter. One a thread, because making one costs 20 µs."""
    native: _Native | None = getattr(_local, "native", None)
    if native is None:
        native = _local.native = _Native()
    block, position, level, base = counter
    native.key[:] = (_word(seed, "seed"), purpose)
    native.counter[:] = (block - 1, _word(position, "position"), level, _word(base, "base"))
    return native


class _Native:
    """numpy's Philox with its state dictionary kept, so that moving it is one assignment."""

    def __init__(self) -> None:
        self.philox: Any = np.random.Philox(key=0)
        # Lists of Python numbers: the setter reads them three times as fast as arrays.
        self.counter: list[int] = [0, 0, 0, 0]
        self.key: list[int] = [0, 0]
        self.state: dict[str, Any] = dict(self.philox.state)
        self.state["state"] = {"counter": self.counter, "key": self.key}
        self.state["buffer"] = [0, 0, 0, 0]
        self.state["buffer_pos"] = 4  # nothing buffered: the next word starts a block

    def words(self, count: int) -> Words:
        """Words from the block after `counter` on; counter itself does not move."""
        self.philox.state = self.state
        raw: Words = self.philox.random_raw(count)
        return raw


def _word(value: int, name: str) -> int:
    if not 0 <= value < 2**64:
        raise ValueError(f"{name} must be in [0, 2**64), got {value}")
    return value
