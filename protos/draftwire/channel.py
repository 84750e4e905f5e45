"""One table of channel and server options for both ends, and how channels are opened.

Knows limits, keep-alive, load balancing and client credentials. Light, since the SDK opens its
channels here. Does not know the services.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from draftwire.addresses import is_local, is_many, normalise_target
from draftwire.config import MIB, MIN_KEEPALIVE_S, WireConfig
from draftwire.errors import FailedPrecondition, InvalidArgument

__all__ = [
    "ChannelConfig",
    "is_local",
    "normalise_target",
    "open_channel",
    "open_sync_channel",
    "server_options",
]

Options = list[tuple[str, Any]]
_KEEPALIVE_TIMEOUT_MS = 20_000
_LONGEST_UNREQUESTED_S = 86_400


@dataclass(frozen=True)
class ChannelConfig:
    """How to reach a service. TLS is on with `tls` (system authorities) or a tls_* file."""

    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token: str | None = field(default=None, repr=False)
    allow_insecure: bool = False
    max_message_bytes: int = 64 * MIB
    keepalive_s: float = 60.0
    server_name_override: str | None = None
    # Round robin over a DNS name or a list passes over servers that are not SERVING. Off to ask
    # such a server for its health, which could not be reached otherwise.
    health_checked: bool = True
    health_service: str = ""
    service_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidArgument("tls_key", self.tls_key or "", "given together with tls_cert")
        if self.keepalive_s < MIN_KEEPALIVE_S:
            raise InvalidArgument("keepalive_s", self.keepalive_s, f"at least {MIN_KEEPALIVE_S}")
        if self.max_message_bytes <= 0:
            raise InvalidArgument("max_message_bytes", self.max_message_bytes, "at least 1")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise InvalidArgument("token", "***", "printable ASCII")

    @property
    def secure(self) -> bool:
        """Whether TLS is on."""
        return self.tls or self.tls_ca is not None or self.tls_cert is not None


def _common_options(max_message_bytes: int, keepalive_s: float) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(wire: WireConfig) -> Options:
    """Options of a server: shared limits, no port sharing, and room for any client's pings."""
    return [
        *_common_options(wire.max_message_bytes, wire.keepalive_s),
        ("grpc.so_reuseport", 0),
        # A call that was not picked up for 30 s, because the process was held up or frozen, would
        # end as CANCELLED with no trace at the server. It has a deadline of its own.
        ("grpc.server_max_unrequested_time_in_server", _LONGEST_UNREQUESTED_S),
        ("grpc.http2.min_ping_interval_without_data_ms", int(MIN_KEEPALIVE_S * 500)),
        ("grpc.http2.max_ping_strikes", 2),
    ]


def channel_options(target: str, config: ChannelConfig) -> Options:
    """Options of a channel to a normalised target."""
    options = _common_options(config.max_message_bytes, config.keepalive_s)
    service_config = dict(config.service_config)
    if is_many(target):
        service_config.setdefault("loadBalancingConfig", [{"round_robin": {}}])
        if config.health_checked:
            service_config.setdefault("healthCheckConfig", {"serviceName": config.health_service})
        # A lost server comes back within seconds, not after the default half minute.
        options.append(("grpc.dns_min_time_between_resolutions_ms", 5_000))
    if service_config:
        options.append(("grpc.service_config", json.dumps(service_config)))
    if is_local(target):
        options.append(("grpc.enable_http_proxy", 0))
    if config.server_name_override is not None:
        options.append(("grpc.ssl_target_name_override", config.server_name_override))
    return options


def _credentials(target: str, config: ChannelConfig) -> grpc.ChannelCredentials | None:
    """TLS, local, or None for plain TCP; raises FailedPrecondition where that is not allowed."""
    if config.secure:
        base = grpc.ssl_channel_credentials(
            _read(config.tls_ca, "tls_ca"),
            _read(config.tls_key, "tls_key"),
            _read(config.tls_cert, "tls_cert"),
        )
    elif is_local(target):
        unix = target.startswith("unix")
        kind = grpc.LocalConnectionType.UDS if unix else grpc.LocalConnectionType.LOCAL_TCP
        base = grpc.local_channel_credentials(kind)
    else:
        if config.token is not None:
            raise FailedPrecondition(
                "TOKEN_WITHOUT_TLS", f"a token is not sent to {target} without TLS", target=target
            )
        if not config.allow_insecure:
            raise FailedPrecondition(
                "INSECURE_TARGET",
                f"{target} is not on this host: TLS or allow_insecure is needed",
                target=target,
            )
        return None
    if config.token is None:
        return base
    return grpc.composite_channel_credentials(
        base, grpc.access_token_call_credentials(config.token)
    )


def _read(path: Path | None, name: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(name, path, f"a readable file ({error.strerror})") from error


def open_channel(target: str, config: ChannelConfig | None = None) -> grpc.aio.Channel:
    """An asyncio channel; connects on first use. Raises InvalidArgument or FailedPrecondition."""
    config = config or ChannelConfig()
    name = normalise_target(target)
    credentials = _credentials(name, config)
    options = channel_options(name, config)
    if credentials is None:
        return grpc.aio.insecure_channel(name, options=options)
    return grpc.aio.secure_channel(name, credentials, options=options)


def open_sync_channel(target: str, config: ChannelConfig | None = None) -> grpc.Channel:
    """As open_channel, for threads."""
    config = config or ChannelConfig()
    name = normalise_target(target)
    credentials = _credentials(name, config)
    options = channel_options(name, config)
    if credentials is None:
        return grpc.insecure_channel(name, options=options)
    return grpc.secure_channel(name, credentials, options=options)
