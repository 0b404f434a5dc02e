"""Clients that speak HTTP by hand."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.gateway.events import chat_body
from tests.gateway.stack import Stack

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Reply:
    """One response as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body's value."""
        return json.loads(self.body)


def post(body: dict[str, Any] | None = None, path: str = CHAT, headers: str = "", version: str = "1.1") -> bytes:
    """The bytes of a POST."""
    data = json.dumps(chat_body() if body is None else body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@contextlib.contextmanager
def connected(stack: Stack, receive_buffer: int = 0) -> Iterator[socket.socket]:
    """A socket to the gateway, which waits for 20 s at most."""
    with socket.socket() as connection:
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", stack.port))
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server ends its side."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


def talk(stack: Stack, *parts: bytes) -> list[Reply]:
    """Sends the parts and returns every response until the server ends the connection."""
    with connected(stack) as connection:
        for part in parts:
            connection.sendall(part)
        return replies(read_all(connection))


def replies(data: bytes) -> list[Reply]:
    """The responses in what a server sent."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        assert lines[0].startswith("HTTP/1.1 "), lines[0]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        status = int(lines[0].split(" ")[1])
        if status in (100, 204):
            body = b""
        elif "content-length" in headers:
            size = int(headers["content-length"])
            body, data = data[:size], data[size:]
        elif headers.get("transfer-encoding") == "chunked":
            body, data = _dechunked(data)
        else:
            body, data = data, b""
        found.append(Reply(status, headers, body))
    return found


def _dechunked(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        line, _, data = data.partition(b"\r\n")
        size = int(line, 16)
        body += data[:size]
        data = data[size + 2 :]
        if not size:
            return body, data
