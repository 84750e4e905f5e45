"""The n-gram index against a search that looks at everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafter_service.ngram import LONGEST, PLACES, NgramIndex

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def longest_match(tokens: list[int], path: list[int]) -> tuple[int, int] | None:
    """The longest match of the end of tokens + path among the latest places where its last two
    tokens came before, the later one of two as long; None if there is none.
    """
    tail = (tokens[-LONGEST:] + path)[-LONGEST:]
    if len(tail) < 2:
        return None
    places = [place for place in range(2, len(tokens)) if tokens[place - 2 : place] == tail[-2:]][
        -PLACES:
    ]
    found = []
    for place in places:
        length = max(n for n in range(2, len(tail) + 1) if tokens[:place][-n:] == tail[-n:])
        found.append((length, place))
    if not found:
        return None
    length, place = max(found)
    return place, length


@given(TOKENS, st.lists(st.integers(0, 3), max_size=4))
def test_the_best_match_is_what_a_full_search_finds(tokens: list[int], path: list[int]) -> None:
    index = NgramIndex(tokens)
    found = index.matches(index.tail() + path, 1)
    want = longest_match(tokens, path)
    assert found == ([] if want is None else [want])


@given(st.lists(TOKENS, max_size=6))
def test_an_index_grown_in_pieces_equals_one_made_at_once(pieces: list[list[int]]) -> None:
    grown = NgramIndex()
    for piece in pieces:
        grown.extend(piece)
    whole = NgramIndex([token for piece in pieces for token in piece])
    assert grown.tokens == whole.tokens
    assert grown.matches(grown.tail(), PLACES) == whole.matches(whole.tail(), PLACES)


def test_different_continuations_come_longest_match_first() -> None:
    index = NgramIndex([7, 1, 2, 8, 5, 1, 2, 9, 7, 1, 2])
    assert index.next_tokens(index.tail(), 2) == [(8, 3), (9, 2)]
    assert index.next_tokens(index.tail(), 1) == [(8, 3)]


def test_a_drafted_path_is_matched_as_if_it_had_been_said() -> None:
    index = NgramIndex([4, 5, 6, 7, 0, 4])
    assert index.next_tokens(index.tail(), 1) == []
    assert index.next_tokens([*index.tail(), 5], 1) == [(6, 2)]
    assert index.next_tokens([*index.tail(), 5, 6], 1) == [(7, 3)]


def test_a_loop_goes_on_as_a_loop() -> None:
    index, path = NgramIndex([1, 2, 3, 1, 2, 3, 1]), []
    for _ in range(7):
        ((token, _),) = index.next_tokens(index.tail() + path, 1)
        path.append(token)
    assert path == [2, 3, 1, 2, 3, 1, 2]


def test_nothing_repeated_gives_nothing() -> None:
    index = NgramIndex(range(20))
    assert index.next_tokens(index.tail(), 2) == []
    assert NgramIndex().next_tokens([], 2) == []
