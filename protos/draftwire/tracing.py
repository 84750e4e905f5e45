"""Traces: OpenTelemetry spans with OTLP export, configured by the standard OTEL_* variables.

Knows the SDK (the `tracing` extra; imported only when the environment asks for traces) and how a
trace travels: W3C `traceparent` in call metadata and in OpenSession. Does not use OpenTelemetry's
grpc interceptors: they break streaming handlers that are coroutines and know no rounds. Does not
know what is traced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from draftwire.config import ConfigError

TRACEPARENT = "traceparent"
# https://www.w3.org/TR/trace-context/#traceparent-header; versions after 00 may go on, and are read
# by the fields that they have in common. Version ff is none.
_VALID = re.compile(
    r"((?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-[ -~]*)?"
)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def traceparent_of(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """The W3C trace context in a call's metadata; empty if there is none or it is malformed."""
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str):
            return checked(value)
    return ""


def checked(traceparent: str) -> str:
    """`traceparent` without what only later versions know, empty if it is none: what peers send is
    not trusted.
    """
    found = _VALID.fullmatch(traceparent)
    if found is None or (found[2] is not None and traceparent.startswith("00-")):
        return ""
    return found[1]


def trace_id_of(traceparent: str) -> str:
    """The 32 digits by which backends find a trace; empty for an empty traceparent."""
    return traceparent.split("-")[1] if traceparent else ""


def wanted(env: Mapping[str, str]) -> bool:
    """Whether the environment asks for traces: OTEL_TRACES_EXPORTER=otlp or an OTLP endpoint, and
    not OTEL_SDK_DISABLED.
    """
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = env.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporter:
        return exporter != "none"
    return any(env.get(name) for name in _ENDPOINTS)


def from_environment(service: str, env: Mapping[str, str], **resource: str) -> Tracing | None:
    """The service's tracing, or None where nobody asked: then no call of it costs anything.

    `service` is service.name unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES says otherwise.
    Raises ConfigError for exporters that are not supported and for a missing extra.
    """
    if not wanted(env):
        return None
    exporter = env.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if exporter != "otlp":
        raise ConfigError("OTEL_TRACES_EXPORTER", exporter, "otlp or none")
    for name in _PROTOCOLS:
        if env.get(name, "grpc") != "grpc":
            raise ConfigError(name, env[name], "grpc")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "OTEL_TRACES_EXPORTER", exporter, "none, or draftwire[tracing] installed"
        ) from error
    attributes = {"service.name": service} | {f"service.{k}": v for k, v in resource.items()}
    named = Resource.create(attributes).merge(OTELResourceDetector().detect())
    # Sampler, batching, limits and the exporter read their own OTEL_* variables.
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


class Tracing:
    """Makes spans. `provider`: a TracerProvider of the SDK, shut down by `close`."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("draftwire")
        self._propagator = TraceContextTextMapPropagator()

    def span(
        self, name: str, kind: str, parent: str = "", link: Span | None = None, **attributes: Any
    ) -> Span:
        """A span that has begun; `kind` is server, client, consumer or internal, `parent` a
        traceparent (empty: a new trace), `link` a span of another trace that belongs to it.
        """
        from opentelemetry import trace
        from opentelemetry.context import Context

        context = (
            self._propagator.extract({TRACEPARENT: parent}, Context()) if parent else Context()
        )
        links = [trace.Link(link.raw.get_span_context())] if link is not None else []
        raw = self._tracer.start_span(
            name,
            context=context,
            kind=trace.SpanKind[kind.upper()],
            attributes=_dotted(attributes),
            links=links,
        )
        return Span(raw, self._propagator)

    def close(self) -> None:
        """Export what is left; waits for the collector within OTEL_BSP_EXPORT_TIMEOUT."""
        self._provider.shutdown()


class Span:
    """One span; methods may be called from any thread and do nothing once it has ended."""

    def __init__(self, raw: Any, propagator: Any) -> None:
        self.raw = raw
        self._propagator = propagator

    @property
    def traceparent(self) -> str:
        """What a peer needs to go on with the trace."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(self.raw))
        return carrier.get(TRACEPARENT, "")

    def event(self, name: str, **attributes: Any) -> None:
        """Something that happened now. OTEL_SPAN_EVENT_COUNT_LIMIT (128) of them are kept."""
        if self.raw.is_recording():
            self.raw.add_event(name, _dotted(attributes))

    def set(self, **attributes: Any) -> None:
        """Facts of the whole span."""
        if self.raw.is_recording():
            self.raw.set_attributes(_dotted(attributes))

    def end(self, error: str = "") -> None:
        """It is over; with `error` it failed. Only the first call counts."""
        if self.raw.is_recording():
            if error:
                from opentelemetry.trace import Status, StatusCode

                self.raw.set_status(Status(StatusCode.ERROR, error))
            self.raw.end()


def _dotted(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword names to attribute names: rpc__method -> rpc.method; None is left out."""
    return {key.replace("__", "."): value for key, value in attributes.items() if value is not None}
