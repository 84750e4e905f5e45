"""Addresses and the one option table of both ends."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwire import channel
from draftwire.addresses import split_host_port, unix_path
from draftwire.channel import ChannelConfig, is_local, normalise_target
from draftwire.config import WireConfig
from draftwire.errors import FailedPrecondition, InvalidArgument


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("10.0.0.1:80", "ipv4:10.0.0.1:80"),
        ("10.0.0.1:80, 10.0.0.2:81", "ipv4:10.0.0.1:80,10.0.0.2:81"),
        ("localhost:1,127.0.0.2:2", "ipv4:127.0.0.1:1,127.0.0.2:2"),
        ("[::1]:80", "ipv6:[::1]:80"),
        ("[::1]:80,[::2]:80", "ipv6:[::1]:80,[::2]:80"),
        ("drafters.local:80", "dns:///drafters.local:80"),
        ("dns:///a:1", "dns:///a:1"),
        ("/run/d.sock", "unix:/run/d.sock"),
        ("unix:d.sock", "unix:d.sock"),
    ],
)
def test_targets_get_the_name_grpc_knows(written, name):
    assert normalise_target(written) == name
    assert normalise_target(name) == name


@pytest.mark.parametrize(
    "target",
    ["", " ", "host", "host:", ":80", "host:65536", "host:-1", "::1:80", "[::1", "[host]:80",
     "a:1,b:2", "10.0.0.1:1,[::1]:2", "10.0.0.1:1,", "unix:", "dns:///", "ho st:80", "-a:80",
     "host:80\0", "host:٨٠"],
)  # fmt: skip
def test_targets_that_mean_nothing_are_refused(target):
    with pytest.raises(InvalidArgument) as caught:
        normalise_target(target)
    assert caught.value.field == "target"


@given(st.text())
def test_any_text_is_a_target_or_a_typed_error(text):
    try:
        name = normalise_target(text)
    except InvalidArgument:
        return
    assert name.partition(":")[1]
    assert is_local(text) in (True, False)


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("127.0.0.1:1", True), ("127.8.8.8:1", True), ("[::1]:1", True), ("localhost:1", True),
        ("dns:///localhost:1", True), ("dns:///localhost", True), ("unix:/a", True), ("/a", True),
        ("127.0.0.1:1,127.0.0.2:1", True), ("127.0.0.1:1,10.0.0.1:1", False),
        ("0.0.0.0:1", False), ("[::]:1", False), ("10.0.0.1:1", False), ("host:1", False),
        ("localhost.evil.com:1", False), ("127.0.0.1.evil.com:1", False),
        ("dns://8.8.8.8/localhost.example:1", False), ("dns:///127.0.0.1.example", False),
    ],
)  # fmt: skip
def test_only_the_loopback_and_unix_sockets_are_local(target, local):
    assert is_local(target) is local


def test_an_insecure_channel_leaves_the_host_only_when_told_so():
    with pytest.raises(FailedPrecondition) as caught:
        channel.open_sync_channel("10.0.0.1:80")
    assert caught.value.reason == "INSECURE_TARGET"
    channel.open_sync_channel("10.0.0.1:80", ChannelConfig(allow_insecure=True)).close()
    with pytest.raises(FailedPrecondition) as caught:
        channel.open_sync_channel("10.0.0.1:80", ChannelConfig(allow_insecure=True, token="t" * 20))
    assert caught.value.reason == "TOKEN_WITHOUT_TLS"


def test_a_channel_config_checks_itself_and_hides_its_token():
    for bad in (
        {"tls_cert": Path("c")},
        {"keepalive_s": 1.0},
        {"max_message_bytes": 0},
        {"token": "line\nbreak"},
    ):
        with pytest.raises(InvalidArgument):
            ChannelConfig(**bad)
    assert "hush" not in repr(ChannelConfig(token="hush-hush-hush"))


def test_both_ends_have_one_keep_alive_profile():
    server = dict(channel.server_options(WireConfig()))
    client = dict(channel.channel_options("dns:///a:1", ChannelConfig()))
    fastest = ChannelConfig(keepalive_s=10.0)
    assert server["grpc.so_reuseport"] == 0
    assert server["grpc.keepalive_permit_without_calls"] == 1
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < fastest.keepalive_s * 1000
    for name in ("grpc.max_receive_message_length", "grpc.max_send_message_length"):
        assert server[name] == client[name] == 64 * 1024 * 1024


def test_every_option_is_one_that_grpc_knows():
    library = Path(find_spec("grpc._cython.cygrpc").origin).read_bytes()
    options = channel.server_options(WireConfig()) + channel.channel_options(
        "dns:///localhost:1", ChannelConfig(server_name_override="x")
    )
    unknown = [name for name, _ in options if name.encode() + b"\0" not in library]
    assert not unknown


def test_unix_paths_and_ports_are_taken_apart():
    assert unix_path("unix:/a/b") == "/a/b"
    assert unix_path("unix:///a/b") == "/a/b"
    assert unix_path("unix:b") == "b"
    assert unix_path("a:1") is None
    assert split_host_port("[::1]:80") == ("::1", 80)
