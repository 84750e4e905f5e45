"""`connect`, the one way to make a client, shared by both.

Knows how the parts of the configuration come together. Opens nothing itself: channels connect at
their first call.
"""

from __future__ import annotations

import abc
import dataclasses
from dataclasses import dataclass
from typing import Self

from draftwire.channel import ChannelConfig
from draftwire_client.config import (
    DEFAULT_TIMEOUT_S,
    MAX_MESSAGE_BYTES,
    KeepAliveConfig,
    LoadBalancingConfig,
    RetryConfig,
    TLSConfig,
    channel_config,
    check_timeout,
)


@dataclass(frozen=True, slots=True)
class ConnectConfig:
    """A client's whole configuration. `timeout` is the default deadline of an answer, seconds."""

    target: str
    channel: ChannelConfig
    retry: RetryConfig
    timeout: float

    @property
    def control_channel(self) -> ChannelConfig:
        """For info and health, which must reach a server that is not SERVING too."""
        return dataclasses.replace(self.channel, health_checked=False)


class Connectable(abc.ABC):
    """The constructor of both clients."""

    @abc.abstractmethod
    def __init__(self, config: ConnectConfig) -> None:
        """A client with a checked configuration; `connect` makes it."""

    @classmethod
    def connect(
        cls,
        target: str,
        *,
        tls: TLSConfig | None = None,
        token: str | None = None,
        keep_alive: KeepAliveConfig | None = None,
        retry: RetryConfig | None = None,
        load_balancing: LoadBalancingConfig | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        allow_insecure: bool = False,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> Self:
        """A client of the verifier at `target`.

        A target is "host:port", "unix:PATH", "dns:///name:port" or "ip:port,ip:port".

        Nothing is sent yet. Without `tls` only the loopback and unix sockets are allowed, unless
        `allow_insecure`. `token` is sent as a bearer token; `timeout` is the deadline of an answer
        in seconds where a call gives none; info and health have 10 s. Raises InvalidArgument or
        FailedPrecondition naming what is wrong.
        """
        channel = channel_config(
            tls=tls,
            token=token,
            keep_alive=keep_alive or KeepAliveConfig(),
            load_balancing=load_balancing or LoadBalancingConfig(),
            allow_insecure=allow_insecure,
            max_message_bytes=max_message_bytes,
        )
        seconds = check_timeout(timeout, DEFAULT_TIMEOUT_S)
        return cls(ConnectConfig(target, channel, retry or RetryConfig(), seconds))
