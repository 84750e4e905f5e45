"""Both clients on their way to a server: TLS, tokens, targets, health, info."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwire.errors import (
    DraftwireError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Unauthenticated,
    Unavailable,
)
from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client import (
    HealthStatus,
    RetryConfig,
    TLSConfig,
)
from draftwire_client.testing import (
    ScriptedVerifier,
    ServerTLS,
)

from .conftest import Authority, Either, make_authority

Serve = Callable[..., ScriptedVerifier]
TEXT = "Grüße, 世界 🌍!"
TOKEN = "correct-horse-battery-staple"
QUICK = {"retry": RetryConfig(initial_backoff_s=0.001, max_backoff_s=0.002)}
DOWN = Unavailable("DRAINING", "the service is going away")


def test_a_server_that_is_not_there_is_unreachable(either: Either) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        for method, *arguments in (("generate", "hi"), ("info",), ("health",)):
            with pytest.raises(Unavailable) as caught:
                either.call(target, method, *arguments, connect=QUICK)
            assert caught.value.reason == "UNREACHABLE"


def test_health_tells_every_state(either: Either, serve: Serve) -> None:
    server = serve()
    assert either.call(server.target, "health") is HealthStatus.SERVING
    assert either.call(server.target, "health", "draftwire.v1.Verifier") is HealthStatus.SERVING
    assert either.call(server.target, "health", "nobody") is HealthStatus.SERVICE_UNKNOWN
    server.set_health(HealthStatus.NOT_SERVING)
    assert either.call(server.target, "health") is HealthStatus.NOT_SERVING


def test_a_server_behind_a_name_that_is_not_serving_still_tells_health_and_info(
    either: Either, serve: Serve
) -> None:
    server = serve(info=verifier_pb2.VerifierGetInfoResponse(draining=True))
    server.set_health(HealthStatus.NOT_SERVING)
    target = f"dns:///localhost:{server.target.rpartition(':')[2]}"
    assert either.call(target, "health") is HealthStatus.NOT_SERVING
    assert either.call(target, "info").draining
    with pytest.raises(Unavailable):
        either.call(target, "generate", "hi", connect=QUICK)
    assert server.calls == []


def test_info_is_read_and_its_errors_are_typed(either: Either, serve: Serve) -> None:
    info = verifier_pb2.VerifierGetInfoResponse(model=types_pb2.ModelIdentity(name="tiny"))
    assert either.call(serve(info=info).target, "info").model.name == "tiny"
    broken = serve(info=Internal("INTERNAL_ERROR", "see the log"))
    with pytest.raises(Internal, match="see the log"):
        either.call(broken.target, "info")


def test_a_token_is_sent_and_a_wrong_one_refused(either: Either, serve: Serve) -> None:
    server = serve(token=TOKEN)
    result = either.call(server.target, "generate", "hi", connect={"token": TOKEN})
    assert result.text == "Hello, wörld."
    for connect in ({}, {"token": "wrong"}):
        for method, *arguments in (("generate", "hi"), ("info",)):
            with pytest.raises(Unauthenticated) as caught:
                either.call(server.target, method, *arguments, connect=connect)
            assert caught.value.reason == "TOKEN_REFUSED"
    assert either.call(server.target, "health") is HealthStatus.SERVING
    assert len(server.calls) == 1


def test_tls_needs_the_right_authority(
    either: Either, serve: Serve, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.pair("verifier.test")
    server = serve(tls=ServerTLS(cert, key), token=TOKEN)
    connect: dict[str, Any] = {"tls": TLSConfig(ca=authority.ca), "token": TOKEN}
    assert either.call(server.target, "generate", "hi", connect=connect).text == "Hello, wörld."
    named = {"tls": TLSConfig(ca=authority.ca, server_name="verifier.test"), "token": TOKEN}
    assert either.call(server.target, "health", connect=named) is HealthStatus.SERVING
    stranger = make_authority(tmp_path / "other")
    for tls in (TLSConfig(ca=stranger.ca), TLSConfig(), None):
        with pytest.raises(Unavailable):
            either.call(server.target, "health", connect={"tls": tls})


def test_mutual_tls_needs_the_clients_certificate(
    either: Either, serve: Serve, authority: Authority
) -> None:
    cert, key = authority.pair("verifier.test")
    own_cert, own_key = authority.pair("backend.test")
    server = serve(tls=ServerTLS(cert, key, client_ca=authority.ca))
    mutual = TLSConfig(ca=authority.ca, cert=str(own_cert), key=str(own_key))
    assert either.call(server.target, "health", connect={"tls": mutual}) is HealthStatus.SERVING
    with pytest.raises(Unavailable):
        either.call(server.target, "health", connect={"tls": TLSConfig(ca=authority.ca)})


def test_a_unix_socket_is_a_target(either: Either, serve: Serve, tmp_path: Path) -> None:
    server = serve(listen=f"unix:{tmp_path}/v.sock", token=TOKEN)
    result = either.call(server.target, "generate", "hi", connect={"token": TOKEN})
    assert result.text == "Hello, wörld."


@pytest.mark.parametrize(
    ("target", "options", "kind"),
    [
        ("10.0.0.1:7450", {}, FailedPrecondition),
        ("10.0.0.1:7450", {"token": "t", "allow_insecure": True}, FailedPrecondition),
        ("nonsense", {}, InvalidArgument),
        ("127.0.0.1:1", {"tls": TLSConfig(ca="/no/such/file")}, InvalidArgument),
        ("127.0.0.1:1", {"timeout": -1}, InvalidArgument),
    ],
)
def test_connect_refuses_by_name_what_cannot_work(
    either: Either, target: str, options: dict[str, Any], kind: type[DraftwireError]
) -> None:
    with pytest.raises(kind):
        either.call(target, "health", connect=options)
