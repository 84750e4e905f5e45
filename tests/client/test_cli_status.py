"""The command line: health, info, connection options, the environment, usage."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from draftwire.errors import Internal
from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client import HealthStatus
from draftwire_client.testing import ScriptedVerifier, ServerTLS

from .conftest import Authority, at, run

Serve = Callable[..., ScriptedVerifier]
TOKEN = "correct-horse-battery-staple"


def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_no_server_is_exit_code_3_for_every_command() -> None:
    target = closed_port()
    for command in (["generate", "hi"], ["chat", "hi"], ["info"], ["health"]):
        result = run(*command, "--target", target, "--retries=0")
        assert result.exit_code == 3, command
        assert result.stderr.startswith("UNREACHABLE: ")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "hi", "--nonsense"],
        ["generate", "hi", "--temperature=warm"],
        ["generate", "hi", "--speculation=maybe"],
        ["generate", "hi", "--logit-bias=7"],
        ["generate", "hi", "--target=nonsense"],
        ["generate", "hi", "--target=10.0.0.1:7450"],
        ["generate", "hi", "--timeout=-1"],
        ["generate", "hi", "--tls-cert=/no/such/file"],
        ["health", "--retries=-1"],
        ["unknown"],
    ],
)
def test_bad_usage_is_exit_code_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr


def test_health_is_fit_for_a_container(serve: Serve) -> None:
    server = serve()
    result = at(server, "health")
    assert (result.exit_code, result.stdout) == (0, "SERVING\n")
    server.set_health(HealthStatus.NOT_SERVING)
    result = at(server, "health")
    assert (result.exit_code, result.stdout) == (4, "NOT_SERVING\n")
    named = at(server, "health", "--service=draftwire.v1.Verifier", "--json")
    assert named.exit_code == 0
    assert json.loads(named.stdout) == {"service": "draftwire.v1.Verifier", "status": "SERVING"}
    unknown = at(server, "health", "--service=nobody")
    assert (unknown.exit_code, unknown.stdout) == (4, "SERVICE_UNKNOWN\n")


def test_info_is_for_people_or_json(serve: Serve) -> None:
    info = verifier_pb2.VerifierGetInfoResponse(
        version=types_pb2.ServiceVersion(package_version="0.1.0", instance_id="i-1"),
        model=types_pb2.ModelIdentity(name="tiny", dtype=types_pb2.ELEMENT_TYPE_FLOAT32),
        config={"listen": "127.0.0.1:7450"},
        lanes=[
            verifier_pb2.LaneInfo(
                target="127.0.0.1:7451", state=verifier_pb2.LANE_STATE_READY, block_size=16
            ),
            verifier_pb2.LaneInfo(
                target="127.0.0.1:7452", state=verifier_pb2.LANE_STATE_LOST, last_error="gone"
            ),
        ],
        devices=[types_pb2.DeviceInfo(index=1, utilization=0.25, power_watts=90)],
        totals=types_pb2.AcceptanceStats(
            rounds=1,
            drafted_tokens=2,
            accepted_tokens=1,
            mean_acceptance_length=2.0,
            accepted_per_position=[1, 0],
            drafted_per_position=[1, 1],
        ),
    )
    server = serve(info=info)
    shown = at(server, "info")
    assert shown.exit_code == 0
    for part in ("tiny (float32)", "ready", "random weights", "gone", "1.00 0.00", "listen"):
        assert part in shown.stdout
    assert "25% busy, 90 W" in shown.stdout
    told = json.loads(at(server, "info", "--json").stdout)
    assert told["model"]["name"] == "tiny"
    assert told["lanes"][1]["state"] == "lost"
    assert "decoding is plain" in at(serve(), "info").stdout


def test_with_json_an_error_is_an_object_on_stdout_and_a_line_on_stderr(serve: Serve) -> None:
    server = serve(info=Internal("INTERNAL_ERROR", "see the log"))
    failed = at(server, "info", "--json")
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["error"]["reason"] == "INTERNAL_ERROR"
    assert failed.stderr == "INTERNAL_ERROR: see the log\n"
    gone = run("health", "--target", closed_port(), "--json")
    assert gone.exit_code == 3
    assert json.loads(gone.stdout)["error"]["code"] == "UNAVAILABLE"


def test_what_a_server_says_of_itself_moves_no_cursor(serve: Serve) -> None:
    lane = verifier_pb2.LaneInfo(target="d:1", drafter_name="\x1b[2J", last_error="a\nb")
    shown = at(serve(info=verifier_pb2.VerifierGetInfoResponse(lanes=[lane])), "info").stdout
    assert "\x1b" not in shown
    assert "a\\nb" in shown


def test_target_and_token_come_from_the_environment_and_the_scoped_name_wins(
    serve: Serve, tmp_path: Path
) -> None:
    server = serve(token=TOKEN)
    plain = {"DRAFTWIRE_TARGET": server.target, "DRAFTWIRE_TOKEN": TOKEN}
    assert run("info", **plain).exit_code == 0
    scoped = {"DRAFTWIRE_TARGET": "nonsense", "DRAFTWIRE_CLIENT__TARGET": server.target}
    assert run("health", **scoped).exit_code == 0
    assert run("info", **scoped).exit_code == 1
    file = tmp_path / "token"
    file.write_text(f"# rotated monthly\n{TOKEN}\n")
    assert at(server, "info", "--token-file", str(file)).exit_code == 0
    (tmp_path / "empty").write_text("")
    assert at(server, "info", "--token-file", str(tmp_path / "empty")).exit_code == 2


def test_variables_of_the_services_are_passed_over_and_misspelt_ones_refused(serve: Serve) -> None:
    server = serve()
    assert at(server, "health", DRAFTWIRE_MODEL="x", DRAFTWIRE_TLS_CERT="/y").exit_code == 0
    result = at(server, "health", DRAFTWIRE_CLIENT__TAGRET="x")
    assert result.exit_code == 2
    assert "DRAFTWIRE_CLIENT__TAGRET" in result.stderr


def test_tls_flags_reach_a_tls_server(serve: Serve, authority: Authority) -> None:
    cert, key = authority.pair("verifier.test")
    server = serve(tls=ServerTLS(cert, key))
    assert at(server, "health", "--tls-ca", str(authority.ca)).exit_code == 0
    assert at(server, "health", "--tls").exit_code == 3
    assert at(server, "health").exit_code == 3
