"""Prompt lookup: what followed the last tokens when they came before.

An index from each run of 4, 3 and 2 tokens to where its latest occurrence went on; one entry of
each length is written per token, so a round costs the tokens it added and nothing else. Knows token
ids only.
"""

from __future__ import annotations

from collections.abc import Iterable

LENGTHS = (4, 3, 2)


class NgramIndex:
    """Tokens of one session and where each n-gram was last continued."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in LENGTHS)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. An n-gram enters the index when the token after it is known."""
        known = self.tokens
        for token in tokens:
            at = len(known)
            for length, index in zip(LENGTHS, self._next, strict=True):
                if at >= length:
                    index[tuple(known[at - length :])] = at
            known.append(token)

    def lookup(self, count: int) -> tuple[list[int], int]:
        """Up to `count` tokens that followed the latest earlier occurrence of the last 4, else 3,
        else 2 tokens, and the length that matched (0: none). A match that reaches the end goes on
        with the tokens it has just given, so a loop is continued as a loop.
        """
        known = self.tokens
        for length, index in zip(LENGTHS, self._next, strict=True):
            start = index.get(tuple(known[-length:])) if len(known) >= length else None
            if start is not None:
                period = len(known) - start
                path = known[start : start + count]
                while len(path) < count:
                    path.append(path[-period])
                return path, length
        return [], 0
