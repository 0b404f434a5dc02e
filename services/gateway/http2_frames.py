"""The words of HTTP/2 and of gRPC over it: frames, headers, statuses."""

from __future__ import annotations

import base64
import struct
from typing import Any

from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
ENABLE_PUSH, MAX_CONCURRENT, INITIAL_WINDOW = 2, 3, 4
CANCEL = 8

BY_RESET = {
    7: StatusCode.UNAVAILABLE,  # REFUSED_STREAM
    CANCEL: StatusCode.CANCELLED,
    11: StatusCode.RESOURCE_EXHAUSTED,  # ENHANCE_YOUR_CALM
    12: StatusCode.PERMISSION_DENIED,  # INADEQUATE_SECURITY
}
BY_HTTP_STATUS = {
    "400": StatusCode.INTERNAL,
    "401": StatusCode.UNAUTHENTICATED,
    "403": StatusCode.PERMISSION_DENIED,
    "404": StatusCode.UNIMPLEMENTED,
    "429": StatusCode.UNAVAILABLE,
    "502": StatusCode.UNAVAILABLE,
    "503": StatusCode.UNAVAILABLE,
    "504": StatusCode.UNAVAILABLE,
}
STATUS_BY_NUMBER: dict[str, StatusCode] = {str(code.value[0]): code for code in StatusCode}


def rpc_error(code: StatusCode, details: str, metadata: Metadata | None = None) -> AioRpcError:
    """How a call ended, as gRPC says it."""
    return AioRpcError(code, Metadata(), metadata or Metadata(), details, None)


class Broken(Exception):
    """The peer does not keep to HTTP/2 or to gRPC."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header that no table keeps."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(number: int) -> bytes:
    """HPACK's integer of seven bits and more."""
    if number < 127:
        return bytes([number])
    found, number = bytearray([127]), number - 127
    while number >= 128:
        found.append(number % 128 + 128)
        number //= 128
    return bytes(found) + bytes([number])


def unpadded(payload: bytes, flags: int) -> bytes:
    """What stands in a frame that may be padded."""
    if not flags & PADDED:
        return payload
    if payload[0] >= len(payload):
        raise Broken("more padding than there is")
    return payload[1 : len(payload) - payload[0]]


def timeout(seconds: float) -> bytes:
    """`grpc-timeout`: at most eight digits and a unit."""
    milliseconds = max(1, int(seconds * 1000))
    return b"%dm" % milliseconds if milliseconds < 10**8 else b"%dS" % min(10**8 - 1, int(seconds))


def header_value(name: str, value: str) -> Any:
    """A header's value; that of a name in ``-bin`` is bytes."""
    return base64.b64decode(value + "=" * (-len(value) % 4)) if name.endswith("-bin") else value
