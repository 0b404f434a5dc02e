"""What stands before the app: bytes that never become a request are bounded."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

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
    """The server keeps a bounded part of it and answers 400; others are served."""
    sent, answer = _send_forever(stack, head, piece, 64 << 20)
    assert sent < 4 << 20
    assert answer.startswith(b"HTTP/1.1 400 ")
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
