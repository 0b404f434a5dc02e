"""HTTP/1.1 by httptools and uvicorn, with bounds on what a client may send, keep back, or leave unread.

uvicorn and httptools trust their clients: a header or a connection may last for ever, a refusal is lost when the client still sends, what a
pipelining or an HTTP/1.0 client sent is answered out of turn or in chunks it cannot read, and output that nobody takes stays for ever.
Everything here happens once for a connection or a request, nothing for a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.common.errors import Glm53Error
from services.gateway.error_shapes import response_for
from services.gateway.errors import HeadersTooLarge, InvalidHttp, RequestTimeout, TooManyConnections, UrlTooLong
from services.gateway.http_head import HeadRules, check_head, origin_form
from services.gateway.http_transport import ResponseTransport, Unchunked

log = logging.getLogger(__name__)

# A client that is refused while it sends gets so much more taken from it, so that it comes to reading the answer.
_LINGER_BYTES = 64 * 1024 * 1024
_LINGER_S = 10.0
# Requests that a connection may send ahead of their answers.
_MAX_PIPELINED = 16
# Each piece of a body costs what a token of a stream does: nobody sends a request in so many chunks of so few bytes.
_MOST_SMALL_PIECES = 10_000
_SMALL_PIECE_BYTES = 32
# What a reader must take in HttpLimits.stall_s, or it counts as stopped.
_LEAST_READ_BYTES = 4096
# Unsent bytes that the kernel keeps for one connection; without it, megabytes.
_KERNEL_UNSENT_BYTES = 64 * 1024
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of one connection.

    Attributes:
        rules: of a request's head.
        head_timeout_s: from the first wait for a request, or its first byte, to the end of its head.
        stall_s: a client that takes nothing for so long is cut off.
        max_connections: of all clients together.
    """

    rules: HeadRules
    head_timeout_s: float
    stall_s: float
    max_connections: int


class Observer(Protocol):
    """Hears what the app never sees."""

    def refused(self, error: Glm53Error, status: int) -> None:
        """Something that is no request of ours was answered."""

    def reader_stopped(self) -> None:
        """A client took nothing any more, and was cut off."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Made by `protocol_with`."""

    limits: ClassVar[HttpLimits]
    observer: ClassVar[Observer]

    _held_bytes = 0  # that httptools keeps and has not handed on
    _handed_on = False
    _in_head = False
    _replaying = False
    _muted = False  # whatever else the client sends is thrown away
    _lingering = False
    _ended_sending = False
    _thrown_away = 0
    _fault: Glm53Error | None = None
    _running: RequestResponseCycle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _flush_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    idle_since = 0.0

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        self._socket = transport
        super().connection_made(cast("asyncio.Transport", ResponseTransport(transport, self._closing)))
        self._prepare_socket(transport.get_extra_info("socket"))
        self.idle_since = time.monotonic()
        self._watch_head()
        if len(self.connections) > self.limits.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: so is everything that ran for it."""
        for timer in (self._head_timer, self._flush_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        if isinstance(exc, TimeoutError):
            self._tell_stopped("acknowledged nothing")
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that ends its side has left, as when its program was killed. One that has only looked something up may still read."""
        waiting = self._unanswered()
        if self._muted or not waiting or any(cycle.more_body or cycle.scope["method"] not in _HARMLESS for cycle in waiting):
            return False
        self._muted = self._ended_sending = True
        waiting[-1].keep_alive = False
        return True

    def _prepare_socket(self, sock: socket.socket) -> None:
        """Peers that vanished are noticed, and the kernel keeps little for those that do not read."""
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int((self.limits.stall_s + 5) * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _KERNEL_UNSENT_BYTES)

    def _make_room(self) -> None:
        """Ends the connection that has been idle for longest; where all are busy, this one."""
        mine = (peer for peer in self.connections if isinstance(peer, BoundedHttpProtocol))
        idle = [peer for peer in mine if peer is not self and not peer._unanswered() and not peer.transport.is_closing()]
        if idle:
            min(idle, key=lambda peer: peer.idle_since).transport.close()
        elif len(self.connections) > 2 * self.limits.max_connections:
            # So many that even those that are being refused are too many.
            self._socket.abort()
        else:
            self._refuse(TooManyConnections(f"This server has {self.limits.max_connections} connections open; try again.", retry_after_s=1))

    # ---- what comes in ----

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        if self._muted:
            self._throw_away(len(data))
            return
        self._unset_keepalive_if_required()
        self._handed_on = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(self._fault or InvalidHttp(f"This is no HTTP request that this server understands: {error}"))
            return
        self._held_bytes = 0 if self._handed_on else self._held_bytes + len(data)
        if self._held_bytes > self.limits.rules.max_bytes + HIGH_WATER_LIMIT:
            self._refuse(self._too_large() if self._in_head else InvalidHttp("What stands around the body's chunks is too long."))
        else:
            self._watch_head()

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offered:
                data = data[offered.args[0] :]
                self._decline_upgrade()

    def _decline_upgrade(self) -> None:
        """Goes on with HTTP/1.1, body included: Java's clients offer HTTP/2 with every first request.

        httptools ends with the head of such a request, so its body is read by a new parser.
        """
        framing = [name + b": " + value + b"\r\n" for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._replaying = True
        self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"]))
        self._replaying = False

    def on_message_begin(self) -> None:
        """The parser has found the beginning of a request."""
        if not self._replaying:
            super().on_message_begin()
            self._in_head = True
            self._head_bytes = self._num_pieces = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        if not self._replaying:
            super().on_url(url)
            if len(self.url) > self.limits.rules.max_url_bytes:
                self._reject(UrlTooLong(f"The URL is longer than {self.limits.rules.max_url_bytes} bytes."))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        # Trailers stand behind the body; nobody reads them.
        if self._in_head and not self._replaying:
            super().on_header(name, value)
            self._head_bytes += len(name) + len(value)
            if self._head_bytes > self.limits.rules.max_bytes or len(self.headers) > self.limits.rules.max_headers:
                self._reject(self._too_large())

    def on_headers_complete(self) -> None:
        """The head is complete: the app begins, or waits for its turn."""
        if self._replaying:
            return
        self._in_head = False
        self._handed_on = True
        version = self.parser.get_http_version()
        try:
            check_head(self.parser.get_method(), version, self.headers)
            self.url = origin_form(self.url)
        except Glm53Error as error:
            self._reject(error)
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._reject(InvalidHttp(f"More than {_MAX_PIPELINED} requests wait on this connection."))
        super().on_headers_complete()
        cycle = self.cycle
        self.scope["state"] |= {"body_is_pending": lambda: cycle.more_body, "write_chunk": functools.partial(_write_chunk, cycle)}
        if version == "1.0":
            cycle.transport = cast("asyncio.Transport", Unchunked(cast("ResponseTransport", self.transport)))
            cycle.waiting_for_100_continue = False
        # uvicorn stops reading while a request waits for its turn, and would not notice that the client leaves.
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._handed_on = True
        self._num_pieces += 1
        self._body_bytes += len(body)
        if self._num_pieces > _MOST_SMALL_PIECES and self._body_bytes < _SMALL_PIECE_BYTES * self._num_pieces:
            self._reject(
                InvalidHttp(f"The body comes in more than {_MOST_SMALL_PIECES} pieces of less than {_SMALL_PIECE_BYTES} bytes each.")
            )
        if self.cycle is not self._running and len(self.cycle.body) + len(body) > HIGH_WATER_LIMIT:
            self._reject(InvalidHttp("A request with a large body was sent before its turn."))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._handed_on = True
        # Of a request that offers an upgrade this is the end of its head; its body follows.
        if self._replaying or not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """An answer is complete."""
        self.idle_since = time.monotonic()
        super().on_response_complete()

    # ---- refusing ----

    def _unanswered(self) -> list[RequestResponseCycle]:
        """Requests whose answers are not complete, oldest first."""
        running = [self._running] if self._running is not None and not self._running.response_complete else []
        return running + [cycle for cycle, _ in reversed(self.pipeline)]

    def _too_large(self) -> HeadersTooLarge:
        rules = self.limits.rules
        return HeadersTooLarge(
            f"The headers have more than {rules.max_bytes} bytes (GLM53_MAX_HEADER_BYTES), or are more than {rules.max_headers}."
        )

    def _reject(self, error: Glm53Error) -> None:
        """Stops the parser in the middle of a callback; `data_received` hears of it."""
        self._fault = error
        raise error

    def send_400_response(self, msg: str) -> None:
        """uvicorn's own way of refusing."""
        self._refuse(InvalidHttp(msg))

    def _refuse(self, error: Glm53Error) -> None:
        """Takes nothing more from this connection. Says why, unless an earlier request is still to be answered: then its answer is the
        connection's last word."""
        self._muted = True
        self._watch_head()
        waiting = self._unanswered()
        if waiting and not self._in_head and waiting[-1] is self.cycle and self.cycle.more_body:
            # The fault lies in its body.
            faulty = waiting.pop()
            if faulty is self._running and faulty.response_started:
                waiting.append(faulty)
            else:
                faulty.disconnected = True
                faulty.message_event.set()
                self.pipeline = type(self.pipeline)(entry for entry in self.pipeline if entry[0] is not faulty)
        if waiting:
            waiting[-1].keep_alive = False
            return
        path = self.url.partition(b"?")[0].decode("latin-1") if getattr(self, "url", None) else ""
        response = response_for(path, error)
        self.observer.refused(error, response.status_code)
        head = b"".join(name + b": " + value + b"\r\n" for name, value in [*response.raw_headers, (b"connection", b"close")])
        self.transport.write(b"".join([STATUS_LINE[response.status_code], head, b"\r\n", bytes(response.body)]))
        self.transport.close()

    # ---- deadlines ----

    def _watch_head(self) -> None:
        """Whoever is to send a request must do so in time."""
        wanted = not self._muted and (self._in_head or not self._unanswered())
        if wanted and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._head_is_late)
        elif not wanted and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._in_head or self._held_bytes:
            self._refuse(RequestTimeout(f"The request's head did not arrive within {self.limits.head_timeout_s:g} s."))
        else:
            self.transport.close()

    def _closing(self) -> bool:
        """The connection is about to be closed. Closing while the client still sends would reset it, and the answer with it: first our
        side alone is ended, and what comes is thrown away."""
        unread = self._muted or (self._running is not None and self._running.more_body)
        if not unread or self._ended_sending or self._socket.is_closing():
            # What was written is on its way for as long as the client takes it.
            self._watch_flush()
            return False
        self._muted = self._lingering = True
        with contextlib.suppress(OSError, RuntimeError):
            self._socket.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(_LINGER_S, self._socket.abort)
        return True

    def _throw_away(self, num_bytes: int) -> None:
        self._thrown_away += num_bytes
        if self._thrown_away > _LINGER_BYTES:
            self._socket.abort()

    # ---- readers that stop ----

    def pause_writing(self) -> None:
        """The socket takes nothing more for now."""
        super().pause_writing()
        self._watch_flush()

    def resume_writing(self) -> None:
        """The client has read what waited."""
        super().resume_writing()
        if self._flush_timer is not None and not self.transport.is_closing():
            self._flush_timer.cancel()
            self._flush_timer = None

    def _watch_flush(self) -> None:
        if self._flush_timer is None:
            self._flush_timer = self.loop.call_later(self.limits.stall_s, self._check_flush, self._socket.get_write_buffer_size())

    def _check_flush(self, before: int) -> None:
        self._flush_timer = None
        left = self._socket.get_write_buffer_size()
        # Before its first write uvloop says 0: then this look is the first one.
        if left and 0 < before < left + _LEAST_READ_BYTES:
            self._tell_stopped(f"left {left} bytes unread")
            self._socket.abort()
        elif left:
            self._watch_flush()

    def _tell_stopped(self, how: str) -> None:
        waiting = self._unanswered()
        extra = {"request_id": waiting[0].scope["state"].get("request_id", "")} if waiting else {}
        log.warning("a client %s for %g s: its connection is closed, and what runs for it ends", how, self.limits.stall_s, extra=extra)
        self.observer.reader_stopped()


def _write_chunk(cycle: RequestResponseCycle, data: bytes) -> bool:
    """Writes a part of a body that has begun and goes on, as `send` does it; False when that has to wait, or is none of ours."""
    if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or not data:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def protocol_with(limits: HttpLimits, observer: Observer) -> type[HttpToolsProtocol]:
    """A protocol class for `uvicorn.Config(http=...)`."""
    return type("GatewayHttpProtocol", (BoundedHttpProtocol,), {"limits": limits, "observer": observer})
