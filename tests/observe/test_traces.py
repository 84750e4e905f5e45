"""One request, one trace: client, verifier and drafter export over OTLP to a real receiver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes import eventually, generate, tiny_target
from observe.pair_kit import metered_drafter, metered_verifier
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from draftwire import tracing
from draftwire.config import ConfigError
from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_client import AsyncClient

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver; keeps spans with the name of the service that sent them."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans.extend((names["service.name"], span) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Any]:
        """Spans of a name."""
        return [span for _, span in self.spans if span.name == name]


@contextlib.asynccontextmanager
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """A receiver to which the environment sends all traces."""
    server, receiver = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    try:
        yield receiver
    finally:
        await server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    """Attributes of a span or event of OTLP as Python values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_a_request_is_one_trace_across_client_verifier_and_drafter(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with collector(monkeypatch) as received:
            application = TracerProvider(resource=Resource.create({"service.name": "backend"}))
            application.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            async with (
                metered_drafter(target) as (_, address, _),
                metered_verifier(target, address, draft_wait_ms=10_000.0) as (service, _, _),
                AsyncClient.connect(service.tested_address) as client,
            ):
                with application.get_tracer("test").start_as_current_span("ask"):
                    result = await client.generate(
                        "abcabcabc",
                        max_tokens=12,
                        ignore_eos=True,
                        seed=1,
                        speculation="fixed",
                        request_id="traced-1",
                    )
            await asyncio.to_thread(application.shutdown)
            await eventually(lambda: len(received.spans) >= 4)
        _check_trace(received, result)

    asyncio.run(main())


def _check_trace(received: Collector, result: Any) -> None:
    (ask,) = received.named("ask")
    (call,) = received.named("draftwire.v1.Verifier/Generate")
    (session,) = received.named("draft session")
    (lane,) = received.named("draftwire lane")
    assert {name for name, _ in received.spans} == {
        *("backend", "draftwire-verifier", "draftwire-drafter")
    }
    assert ask.trace_id == call.trace_id == session.trace_id
    assert call.parent_span_id == ask.span_id
    assert session.parent_span_id == call.span_id
    # The lane lives longer than any request: it is linked, and a trace of its own.
    assert [link.span_id for link in session.links] == [lane.span_id]
    assert lane.trace_id != ask.trace_id
    facts = attributes(call)
    assert facts["request.id"] == attributes(session)["request.id"] == "traced-1"
    assert facts["completion_tokens"] == 12 == result.usage.completion_tokens
    assert facts["accepted"] == result.acceptance.accepted
    rounds = [attributes(event) for event in call.events if event.name == "round"]
    stats = result.acceptance
    assert len(rounds) == stats.rounds + stats.plain_rounds
    assert sum(r["accepted"] for r in rounds) == stats.accepted
    assert sum(r["drafted"] for r in rounds) == stats.drafted
    # The first token comes with the prompt's last piece, which is no round.
    assert sum(r["tokens"] for r in rounds) == 11
    proposals = [event for event in session.events if event.name == "proposal"]
    assert len(proposals) == attributes(session)["proposals"] >= stats.rounds > 0
    assert call.start_time_unix_nano <= session.start_time_unix_nano
    assert session.end_time_unix_nano >= proposals[-1].time_unix_nano


def test_a_request_that_fails_ends_its_span_with_the_reason(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with collector(monkeypatch) as received:
            async with metered_verifier(target) as (_, stub, _):
                with pytest.raises(grpc.RpcError):
                    await generate(stub, "x", sampling={"temperature": -1.0})
            (call,) = received.named("draftwire.v1.Verifier/Generate")
            assert call.status.code == trace_status_error()
            assert call.status.message == "INVALID_FIELD"
            assert not call.parent_span_id

    asyncio.run(main())


def trace_status_error() -> int:
    """STATUS_CODE_ERROR of OTLP."""
    from opentelemetry.proto.trace.v1 import trace_pb2

    return int(trace_pb2.Status.STATUS_CODE_ERROR)


def test_traces_are_off_unless_the_environment_asks_for_them() -> None:
    assert tracing.from_environment("x", {}) is None
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
    assert tracing.wanted(endpoint)
    assert tracing.wanted({"OTEL_TRACES_EXPORTER": "otlp"})
    assert not tracing.wanted(endpoint | {"OTEL_SDK_DISABLED": "true"})
    assert not tracing.wanted(endpoint | {"OTEL_TRACES_EXPORTER": "none"})


def test_exporters_and_protocols_that_are_not_served_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER"):
        tracing.from_environment("x", {"OTEL_TRACES_EXPORTER": "zipkin"})
    wish = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        tracing.from_environment("x", wish)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"draftwire\[tracing\]"):
        tracing.from_environment("x", {"OTEL_TRACES_EXPORTER": "otlp"})


def test_without_tracing_the_sdk_is_not_even_imported() -> None:
    import subprocess

    program = (
        "import sys, draftwire.runtime, draftwire.tracing as t; t.from_environment('x', {}); "
        "print([m for m in sys.modules if m.startswith(('opentelemetry', 'prometheus_client'))])"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert found.stdout.strip() == "[]", found.stderr


@pytest.mark.parametrize(
    "sent",
    [
        *("", "00", "00-" + "0" * 32 + "-b7ad6b7169203331-01", PARENT + "-x", PARENT.upper()),
        PARENT.replace("00-", "ff-", 1),
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\n{}",
    ],
)
def test_what_is_no_trace_context_is_passed_over(sent: str) -> None:
    assert tracing.checked(sent) == ""
    assert tracing.traceparent_of([("x", "y"), ("traceparent", sent)]) == ""


def test_a_trace_context_is_passed_on_although_the_verifier_itself_does_not_trace(
    target: Path,
) -> None:
    from fakes import ScriptedDrafter, scripted

    from draftwire_kernels.tree import TokenTree

    opened: list[str] = []

    class Listening(ScriptedDrafter):
        def _take(self, step: Any, mine: set[int]) -> list[int]:
            opened.extend(o.traceparent for o in step.opens)
            return super()._take(step, mine)

    async def main() -> None:
        drafter = Listening(lambda tokens, session: TokenTree.chain((1,)))
        async with (
            scripted(drafter) as address,
            metered_verifier(target, address) as (_, stub, _),
        ):
            stop = {"max_tokens": 4, "ignore_eos": True}
            request = _request("hello", stop)
            request.speculation.mode = types_pb2.SPECULATION_MODE_FIXED
            call = stub.Generate(request, metadata=(("traceparent", PARENT),))
            async for _ in call:
                pass
            async for _ in stub.Generate(request, metadata=(("traceparent", "nonsense"),)):
                pass

    asyncio.run(main())
    assert opened == [PARENT, ""]


def _request(text: str, stop: dict[str, Any]) -> Any:
    return verifier_pb2.GenerateRequest(text=text, stop=types_pb2.StopConditions(**stop))


def test_a_span_that_has_ended_takes_nothing_more() -> None:
    provider = TracerProvider()
    traces = tracing.Tracing(provider)
    span = traces.span("s", "server", PARENT, a__b=1, nothing=None)
    assert tracing.trace_id_of(span.traceparent) == PARENT.split("-")[1]
    assert dict(span.raw.attributes) == {"a.b": 1}
    span.end("REASON")
    span.end()
    span.event("late")
    span.set(late=True)
    assert span.raw.status.status_code is trace.StatusCode.ERROR
    assert not span.raw.events
    traces.close()


def test_a_later_version_is_read_by_the_fields_it_has_in_common() -> None:
    later = PARENT.replace("00-", "cc-", 1)
    assert tracing.checked(f"{later}-what-comes") == later
    assert tracing.checked(later) == later
    assert tracing.checked(PARENT) == PARENT
