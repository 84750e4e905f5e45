"""Request bytes to messages, so that bytes that are none become a typed error and not an INTERNAL
of the gRPC library.

Knows: protobuf's wire format, as far as needed to name the field that is wrong. Does not know: what
fields mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from draftwire.errors import InvalidArgument

M = TypeVar("M", bound=Message)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def deserializer(message_type: type[M]) -> Callable[[bytes], M | InvalidArgument]:
    """A gRPC request deserializer that returns the error instead of raising it; the handler raises
    it where it is mapped."""

    def parse(data: bytes) -> M | InvalidArgument:
        try:
            return message_type.FromString(data)
        except DecodeError:
            name = message_type.DESCRIPTOR.name
            field = _field_that_is_no_text(data, message_type.DESCRIPTOR)
            if field is None:
                return InvalidArgument(
                    "request", f"{len(data)} bytes", f"a {name} message", reason="MALFORMED_MESSAGE"
                )
            return InvalidArgument(
                field, "bytes that are not UTF-8", "UTF-8 text", reason="INVALID_UTF8"
            )

    return parse


def _field_that_is_no_text(data: bytes, descriptor: Any, depth: int = 16) -> str | None:
    """Path of the first string field whose bytes are not UTF-8; None if the bytes are wrong in
    another way."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind == _BYTES:
            size, at = _varint(data, at)
            found = _wrong_text(
                data[at : at + size], descriptor.fields_by_number.get(tag >> 3), depth
            )
            if found is not None:
                return found
            at += size
        else:
            return None
    return None


def _wrong_text(value: bytes, field: Any, depth: int) -> str | None:
    if field is None:
        return None
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            value.decode()
        except UnicodeDecodeError:
            return str(field.name)
    elif field.type == FieldDescriptor.TYPE_MESSAGE and depth > 0:
        inner = _field_that_is_no_text(value, field.message_type, depth - 1)
        return None if inner is None else f"{field.name}.{inner}"
    return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
    return 0, len(data)
