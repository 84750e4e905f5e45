"""Counts calls: an interceptor outside the guard, so that it sees how each call really ended.

Knows grpc's handler shapes and status codes. Does not know what the calls do. Handlers reach it
from the guard as coroutines that write; generators would be unwound by it too (OpenTelemetry's own
interceptor breaks on the former).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from draftwire.meters import REQUEST_S, Distribution, Reading
from draftwire.metric_table import LABELS, OTHER

_METHODS = frozenset(LABELS["method"])


class RpcMeter(grpc.aio.ServerInterceptor):
    """Started, handled by code, open, and how long; `readings` may be called from any thread."""

    def __init__(self) -> None:
        self._started: Counter[str] = Counter()
        self._handled: Counter[tuple[str, str]] = Counter()
        self._open: Counter[str] = Counter()
        self._seconds: dict[str, Distribution] = {}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler, counted."""
        handler: Any = await continuation(handler_call_details)
        method = method_label(str(handler_call_details.method))
        if handler is None:
            self._started[method] += 1
            self._handled[method, "UNIMPLEMENTED"] += 1
            return None
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        inner = getattr(handler, kind)

        async def counted(request: Any, context: Any) -> Any:
            begun = time.perf_counter()
            self._started[method] += 1
            self._open[method] += 1
            code = "UNKNOWN"
            try:
                result = inner(request, context)
                if not isinstance(result, Awaitable):
                    async for response in result:
                        await context.write(response)
                    response = None
                else:
                    response = await result
                code = _code(context) or "OK"
                return response
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            except grpc.aio.AbortError:
                code = _code(context) or "UNKNOWN"
                raise
            finally:
                self._open[method] -= 1
                self._handled[method, code] += 1
                seconds = self._seconds.setdefault(method, Distribution(REQUEST_S))
                seconds.add(time.perf_counter() - begun)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(counted, handler.request_deserializer, handler.response_serializer)

    def readings(self) -> Iterable[Reading]:
        """Everything counted so far."""
        for method, count in dict(self._started).items():
            yield Reading("draftwire_rpc_started_total", count, (method,))
        for (method, code), count in dict(self._handled).items():
            yield Reading("draftwire_rpc_handled_total", count, (method, code))
        for method, count in dict(self._open).items():
            yield Reading("draftwire_rpc_open", count, (method,))
        for method, seconds in dict(self._seconds).items():
            yield Reading("draftwire_rpc_seconds", seconds, (method,))


def method_label(method: str) -> str:
    """ "/draftwire.v1.Verifier/Generate" -> "Verifier/Generate"; what is not ours is "other"."""
    service, _, name = method.strip("/").rpartition("/")
    label = f"{service.rpartition('.')[2]}/{name}"
    return label if label in _METHODS else OTHER


def _code(context: Any) -> str:
    """Name of the status set on a context; empty if none is."""
    code = context.code()
    if isinstance(code, int):
        code = next((known for known in grpc.StatusCode if known.value[0] == code), None)
    return code.name if isinstance(code, grpc.StatusCode) else ""
