"""Tokens to text as they come, and where a stop string cuts it.

Knows: a tokenizer's `decode` and the request's stop strings. Takes one token at a time, whatever
the size of the block it came in, so a chunk of n tokens says the same as n chunks of one. Does not
know: sessions, stop token ids, or the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "�"  # what decode() makes of bytes that are not (yet) a character


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of `token_ids`."""


class TextStream:
    """Text of one answer. `push` returns the text that is certain now: no part of a character, no
    start of a stop string."""

    def __init__(
        self, tokenizer: Decoder, stops: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._skip = skip_special_tokens
        self._tokens: list[int] = []
        # Decoding starts at `_context`: tokens before a piece decide whether its space is kept.
        self._context = 0
        self._decoded = 0  # all text of the tokens before this is in `_pending` or already out
        self._taken = (
            0  # characters of the text from `_context` on that are in `_pending` or already out
        )
        self._pending = ""  # decoded, may still turn out to be the start of a stop string
        self.matched: str | None = None

    def push(self, token: int) -> str:
        """Add a token. Once `matched` is set the text before the stop string is complete and
        nothing more may be pushed."""
        if self.matched is not None:
            raise RuntimeError("push after a stop string matched")
        self._tokens.append(token)
        piece = self._next_piece()
        return self._filter(piece) if piece else ""

    def finish(self) -> str:
        """The rest, at the end of an answer that no stop string ended: held-back text and
        incomplete characters as they are."""
        if self.matched is not None:
            return ""
        rest = self._decode(self._context, len(self._tokens))[self._taken :]
        # What was incomplete may decode to something that completes a stop string.
        out = self._filter(rest)
        if self.matched is None:
            out, self._pending = out + self._pending, ""
        return out

    def _next_piece(self) -> str:
        text = self._decode(self._context, len(self._tokens))
        certain = text.rstrip(REPLACEMENT)
        piece, self._taken = certain[self._taken :], max(self._taken, len(certain))
        if len(certain) == len(text):
            # Nothing is incomplete: from now on only the last piece is needed as context.
            self._context, self._decoded = self._decoded, len(self._tokens)
            self._taken = len(self._decode(self._context, self._decoded))
        return piece

    def _decode(self, start: int, end: int) -> str:
        return (
            self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=self._skip)
            if end > start
            else ""
        )

    def _filter(self, piece: str) -> str:
        text = self._pending + piece
        hits = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, self.matched = min(hits)
            self._pending = ""
            return text[:at]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper start of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
