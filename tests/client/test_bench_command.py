"""`draftwire bench` from its flags to its files and exit codes, against a scripted verifier."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result as Ran

from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client import InvalidArgument, Unavailable
from draftwire_client.testing import Reply, ScriptedVerifier

from .conftest import at, run

Serve = Callable[..., ScriptedVerifier]
OFF, ADAPTIVE = types_pb2.SPECULATION_MODE_OFF, types_pb2.SPECULATION_MODE_ADAPTIVE


def counting() -> tuple[Callable[[verifier_pb2.GenerateRequest], Reply], Any]:
    """A script that makes what is asked for and an info whose totals count it, as a verifier's."""
    info = verifier_pb2.VerifierGetInfoResponse()
    info.model.name, info.model.vocab_size, info.model.max_context = "scripted", 1000, 512
    info.config["max_tokens"] = "64"

    def script(request: verifier_pb2.GenerateRequest) -> Reply:
        size = 1 if request.speculation.mode == OFF else 3
        reply = Reply.of("x" * request.stop.max_tokens, tokens_per_chunk=size)
        stats = reply.statistics([s for s in reply.steps if hasattr(s, "token_ids")])  # type: ignore[misc]
        totals = info.totals
        for name in ("rounds", "plain_rounds", "drafted_tokens", "accepted_tokens"):
            setattr(totals, name, getattr(totals, name) + getattr(stats, name))
        for name in ("accepted_per_position", "drafted_per_position"):
            mine, new = getattr(totals, name), getattr(stats, name)
            mine.extend([0] * (len(new) - len(mine)))
            for place, value in enumerate(new):
                mine[place] += value
        return reply

    return script, info


@pytest.fixture
def server(serve: Serve) -> ScriptedVerifier:
    script, info = counting()
    return serve(script, info=info)


def bench(server: ScriptedVerifier, *arguments: str) -> Ran:
    return at(server, "bench", "--json", "--quiet", *arguments)


def found(ran: Ran) -> dict[str, Any]:
    results: dict[str, Any] = json.loads(ran.stdout)
    return results


def test_a_run_has_vllm_s_keys_and_agrees_with_the_server(server: ScriptedVerifier) -> None:
    ran = bench(
        server,
        *("--num-prompts", "6", "--output-len", "10", "--arms", "plain,fixed:4"),
        *("--goodput", "ttft:60000", "e2el:60000", "--metadata", "host=here", "run=1"),
    )
    assert ran.exit_code == 0, ran.output
    results = found(ran)
    assert results["completed"] == 12
    assert results["total_output_tokens"] == 120
    assert (results["host"], results["run"]) == ("here", "1")
    for key in ("mean_ttft_ms", "p99_tpot_ms", "median_itl_ms", "p90_e2el_ms", "p99_queue_ms"):
        assert results[key] >= 0
    assert results["request_goodput"] == results["request_throughput"]
    assert results["counters"]["agree"]
    plain, fixed = results["arms"]["plain"], results["arms"]["fixed:4"]
    assert plain["spec_decode_num_drafts"] == 0
    assert fixed["spec_decode_acceptance_length"] == 3.0
    assert fixed["spec_decode_per_position_acceptance_rates"] == [1.0, 1.0]
    assert (fixed["same_tokens"], fixed["different_tokens"]) == (6, 0)
    assert fixed["speedup_decode_low"] <= fixed["speedup_decode"] <= fixed["speedup_decode_high"]
    # Warm-up is sent first and is not counted.
    assert len(server.calls) == 14
    modes = [call.request.speculation.mode for call in server.calls[2:]]
    assert sorted(modes) == [OFF] * 6 + [types_pb2.SPECULATION_MODE_FIXED] * 6
    seeds = [call.request.sampling.seed for call in server.calls[2:]]
    assert len(set(seeds)) == 6


def test_counters_that_disagree_fail_the_run(serve: Serve) -> None:
    still = verifier_pb2.VerifierGetInfoResponse()  # an info that counts nothing
    server = serve(Reply.of("abcd", tokens_per_chunk=2), info=still)
    ran = bench(server, "--num-prompts", "2")
    assert ran.exit_code == 1
    assert "acceptance disagrees" in ran.stderr
    assert bench(server, "--num-prompts", "2", "--no-check-counters").exit_code == 0


def test_arms_that_differ_in_tokens_fail_the_run(serve: Serve) -> None:
    def script(request: verifier_pb2.GenerateRequest) -> Reply:
        return Reply.of("same" if request.speculation.mode == OFF else "some")

    server = serve(script)
    flags = ("--num-prompts", "2", "--arms", "plain,fixed", "--no-check-counters")
    ran = bench(server, *flags)
    assert ran.exit_code == 1
    assert "2 answers differ between arms" in ran.stderr
    assert [d["position"] for d in found(ran)["differences"]] == [1, 1]
    assert bench(server, *flags, "--no-check-equal").exit_code == 0


def test_a_constraint_sets_the_exit_code(server: ScriptedVerifier) -> None:
    fine = bench(server, "--num-prompts", "2", "--require", "p99_ttft_ms<60000", "failed==0")
    assert fine.exit_code == 0, fine.output
    ran = bench(server, "--num-prompts", "2", "--require", "completed>=2", "completed>2")
    assert ran.exit_code == 5
    assert ran.stderr.strip().endswith("not met: completed>2: 2")
    assert [verdict["met"] for verdict in found(ran)["constraints"]] == [True, False]


def test_failures_are_counted_by_their_text(serve: Serve) -> None:
    def script(request: verifier_pb2.GenerateRequest) -> Reply:
        if request.stop.max_tokens == 9:
            return Reply.failing(Unavailable("FULL", "no room"))
        return Reply.of("ok")

    server = serve(script)
    flags = ("--num-prompts", "3", "--output-len", "9", "--retries", "0", "--no-check-counters")
    ran = bench(server, *flags)
    assert ran.exit_code == 1
    assert found(ran)["errors_by_text"] == {"FULL: no room": 3}
    assert bench(server, *flags, "--require", "failed<=3").exit_code == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--require", "p98_ttft_ms<1"), "--require"),
        (("--goodput", "speed:1"), "--goodput"),
        (("--arms", "quick"), "--arms"),
        (("--num-prompts", "9999"), "--num-prompts"),
        (("--dataset-name", "custom"), "--dataset-path"),
        (("--fault", "drafter:kill@1s"), "--drafter-command"),
        (("--ramp-up-strategy", "linear"), "--ramp-up-strategy"),
        (("--metric-percentiles", "101"), "--metric-percentiles"),
        (("--percentile-metrics", "speed"), "--percentile-metrics"),
        (("--metadata", "alone"), "--metadata"),
        (("--seed", "-1"), "--seed"),
        # 0 and below are groups of processes, and -1 is all of them.
        (("--drafter-pid", "0", "--fault", "drafter:cont@0s"), "--drafter-pid"),
        (("--drafter-pid=-1", "--fault", "drafter:cont@0s"), "--drafter-pid"),
        (("--drafter-command", "'"), "--drafter-command"),
        (("--output-len-scale", "nan"), "--output-len-scale"),
        (("--input-len-scale", "0"), "--input-len-scale"),
        (("--save-result", "--result-dir", "/proc/none"), "--result-dir"),
        (("stray",), "stray"),
    ],
)
def test_bad_usage_is_refused_by_name(
    server: ScriptedVerifier, flags: tuple[str, ...], words: str
) -> None:
    ran = bench(server, *flags)
    assert ran.exit_code == 2
    assert words in ran.stderr


def test_a_server_that_is_not_there_is_exit_3() -> None:
    ran = run("bench", "--target", "127.0.0.1:1", "--retries", "0", "--quiet")
    assert ran.exit_code == 3


def test_an_arm_that_is_refused_ends_the_run_or_is_left_out(serve: Serve) -> None:
    script, info = counting()

    def choosy(request: verifier_pb2.GenerateRequest) -> Reply:
        if request.speculation.mode == ADAPTIVE:
            return Reply.failing(InvalidArgument("speculation.mode", "ADAPTIVE", "OFF or FIXED"))
        return script(request)

    server = serve(choosy, info=info)
    flags = ("--num-prompts", "2", "--arms", "plain,adaptive")
    ran = bench(server, *flags)
    assert ran.exit_code == 1
    assert "speculation.mode" in ran.stderr
    left = bench(server, *flags, "--skip-refused-arms")
    assert left.exit_code == 0, left.output
    assert list(found(left)["arms"]) == ["plain"]


class _Page(HTMLParser):
    """Collects what a page would fetch or run, and its headings."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.headings: list[str] = []
        self._in_heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_heading = tag in ("h2", "h3")
        if tag in ("script", "link", "img", "iframe") or {"src", "href"} & dict(attrs).keys():
            self.fetched.append(tag)

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.headings.append(data)
            self._in_heading = False


def test_results_are_written_as_json_requests_and_a_page_that_fetches_nothing(
    server: ScriptedVerifier, tmp_path: Path
) -> None:
    ran = at(
        server,
        *("bench", "--num-prompts", "5", "--arms", "plain,fixed:4", "--output-len", "8"),
        *("--request-rate", "200", "--poll-interval", "0.01", "--label", "<b>mine</b>"),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new")),
        *("--result-filename", "r.json", "--skip-chat-template"),
    )
    assert ran.exit_code == 0, ran.output
    assert "Speed-up, decode" in ran.stdout
    results = json.loads((tmp_path / "new" / "r.json").read_text())
    assert results["request_rate"] == 200
    assert len(results["ttfts"]) == len(results["generated_texts"]) == 10
    assert results["itls"][0] and len(results["itls"][0]) == 7  # noqa: PT018
    rows = [json.loads(row) for row in (tmp_path / "new" / "r.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(10))
    assert all(row["output_len"] == 8 and row["error"] == "" for row in rows)
    text = (tmp_path / "new" / "r.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.fetched == []
    assert "http" not in text.replace("http-equiv", "")
    assert "<b>mine</b>" not in text
    assert "prefers-color-scheme:dark" in text
    for heading in ("Speed-up by arm", "Acceptance by position", "Output tokens over time", "TTFT"):
        assert heading in page.headings
    drawn = [ET.fromstring(part.split("</svg>")[0] + "</svg>") for part in _svgs(text)]
    assert len(drawn) >= 8
    assert "nan" not in text.split("<details>")[0]
    # Texts were sent as they are.
    assert {call.request.WhichOneof("prompt") for call in server.calls} == {"text"}


def _svgs(text: str) -> list[str]:
    return ["<svg" + part for part in text.split("<svg")[1:]]


def test_several_workers_send_the_whole_plan_once(server: ScriptedVerifier) -> None:
    ran = bench(
        server, "--workers", "2", "--num-prompts", "7", "--output-len", "5", "--request-rate", "50"
    )
    assert ran.exit_code == 0, ran.output
    results = found(ran)
    assert results["completed"] == 7
    assert results["counters"]["agree"]
    assert [loop["worker"] for loop in results["client"]["loops"]] == [0, 1]
    prompts = [call.request.chat.messages[0].content for call in server.calls[1:]]
    assert len(set(prompts)) == 7


def test_data_from_files_random_ids_and_traces_is_sent(
    server: ScriptedVerifier, tmp_path: Path
) -> None:
    lines = tmp_path / "d.jsonl"
    lines.write_text('{"prompt": "one", "max_tokens": 3}\n{"prompt": "two", "max_tokens": 99}\n')
    ran = bench(server, "--dataset-name", "custom", "--dataset-path", str(lines))
    assert ran.exit_code == 0, ran.output
    assert found(ran)["total_output_tokens"] == 3 + 64  # the server's max_tokens is 64
    assert found(ran)["clipped_prompts"] == 1
    few = ("--dataset-path", str(lines), "--dataset-name", "custom", "--num-prompts", "3")
    assert bench(server, *few).exit_code == 2
    assert bench(server, *few, "--oversample").exit_code == 0
    ids = bench(
        server,
        *("--dataset-name", "random", "--num-prompts", "2", "--random-input-len", "12"),
        *("--random-output-len", "4"),
    )
    assert ids.exit_code == 0, ids.output
    assert len(server.calls[-1].request.token_ids.ids) == 12
    trace = tmp_path / "t.csv"
    rows = [f"2023-11-16 18:15:4{i}.0000000,{20 + i},{5 + i}" for i in range(5)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    traced = bench(
        server,
        *("--dataset-name", "azure", "--dataset-path", str(trace), "--time-scale", "0.01"),
        *("--num-prompts", "4", "--max-output-len", "6"),
    )
    assert traced.exit_code == 0, traced.output
    assert found(traced)["total_output_tokens"] == 5 + 6 + 6 + 6
    assert found(traced)["offered_rate"] == pytest.approx(4 / 0.03, rel=1e-6)


def test_what_json_has_no_number_for_is_written_all_the_same(server: ScriptedVerifier) -> None:
    ran = bench(
        server,
        *("--num-prompts", "3", "--output-len", "1", "--arms", "plain,fixed"),
        *("--request-rate", "100", "--burstiness", "inf"),
    )
    assert ran.exit_code == 0, ran.output
    results = found(ran)
    assert results["burstiness"] == "inf"
    # One token has no time a token, and so no speed-up.
    assert results["mean_tpot_ms"] is None
    assert results["arms"]["fixed"]["speedup_decode"] is None
    assert results["arms"]["fixed"]["speedup_e2el"] > 0


def test_a_fault_that_comes_after_the_end_fails_the_run(server: ScriptedVerifier) -> None:
    ran = bench(
        server,
        "--num-prompts",
        "1",
        "--drafter-pid",
        str(os.getpid()),
        "--fault",
        "drafter:kill@9m",
    )
    assert ran.exit_code == 1
    assert "1 fault(s) not reached" in ran.stderr


def test_a_server_that_dies_in_mid_run_leaves_results_that_say_so(serve: Serve) -> None:
    script, info = counting()
    dying: list[ScriptedVerifier] = []

    def mortal(request: verifier_pb2.GenerateRequest) -> Reply:
        if len(dying[0].calls) == 4:  # one warmed up, two answered
            dying[0]._server.stop(0)
        return script(request)

    dying.append(serve(mortal, info=info))
    ran = bench(dying[0], "--num-prompts", "5", "--max-concurrency", "1", "--retries", "0")
    assert ran.exit_code == 1, ran.output
    results = found(ran)
    assert (results["completed"], results["failed"]) == (2, 3)
    assert "the server did not tell its counters after the run" in ran.stderr
