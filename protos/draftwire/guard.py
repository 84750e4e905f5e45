"""The one interceptor of a server: who may call, when calls are taken, and how errors leave.

Every error leaves as google.rpc.Status. Whatever is not a DraftwireError leaves as INTERNAL with a
random id; its details are in the log under that id and nowhere else.
"""

from __future__ import annotations

import contextlib
import enum
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from draftwire import errors, health, logs
from draftwire.auth import TokenCheck

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Any]
_INFRASTRUCTURE = ("/grpc.",)


class Phase(enum.Enum):
    """Where a server is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Guard(grpc.aio.ServerInterceptor):
    """Outermost interceptor: checks the token, refuses by phase, maps errors."""

    def __init__(self, tokens: TokenCheck | None = None) -> None:
        self.phase = Phase.STARTING
        self._tokens = tokens
        self._log = logs.get_logger("draftwire.guard")

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """A handler of the same shape that runs the original one inside the guard."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # grpc answers UNIMPLEMENTED
        method = str(handler_call_details.method)
        refusal = self._refusal(method, handler, handler_call_details)
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        inner: Behaviour = getattr(handler, kind)
        outer = self._stream(method, inner, refusal) if handler.response_streaming else None
        outer = outer or self._unary(method, inner, refusal)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(outer, handler.request_deserializer, handler.response_serializer)

    def _refusal(
        self, method: str, handler: Any, details: grpc.HandlerCallDetails
    ) -> errors.DraftwireError | None:
        if method.startswith(f"/{health.SERVICE}/"):
            return None
        if self._tokens is not None:
            metadata: Any = details.invocation_metadata or ()
            if not self._tokens.allows(metadata):
                return errors.Unauthenticated(
                    "TOKEN_REFUSED", "a valid bearer token is needed in `authorization`"
                )
        if method.startswith(_INFRASTRUCTURE):
            return None
        if self.phase is Phase.STARTING:
            return errors.Unavailable("STARTING", "the service is still loading")
        if self.phase is Phase.DRAINING and handler.response_streaming:
            return errors.Unavailable("DRAINING", "the service is going away")
        return None

    def _unary(
        self, method: str, inner: Behaviour, refusal: errors.DraftwireError | None
    ) -> Behaviour:
        async def unary(request: Any, context: Context) -> Any:
            try:
                if refusal is not None:
                    raise refusal
                return await inner(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001  the last resort of the server
                await self._fail(method, context, error)

        return unary

    def _stream(
        self, method: str, inner: Behaviour, refusal: errors.DraftwireError | None
    ) -> Behaviour:
        # A coroutine that writes, not a generator: one cut off at its yield would leave the inner
        # generator to the garbage collector. Here its `finally` has run before the call is over.
        async def stream(request: Any, context: Context) -> None:
            try:
                if refusal is not None:
                    raise refusal
                responses = inner(request, context)
                if not isinstance(responses, AsyncIterator):
                    await responses
                    return
                async with contextlib.AsyncExitStack() as stack:
                    if hasattr(responses, "aclose"):
                        stack.push_async_callback(responses.aclose)
                    async for response in responses:
                        await context.write(response)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001  the last resort of the server
                await self._fail(method, context, error)

        return stream

    async def _fail(self, method: str, context: Context, error: Exception) -> NoReturn:
        if not isinstance(error, errors.DraftwireError):
            error_id = secrets.token_hex(8)
            self._log.error("call failed", method=method, error_id=error_id, exc_info=error)
            error = errors.Internal(
                "INTERNAL_ERROR",
                f"internal error; the server's log has it as {error_id}",
                error_id=error_id,
            )
        status = errors.to_status(error)
        # abort() replaces trailers that the handler has set: usage and statistics go along.
        trailers = [*(context.trailing_metadata() or ()), *(status.trailing_metadata or ())]
        await context.abort(status.code, status.details, tuple(trailers))
