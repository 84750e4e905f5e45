"""What the load tester makes of what it saw: latencies, figures, comparisons, judgements."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwire_client import InvalidArgument
from draftwire_client.bench import counters, energy, limits, stats, svg
from draftwire_client.bench.compare import compare, first_difference
from draftwire_client.bench.energy import Meter
from draftwire_client.bench.measure import Record, line
from draftwire_client.bench.summary import most_at_once, summarise, total, values
from draftwire_client.types import Acceptance


def record(
    chunks: list[tuple[float, int]],
    *,
    index: int = 0,
    pair: int = 0,
    arm: str = "plain",
    scheduled: float = 0.0,
    sent: float | None = None,
    error: str = "",
    ids: tuple[int, ...] = (),
    acceptance: Acceptance | None = None,
) -> Record:
    made = Record(index, pair, arm, scheduled, error=error, acceptance=acceptance)
    made.sent = scheduled if sent is None else sent
    for moment, tokens in chunks:
        made.chunk(moment, tokens)
    made.ended = made.chunk_times[-1] if made.chunk_times else made.sent
    made.token_ids = ids
    made.finish_reason = "max_tokens"
    return made


chunk_lists = st.lists(
    st.tuples(st.floats(0.001, 10), st.integers(1, 9)), min_size=1, max_size=30
).map(
    lambda steps: [
        (sum(gap for gap, _ in steps[: i + 1]), tokens) for i, (_, tokens) in enumerate(steps)
    ]
)


@given(chunk_lists, st.floats(0, 5), st.floats(0, 3))
def test_latencies_fit_together_whatever_the_chunks(
    chunks: list[tuple[float, int]], scheduled: float, wait: float
) -> None:
    moved = [(scheduled + wait + at, tokens) for at, tokens in chunks]
    one = record(moved, scheduled=scheduled, sent=scheduled + wait)
    tokens = sum(n for _, n in chunks)
    assert one.queue == pytest.approx(wait, abs=1e-9)
    assert one.ttft == pytest.approx(wait + chunks[0][0])
    assert one.e2el == pytest.approx(wait + chunks[-1][0])
    assert len(one.itls()) == tokens - 1
    assert sum(one.itls()) == pytest.approx(one.e2el - one.ttft, abs=1e-9)
    assert len(one.gaps()) == len(chunks) - 1
    if tokens > 1:
        assert one.tpot == pytest.approx((one.e2el - one.ttft) / (tokens - 1), abs=1e-9)
    else:
        assert one.tpot is None


def test_a_chunk_of_several_tokens_shares_its_gap() -> None:
    one = record([(1.0, 3), (1.4, 4), (1.5, 1)])
    assert one.itls() == pytest.approx([0, 0, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert one.gaps() == pytest.approx([0.4, 0.1])


def test_an_answer_without_tokens_lasts_until_its_end() -> None:
    one = record([], scheduled=1.0, sent=2.0)
    one.chunk(2.5, 0)
    one.ended = 3.0
    assert (one.ttft, one.tpot, one.e2el, one.itls()) == (None, None, 2.0, [])
    assert json.dumps(line(one))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_are_numpy_s(found: list[float], percent: float) -> None:
    expected = float(np.percentile(found, percent))
    assert stats.percentile(sorted(found), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert stats.mean(found) == pytest.approx(float(np.mean(found)), rel=1e-9, abs=1e-6)
    assert stats.deviation(found) == pytest.approx(float(np.std(found)), rel=1e-6, abs=1e-5)


def test_figures_have_the_names_and_values_of_vllm() -> None:
    first = Acceptance(
        rounds=10,
        plain_rounds=1,
        drafted=40,
        accepted=15,
        rejected=25,
        accepted_per_position=(10, 5),
        drafted_per_position=(10, 10),
    )
    second = Acceptance(
        rounds=10, drafted=10, accepted=5, rejected=5, accepted_per_position=(3, 1, 1)
    )
    records = [
        record([(1.0, 1), (2.0, 10)], acceptance=first),
        record([(2.5, 1), (4.0, 5)], scheduled=1.0, acceptance=second),
        record([], scheduled=1.0, error="INTERNAL: broken"),
    ]
    for one in records:
        one.input_len = 7
    found = summarise(records, duration=4.0, percentiles=(99, 99.9), goodput={"ttft": 1200})
    assert found["completed"] == 2
    assert found["failed"] == 1
    assert found["request_throughput"] == 0.5
    assert found["output_throughput"] == 17 / 4
    assert found["total_token_throughput"] == (17 + 14) / 4
    assert found["request_goodput"] == 0.25
    assert found["mean_ttft_ms"] == 1250
    assert found["median_e2el_ms"] == 2500
    assert found["mean_tpot_ms"] == pytest.approx((100 + 300) / 2)
    assert found["p99_tpot_ms"] == pytest.approx(298)
    assert found["p99.9_ttft_ms"] == pytest.approx(1499.5)
    assert found["max_output_tokens_per_s"] == 11  # both of 2.0 and 2.5 fall into one second
    assert found["spec_decode_num_drafts"] == 20
    assert found["spec_decode_acceptance_rate"] == 40.0
    assert found["spec_decode_acceptance_length"] == 2.0
    assert found["spec_decode_per_position_acceptance_rates"] == [0.65, 0.3, 0.05]


def test_figures_of_nothing_are_null_not_nan() -> None:
    found = summarise([], duration=0.0, percentiles=(50,), goodput={"ttft": 1})
    assert found["mean_ttft_ms"] is None
    assert found["request_throughput"] is None
    json.dumps(found, allow_nan=False)


def test_the_queue_counts_for_requests_that_failed_too() -> None:
    records = [record([], sent=2.0, error="UNAVAILABLE: gone"), record([(1.0, 1)], sent=0.5)]
    assert sorted(values(records, "queue")) == [500, 2000]
    assert values(records, "ttft") == [1000]


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), max_size=20))
def test_the_most_requests_at_once_are_found(spans: list[tuple[float, float]]) -> None:
    records = []
    for begin, length in spans:
        one = record([], scheduled=begin)
        one.ended = begin + length
        records.append(one)
    expected = max((sum(a <= at < a + n for a, n in spans) for at, _ in spans), default=0)
    assert most_at_once(records) == expected


def pairs(speed: float, count: int = 60, seed: int = 1) -> list[Record]:
    """Answers of two arms; the second's time a token is that of the first by `speed`."""
    rng = random.Random(seed)
    found = []
    for pair in range(count):
        each, tokens = rng.uniform(0.05, 0.4), rng.randrange(8, 40)
        for arm, factor in (("plain", 1.0), ("fast", 1 / speed)):
            noise = rng.uniform(0.97, 1.03)
            chunks = [(0.2 + i * each * factor * noise, 1) for i in range(tokens)]
            found.append(record(chunks, pair=pair, arm=arm, ids=tuple(range(tokens))))
    return found


def test_speed_ups_are_found_with_their_interval_in_pairs() -> None:
    (against,) = compare(pairs(1.5), ["plain", "fast"], seed=0)
    decode = against.speedups["decode"]
    assert decode is not None
    assert decode.low < 1.5 < decode.high
    # Times differ eightfold between prompts; pairing keeps that out of the interval.
    assert decode.high - decode.low < 0.03
    assert (against.compared, against.same) == (60, 60)
    (no_faster,) = compare(pairs(1.0, seed=2), ["plain", "fast"], seed=0)
    even = no_faster.speedups["decode"]
    assert even is not None
    assert even.low < 1.0 < even.high


def test_a_difference_between_arms_is_found_at_its_place() -> None:
    records = pairs(1.0, count=3)
    records[3].token_ids = (0, 1, 99, *records[3].token_ids[3:])
    (against,) = compare(records, ["plain", "fast"], seed=0)
    assert (against.compared, against.same) == (3, 2)
    assert [(d.pair, d.arm, d.position) for d in against.differences] == [(1, "fast", 2)]
    records[3].finish_reason = "deadline"
    assert compare(records, ["plain", "fast"], seed=0)[0].compared == 2
    records[3].error = "INTERNAL: broken"
    assert compare(records, ["plain", "fast"], seed=0)[0].compared == 2


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_the_first_difference_is_where_the_answers_part(left: list[int], right: list[int]) -> None:
    place = first_difference(left, right)
    if place is None:
        assert left == right
    else:
        assert left[:place] == right[:place]
        assert left[place : place + 1] != right[place : place + 1]


def counted(scale: int) -> Acceptance:
    return Acceptance(
        rounds=4 * scale,
        plain_rounds=scale,
        drafted=12 * scale,
        accepted=5 * scale,
        rejected=6 * scale,
        discarded=scale,
        accepted_per_position=(3 * scale, 2 * scale, 0),
        drafted_per_position=(4 * scale, 4 * scale, 4 * scale),
    )


def test_counters_agree_when_both_sides_counted_the_same() -> None:
    records = [record([(1.0, 1)], acceptance=counted(1)) for _ in range(3)]
    found = counters.agreement(counted(7), counted(10), records)
    assert found.agree
    assert found.server.accepted == found.answers.accepted == 15
    assert total(r.acceptance for r in records).mean_acceptance_length == 1 + 15 / 12


def test_a_disagreement_is_named() -> None:
    records = [record([(1.0, 1)], acceptance=counted(1)) for _ in range(3)]
    more = counters.agreement(counted(7), counted(11), records)
    assert not more.agree
    assert "accepted: answers say 15, the server counted 20" in more.differences
    assert any(text.startswith("accepted_per_position") for text in more.differences)
    # An answer that broke off without statistics may explain more, never less.
    records.append(record([], error="UNAVAILABLE: gone"))
    assert counters.agreement(counted(7), counted(11), records).agree
    assert not counters.agreement(counted(7), counted(9), records).agree


def test_goodput_limits_are_read_as_vllm_writes_them() -> None:
    assert limits.parse_goodput(["ttft:500", "tpot:50"]) == {"ttft": 500, "tpot": 50}
    assert limits.parse_goodput(["ttft:500 e2el:5e3,queue:0"])["e2el"] == 5000
    for wrong in ("ttft", "ttft:", "ttft:-1", "speed:3", "itl:nan"):
        with pytest.raises(InvalidArgument):
            limits.parse_goodput([wrong])


def test_constraints_are_judged_on_run_and_arm() -> None:
    results: dict[str, Any] = {
        "p99_ttft_ms": 480.0,
        "p99.9_ttft_ms": None,
        "model_id": "m",
        "arms": {"fixed:8+nodes=7": {"speedup_decode": 1.2, "p99.9_ttft_ms": 3}},
    }
    texts = [
        "p99_ttft_ms<500",
        "p99_ttft_ms <= 479.9",
        "fixed:8+nodes=7.speedup_decode>=1.2",
        "fixed:8+nodes=7.p99.9_ttft_ms==3",
        "p99.9_ttft_ms<1e9",
    ]
    found = limits.parse_constraints(texts, results["arms"])
    limits.check_names(found, results)
    assert [verdict.met for verdict in limits.judge(found, results)] == [
        True,
        False,
        True,
        True,
        False,  # nothing was measured
    ]
    for wrong in ("p99_ttft_ms", "p99_ttft_ms<fast", "slow.p99_ttft_ms<1", "<3"):
        with pytest.raises(InvalidArgument):
            limits.parse_constraints([wrong], results["arms"])
    for unknown in ("p98_ttft_ms<1", "model_id==1"):
        with pytest.raises(InvalidArgument):
            limits.check_names(limits.parse_constraints([unknown], []), results)


@given(st.floats(-1e5, 1e5), st.floats(1e-3, 1e6))
def test_ticks_are_few_and_within_the_axis(low: float, length: float) -> None:
    found = svg.ticks(low, low + length)
    assert 1 <= len(found) <= 8
    assert all(low - 1e-6 * length <= t <= low + length * (1 + 1e-6) for t in found)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=700))
def test_a_thinned_distribution_ends_at_one_and_never_falls(found: list[float]) -> None:
    points = stats.cdf(found)
    assert len(points) <= 200
    assert points[-1] == (max(found), 1.0)
    assert points == sorted(points)
    assert points[0][0] == min(found)


def test_intervals_without_rows_do_not_exist() -> None:
    assert stats.ratio_of_sums([], lambda sums: sums[0]) is None
    assert math.isnan(stats.percentile([], 50))


def test_energy_is_the_server_s_where_it_tells_and_never_a_mixture() -> None:
    told = Meter((100.0, 50.0), "2 GPU(s) of the target, as the server says")
    later = Meter((160.0, 60.0), told.note)
    assert energy.used(told, later, 35) == {
        "energy_j": 70.0,
        "energy_per_token_j": 2.0,
        "energy_note": told.note,
    }
    here = Meter((1e6,), "1 GPU(s) of this machine, the whole of each")
    none = Meter(None, "no driver")
    for before, after in ((told, here), (none, later), (told, none)):
        assert energy.used(before, after, 35)["energy_per_token_j"] is None
    assert energy.used(told, none, 35)["energy_note"] == "no driver"
