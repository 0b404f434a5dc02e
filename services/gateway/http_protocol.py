"""HTTP/1.1 by httptools, with a bound on what a client may send before any of it can be used, and a response's head sent with its body.

httptools itself keeps a header that never ends, and a body's trailers, for as long as the client sends.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)


class HeadWithBody:
    """A transport that keeps a response's head back until the next write, which follows at once: one packet instead of two.

    Args:
        transport: writes.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""

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

    def close(self) -> None:
        """Closes when everything is sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")


def protocol_with(max_head_bytes: int) -> type[HttpToolsProtocol]:
    """A protocol class for `uvicorn.Config(http=...)`.

    Args:
        max_head_bytes: most bytes of a request's line and headers; a connection that sends more gets 400 and is closed.
    """

    class BoundedHttpProtocol(HttpToolsProtocol):
        """Counts the bytes that are held and not yet handed on."""

        _held_bytes = 0
        _handed_on = False
        _in_head = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(cast("asyncio.Transport", HeadWithBody(transport)))

        def data_received(self, data: bytes) -> None:
            self._handed_on = False
            super().data_received(data)
            self._held_bytes = 0 if self._handed_on else self._held_bytes + len(data)
            if self._held_bytes > max_head_bytes and not self.transport.is_closing():
                log.warning("a connection is closed: its headers exceed %d bytes", max_head_bytes)
                self.send_400_response("The headers are too large.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head = True

        def on_header(self, name: bytes, value: bytes) -> None:
            # Trailers stand behind the body; nobody reads them.
            if self._in_head:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._handed_on = True
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._handed_on = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._handed_on = True
            super().on_message_complete()

    return BoundedHttpProtocol
