"""What is tried again, and when: arithmetic on a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from draftwire_client import (
    Internal,
    InvalidArgument,
    KeepAliveConfig,
    ResourceExhausted,
    RetryConfig,
    TLSConfig,
    Unavailable,
)
from draftwire_client.config import check_timeout
from draftwire_client.retry import Attempts

DOWN = Unavailable("DOWN", "down")


class Failed(grpc.RpcError):
    def __init__(self, *trailers: tuple[str, str | bytes]) -> None:
        self._trailers = trailers

    def trailing_metadata(self) -> Any:
        return self._trailers


@dataclass
class Clock:
    now: float = 100.0
    chances: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def attempts(self, config: RetryConfig, timeout: float, chance: float = 0.0) -> Attempts:
        return Attempts(config, timeout, clock=self, chance=lambda: chance)


def retry_info(seconds: int) -> Failed:
    status = status_pb2.Status(code=14)
    info = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=seconds))
    status.details.add().Pack(info)
    return Failed(("grpc-status-details-bin", status.SerializeToString()))


def test_delays_double_up_to_their_cap_and_end_with_the_attempts() -> None:
    config = RetryConfig(max_attempts=5, initial_backoff_s=1, max_backoff_s=3, multiplier=2)
    attempts = Clock().attempts(config, 100)
    delays = [attempts.next_delay(DOWN, Failed()) for _ in range(6)]
    assert delays == [1, 2, 3, 3, None, None]
    assert attempts.made == 5


@given(
    st.integers(1, 8),
    st.floats(0.01, 10),
    st.floats(0.01, 10),
    st.floats(1, 5),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.01, 60),
)
def test_no_delay_passes_the_deadline_or_the_cap_whatever_the_configuration(
    most: int,
    first: float,
    cap: float,
    multiplier: float,
    jitter: float,
    chance: float,
    timeout: float,
) -> None:
    config = RetryConfig(
        max_attempts=most,
        initial_backoff_s=first,
        max_backoff_s=cap,
        multiplier=multiplier,
        jitter=jitter,
    )
    clock = Clock()
    attempts = clock.attempts(config, timeout, chance)
    waits = 0
    while (delay := attempts.next_delay(DOWN, Failed())) is not None:
        waits += 1
        assert 0 <= delay <= cap
        assert delay < attempts.remaining()
        clock.now += delay
    assert waits < most
    assert attempts.elapsed() <= timeout + 1e-9  # the clock adds floats


def test_jitter_shortens_a_delay_by_at_most_its_share() -> None:
    config = RetryConfig(initial_backoff_s=1, max_backoff_s=1, jitter=0.5)
    assert Clock().attempts(config, 10, chance=1.0).next_delay(DOWN, Failed()) == 0.5
    assert Clock().attempts(config, 10, chance=0.0).next_delay(DOWN, Failed()) == 1.0


@pytest.mark.parametrize("error", [Internal("X", "x"), ResourceExhausted("FULL", "full")])
def test_only_unavailable_is_tried_again(error: Internal | ResourceExhausted) -> None:
    assert Clock().attempts(RetryConfig(), 10).next_delay(error, Failed()) is None


def test_retry_info_makes_the_delay_longer_and_never_shorter() -> None:
    config = RetryConfig(initial_backoff_s=1, max_backoff_s=1)
    delay = Clock().attempts(config, 100).next_delay(DOWN, retry_info(7))
    assert delay == 8


def test_a_retry_asked_for_after_the_deadline_is_not_made() -> None:
    attempts = Clock().attempts(RetryConfig(), 5)
    assert attempts.next_delay(DOWN, retry_info(60)) is None
    assert attempts.made == 1


@pytest.mark.parametrize(("value", "made"), [("250", 2), ("-1", 1), ("soon", 1)])
def test_push_back_delays_or_forbids_the_retry(value: str, made: int) -> None:
    attempts = Clock().attempts(RetryConfig(initial_backoff_s=1, max_backoff_s=1), 100)
    delay = attempts.next_delay(DOWN, Failed(("grpc-retry-pushback-ms", value)))
    assert delay == (1.25 if made == 2 else None)
    assert attempts.made == made


@given(st.binary())
def test_details_of_any_bytes_never_raise(data: bytes) -> None:
    attempts = Clock().attempts(RetryConfig(), 100)
    attempts.next_delay(DOWN, Failed(("grpc-status-details-bin", data)))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: RetryConfig(max_attempts=0), "retry.max_attempts"),
        (lambda: RetryConfig(initial_backoff_s=0), "retry.initial_backoff_s"),
        (lambda: RetryConfig(max_backoff_s=float("nan")), "retry.max_backoff_s"),
        (lambda: RetryConfig(multiplier=0.5), "retry.multiplier"),
        (lambda: RetryConfig(jitter=2), "retry.jitter"),
        (lambda: KeepAliveConfig(interval_s=-1), "keep_alive.interval_s"),
        (lambda: TLSConfig(cert="c"), "tls.key"),
        (lambda: TLSConfig(key="k"), "tls.cert"),
        (lambda: check_timeout(0, 1), "timeout"),
        (lambda: check_timeout(float("inf"), 1), "timeout"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field


def test_a_timeout_that_is_no_number_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="timeout"):
        check_timeout("5", 1)  # type: ignore[arg-type]
