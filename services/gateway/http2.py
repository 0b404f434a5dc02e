"""gRPC streams over HTTP/2, read on the event loop itself.

gRPC's own client for asyncio polls its connection in a thread of its own and wakes the loop through a socket for every message: more than
half of what a streamed token costs a processor. Here a message is read where it arrives. It is for calls with one request and a stream of
answers, without TLS; everything else, and addresses that gRPC alone can resolve, stays gRPC's.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import urllib.parse
from collections import deque
from collections.abc import Sequence
from typing import cast

import hpack
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata

from services.gateway import http2_frames as h2
from services.gateway.http2_frames import Broken, rpc_error

# What every peer begins with. Of a stream as much may be on its way or wait for its reader; of all together there is no bound but theirs.
_WINDOW = 65_535
_FRAME_BYTES = 16_384
_CONNECTION_WINDOW = 1 << 24
_MAX_HEADER_BYTES = 256 * 1024
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_LAST_STREAM = 1 << 30


class Call:
    """One call's answers. Made by `Connection.call`; read by one task.

    Args:
        connection: what it goes over.
        number: of its HTTP/2 stream.
        window: bytes of the request that the peer takes at first.
    """

    def __init__(self, connection: Connection, number: int, window: int) -> None:
        self.number = number
        self.window = window
        self.outbox = b""
        self._connection = connection
        self._messages: deque[bytes] = deque()
        self._partial = bytearray()
        self._taken = self._granted = 0  # bytes that no longer wait, and those that the peer was told of
        self._http_status = ""
        self._waiter: asyncio.Future[None] | None = None
        self._failure: AioRpcError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.over = False

    async def read(self) -> bytes | None:
        """The next message; None after the last one.

        Raises:
            AioRpcError: how the call ended, if not well.
        """
        while not self._messages:
            if self.over:
                if self._failure is not None:
                    raise self._failure
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._messages.popleft()
        self._taken += len(message) + 5
        self._grant()
        return message

    def cancel(self) -> None:
        """Lets the peer stop. Safe to call at any time."""
        if not self.over:
            self._connection.reset(self)
            self.end(StatusCode.CANCELLED, "cancelled by the reader")

    def expire_in(self, timeout_s: float) -> None:
        """Ends the call after so many seconds."""
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def _expire(self) -> None:
        if not self.over:
            self._connection.reset(self)
            self.end(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def end(self, code: StatusCode, details: str = "", metadata: Metadata | None = None) -> None:
        """The call is over; what has come can still be read."""
        if self.over:
            return
        self.over = True
        self.outbox = b""
        if self._timer is not None:
            self._timer.cancel()
        if code is not StatusCode.OK:
            self._failure = rpc_error(code, details, metadata)
        self._connection.forget(self)
        self._wake()

    def data(self, payload: bytes, padding: int) -> None:
        """Bytes of messages have come."""
        self._taken += padding
        data = payload
        if self._partial:
            self._partial += payload
            if len(self._partial) >= 5 and len(self._partial) - 5 < int.from_bytes(self._partial[1:5], "big") <= _MAX_MESSAGE_BYTES:
                self._grant()
                return
            data = bytes(self._partial)
        start = 0
        while len(data) - start >= 5:
            size = int.from_bytes(data[start + 1 : start + 5], "big")
            if data[start] or size > _MAX_MESSAGE_BYTES:
                raise Broken(f"a message is compressed or too long ({size} bytes)")
            if len(data) - start - 5 < size:
                break
            self._messages.append(data[start + 5 : start + 5 + size])
            start += 5 + size
        self._partial = bytearray(data[start:])
        if self._messages:
            self._wake()
        self._grant()

    def headers(self, headers: Sequence[tuple[str, str]], *, last: bool) -> None:
        """Headers of the answer, or what follows it."""
        found = dict(headers)
        self._http_status = found.get(":status", self._http_status)
        if not last:
            return
        code = h2.STATUS_BY_NUMBER.get(found.get("grpc-status", ""))
        if code is None:
            code = h2.BY_HTTP_STATUS.get(self._http_status, StatusCode.UNKNOWN)
            self.end(code, f"the worker answered with HTTP {self._http_status} and no status of gRPC")
        elif code is StatusCode.OK and self._partial:
            self.end(StatusCode.INTERNAL, "the answer ends inside a message")
        else:
            pairs = [(name, h2.header_value(name, value)) for name, value in headers if not name.startswith((":", "grpc-", "content-type"))]
            self.end(code, urllib.parse.unquote(found.get("grpc-message", "")), Metadata(*pairs))

    def _grant(self) -> None:
        """Lets the peer send as much again as has been taken. Half of a message is taken too: it could not be completed otherwise."""
        due = self._taken + len(self._partial) - self._granted
        if due >= _WINDOW // 4 and not self.over:
            self._granted += due
            self._connection.write(h2.frame(h2.WINDOW_UPDATE, 0, self.number, struct.pack(">I", due)))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """One connection to a worker.

    Args:
        authority: whom it is to.
    """

    def __init__(self, authority: str) -> None:
        self._authority = authority.encode()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, Call] = {}
        self._buffer = b""
        self._next = 1
        self._decoder = hpack.Decoder(_MAX_HEADER_BYTES)
        self._header_block: tuple[int, int, bytearray] | None = None  # stream, flags, what has come of it
        self._received = 0
        self._window = self._peer_window = _WINDOW
        self._most = 1 << 31
        self._greeted = asyncio.Event()
        self.closing = False

    @property
    def has_room(self) -> bool:
        """True while another call may begin."""
        return not self.closing and len(self._calls) < self._most and self._next < _LAST_STREAM

    async def greeted(self) -> bool:
        """Waits until the peer has said what it takes; False when it went away instead."""
        await self._greeted.wait()
        return not self.closing

    def call(self, path: str, request: bytes, timeout_s: float, metadata: Sequence[tuple[str, str]] = ()) -> Call:
        """Begins a call."""
        number, self._next = self._next, self._next + 2
        call = self._calls[number] = Call(self, number, self._peer_window)
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", self._authority),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"glm53-gateway"),
            (b"grpc-timeout", h2.timeout(timeout_s)),
            *((name.encode(), value.encode()) for name, value in metadata),
        ]
        self.write(h2.frame(h2.HEADERS, h2.END_HEADERS, number, b"".join(h2.literal(name, value) for name, value in headers)))
        call.outbox = struct.pack(">BI", 0, len(request)) + request
        self._flush(call)
        call.expire_in(timeout_s)
        return call

    def reset(self, call: Call) -> None:
        """Tells the peer that nobody reads a call any more."""
        self.write(h2.frame(h2.RST_STREAM, 0, call.number, struct.pack(">I", h2.CANCEL)))

    def forget(self, call: Call) -> None:
        """A call is over."""
        self._calls.pop(call.number, None)
        if self.closing and not self._calls:
            self.close()

    def write(self, data: bytes) -> None:
        """Sends bytes; nowhere when the connection is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Ends the connection, and all calls with it."""
        self.closing = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greets the peer."""
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # A machine that vanished is noticed.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
        settings = struct.pack(">HI", h2.ENABLE_PUSH, 0)
        window = struct.pack(">I", _CONNECTION_WINDOW - _WINDOW)
        self.write(h2.PREFACE + h2.frame(h2.SETTINGS, 0, 0, settings) + h2.frame(h2.WINDOW_UPDATE, 0, 0, window))

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone: so is every call."""
        self.closing = True
        self._transport = None
        self._greeted.set()
        for call in list(self._calls.values()):
            call.end(StatusCode.UNAVAILABLE, f"the connection to the worker broke{f': {exc}' if exc else ''}")

    def data_received(self, data: bytes) -> None:
        """Reads what frames are whole."""
        data = self._buffer + data if self._buffer else data
        start, end = 0, len(data)
        try:
            while end - start >= 9:
                size = int.from_bytes(data[start : start + 3], "big")
                if size > _FRAME_BYTES:
                    raise Broken(f"a frame has {size} bytes")
                if end - start - 9 < size:
                    break
                stream = int.from_bytes(data[start + 5 : start + 9], "big") & 0x7FFF_FFFF
                self._take(data[start + 3], data[start + 4], stream, data[start + 9 : start + 9 + size])
                start += 9 + size
        except (Broken, hpack.HPACKError, struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
            for call in list(self._calls.values()):
                call.end(StatusCode.INTERNAL, f"the worker's answer cannot be read: {error}")
            self.close()
            start = end
        self._buffer = data[start:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._header_block is not None and (kind != h2.CONTINUATION or stream != self._header_block[0]):
            raise Broken("headers that do not go on")
        if kind == h2.DATA:
            self._take_data(flags, stream, payload)
        elif kind == h2.HEADERS:
            body = h2.unpadded(payload, flags)
            self._header_block = stream, flags, bytearray(body[5:] if flags & h2.PRIORITY else body)
            self._take_headers(flags)
        elif kind == h2.CONTINUATION:
            if self._header_block is None:
                raise Broken("headers that never began")
            self._header_block[2].extend(payload)
            self._take_headers(flags)
        elif kind == h2.RST_STREAM:
            if call := self._calls.get(stream):
                (reason,) = struct.unpack(">I", payload)
                call.end(h2.BY_RESET.get(reason, StatusCode.INTERNAL), f"the worker reset the call ({reason})")
        elif kind == h2.SETTINGS and not flags & h2.ACK:
            self._take_settings(payload)
        elif kind == h2.PING and not flags & h2.ACK:
            self.write(h2.frame(h2.PING, h2.ACK, 0, payload))
        elif kind == h2.GOAWAY:
            self._take_goaway(payload)
        elif kind == h2.WINDOW_UPDATE:
            self._take_window(stream, payload)
        elif kind == h2.PUSH_PROMISE:
            raise Broken("a push that was not allowed")

    def _take_data(self, flags: int, stream: int, payload: bytes) -> None:
        # The connection itself never holds anybody up: what waits is bounded by each call's window.
        self._received += len(payload)
        if self._received >= _CONNECTION_WINDOW // 4:
            self.write(h2.frame(h2.WINDOW_UPDATE, 0, 0, struct.pack(">I", self._received)))
            self._received = 0
        call = self._calls.get(stream)
        if call is None:
            return
        body = h2.unpadded(payload, flags) if flags & h2.PADDED else payload
        call.data(body, len(payload) - len(body))
        if flags & h2.END_STREAM:
            call.end(StatusCode.INTERNAL, "the answer ends without a status")

    def _take_headers(self, flags: int) -> None:
        assert self._header_block is not None
        stream, first, block = self._header_block
        if len(block) > _MAX_HEADER_BYTES:
            raise Broken("headers without end")
        if not flags & h2.END_HEADERS:
            return
        self._header_block = None
        # Read for unknown calls too: the table of names is one for all.
        headers = [(str(name), str(value)) for name, value in self._decoder.decode(bytes(block))]
        if call := self._calls.get(stream):
            call.headers(headers, last=bool(first & h2.END_STREAM))

    def _take_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == h2.INITIAL_WINDOW:
                for call in self._calls.values():
                    call.window += value - self._peer_window
                self._peer_window = value
            elif name == h2.MAX_CONCURRENT:
                self._most = value
        self.write(h2.frame(h2.SETTINGS, h2.ACK, 0))
        self._greeted.set()
        self._flush_all()

    def _take_goaway(self, payload: bytes) -> None:
        self.closing = True
        last = int.from_bytes(payload[:4], "big") & 0x7FFF_FFFF
        for number, call in list(self._calls.items()):
            if number > last:
                call.end(StatusCode.UNAVAILABLE, "the worker goes away")
        if not self._calls:
            self.close()

    def _take_window(self, stream: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & 0x7FFF_FFFF
        if not stream:
            self._window += more
            self._flush_all()
        elif call := self._calls.get(stream):
            call.window += more
            self._flush(call)

    def _flush_all(self) -> None:
        for call in list(self._calls.values()):
            self._flush(call)

    def _flush(self, call: Call) -> None:
        """Sends as much of a request as the peer takes now."""
        view, start = call.outbox, 0
        while start < len(view):
            size = min(len(view) - start, _FRAME_BYTES, self._window, call.window)
            if size <= 0:
                break
            last = start + size == len(view)
            self.write(h2.frame(h2.DATA, h2.END_STREAM if last else 0, call.number, view[start : start + size]))
            self._window -= size
            call.window -= size
            start += size
        if start:
            call.outbox = view[start:]
