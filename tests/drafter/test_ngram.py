"""The n-gram index against a search that looks at everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafter_service.ngram import NgramIndex

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def brute_force(tokens: list[int], count: int) -> tuple[list[int], int]:
    """The latest earlier place of the last 4, 3 or 2 tokens, and what followed it; a continuation
    that runs past the end goes on with itself.
    """
    for length in (4, 3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                path: list[int] = []
                for i in range(count):
                    at = end + i
                    path.append(tokens[at] if at < len(tokens) else path[at - len(tokens)])
                return path, length
    return [], 0


@given(TOKENS, st.integers(0, 12))
def test_lookup_finds_what_a_full_search_finds(tokens: list[int], count: int) -> None:
    assert NgramIndex(tokens).lookup(count) == brute_force(tokens, count)


@given(st.lists(TOKENS, max_size=6), st.integers(1, 9))
def test_an_index_grown_in_pieces_equals_one_made_at_once(
    pieces: list[list[int]], count: int
) -> None:
    grown = NgramIndex()
    for piece in pieces:
        grown.extend(piece)
    whole = [token for piece in pieces for token in piece]
    assert grown.tokens == whole
    assert grown.lookup(count) == NgramIndex(whole).lookup(count)


def test_a_loop_goes_on_as_a_loop() -> None:
    assert NgramIndex([1, 2, 3, 1, 2, 3, 1]).lookup(7) == ([2, 3, 1, 2, 3, 1, 2], 4)


def test_nothing_repeated_gives_nothing() -> None:
    assert NgramIndex(range(20)).lookup(5) == ([], 0)
