"""Prompt lookup: what followed the last tokens when they came before.

An index from each pair of tokens to where it came, in prompt and answer; matches are then followed
backwards to see how long they are. One entry is written per token, so a round costs the tokens it
added and the look-ups it makes. Knows token ids only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SHORTEST = 2
LONGEST = 16
PLACES = 8  # latest occurrences looked at


class NgramIndex:
    """Tokens of one session and where each pair of them was continued."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, int], list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. A pair enters the index when the token after it is known."""
        known, after = self.tokens, self._after
        for token in tokens:
            at = len(known)
            if at >= SHORTEST:
                after.setdefault((known[-2], known[-1]), []).append(at)
            known.append(token)

    def tail(self) -> list[int]:
        """The last tokens, as many as a match may be long."""
        return self.tokens[-LONGEST:]

    def matches(self, tail: Sequence[int], most: int) -> list[tuple[int, int]]:
        """(place, length) of up to `most` earlier occurrences of the end of `tail`, longest first
        and later ones first among equals. `tail` is the session's own end, or that with a drafted
        path after it; the token that followed is `tokens[place]`. Lengths are 2 to 16.
        """
        if len(tail) < SHORTEST:
            return []
        places = self._after.get((tail[-2], tail[-1]))
        if not places:
            return []
        known, longest = self.tokens, min(LONGEST, len(tail))
        found = []
        for place in reversed(places[-PLACES:]):
            length = SHORTEST
            while (
                length < longest
                and length < place
                and known[place - 1 - length] == tail[-1 - length]
            ):
                length += 1
            found.append((place, length))
            if length == LONGEST:
                break
        if len(found) > 1:
            found.sort(key=lambda match: -match[1])
        return found[:most]

    def next_tokens(self, tail: Sequence[int], most: int) -> list[tuple[int, int]]:
        """(token, length of the match) of up to `most` different tokens that followed the end of
        `tail`, best first.
        """
        found: dict[int, int] = {}
        for place, length in self.matches(tail, PLACES):
            found.setdefault(self.tokens[place], length)
            if len(found) == most:
                break
        return list(found.items())
