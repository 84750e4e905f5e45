"""grpc.health.v1 for asyncio whose watchers end, so that a server with watchers can stop.

The stock servicer's Watch never returns and would hold `server.stop` for the whole grace; and it is
written in the style that OpenTelemetry's interceptor breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.errors import NotFound, Unavailable

SERVICE = "grpc.health.v1.Health"
_Response = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """One status for the server ("") and for each of its services: they live and die together."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset({"", *names})
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Whether SERVING is reported."""
        return self._serving

    def set_serving(self, serving: bool) -> None:
        """Reports SERVING or NOT_SERVING to all."""
        if serving != self._serving:
            self._serving = serving
            self._wake()

    def close(self) -> None:
        """Reports NOT_SERVING for good and ends all watchers."""
        self._serving = False
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self, name: str) -> int:
        if name not in self._names:
            return int(_Response.SERVICE_UNKNOWN)
        return int(_Response.SERVING if self._serving else _Response.NOT_SERVING)

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ],
    ) -> health_pb2.HealthCheckResponse:
        """Status now; NOT_FOUND for a name that is not served here."""
        if request.service not in self._names:
            raise NotFound(
                "UNKNOWN_SERVICE",
                f"no service {request.service!r} here",
                service=request.service,
            )
        return _Response(status=self._status(request.service))

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ],
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Status now and at each change, until the server goes away."""
        last = -1
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                last = status
                yield _Response(status=status)
            if self._closed:
                raise Unavailable("DRAINING", "the server is going away")
            if changed is self._changed:
                await changed.wait()
