"""The pair for users' tests: real services on a tiny model, started and ended with the test."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from draftwire.channel import open_sync_channel
from draftwire.errors import InvalidArgument, from_rpc_error
from draftwire.models import resolve, unpacked
from draftwire.v1 import verifier_pb2, verifier_pb2_grpc
from draftwire_client import Client, FailedPrecondition, RetryConfig, Unavailable
from draftwire_client.processes import ServiceProcess
from draftwire_client.testing import LocalPair

RETRY = RetryConfig(max_attempts=8)


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalPair]:
    """One pair for all tests: starting one takes seconds."""
    with LocalPair(start_timeout_s=170) as running:
        yield running


def test_it_answers_the_same_with_and_without_speculation_and_drafts_are_accepted(
    pair: LocalPair,
) -> None:
    with Client.connect(pair.target, retry=RETRY) as client:
        fast = client.generate("abc", temperature=0, max_tokens=60)
        plain = client.generate("abc", temperature=0, max_tokens=60, speculation="off")
        drawn = [client.chat("hello", seed=3, max_tokens=30).token_ids for _ in range(2)]
    assert fast.token_ids == plain.token_ids
    assert fast.text.isascii()
    assert fast.acceptance.accepted > 0
    assert plain.acceptance.drafted == 0
    assert drawn[0] == drawn[1]


def test_a_drafter_may_be_killed_and_started_again_and_no_request_fails(pair: LocalPair) -> None:
    with Client.connect(pair.target, retry=RETRY) as client:
        before = client.generate("xyz", seed=1, max_tokens=40)
        pair.kill_drafter()
        assert client.generate("xyz", seed=1, max_tokens=40).token_ids == before.token_ids
        pair.start_drafter()
        while client.generate("xyz", seed=1, max_tokens=40).acceptance.rounds == 0:
            pass


def test_a_request_id_that_would_break_a_log_line_is_refused_by_both_ends(pair: LocalPair) -> None:
    with Client.connect(pair.target) as client, pytest.raises(InvalidArgument) as caught:
        client.generate("a", request_id="a\nb")
    assert (caught.value.field, caught.value.value) == ("request_id", "'a\\nb'")
    request = verifier_pb2.GenerateRequest(text="a", request_id="a\x1b[2Jb")
    with open_sync_channel(pair.target) as channel, pytest.raises(grpc.RpcError) as refused:
        list(verifier_pb2_grpc.VerifierStub(channel).Generate(request, timeout=60))
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidArgument)
    assert (error.field, error.limit) == ("request_id", "printable characters")


@pytest.mark.slow
def test_calls_are_spread_over_real_verifiers_and_a_lost_one_fails_no_call() -> None:
    with (
        LocalPair(verifiers=2, drafters=0, start_timeout_s=170) as pair,
        Client.connect(pair.target, retry=RETRY) as client,
    ):
        seen: set[str] = set()
        while len(seen) < 2:
            seen.add(client.info().instance_id)
        answers = client.batch(["ab"] * 20, seed=1, max_tokens=5, concurrency=4)
        assert len({item.unwrap().token_ids for item in answers}) == 1
        for target in pair.target.split(","):
            with Client.connect(target) as one:
                assert one.info().load.tokens > 0
        pair._verifiers[0].kill()
        answers = client.batch(["ab"] * 20, seed=1, max_tokens=5, concurrency=4)
        assert all(item.error is None for item in answers)


def test_a_service_that_does_not_start_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = ServiceProcess("draftwire_client", ["generate", "--nonsense"], log)
    with pytest.raises(Unavailable, match="No such option") as caught:
        process.serving(60)
    assert "ended with status 2" in str(caught.value)
    process.stop()


def test_a_service_ends_with_its_object(tmp_path: Path) -> None:
    asleep = tmp_path / "asleep.py"
    asleep.write_text("import sys, time\nprint('serving here', flush=True)\ntime.sleep(1000)\n")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from draftwire_client.processes import ServiceProcess\n"
        "process = ServiceProcess('asleep', [])\n"
        "print(process.serving(100), process._process.pid)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )
    address, pid = done.stdout.split()
    assert address == "here"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), signal.SIGCONT)


def test_without_the_services_the_extra_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    with pytest.raises(FailedPrecondition, match=r"pip install 'draftwire\[serve\]'") as caught:
        LocalPair()
    assert caught.value.metadata["extra"] == "serve"


def test_a_tiny_model_is_the_same_whenever_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name in ("one", "two"):
        monkeypatch.setenv("DRAFTWIRE_CACHE_DIR", str(tmp_path / name))
        source = unpacked(resolve("random:tiny:7"))
        assert source.name == "random-tiny-7"
        made.append({p.name: p.read_bytes() for p in Path(source.location).iterdir()})
    assert made[0] == made[1]
    other = unpacked(resolve("random:tiny"))
    weights = Path(other.location) / "model.safetensors"
    assert weights.read_bytes() != made[0]["model.safetensors"]


@pytest.mark.parametrize("name", ["random:", "random:huge", "random:tiny:x", "random:tiny:-1"])
def test_a_random_model_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="random:tiny"):
        resolve(name)


def test_an_option_holds_where_the_pair_has_another_by_itself() -> None:
    given = ("--speculation", "off", "--max_nodes=3")
    with (
        LocalPair(drafters=0, verifier_options=given) as pair,
        Client.connect(pair.target) as client,
    ):
        config = client.info().config
    found = [config[name] for name in ("speculation", "max-nodes", "profile-s")]
    assert found == ["off", "3", "0.0"]
