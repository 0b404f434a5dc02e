"""Addresses: can they be listened on, can others be reached."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from cli.doctor.findings import Finding, fail, ok, warn

CONNECT_S = 2.0


def listen(setting: str, host: str, port: int) -> Iterator[Finding]:
    """An address that a service is about to listen on."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        yield fail(
            "address", f"{setting}: cannot listen on {host}:{port}: {error.strerror}", f"Stop what listens there, or change {setting}."
        )
        return
    yield ok("address", f"{setting}: {host}:{port} is free")


def reach(what: str, host: str, port: int, fix: str) -> Iterator[Finding]:
    """An address that may be unreachable for a while without harm."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            yield ok(what, f"{host}:{port} answers")
    except OSError as error:
        yield warn(what, f"{host}:{port} does not answer: {error.strerror or error}", fix)
