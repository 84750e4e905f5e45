"""Deadline and retries of one call, as plain arithmetic on the clock.

Knows what may be tried again, when, and how much time is left. Does not wait and does not call:
both clients do that in their own way.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from draftwire_client.config import RetryConfig
from draftwire_client.errors import DraftwireError, trailers_of
from draftwire_client.responses import seconds

_DETAILS = "grpc-status-details-bin"
_PUSHBACK = "grpc-retry-pushback-ms"


class Attempts:
    """The attempts of one call, which together have `timeout` seconds from now on."""

    def __init__(
        self,
        config: RetryConfig,
        timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.made = 1
        self._config = config
        self._clock = clock
        self._chance = chance
        self._start = clock()
        self._deadline = self._start + timeout

    def elapsed(self) -> float:
        """Seconds since the call began."""
        return self._clock() - self._start

    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._deadline - self._clock())

    def next_delay(self, error: DraftwireError, exc: grpc.RpcError) -> float | None:
        """Seconds to wait before the next attempt, which is counted; None: raise `error`.

        The caller asks only while no message has arrived.
        """
        if error.code is not grpc.StatusCode.UNAVAILABLE or self.made >= self._config.max_attempts:
            return None
        config = self._config
        delay = config.initial_backoff_s * config.multiplier ** (self.made - 1)
        delay = min(delay, config.max_backoff_s) * (1 - config.jitter * self._chance())
        asked = asked_delay(exc)
        if asked is not None:
            if asked < 0:
                return None
            # A crowd told the same delay must not come back as one.
            delay += asked
        if delay >= self.remaining():
            return None
        self.made += 1
        return delay


def asked_delay(exc: grpc.RpcError) -> float | None:
    """Seconds the server asked to wait, by RetryInfo or the push-back trailer.

    Below 0: do not try again; None: it did not say.
    """
    for key, value in trailers_of(exc):
        if key == _PUSHBACK:
            try:
                return int(value) / 1000
            except ValueError:
                return -1.0  # gRPC's rule: a push-back that cannot be read forbids the retry
        if key == _DETAILS and isinstance(value, bytes):
            try:
                details = status_pb2.Status.FromString(value).details
                for detail in details:
                    info = error_details_pb2.RetryInfo()
                    if detail.Unpack(info):
                        return max(0.0, seconds(info.retry_delay))
            except DecodeError:
                continue
    return None
