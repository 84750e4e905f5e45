"""What one request took: times at the client and what came of it.

Knows the definitions of the latencies. All times are seconds on one clock whose 0 is the start of
the run. Does not know where times and chunks come from.

Definitions, with n tokens in chunks at t_1 < … < t_k, and s the time it was scheduled for:

* TTFT = time of the first chunk with a token - s.
* E2EL = time of the last chunk - s (of the end, if there was no chunk).
* TPOT = (E2EL - TTFT) / (n - 1).
* chunk gap: time between neighbouring chunks with tokens.
* ITL, one value a token after the first: a chunk of m tokens after a gap g gives m values g/m, and
  the tokens that came with the first one give 0; so ITLs sum to E2EL - TTFT whatever the chunks.
* queue time: time of sending - s, spent at the client: waiting for a free slot, or being late.

Latency counts from s, not from the sending: a server that stalls cannot delay the measurement of
its own stall (no coordinated omission).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from draftwire_client.types import Acceptance


@dataclass(slots=True)
class Record:
    """One request. Times in seconds from the start of the run."""

    index: int
    pair: int
    arm: str
    scheduled: float
    input_len: int = 0
    """Prompt tokens as the server counted them."""
    asked_output: int | None = None
    sent: float | None = None
    late: float = 0.0
    """Seconds that the client itself was late: waiting for a slot is not counted."""
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    ended: float | None = None
    error: str = ""
    finish_reason: str = ""
    cached_tokens: int = 0
    completion_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    acceptance: Acceptance | None = None
    attempts: int = 1
    worker: int = 0

    def chunk(self, now: float, tokens: int) -> None:
        """A chunk with so many tokens arrived."""
        if tokens:
            self.chunk_times.append(now)
            self.chunk_tokens.append(tokens)

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.ended is not None and not self.error

    @property
    def output_len(self) -> int:
        """Tokens that arrived."""
        return sum(self.chunk_tokens)

    @property
    def queue(self) -> float | None:
        """Seconds between the scheduled time and the sending; None if it was never sent."""
        return None if self.sent is None else self.sent - self.scheduled

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.chunk_times[0] - self.scheduled if self.chunk_times else None

    @property
    def e2el(self) -> float | None:
        """Seconds to the last chunk."""
        last = self.chunk_times[-1] if self.chunk_times else self.ended
        return None if last is None else last - self.scheduled

    @property
    def decode(self) -> float:
        """Seconds from the first token to the last."""
        return self.chunk_times[-1] - self.chunk_times[0] if self.chunk_times else 0.0

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for fewer than two tokens."""
        after_first = self.output_len - 1
        return self.decode / after_first if after_first > 0 else None

    def gaps(self) -> list[float]:
        """Seconds between neighbouring chunks."""
        return [b - a for a, b in pairwise(self.chunk_times)]

    def itls(self) -> list[float]:
        """Seconds before each token after the first; output_len - 1 values."""
        if not self.chunk_tokens:
            return []
        found = [0.0] * (self.chunk_tokens[0] - 1)
        for gap, tokens in zip(self.gaps(), self.chunk_tokens[1:], strict=True):
            found += [gap / tokens] * tokens
        return found


def line(record: Record) -> dict[str, object]:
    """A record as the JSON object of the request log; times in seconds, latencies in ms."""
    stats = record.acceptance
    return {
        "index": record.index,
        "pair": record.pair,
        "arm": record.arm,
        "worker": record.worker,
        "scheduled_s": _s(record.scheduled),
        "sent_s": _s(record.sent),
        "ended_s": _s(record.ended),
        "queue_ms": _ms(record.queue),
        "ttft_ms": _ms(record.ttft),
        "tpot_ms": _ms(record.tpot),
        "e2el_ms": _ms(record.e2el),
        "chunk_s": [round(t, 6) for t in record.chunk_times],
        "chunk_tokens": record.chunk_tokens,
        "input_len": record.input_len,
        "output_len": record.output_len,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
        "attempts": record.attempts,
        "error": record.error,
        "rounds": stats.rounds if stats else None,
        "plain_rounds": stats.plain_rounds if stats else None,
        "drafted": stats.drafted if stats else None,
        "accepted": stats.accepted if stats else None,
        "token_ids": list(record.token_ids),
        "text": record.text,
    }


def _s(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value * 1000, 3)
