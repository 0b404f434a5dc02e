"""Addresses: can they be listened on, can others be reached."""

from __future__ import annotations

import errno
import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping

from cli.doctor.findings import Finding, fail, ok
from cli.probe import SILENT, worker_question
from services.common.errors import ConfigError

CONNECT_S = 2.0
_MOST_BYTES = 65_536
Question = Callable[[str, int], str | None]


def listen(setting: str, host: str, port: int, who: Question) -> Iterator[Finding]:
    """An address that a service is about to listen on.

    Args:
        who: says what of ours answers there, None when nothing does.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        own = who(_here(host), port) if error.errno == errno.EADDRINUSE else None
        if own is not None:
            yield ok("address", f"{setting}: {host}:{port} is this server's own: {own}. Stop it before another one starts there")
            return
        yield fail(
            "address", f"{setting}: cannot listen on {host}:{port}: {error.strerror}", f"Stop what listens there, or change {setting}."
        )
        return
    yield ok("address", f"{setting}: {host}:{port} is free")


def gateway(host: str, port: int) -> str | None:
    """What a running gateway says of itself."""
    answer = _get(host, port, "/health")
    try:
        health = json.loads(answer[1]) if answer is not None else None
    except ValueError:
        return None
    if not isinstance(health, dict) or not {"status", "worker"} <= health.keys():
        return None
    model = f", model {health['model']}" if health.get("model") else ""
    return f"a gateway answers, status {health['status']}{model}"


def probe_endpoint(host: str, port: int) -> str | None:
    """What the endpoint for probes of a running gpu_worker or cpu_expert says."""
    answer = _get(host, port, "/health/live")
    return "a service of ours answers probes" if answer is not None and answer[0] == "glm53" else None


def worker(host: str, port: int) -> str | None:
    """Whether a running gpu_worker answers."""
    shown = f"[{host}]" if ":" in host else host
    return None if worker_question(f"{shown}:{port}")(CONNECT_S) == SILENT else "a gpu_worker answers"


def running(env: Mapping[str, str]) -> str | None:
    """What the server says that these settings name, None when none runs."""
    try:
        # Late: the images of the other services have no gateway.
        from services.gateway.settings import GatewaySettings

        settings = GatewaySettings.load(env)
    except (ImportError, ConfigError):
        return None
    return gateway(_here(settings.host), settings.port)


def _here(host: str) -> str:
    """Where this machine reaches what listens on `host`."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _get(host: str, port: int, path: str) -> tuple[str, bytes] | None:
    """(Server header, body) of whatever answers; None when nothing does, or it speaks no HTTP."""
    connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.headers.get("Server", "").strip(), answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
