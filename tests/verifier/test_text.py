"""Text and stop strings do not depend on how tokens were grouped."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_service.text import TextStream


class Bytes:
    """A tokenizer whose tokens are pieces of UTF-8 bytes, as byte-level BPE has them."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.pieces[t] for t in token_ids).decode("utf-8", errors="replace")


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """`data` cut at the given places."""
    places = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def stream(pieces: Sequence[bytes], stops: Sequence[str]) -> tuple[list[str], int, str | None]:
    """Chunks, tokens taken and the stop string matched."""
    text = TextStream(Bytes(pieces), stops)
    chunks = []
    for count in range(len(pieces)):
        chunks.append(text.push(count))
        if text.matched is not None:
            return chunks, count + 1, text.matched
    chunks.append(text.finish())
    return chunks, len(pieces), text.matched


TEXT = st.text(alphabet="ab é€😀\n", min_size=1, max_size=30)


@settings(max_examples=400, deadline=None)
@given(TEXT, st.lists(st.integers(0, 200), max_size=60))
def test_joined_chunks_are_the_text_and_no_character_is_split(text: str, cuts: list[int]) -> None:
    chunks, _, _ = stream(split(text.encode(), cuts), ())
    assert "".join(chunks) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in chunk for chunk in chunks)


@settings(max_examples=600, deadline=None)
@given(
    TEXT,
    st.lists(st.integers(0, 200), max_size=60),
    st.lists(st.text(alphabet="ab é€", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_string_cuts_at_its_first_occurrence_wherever_tokens_end(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    pieces = split(text.encode(), cuts)
    chunks, taken, matched = stream(pieces, stops)
    # The plain truth: the shortest beginning of the tokens whose text contains a stop string.
    for count in range(1, len(pieces) + 1):
        whole = b"".join(pieces[:count]).decode("utf-8", errors="ignore")
        hits = [(whole.find(stop), stop) for stop in stops if stop in whole]
        if hits:
            at, _ = min(hits)
            assert "".join(chunks) == whole[:at]
            assert taken == count
            assert matched is not None
            assert whole[at:].startswith(matched)
            return
    assert matched is None
    assert "".join(chunks) == text


def test_bytes_that_are_no_character_come_out_at_the_end() -> None:
    chunks, _, _ = stream([b"a", b"\xe2\x82"], ())
    assert "".join(chunks) == "a\N{REPLACEMENT CHARACTER}"


def test_pushing_after_a_match_is_an_error() -> None:
    text = TextStream(Bytes([b"x", b"y"]), ("x",))
    text.push(0)
    with pytest.raises(RuntimeError):
        text.push(1)
