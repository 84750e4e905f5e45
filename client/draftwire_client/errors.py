"""Errors as the client raises them, and what had arrived before one.

Knows how a failed call becomes a typed error and a line for people. Does not know when to try again
(`retry`).
"""

from __future__ import annotations

import grpc

from draftwire.errors import (
    UNSPECIFIED,
    Cancelled,
    DeadlineExceeded,
    DraftwireError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
)
from draftwire_client.types import Partial

__all__ = [
    "Cancelled",
    "DeadlineExceeded",
    "DraftwireError",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "ResourceExhausted",
    "Unauthenticated",
    "Unavailable",
    "describe",
    "partial_of",
]

UNREACHABLE = "UNREACHABLE"
CONNECTION_LOST = "CONNECTION_LOST"
DEADLINE_PASSED = "DEADLINE_PASSED"
CANCELLED_BY_CALLER = "CANCELLED_BY_CALLER"
CANCELLED_BY_SERVER = "CANCELLED_BY_SERVER"
# A status made by gRPC itself carries no reason; these say what it means here.
_OWN_REASONS = {
    grpc.StatusCode.UNAVAILABLE: UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: DEADLINE_PASSED,
}
_PARTIAL = "_draftwire_partial"


def partial_of(error: BaseException) -> Partial | None:
    """What had arrived when the answer that raised `error` failed; None for other errors."""
    found = getattr(error, _PARTIAL, None)
    return found if isinstance(found, Partial) else None


def describe(error: DraftwireError) -> str:
    """One line for people: `REASON: message (field=…, limit=…, value=…)`, parts as given."""
    # A field that is empty is worth saying; a part that nobody gave is not.
    blank = "empty" if error.metadata.get("field") else ""
    found = {key: error.metadata.get(key, "") for key in ("field", "limit", "value")}
    given = [f"{key}={text or blank}" for key, text in found.items() if text or blank]
    line = f"{error.reason}: {error.message}" + (f" ({', '.join(given)})" if given else "")
    return " ".join(line.split())


def from_call(
    exc: grpc.RpcError, *, begun: bool = False, given_up: bool = False, late: bool = False
) -> DraftwireError:
    """The typed error of a failed call.

    `begun`: the server had said something; `given_up`: this end has cancelled the call or closed
    its client; `late`: the deadline has passed. An error that no server wrote has a reason of this
    package, never UNSPECIFIED.
    """
    if given_up:
        return cancelled_by_caller()
    error = from_rpc_error(exc)
    if error.reason == UNSPECIFIED and error.code is grpc.StatusCode.CANCELLED:
        # Nobody here cancelled: a server or a proxy dropped the call. Its clock may have counted
        # the deadline out a little before this one's.
        if late:
            return DeadlineExceeded(DEADLINE_PASSED, "the deadline passed")
        return Unavailable(CANCELLED_BY_SERVER, f"the server dropped the call: {error.message}")
    if error.reason == UNSPECIFIED:
        error.reason = _OWN_REASONS.get(error.code, error.code.name)
        if begun and error.reason == UNREACHABLE:
            error.reason = CONNECTION_LOST
    return error


def trailers_of(exc: grpc.RpcError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailers of a failed call of either stack."""
    read = getattr(exc, "trailing_metadata", None)
    return tuple((read() if callable(read) else None) or ())


def with_partial(error: DraftwireError, partial: Partial) -> DraftwireError:
    """`error`, remembering what had arrived."""
    setattr(error, _PARTIAL, partial)
    return error


def cancelled_by_caller() -> Cancelled:
    """The error of a call that its own caller cancelled."""
    return Cancelled(CANCELLED_BY_CALLER, "the call was cancelled by its caller")


def client_closed() -> FailedPrecondition:
    """The error of using a client after `close`."""
    return FailedPrecondition("CLIENT_CLOSED", "the client was closed; connect a new one")
