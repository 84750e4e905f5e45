"""How tokens are drawn (`Sampling`) and what a session has produced so far (`History`).

Knows the parameters, their limits, and the counts that penalties need. Knows neither logits (see
`rows`) nor the wire: each service converts its own messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: logits divided by less would leave fp32."""

MAX_SEED = 2**64 - 1


class SamplingError(ValueError):
    """A sampling parameter is outside its limits. Carries field, limit and value."""

    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field} must be {limit}, got {value!r}")
        self.field = field
        self.limit = limit
        self.value = value


def _check(ok: bool, name: str, limit: str, value: object) -> None:
    if not ok:
        raise SamplingError(name, limit, value)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of one session's draws. Raises SamplingError for a value outside its limits."""

    temperature: float = 1.0
    """Softmax temperature, >= 0; below 1e-5 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens, the lower id first among equals; 0 is off."""
    top_p: float = 1.0
    """Keep the shortest prefix, most likely first, whose probability reaches this, in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens seen in prompt or output, > 0."""
    presence_penalty: float = 0.0
    """Subtracted from logits of tokens seen in the output."""
    frequency_penalty: float = 0.0
    """Subtracted, times the count, from logits of tokens seen in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit), each id once."""
    seed: int = 0
    """Key of the counter noise, in [0, 2**64)."""
    banned_ids: tuple[int, ...] = ()
    """Token ids that may not be drawn at positions < banned_before."""
    banned_before: int = 0
    """First absolute position at which banned_ids may be drawn (min_tokens)."""
    bias_ids: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """Ids of logit_bias as an array, made once because every row reads it."""
    bias_values: npt.NDArray[np.float32] = field(init=False, repr=False, compare=False)
    """Values of logit_bias as an array."""
    banned: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """banned_ids as an array."""

    def __post_init__(self) -> None:
        finite = math.isfinite
        t, p, m, r = self.temperature, self.top_p, self.min_p, self.repetition_penalty
        _check(finite(t) and t >= 0, "temperature", "finite and >= 0", t)
        _check(self.top_k >= 0, "top_k", ">= 0", self.top_k)
        _check(finite(p) and 0 < p <= 1, "top_p", "in (0, 1]", p)
        _check(finite(m) and 0 <= m <= 1, "min_p", "in [0, 1]", m)
        _check(finite(r) and r > 0, "repetition_penalty", "finite and > 0", r)
        _check(finite(self.presence_penalty), "presence_penalty", "finite", self.presence_penalty)
        _check(
            finite(self.frequency_penalty), "frequency_penalty", "finite", self.frequency_penalty
        )
        _check(0 <= self.seed <= MAX_SEED, "seed", "in [0, 2**64)", self.seed)
        ids = [token for token, _ in self.logit_bias]
        _check(all(token >= 0 for token in ids), "logit_bias", "ids >= 0", ids)
        _check(len(set(ids)) == len(ids), "logit_bias", "ids given once", ids)
        for token, value in self.logit_bias:
            _check(finite(value), "logit_bias", "finite values", (token, value))
        _check(all(i >= 0 for i in self.banned_ids), "banned_ids", ">= 0", self.banned_ids)
        values = [value for _, value in self.logit_bias]
        object.__setattr__(self, "bias_ids", np.asarray(ids, dtype=np.int64))
        object.__setattr__(self, "bias_values", np.asarray(values, dtype=np.float32))
        object.__setattr__(self, "banned", np.asarray(self.banned_ids, dtype=np.int64))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_BELOW

    @property
    def needs_history(self) -> bool:
        """Whether a History must be given: some penalty is on."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p may exclude tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse ids outside the vocabulary. Raises SamplingError."""
        for name, ids in (("logit_bias", self.bias_ids), ("banned_ids", self.banned)):
            if ids.size and int(ids.max()) >= vocab_size:
                raise SamplingError(name, f"ids < {vocab_size}", int(ids.max()))


class History:
    """Which tokens prompt and output contain, and how often the output does. A stack.

    Kept as a table of distinct tokens, so that a row pays for the tokens seen and not for the
    vocabulary.
    """

    def __init__(self, vocab_size: int, prompt_ids: Iterable[int]) -> None:
        """Start after a prompt. Raises SamplingError for ids outside the vocabulary."""
        prompt = np.unique(np.asarray(list(prompt_ids), dtype=np.int64))
        if prompt.size and (prompt[0] < 0 or prompt[-1] >= vocab_size):
            bad = int(prompt[0] if prompt[0] < 0 else prompt[-1])
            raise SamplingError("prompt_ids", f"in [0, {vocab_size})", bad)
        self.vocab_size = vocab_size
        self._prompt_size = self._size = int(prompt.size)
        self._ids = np.zeros(max(64, 2 * self._size), dtype=np.int64)
        self._ids[: self._size] = prompt
        self._counts = np.zeros(self._ids.size, dtype=np.float32)
        self._slots = {int(token): slot for slot, token in enumerate(prompt)}
        self._output: list[int] = []

    def __len__(self) -> int:
        """Tokens of the output."""
        return len(self._output)

    def append(self, token: int) -> None:
        """Count one more output token. Raises SamplingError if it is outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise SamplingError("token", f"in [0, {self.vocab_size})", token)
        slot = self._slots.get(token)
        if slot is None:
            slot = self._size
            if slot == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
            self._counts[slot] = 0
            self._slots[token] = slot
            self._size += 1
        self._counts[slot] += 1
        self._output.append(token)

    def pop(self) -> int:
        """Undo the last append and return its token. Raises IndexError on an empty output."""
        token = self._output.pop()
        slot = self._slots[token]
        self._counts[slot] -= 1
        if slot >= self._prompt_size and self._counts[slot] == 0:
            # Appends and pops nest, so a token that vanishes was the newest entry of the table.
            del self._slots[token]
            self._size -= 1
        return token

    def table(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Distinct tokens seen and their counts in the output, 0 if only the prompt has them.

        Views, valid until the next change.
        """
        return self._ids[: self._size], self._counts[: self._size]
