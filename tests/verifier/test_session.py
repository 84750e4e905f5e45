"""Where an answer ends, and how rounds are counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwire.v1 import types_pb2
from draftwire_kernels.sampling import Sampling
from draftwire_kernels.tree import TokenTree
from verifier_service.session import (
    FinishReason,
    Proposal,
    Request,
    Session,
    Speculation,
)
from verifier_service.stats import Statistics

LETTERS = "abcdefgh"


class Letters:
    """Token i is the letter i."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(LETTERS[t] for t in token_ids)


def session(**fields: object) -> Session:
    defaults = {
        "request_id": "r",
        "prompt": (0,),
        "sampling": Sampling(),
        "max_tokens": 20,
        "speculation": Speculation(True, 8, 16),
    }
    return Session(1, Request(**{**defaults, **fields}), len(LETTERS), Letters())  # type: ignore[arg-type]


def play(
    tokens: Sequence[int], sizes: Sequence[int], context: int = 100, **fields: object
) -> tuple[str, list[int], object]:
    """Commit `tokens` in blocks of the given sizes until the answer ends."""
    s = session(**fields)
    text, taken, at = "", [], 0
    for size in sizes:
        delta = s.commit(tokens[at : at + size], context)
        at += size
        text += delta.text
        taken.extend(delta.tokens)
        if s.ending is not None:
            break
    return text, taken, s.ending


@settings(max_examples=500, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 7), min_size=24, max_size=24),
    sizes=st.lists(st.integers(1, 16), min_size=24, max_size=24),
    eos=st.frozensets(st.integers(0, 7), max_size=1),
    stop_ids=st.frozensets(st.integers(0, 7), max_size=1),
    stops=st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=3), max_size=2),
    max_tokens=st.integers(1, 24),
    context=st.integers(2, 30),
)
def test_an_answer_ends_at_the_same_token_whatever_the_blocks(
    tokens: list[int],
    sizes: list[int],
    eos: frozenset[int],
    stop_ids: frozenset[int],
    stops: list[str],
    max_tokens: int,
    context: int,
) -> None:
    fields = {
        "eos_ids": eos,
        "stop_token_ids": stop_ids,
        "stop_strings": tuple(stops),
        "max_tokens": max_tokens,
    }
    plain = play(tokens, [1] * len(tokens), context, **fields)
    assert play(tokens, sizes, context, **fields) == plain
    assert len(plain[1]) <= max_tokens
    assert len(plain[1]) + 1 <= context


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"eos_ids": frozenset({2}), "stop_token_ids": frozenset({2})},
            FinishReason.FINISH_REASON_EOS,
        ),
        (
            {"stop_token_ids": frozenset({2}), "stop_strings": ("c",)},
            FinishReason.FINISH_REASON_STOP_TOKEN,
        ),
        ({"stop_strings": ("c",), "max_tokens": 3}, FinishReason.FINISH_REASON_STOP_STRING),
        ({"max_tokens": 3}, FinishReason.FINISH_REASON_MAX_TOKENS),
    ],
)
def test_the_earlier_check_wins_when_several_meet_in_one_token(
    fields: dict[str, object], reason: int
) -> None:
    text, taken, ending = play([0, 1, 2, 3], [4], **fields)
    assert taken == [0, 1, 2]
    assert ending.reason == reason  # type: ignore[attr-defined]
    assert text == ("abc" if reason == FinishReason.FINISH_REASON_MAX_TOKENS else "ab")


def test_max_tokens_and_a_stop_in_one_block_the_earlier_wins() -> None:
    _, taken, ending = play([0, 1, 2, 3, 4], [5], stop_token_ids=frozenset({4}), max_tokens=3)
    assert (len(taken), ending.reason) == (3, FinishReason.FINISH_REASON_MAX_TOKENS)  # type: ignore[attr-defined]


def test_counts_add_up_when_the_text_ends_inside_an_accepted_path() -> None:
    s = session()
    tree = TokenTree((1, 2, 3, 4, 7), (-1, 0, 1, 2, 0))
    s.count_round(Proposal(0, tree, (3, 3, 3, 3, 4), 5, 1), (0, 1, 2, 3), emitted=2)
    proto = s.stats.to_proto()
    assert proto.drafted_tokens == 5
    assert (proto.accepted_tokens, proto.discarded_tokens, proto.rejected_tokens) == (2, 2, 1)
    assert list(proto.accepted_per_position) == [1, 1, 0, 0]
    assert list(proto.drafted_per_position) == [1, 1, 1, 1]
    assert proto.mean_acceptance_length == 3
    parts = {p.part: (p.drafted, p.accepted) for p in proto.accepted_per_part}
    assert parts == {types_pb2.DRAFT_PART_BRANCHES: (4, 2), types_pb2.DRAFT_PART_NGRAM: (1, 0)}


@given(made=st.integers(0, 20), block=st.integers(1, 16), context=st.integers(2, 30))
def test_a_path_never_commits_past_max_tokens_or_the_context(
    made: int, block: int, context: int
) -> None:
    s = session(speculation=Speculation(True, block, 16))
    s.tokens.extend([0] * min(made, context - 1))
    depth = s.drafts_allowed(context)
    assert 0 <= depth <= block - 1
    if depth:
        assert s.made + depth + 1 <= s.request.max_tokens
        assert len(s.tokens) + depth + 1 <= context


def test_a_tree_cut_for_the_load_of_a_step_says_so() -> None:
    tree = TokenTree((1, 2, 3, 4), (-1, 0, 1, 2))
    cut = Proposal(0, tree, (3, 3, 3, 3), 5, types_pb2.BLOCK_SIZE_REASON_FIXED).cut(2)
    assert cut.tree.tokens == (1, 2)
    assert (cut.block_size, cut.reason) == (3, types_pb2.BLOCK_SIZE_REASON_LOAD)


def test_counts_past_the_width_of_an_answers_statistics_are_whole_in_the_totals() -> None:
    many = 2**32 + 5
    stats = Statistics(rounds=many, drafted=3 * many, accepted=many)
    stats.block_sizes[4, 1] = stats.drafted_parts[2] = stats.drafted_at[0] = many
    narrow, wide = stats.to_proto(), stats.to_totals()
    for message, count in ((narrow, 2**32 - 1), (wide, many)):
        assert (message.rounds, message.accepted_tokens) == (count, count)
        assert message.block_sizes[0].rounds == message.accepted_per_part[0].drafted == count
        assert list(message.drafted_per_position) == [count]
        assert message.mean_acceptance_length == 2.0
    assert (wide.drafted_tokens, wide.rejected_tokens) == (3 * many, 2 * many)
