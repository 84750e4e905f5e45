"""The caller's trace travels with its calls: given, or the active span of OpenTelemetry."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwire_client import AsyncClient, Client, InvalidArgument, RetryConfig, TraceContext
from draftwire_client.errors import Unavailable
from draftwire_client.testing import Reply, ScriptedVerifier
from draftwire_client.trace import trace_metadata

from .conftest import Either

Serve = Callable[..., ScriptedVerifier]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def sent(server: ScriptedVerifier) -> list[tuple[Any, Any]]:
    return [
        (call.metadata.get("traceparent"), call.metadata.get("tracestate")) for call in server.calls
    ]


def test_a_trace_that_is_given_goes_with_the_call_and_with_its_retries(
    either: Either, serve: Serve
) -> None:
    server = serve(Reply.failing(Unavailable("DOWN", "down")), Reply.of("ok"))
    trace = TraceContext(PARENT, "vendor=1,other=2")
    quick = {"retry": RetryConfig(initial_backoff_s=0.001)}
    either.call(server.target, "generate", "hi", trace=trace, connect=quick)
    either.call(server.target, "chat", "hi", trace=PARENT)
    either.call(server.target, "batch", ["a", "b"], trace=PARENT)
    assert sent(server) == [(PARENT, "vendor=1,other=2")] * 2 + [(PARENT, None)] * 3


def test_without_a_trace_nothing_is_sent(either: Either, serve: Serve) -> None:
    server = serve()
    either.call(server.target, "generate", "hi")
    assert sent(server) == [(None, None)]


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "-more",
        "ff" + PARENT[2:],
        "00-" + "0" * 32 + PARENT[35:],
        PARENT[:36] + "0" * 16 + "-01",
        PARENT + "\n",
    ],
)
def test_a_traceparent_that_is_none_is_refused_by_name(
    either: Either, serve: Serve, wrong: str
) -> None:
    server = serve()
    with pytest.raises(InvalidArgument) as caught:
        either.call(server.target, "generate", "hi", trace=wrong)
    assert caught.value.field == "traceparent"
    assert server.calls == []


def test_other_wrong_traces_are_refused(serve: Serve) -> None:
    with pytest.raises(InvalidArgument, match="tracestate"):
        TraceContext(PARENT, "a=1\n")
    with pytest.raises(TypeError, match="trace"):
        trace_metadata(7)  # type: ignore[arg-type]


def test_a_later_version_may_go_on() -> None:
    later = "01" + PARENT[2:] + "-what-else"
    assert trace_metadata(later) == (("traceparent", later),)


@given(st.text())
def test_what_is_accepted_is_metadata_that_grpc_carries(text: str) -> None:
    try:
        trace = TraceContext(PARENT, text)
    except InvalidArgument:
        return
    for _, value in trace_metadata(trace):
        assert value.isascii()
        assert value.isprintable()


@pytest.fixture
def span() -> Iterator[Any]:
    """A recording span of OpenTelemetry, active."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    provider = sdk.TracerProvider()
    with provider.get_tracer("test").start_as_current_span("caller") as active:
        yield active.get_span_context()
    provider.shutdown()


def test_the_active_span_is_the_parent_of_every_call(serve: Serve, span: Any) -> None:
    server = serve()
    expected = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    with Client.connect(server.target) as client:
        client.generate("hi")
        client.batch(["a", "b"], concurrency=2)  # threads of a pool have no span of their own
        client.generate("hi", trace=PARENT)

    async def main() -> None:
        async with AsyncClient.connect(server.target) as client:
            await client.generate("hi")
            await client.batch(["a", "b"])

    asyncio.run(main())
    parents = [parent for parent, _ in sent(server)]
    assert parents == [expected] * 3 + [PARENT] + [expected] * 3


def test_opentelemetry_that_is_not_used_is_not_imported() -> None:
    code = (
        "import sys, draftwire_client; from draftwire_client.trace import trace_metadata; "
        "print(trace_metadata(None), any(n.startswith('opentelemetry') for n in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "() False\n"
