"""Typed errors and their google.rpc.Status form.

Knows how an error travels: canonical code, ErrorInfo with reason, domain and every number again as
metadata. Does not know who raises or who shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "draftwire"
UNSPECIFIED = "UNSPECIFIED"
MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"

_DETAILS_KEY = "grpc-status-details-bin"
_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,62}")
_OVERSIZE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")
# Trailers share one HTTP/2 header block, which peers commonly cap at 8 KiB.
_MAX_MESSAGE = 1000
_MAX_VALUE = 200
_MAX_ENTRIES = 16


def _clean(value: object, limit: int) -> str:
    """Text that protobuf accepts (no lone surrogates), at most `limit` characters."""
    text = value if isinstance(value, str) else str(value)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 1] + "…"


class DraftwireError(Exception):
    """Root of the errors that cross the wire.

    `reason` is UPPER_SNAKE and stable; `metadata` repeats every dynamic part of `message`.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    reason: str
    message: str
    metadata: dict[str, str]

    def __init__(self, reason: str, message: str, /, **metadata: object) -> None:
        if not _REASON.fullmatch(reason):
            raise ValueError(f"reason {reason!r} is not UPPER_SNAKE of at most 63 characters")
        self.reason = reason
        self.message = _clean(message, _MAX_MESSAGE)
        self.metadata = {
            key: _clean(value, _MAX_VALUE) for key, value in list(metadata.items())[:_MAX_ENTRIES]
        }
        super().__init__(self.message)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.code, self.reason, self.message, self.metadata))


class InvalidArgument(DraftwireError):
    """A field of a request is wrong, whatever the state of the server."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    field: str
    value: str
    limit: str

    def __init__(
        self,
        field: str,
        value: object,
        limit: object,
        message: str | None = None,
        reason: str = "INVALID_FIELD",
    ) -> None:
        """`limit` says what is allowed, worded to follow "must be": "in [0, 2]", "at most 2048"."""
        shown = value if isinstance(value, str) else repr(value)
        super().__init__(
            reason,
            message or f"{field} is {_clean(shown, _MAX_VALUE) or 'empty'}; it must be {limit}",
            field=field,
            value=shown,
            limit=limit,
        )
        self.field = self.metadata["field"]
        self.value = self.metadata["value"]
        self.limit = self.metadata["limit"]


class FailedPrecondition(DraftwireError):
    """The system is not in the state that the request needs."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(DraftwireError):
    """A quota, a queue or a message limit is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(DraftwireError):
    """Not reachable or not taking work now; worth trying again."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(DraftwireError):
    """The deadline passed or cannot be met."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(DraftwireError):
    """The caller gave up."""

    code = grpc.StatusCode.CANCELLED


class NotFound(DraftwireError):
    """A named thing does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class Unauthenticated(DraftwireError):
    """No token, or a wrong one."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Internal(DraftwireError):
    """A fault inside the server; details are in its log only."""

    code = grpc.StatusCode.INTERNAL


_BY_CODE: Mapping[grpc.StatusCode, type[DraftwireError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        FailedPrecondition,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        NotFound,
        Unauthenticated,
        Internal,
    )
}


_NUMBERS = {code: code_pb2.Code.Value(code.name) for code in grpc.StatusCode}


def to_proto(error: DraftwireError) -> status_pb2.Status:
    """google.rpc.Status with one ErrorInfo."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status = status_pb2.Status(code=_NUMBERS[error.code], message=error.message)
    status.details.add().Pack(info)
    return status


def to_status(error: DraftwireError) -> grpc.Status:
    """The form that `context.abort_with_status` takes."""
    return rpc_status.to_status(to_proto(error))


def from_rpc_error(exc: grpc.RpcError) -> DraftwireError:
    """The typed error in an RpcError of either stack; without ErrorInfo, reason UNSPECIFIED."""
    code = getattr(exc, "code", None)
    details = getattr(exc, "details", None)
    trailers = getattr(exc, "trailing_metadata", None)
    if not callable(code) or code() is None:
        return _rebuild(grpc.StatusCode.UNKNOWN, UNSPECIFIED, type(exc).__name__, {})
    return from_status_parts(
        code(),
        (details() if callable(details) else None) or "",
        (trailers() if callable(trailers) else None) or (),
    )


def from_status_parts(
    code: grpc.StatusCode,
    message: str,
    trailing_metadata: Iterable[tuple[str, str | bytes]] | None,
) -> DraftwireError:
    """The typed error for a code, its message and its trailers; bad details are passed over."""
    for key, value in trailing_metadata or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        info = _error_info(value)
        if info is not None and _REASON.fullmatch(info.reason):
            return _rebuild(code, info.reason, message, dict(info.metadata))
    oversize = _OVERSIZE.search(message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and oversize:
        size, limit = oversize.groups()
        return ResourceExhausted(
            MESSAGE_TOO_LARGE,
            f"a message of {size} bytes is over max_message_bytes = {limit} of its receiver",
            size=size,
            limit=limit,
            option="max_message_bytes",
        )
    return _rebuild(code, UNSPECIFIED, message, {})


def _error_info(serialized: bytes) -> error_details_pb2.ErrorInfo | None:
    try:
        status = status_pb2.Status.FromString(serialized)
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info):
                return info
    except DecodeError:  # a peer may send anything
        return None
    return None


def _rebuild(
    code: grpc.StatusCode, reason: str, message: str, metadata: Mapping[str, str]
) -> DraftwireError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        known = {"field", "value", "limit"}
        error: DraftwireError = InvalidArgument(
            metadata.get("field", ""),
            metadata.get("value", ""),
            metadata.get("limit", ""),
            message or code.name,
            reason,
        )
        extra = {key: value for key, value in metadata.items() if key not in known}
        error.metadata.update(DraftwireError(reason, "", **extra).metadata)
        return error
    error = _BY_CODE.get(code, DraftwireError)(reason, message or code.name, **metadata)
    error.code = code
    return error
