"""`draftwire top`: what two readings say of the time between them, and how it is shown."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from draftwire.errors import Unavailable
from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client.cli import panels
from draftwire_client.cli.monitor import difference
from draftwire_client.responses import read_info
from draftwire_client.testing import ScriptedVerifier

from .conftest import at, run

Serve = Callable[..., ScriptedVerifier]
FIXED = types_pb2.BLOCK_SIZE_REASON_FIXED
Counts = list[int]


def reading(
    *,
    instance: str = "one",
    uptime: int = 100,
    tokens: int = 0,
    steps: int = 0,
    accepted: Counts | None = None,
    drafted: Counts | None = None,
    sizes: dict[int, int] | None = None,
    drafter: str = "127.0.0.1:7451",
) -> verifier_pb2.VerifierGetInfoResponse:
    per_position, offered = accepted or [], drafted or []
    return verifier_pb2.VerifierGetInfoResponse(
        version=types_pb2.ServiceVersion(instance_id=instance, uptime=Duration(seconds=uptime)),
        model=types_pb2.ModelIdentity(name="tiny", dtype=types_pb2.ELEMENT_TYPE_FLOAT32),
        lanes=[
            verifier_pb2.LaneInfo(target=drafter, state=verifier_pb2.LANE_STATE_READY, sessions=3)
        ],
        load=verifier_pb2.LoadInfo(
            running=5, waiting=2, free_pages=30, total_pages=40, tokens=tokens, steps=steps
        ),
        totals=types_pb2.AcceptanceStats(
            rounds=offered[0] if offered else 0,
            drafted_tokens=sum(offered),
            accepted_tokens=sum(per_position),
            accepted_per_position=per_position,
            drafted_per_position=offered,
            block_sizes=[
                types_pb2.BlockSizeCount(block_size=size, reason=FIXED, rounds=rounds)
                for size, rounds in (sizes or {}).items()
            ],
        ),
        devices=[
            types_pb2.DeviceInfo(
                index=0, utilization=0.5, power_watts=70, memory_used_bytes=1 << 30
            )
        ],
    )


BEFORE = reading(tokens=100, steps=40, accepted=[8, 2], drafted=[10, 10], sizes={1: 5, 4: 10})
AFTER = reading(
    tokens=150, steps=50, accepted=[9, 5, 1], drafted=[20, 16, 2], sizes={1: 5, 4: 18, 8: 2}
)


def test_rates_are_of_the_interval_and_totals_since_the_start() -> None:
    sample = difference(read_info(BEFORE), read_info(AFTER), 2.0)
    assert (sample.tokens_per_s, sample.steps_per_s) == (25.0, 5.0)
    assert sample.acceptance_per_position == (0.1, 0.5, 0.5)
    assert sample.total_acceptance_per_position == (0.45, 5 / 16, 0.5)
    assert sample.mean_acceptance_length == 1 + 5 / 10
    assert sample.total_mean_acceptance_length == 1 + 15 / 20
    assert sample.block_sizes == {4: 8, 8: 2}
    assert sample.total_block_sizes == {1: 5, 4: 18, 8: 2}
    assert (sample.running, sample.waiting) == (5, 2)


def test_an_interval_without_drafts_has_no_acceptance() -> None:
    sample = difference(read_info(AFTER), read_info(AFTER), 1.0)
    assert sample.acceptance_per_position == (None, None, None)
    assert sample.mean_acceptance_length is None
    assert (sample.tokens_per_s, sample.block_sizes) == (0.0, {})


def test_a_process_that_was_restarted_is_counted_from_its_start() -> None:
    again = reading(instance="two", uptime=4, tokens=20, accepted=[1], drafted=[2])
    sample = difference(read_info(AFTER), read_info(again), 2.0)
    assert (sample.tokens_per_s, sample.interval_s) == (5.0, 4.0)
    assert sample.acceptance_per_position == (0.5,)


PAIRS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5)


@given(PAIRS, PAIRS)
def test_whatever_is_counted_rates_are_shares(
    first: list[tuple[int, int]], more: list[tuple[int, int]]
) -> None:
    def counts(*parts: list[tuple[int, int]]) -> dict[str, Counts]:
        """(accepted, not accepted) of each position, summed over the parts."""
        sums = [
            [sum(column) for column in zip(*position, strict=True)]
            for position in zip_longest(*parts, fillvalue=(0, 0))
        ]
        return {"accepted": [a for a, _ in sums], "drafted": [a + b for a, b in sums]}

    before, after = reading(**counts(first)), reading(**counts(first, more))
    sample = difference(read_info(before), read_info(after), 1.0)
    assert len(sample.acceptance_per_position) == max(len(first), len(more))
    for (accepted, rest), rate in zip(more, sample.acceptance_per_position, strict=False):
        assert rate == (accepted / (accepted + rest) if accepted + rest else None)


def drawn(response: verifier_pb2.VerifierGetInfoResponse, width: int = 120) -> str:
    info = read_info(response)
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(panels.view(info, difference(None, info, 1.0), "UNREACHABLE: gone"))
    return captured.get()


def test_the_view_shows_load_acceptance_blocks_drafters_and_gpus() -> None:
    shown = drawn(AFTER)
    for part in (
        "tiny (float32)",
        "UNREACHABLE: gone",
        "10 of 40",
        "0.45",
        "plain",
        "127.0.0.1:7451",
        "ready",
        "50%",
        "70 W",
    ):
        assert part in shown
    assert "no drafters" in drawn(verifier_pb2.VerifierGetInfoResponse())


def test_what_a_server_says_moves_no_cursor_and_is_no_markup() -> None:
    shown = drawn(reading(drafter="\x1b[2J[red]x[/nonsense]\n\u202e"))
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[red]x[/nonsense]" in shown


def readings(
    *responses: verifier_pb2.VerifierGetInfoResponse | Unavailable,
) -> Callable[[], object]:
    left: Iterator[object] = iter(responses)
    return lambda: next(left)


def test_once_is_one_interval(serve: Serve) -> None:
    shown = at(serve(info=readings(BEFORE, AFTER)), "top", "--once", "--interval=0.05")
    assert shown.exit_code == 0
    assert "tiny (float32)" in shown.stdout
    told = at(serve(info=readings(BEFORE, AFTER)), "top", "--once", "--interval=0.05", "--json")
    sample = json.loads(told.stdout)
    assert sample["event"] == "sample"
    assert sample["acceptance_per_position"] == [0.1, 0.5, 0.5]
    assert sample["block_sizes"] == {"4": 8, "8": 2}
    assert sample["devices"][0]["power_watts"] == 70
    assert 0 < sample["tokens_per_s"] <= 50 / 0.05


def test_a_server_that_is_not_there_is_exit_code_3(serve: Serve) -> None:
    server = serve()
    server.close()
    result = at(server, "top", "--retries=0", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["reason"] == "UNREACHABLE"
    gone = serve(info=readings(BEFORE, Unavailable("DRAINING", "going away")))
    assert at(gone, "top", "--once", "--interval=0.05", "--retries=0").exit_code == 1


@pytest.mark.parametrize("arguments", [["--interval=0"], ["--interval=often"]])
def test_an_interval_that_is_none_is_bad_usage(arguments: list[str]) -> None:
    assert run("top", *arguments).exit_code == 2


def test_one_object_comes_each_interval_a_lost_server_is_waited_for_and_ctrl_c_leaves(
    serve: Serve,
) -> None:
    down = Unavailable("DRAINING", "going away")
    last = reading(tokens=170, steps=51)

    def endless() -> Iterator[object]:
        yield from (BEFORE, AFTER, down)
        while True:
            yield last

    source = endless()
    server = serve(info=lambda: next(source))
    command = [sys.executable, "-m", "draftwire_client", "top", "--json", "--retries=0"]
    environment = {**os.environ, "DRAFTWIRE_TARGET": server.target}
    with subprocess.Popen(
        [*command, "--interval=0.05"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(4)]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert [line["event"] for line in lines] == ["sample", "error", "sample", "sample"]
    assert lines[1]["error"]["reason"] == "DRAINING"
    assert lines[2]["total_tokens"] == 170
    assert process.returncode == 0
    assert err == b""


def test_a_terminal_gets_a_live_view(serve: Serve) -> None:
    pty = pytest.importorskip("pty")
    server = serve(info=lambda: AFTER)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "draftwire_client", "top", "--interval=0.05"]
    environment = {
        **os.environ,
        "DRAFTWIRE_TARGET": server.target,
        "TERM": "xterm",
        "COLUMNS": "120",
    }
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while seen.count(b"tiny") < 2:
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        try:
            while more := os.read(ours, 65536):
                seen += more
        except OSError:  # how a terminal says that its other end is closed
            pass
        process.wait(60)
    os.close(ours)
    assert process.returncode == 0
    assert re.search(
        rb"\x1b\[\?1049h.*\x1b\[\?1049l", seen, re.DOTALL
    )  # another screen, left again
