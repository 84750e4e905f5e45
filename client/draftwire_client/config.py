"""How a client reaches a server: TLS, keep-alive, retries and limits, all with defaults.

Knows the settings and the ChannelConfig they become. Does not know channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftwire.channel import ChannelConfig
from draftwire_client.errors import InvalidArgument

DEFAULT_TIMEOUT_S = 300.0
CONTROL_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_POLICIES = ("round_robin", "pick_first")


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSConfig:
    """TLS to the server. With `cert` and `key` the client shows a certificate too (mTLS)."""

    ca: Path | str | None = None
    """PEM file of the authorities trusted; None: those of gRPC."""
    cert: Path | str | None = None
    """PEM file of the client's certificate."""
    key: Path | str | None = None
    """PEM file of the client's key."""
    server_name: str | None = None
    """Name expected in the server's certificate, if it is not the host of the target."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            missing = "tls.key" if self.key is None else "tls.cert"
            raise InvalidArgument(missing, "None", "given together with its other half")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAliveConfig:
    """Pings that keep an idle connection known to be alive."""

    interval_s: float = 60.0
    """Seconds between pings; the services allow down to their own `keepalive_s`."""

    def __post_init__(self) -> None:
        _positive("keep_alive.interval_s", self.interval_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBalancingConfig:
    """How calls are spread where the target is a list or a DNS name, which may be several servers.

    An answer stays on the server that began it.
    """

    policy: Literal["round_robin", "pick_first"] = "round_robin"
    """round_robin: call by call over all servers; pick_first: all calls to the first that answers,
    the next only when it is lost."""
    health_checked: bool = True
    """Round robin passes over servers whose health is not SERVING. Off for servers or proxies
    without the standard health service."""

    def __post_init__(self) -> None:
        if self.policy not in _POLICIES:
            raise InvalidArgument(
                "load_balancing.policy", self.policy, f"one of {', '.join(_POLICIES)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """When to try again.

    Only UNAVAILABLE, and only before the first message of an answer, is ever tried again.

    The n-th retry waits initial_backoff_s * multiplier ** (n - 1), at most max_backoff_s, less a
    random share of up to `jitter`. A server's RetryInfo makes the wait at least that long. A wait
    that would pass the deadline is not begun.
    """

    max_attempts: int = 4
    """Calls in all; 1 turns retries off."""
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    multiplier: float = 2.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise InvalidArgument("retry.max_attempts", self.max_attempts, "at least 1")
        _positive("retry.initial_backoff_s", self.initial_backoff_s)
        _positive("retry.max_backoff_s", self.max_backoff_s)
        if not self.multiplier >= 1:
            raise InvalidArgument("retry.multiplier", self.multiplier, "at least 1")
        if not 0 <= self.jitter <= 1:
            raise InvalidArgument("retry.jitter", self.jitter, "in [0, 1]")


def channel_config(
    *,
    tls: TLSConfig | None,
    token: str | None,
    keep_alive: KeepAliveConfig,
    load_balancing: LoadBalancingConfig,
    allow_insecure: bool,
    max_message_bytes: int,
) -> ChannelConfig:
    """The channel's settings."""
    first = load_balancing.policy == "pick_first"
    files = tls or TLSConfig()
    return ChannelConfig(
        tls=tls is not None,
        tls_ca=_path(files.ca),
        tls_cert=_path(files.cert),
        tls_key=_path(files.key),
        server_name_override=files.server_name,
        token=token,
        allow_insecure=allow_insecure,
        max_message_bytes=max_message_bytes,
        keepalive_s=keep_alive.interval_s,
        # gRPC has no health checks under pick_first.
        health_checked=load_balancing.health_checked and not first,
        service_config={"loadBalancingConfig": [{"pick_first": {}}]} if first else {},
    )


def check_timeout(timeout: float | None, default: float) -> float:
    """Seconds a call may take.

    Raises TypeError for what is not a number, InvalidArgument for what is not a time.
    """
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout takes seconds as a number, not {type(timeout).__name__}")
    _positive("timeout", timeout)
    return float(timeout)


def _positive(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidArgument(field, value, "a finite number of seconds above 0")


def _path(value: Path | str | None) -> Path | None:
    return None if value is None else Path(value)
