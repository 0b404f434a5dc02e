"""A small HTTP endpoint for probes and scrapers, for services whose own protocol is not HTTP.

    GET /metrics        Prometheus text
    GET /health/live    200 while the process should be left running, 503 when it should be replaced
    GET /health/ready   200 when it can do its work; /health is the same

It has its own threads, so it answers while the service works, and never more than a few, so that nobody can use them up.
"""

from __future__ import annotations

import http.server
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator

from services.common.errors import ConfigError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
# A probe that sends or reads nothing for so long is cut off.
IDLE_S = 5.0
TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Verdict:
    """An answer to a probe.

    Attributes:
        ok: 200 or 503.
        facts: the JSON body; says why when not ok.
    """

    ok: bool
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class OpsAnswers:
    """What the endpoint tells; each is called in a thread of the endpoint.

    Attributes:
        live: should the process be left running?
        ready: can it do its work?
        metrics: Prometheus text.
    """

    live: Callable[[], Verdict]
    ready: Callable[[], Verdict]
    metrics: Callable[[], bytes]


class OpsServer:
    """Listens from construction on, until `close`.

    Args:
        address: host:port; port 0 takes a free one.
        answers: what is told.
        setting: the setting that gave the address, named in errors.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, address: str, answers: OpsAnswers, setting: str) -> None:
        host, port = split_address(address)
        try:
            self._server = _Server(host, port, answers)
        except OSError as error:
            raise ConfigError(f"{setting}={address} cannot be listened on: {error.strerror or error}", param=setting) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="ops-http", daemon=True)
        self._thread.start()
        log.info("metrics and health on http://%s:%d", host, self.port)

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(IDLE_S)


def split_address(address: str) -> tuple[str, int]:
    """("0.0.0.0", 9401) of "0.0.0.0:9401"; the host may be an IPv6 address in brackets. Raises ValueError that says what is needed."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("need host:port, e.g. 0.0.0.0:9401")
    return host.strip("[]"), int(port)


def _checked(address: str) -> str:
    if address:
        split_address(address)
    return address


OptionalAddress = Annotated[str, AfterValidator(_checked)]
"""A setting that is a host:port, or empty for nowhere."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # an idle probe must not hold the end of the service
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, answers: OpsAnswers) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answers = answers
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread a connection, as long as there are places; then connections are closed at once."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Gives the place back, however the connection ended."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        """A client that went away is nobody's error; anything else is logged."""
        level = logging.DEBUG if isinstance(sys.exception(), OSError) else logging.ERROR
        log.log(level, "a probe got no answer", exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = IDLE_S
    server_version = "glm53"
    sys_version = ""
    server: _Server

    def do_HEAD(self) -> None:
        """Answers as GET does, without the body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answers a probe or a scrape."""
        answers = self.server.answers
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(200, TEXT, answers.metrics())
        elif path == "/health/live":
            self._verdict(answers.live())
        elif path in ("/health", "/health/ready"):
            self._verdict(answers.ready())
        else:
            self._send(404, "application/json", b'{"error": "known are /metrics, /health, /health/live and /health/ready"}\n')

    def _verdict(self, verdict: Verdict) -> None:
        body = json.dumps(dict(verdict.facts)).encode() + b"\n"
        self._send(200 if verdict.ok else 503, "application/json", body)

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Probes come every few seconds: debug only."""
        log.debug(format, *args)
