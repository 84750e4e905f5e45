"""The load tester before it sends anything: when, what, and whose."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from draftwire_client import ChatMessage, InvalidArgument
from draftwire_client.bench import datasets, texts
from draftwire_client.bench.arms import Arm, parse_arms
from draftwire_client.bench.arrivals import Ramp, offsets, replay
from draftwire_client.bench.datasets import Lengths, Sample
from draftwire_client.bench.faults import Fault, parse_faults
from draftwire_client.bench.plan import Timing, make_plan


def gaps(times: tuple[float, ...]) -> list[float]:
    return [b - a for a, b in pairwise((0.0, *times))]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gaps_have_the_distribution_that_was_asked_for(burstiness: float, seed: int) -> None:
    # Kolmogorov-Smirnov on fixed seeds; one false alarm in 1,000 draws would be expected.
    found = gaps(offsets(4000, rate=200, burstiness=burstiness, seed=seed))
    test = scipy_stats.kstest(found, "gamma", args=(burstiness, 0, 1 / (200 * burstiness)))
    assert test.pvalue > 0.001


def test_gaps_of_another_rate_fail_that_test() -> None:
    found = gaps(offsets(4000, rate=220, seed=0))
    assert scipy_stats.kstest(found, "expon", args=(0, 1 / 200)).pvalue < 0.001


@pytest.mark.parametrize("burstiness", [0.2, 1.0, math.inf])
def test_the_offered_rate_is_exact_over_the_run(burstiness: float) -> None:
    times = offsets(1000, rate=200, burstiness=burstiness, seed=5)
    assert times[-1] == pytest.approx(5.0, rel=1e-9)
    assert list(times) == sorted(times)


def test_an_infinite_rate_sends_all_at_once_and_an_infinite_burstiness_evenly() -> None:
    assert offsets(3) == (0.0, 0.0, 0.0)
    assert offsets(4, rate=2, burstiness=math.inf) == pytest.approx((0.5, 1.0, 1.5, 2.0))


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_moves_from_one_rate_to_the_other(strategy: str) -> None:
    times = offsets(2000, burstiness=math.inf, ramp=Ramp(strategy, 10, 100))
    found = gaps(times)
    assert 1 / found[0] == pytest.approx(10, rel=0.01)
    assert 1 / found[-1] == pytest.approx(100, rel=0.01)
    middle = 55 if strategy == "linear" else math.sqrt(1000)
    assert 1 / found[1000] == pytest.approx(middle, rel=0.01)
    assert all(a > b for a, b in pairwise(found))


def test_a_ramp_from_nothing_begins() -> None:
    assert all(math.isfinite(time) for time in offsets(50, ramp=Ramp("linear", 0, 10), seed=1))


def test_a_trace_is_replayed_by_scale_or_by_rate() -> None:
    trace = (100.0, 101.0, 104.0, 110.0)
    assert replay(trace, rate=None, time_scale=0.5) == (0.0, 0.5, 2.0, 5.0)
    by_rate = replay(trace, rate=3.0, time_scale=1.0)
    assert by_rate[-1] == pytest.approx(1.0)
    assert by_rate[1] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: offsets(-1), "--num-prompts"),
        (lambda: offsets(1, rate=0), "--request-rate"),
        (lambda: offsets(1, rate=1, burstiness=0), "--burstiness"),
        (lambda: Ramp("exponential", 0, 1), "--ramp-up-start-rps"),
        (lambda: Ramp("linear", 0, 0), "--ramp-up-end-rps"),
        (lambda: Ramp("sudden", 1, 2), "--ramp-up-strategy"),
        (lambda: replay((0.0,), rate=None, time_scale=-1), "--time-scale"),
        (lambda: Timing(max_concurrency=0), "--max-concurrency"),
        (lambda: parse_arms("fast"), "--arms"),
        (lambda: parse_arms("fixed:0"), "--arms"),
        (lambda: parse_arms("fixed:²"), "--arms"),
        (lambda: parse_arms("plain,plain"), "--arms"),
        (lambda: parse_arms("fixed+parts=guess"), "--arms"),
        (lambda: parse_faults(["drafter:kill"], owned=True, known=False), "--fault"),
        (lambda: parse_faults(["verifier:kill@1s"], owned=True, known=False), "--fault"),
        (lambda: parse_faults(["drafter:restart@1s"], owned=False, known=True), "--fault"),
        (lambda: parse_faults(["drafter:kill@1s"], owned=False, known=False), "--fault"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_flag(make: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        make()  # type: ignore[operator]
    assert raised.value.field == field


def test_arms_become_request_options() -> None:
    plain, fixed, narrow, adaptive, default = parse_arms(
        "plain, fixed:8,fixed:4+nodes=7+parts=ngram/rank_tree+rule=follow,adaptive,default"
    )
    assert plain == Arm("plain", {"speculation": "off"})
    assert fixed.options == {"speculation": "fixed", "max_block_size": 8}
    assert narrow.options == {
        "speculation": "fixed",
        "max_block_size": 4,
        "max_nodes": 7,
        "draft_parts": ["ngram", "rank_tree"],
        "rule": "follow",
    }
    assert adaptive.options == {"speculation": "adaptive"}
    assert default.options == {}


def test_faults_are_played_in_order_of_time() -> None:
    found = parse_faults(
        ["drafter:restart@1.5m,kill@500ms", "drafter:stop@3"], owned=True, known=False
    )
    assert found == (Fault("kill", 0.5), Fault("stop", 3.0), Fault("restart", 90.0))


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 5))
def test_every_pair_has_one_prompt_and_one_seed_for_all_arms(
    prompts: int, arms: int, seed: int
) -> None:
    samples = [Sample(f"prompt {i}", i + 1) for i in range(prompts)]
    names = [Arm(f"arm {k}", {"max_block_size": k + 1}) for k in range(arms)]
    plan = make_plan(samples, names, Timing(rate=10), options={"temperature": 0.5}, seed=seed)
    assert [item.index for item in plan] == list(range(prompts * arms))
    assert sorted(item.at or 0.0 for item in plan) == [item.at for item in plan]
    seeds = set()
    for pair in range(prompts):
        mine = [item for item in plan if item.pair == pair]
        assert {item.arm for item in mine} == {arm.name for arm in names}
        assert {item.prompt for item in mine} == {f"prompt {pair}"}
        assert {item.options["max_tokens"] for item in mine} == {pair + 1}
        (one,) = {item.options["seed"] for item in mine}
        seeds.add(one)
        # Arms take turns at being first.
        assert mine[0].arm == names[pair % arms].name
    assert len(seeds) == prompts


def test_only_without_a_rate_do_slots_make_a_closed_loop() -> None:
    samples, arm = [Sample("a"), Sample("b")], parse_arms("plain")
    closed = make_plan(samples, arm, Timing(max_concurrency=2), options={}, seed=0)
    assert [item.at for item in closed] == [None, None]
    limited = make_plan(samples, arm, Timing(rate=5, max_concurrency=2), options={}, seed=0)
    assert all(item.at is not None for item in limited)


def test_the_arms_of_a_trace_share_the_gaps_of_its_rows() -> None:
    samples = [Sample("a", at=0.0), Sample("b", at=3.0), Sample("c", at=9.0)]
    arms = parse_arms("plain,fixed,adaptive")
    plan = make_plan(samples, arms, Timing(), options={}, seed=0)
    assert [item.at for item in plan] == pytest.approx([0, 1, 2, 3, 5, 7, 9, 10.5, 12])
    scaled = make_plan(samples, arms, Timing(rate=2.0), options={}, seed=0)
    assert len(scaled) / (scaled[-1].at or 0) == pytest.approx(2.0, rel=0.2)
    with pytest.raises(InvalidArgument):
        make_plan([Sample("a", at=1.0), Sample("b", at=0.0)], arms, Timing(), options={}, seed=0)


def test_prompts_of_ours_are_many_and_all_different() -> None:
    found = list(texts.prompts(3))
    assert len(found) == len(set(found)) > 600
    assert found != list(texts.prompts(4))


@given(st.integers(1, 5000))
def test_prose_is_as_long_as_asked_and_different_by_seed(characters: int) -> None:
    text = texts.prose(characters, "1")
    assert 1 <= len(text) <= characters
    assert characters - len(text) <= 120
    if characters > 400:
        assert text != texts.prose(characters, "2")


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_json_lines_with_any_usual_field_are_read(tmp_path: Path) -> None:
    found = datasets.custom(
        write(
            tmp_path / "d.jsonl",
            {"prompt": "a", "output_tokens": 7},
            {"turns": ["b", "later"]},
            {"messages": [{"role": "user", "content": "c"}]},
            {"instruction": "d", "input": "e"},
            {"prompt_token_ids": [1, 2]},
            {"question": "f", "answer": "g"},
        )
    )
    assert [sample.prompt for sample in found] == [
        "a",
        "b",
        (ChatMessage("user", "c"),),
        "d\n\ne",
        (1, 2),
        "f",
    ]
    assert [sample.max_tokens for sample in found] == [7, None, None, None, None, None]


@pytest.mark.parametrize(
    "row", [{"answer": "x"}, {"prompt": ""}, {"prompt": "a", "max_tokens": 0}, [1]]
)
def test_a_line_without_a_prompt_is_refused_by_its_number(tmp_path: Path, row: object) -> None:
    with pytest.raises(InvalidArgument, match="line 2"):
        datasets.custom(write(tmp_path / "d.jsonl", {"prompt": "fine"}, row))


def test_a_conversation_gives_its_first_question_and_the_length_of_its_answer(
    tmp_path: Path,
) -> None:
    rows = [
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a" * 40},
            ]
        },
        {"conversations": [{"from": "human", "value": "alone"}]},
    ]
    whole = tmp_path / "s.json"
    whole.write_text(json.dumps(rows))
    assert datasets.sharegpt(whole, 4.0) == [Sample("q", 10)]
    assert datasets.sharegpt(write(tmp_path / "s.jsonl", *rows), 4.0) == [Sample("q", 10)]


def test_random_lengths_keep_to_their_range() -> None:
    found = datasets.random_ids(
        200, vocab_size=1000, input_len=20, output_len=10, spread=0.5, seed=1
    )
    assert {len(sample.prompt) for sample in found} == set(range(10, 31))
    assert {sample.max_tokens for sample in found} == set(range(5, 16))
    ids = {token for sample in found for token in sample.prompt}
    assert ids <= set(range(50, 950))
    assert datasets.distinct(found) == 200


def test_a_trace_gives_times_and_lengths_cut_to_the_target(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,4000,109\n"
        "2023-11-16 18:16:50.0000000,10,5\n"
    )
    lengths = Lengths(1024, 100, overhead=24)
    first, second = datasets.azure(trace, 2, lengths, 4.0, 0)
    assert (first.input_len, first.max_tokens, first.at, first.clipped) == (374, 44, 0.0, False)
    assert second.at == pytest.approx(4.314579)
    assert (second.input_len, second.max_tokens, second.clipped) == (900, 100, True)
    assert isinstance(second.prompt, str)
    assert 3500 < len(second.prompt) <= 3600
    trace.write_text("TIMESTAMP,ContextTokens\nyesterday,3\n")
    with pytest.raises(InvalidArgument, match="line 2"):
        datasets.azure(trace, 1, lengths, 4.0, 0)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(80, 4096), st.integers(1, 5000))
def test_fitted_lengths_always_fit(
    context: int, generated: int, most_context: int, most_tokens: int
) -> None:
    taken, made, _ = Lengths(most_context, most_tokens).fit(context, generated)
    assert taken >= 1
    assert 1 <= made <= most_tokens
    assert taken + made + 64 <= max(most_context, 66)


def test_prompts_repeat_only_when_asked() -> None:
    few = [Sample("a"), Sample("b")]
    with pytest.raises(InvalidArgument) as raised:
        datasets.choose(few, 3, shuffle=True, oversample=False, seed=0)
    assert raised.value.field == "--num-prompts"
    found = datasets.choose(few, 5, shuffle=False, oversample=True, seed=0)
    assert [sample.prompt for sample in found] == ["a", "b", "a", "b", "a"]
    many = [Sample(str(i)) for i in range(50)]
    chosen = datasets.choose(many, 20, shuffle=True, oversample=False, seed=1)
    assert len(set(chosen)) == 20
    assert chosen != many[:20]


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BROKEN: dict[str, tuple[Callable[[Path], object], bytes]] = {
    "a JSON line that is cut off": (datasets.custom, b'{"prompt": '),
    "a JSON line too deep": (datasets.custom, b"[" * 100_000),
    "a line that is not UTF-8": (datasets.custom, b'{"prompt": "\xff"}'),
    "a message without its role": (datasets.custom, b'{"messages": [{"content": "x"}]}'),
    "a message that is a text": (datasets.custom, b'{"messages": ["x"]}'),
    "an id that is a text": (datasets.custom, b'{"token_ids": ["x"]}'),
    "an id that is no number": (datasets.custom, b'{"token_ids": [NaN]}'),
    "an id below 0": (datasets.custom, b'{"token_ids": [-1]}'),
    "conversations that are no JSON": (lambda p: datasets.sharegpt(p, 4.0), b"[{]"),
    "conversations too deep": (lambda p: datasets.sharegpt(p, 4.0), b"[" * 100_000),
    "a trace that goes back in time": (
        lambda p: datasets.azure(p, 9, Lengths(2048, 64), 4.0, 0),
        f"{HEAD}2024-05-10 00:00:05,9,9\n2024-05-10 00:00:01,9,9\n".encode(),
    ),
    "a length below 0": (
        lambda p: datasets.azure(p, 9, Lengths(2048, 64), 4.0, 0),
        f"{HEAD}2024-05-10 00:00:05,-9,9\n".encode(),
    ),
    "a field without end": (
        lambda p: datasets.azure(p, 9, Lengths(2048, 64), 4.0, 0),
        HEAD.encode() + b'"' + b"x" * 200_000,
    ),
}


@pytest.mark.parametrize(("read", "content"), BROKEN.values(), ids=BROKEN.keys())
def test_data_that_is_broken_is_refused_by_file_and_line(
    tmp_path: Path, read: Callable[[Path], object], content: bytes
) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument) as caught:
        read(path)
    assert caught.value.field == "--dataset-path"
    assert "data" in caught.value.value


def test_data_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InvalidArgument, match="can be read"):
            datasets.custom(path)


def test_conversations_of_other_shapes_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "data"
    good = '{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "aaaa"}]}'
    others = ['{"conversations": 7}', '{"conversations": "ab"}', "3", good.replace('"aaaa"', "5")]
    path.write_text(f"[{', '.join([*others, good])}]")
    assert datasets.sharegpt(path, 2.0) == [Sample("q", 2)]


def test_rows_of_a_trace_may_tell_their_zone_or_not(tmp_path: Path) -> None:
    """The public trace of 2024 has both: whole seconds are written without a fraction."""
    path = tmp_path / "data"
    rows = ["2024-05-10 00:00:00.009930+00:00,9,5", "2024-05-10 00:00:01+00:00,9,5"]
    rows.append("2024-05-10 00:00:02.0099300,9,5")
    path.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8-sig")
    found = datasets.azure(path, 9, Lengths(2048, 64), 4.0, 0)
    assert [sample.at for sample in found] == pytest.approx([0.0, 0.99007, 2.0])
