"""W3C trace context: which trace a call belongs to, and the metadata that says so.

Knows the two headers and how to ask OpenTelemetry for the active span where the application uses
it. Needs no OpenTelemetry and makes no spans.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from draftwire_client.errors import InvalidArgument

Metadata = tuple[tuple[str, str], ...]

# https://www.w3.org/TR/trace-context/#traceparent-header; only versions after 00 may go on.
_PARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]*)?"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The caller's place in a trace, as in the HTTP headers of the same names."""

    traceparent: str
    tracestate: str = ""

    def __post_init__(self) -> None:
        found = _PARENT.fullmatch(self.traceparent)
        if found is None or (found[1] == "00" and found[2] is not None):
            raise InvalidArgument(
                "traceparent", self.traceparent, "VERSION-TRACE_ID-PARENT_ID-FLAGS in lower hex"
            )
        if not (self.tracestate.isascii() and self.tracestate.isprintable()):
            raise InvalidArgument("tracestate", self.tracestate, "printable ASCII")


def trace_metadata(trace: TraceContext | str | None) -> Metadata:
    """The metadata of a call: of `trace`, else of OpenTelemetry's active span, else none.

    A text is a traceparent. Raises InvalidArgument naming the header, TypeError for other types.
    """
    if isinstance(trace, str):
        trace = TraceContext(trace)
    if trace is None:
        trace = _active()
    if trace is None:
        return ()
    if not isinstance(trace, TraceContext):
        raise TypeError(f"trace takes a TraceContext or a text, not {type(trace).__name__}")
    state = (("tracestate", trace.tracestate),) if trace.tracestate else ()
    return (("traceparent", trace.traceparent), *state)


def _active() -> TraceContext | None:
    # Not imported here: a span can only be active where the application has imported it.
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    span = api.get_current_span().get_span_context()
    if not span.is_valid:
        return None
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return TraceContext(parent, span.trace_state.to_header())
