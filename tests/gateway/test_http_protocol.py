"""What stands before the app: bytes that never become a request are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from services.gateway.http_transport import ResponseTransport
from tests.gateway.stack import Stack

LIMIT = 64 * 1024 + 4096  # the app's own limit comes first, in words


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack(max_header_bytes=4096)
    yield stack
    stack.close()


def _send_forever(stack: Stack, head: bytes, piece: bytes, limit: int) -> tuple[int, bytes]:
    """Sends `head`, then `piece` again and again until the server closes; returns the bytes that it took and its answer."""
    sent, answer = 0, b""
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(head)
        while sent < limit:
            connection.sendall(piece)
            sent += len(piece)
            connection.settimeout(0.001)
            with contextlib.suppress(TimeoutError):
                answer += connection.recv(65536)
                break
            connection.settimeout(10)
        connection.settimeout(10)
        while data := connection.recv(65536):
            answer += data
    return sent, answer


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"GET /health HTTP/1.1\r\nHost: a\r\nx-long: ", b"a" * 4096),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n", b"x-many: " + b"b" * 1000 + b"\r\n"),
        (b"GET /", b"c" * 4096),
    ],
    ids=["one header", "many headers", "url"],
)
def test_a_head_that_never_ends_closes_the_connection(stack: Stack, head: bytes, piece: bytes) -> None:
    """The server keeps a bounded part of it and says why it takes no more; others are served."""
    sent, answer = _send_forever(stack, head, piece, 64 << 20)
    assert sent < 4 << 20
    assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 414 "))
    assert stack.post().status_code == 200


def test_trailers_that_never_end_close_the_connection(stack: Stack) -> None:
    """They stand behind the body, where nobody reads them; the request itself was whole only after them."""
    body = b'{"model":"tiny"}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent, _ = _send_forever(stack, head + b"%x\r\n%s\r\n0\r\n" % (len(body), body) + b"x-t: ", b"a" * 4096, 64 << 20)
    assert sent < 4 << 20
    assert stack.post().status_code == 200


def test_a_request_in_small_pieces_is_one_request(stack: Stack) -> None:
    """Bytes count only as long as they are held."""
    request = b"GET /health/live HTTP/1.1\r\nHost: a\r\nx-a: " + b"b" * 3000 + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as connection:
        for _ in range(3):
            for i in range(0, len(request), 500):
                connection.sendall(request[i : i + 500])
            assert b"200 OK" in connection.recv(65536)


class _Transport:
    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed_after = -1

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.closed_after = len(self.writes)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


async def test_a_head_goes_out_with_its_body() -> None:
    """One write for a whole response; the next body goes out alone."""
    under = _Transport()
    transport = ResponseTransport(under)
    transport.write(HEAD)
    assert not under.writes
    transport.write(b"ok")
    transport.write(b"more")
    assert under.writes == [HEAD + b"ok", b"more"]


async def test_a_head_without_a_body_waits_for_nobody() -> None:
    """It is sent in the same round of the loop, and before the connection is closed."""
    under = _Transport()
    ResponseTransport(under).write(HEAD)
    await asyncio.sleep(0)
    assert under.writes == [HEAD]
    transport = ResponseTransport(under)
    transport.write(HEAD)
    transport.close()
    assert under.writes == [HEAD, HEAD]
    assert under.closed_after == 2
