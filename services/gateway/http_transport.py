"""What a response passes on its way to the socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_CHUNKED = b"transfer-encoding: chunked\r\n"


class ResponseTransport:
    """A transport that keeps a response's head back until the next write, which follows at once: one packet instead of two.

    Args:
        transport: writes.
        closing: called once before it is closed; True when it will be closed later, by somebody else.
    """

    def __init__(self, transport: asyncio.Transport, closing: Callable[[], bool] = lambda: False) -> None:
        self._transport = transport
        self._closing = closing
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends `data`, after what was kept back."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            # No later than this round of the loop, whatever comes after it.
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def is_closing(self) -> bool:
        """True when nothing more can be sent."""
        return self._closed or self._transport.is_closing()

    def close(self) -> None:
        """Closes when everything is sent."""
        self._flush()
        if not self._closed:
            self._closed = True
            if not self._closing():
                self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")


class Unchunked:
    """A transport for a client of HTTP/1.0, which knows no chunks: its body ends with the connection.

    Args:
        transport: gets what uvicorn writes for HTTP/1.1, less the chunks' frames.
    """

    def __init__(self, transport: ResponseTransport) -> None:
        self._transport = transport
        self._in_chunks = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends a head, or the body of whole chunks."""
        if data.startswith(b"HTTP/1.1 ") and _CHUNKED in data:
            self._in_chunks = True
            data = data.replace(_CHUNKED, b"")
        elif self._in_chunks:
            data = _unframed(data)
        self._transport.write(data)


def _unframed(data: bytes) -> bytes:
    """The bodies of whole chunks."""
    parts, position = [], 0
    while position < len(data):
        line_end = data.index(b"\r\n", position)
        size = int(data[position:line_end], 16)
        parts.append(data[line_end + 2 : line_end + 2 + size])
        position = line_end + 2 + size + 2
    return b"".join(parts)
