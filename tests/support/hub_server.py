"""A model hub on a port of this machine: the three requests that a download makes, with faults to order."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
REPO = "people/model"


@dataclass
class Faults:
    """What goes wrong, by file name or for all.

    Attributes:
        status: every request is answered so, with `code` as the hub's error code.
        cut: file -> how often its answer breaks off, after `cut_after` bytes.
        longer: file -> bytes too many that it sends.
        garbled: file -> how often it comes with one bit wrong.
        gate: an answer's body waits for this in the middle.
    """

    status: int = 0
    code: str = ""
    cut: dict[str, int] = field(default_factory=dict)
    cut_after: int = 40_000
    longer: dict[str, int] = field(default_factory=dict)
    garbled: dict[str, int] = field(default_factory=dict)
    slow_s: float = 0.0
    gate: threading.Event | None = None


class HubServer:
    """Serves one repository. `requests` lists (method, file, first byte asked for)."""

    def __init__(self, files: dict[str, bytes], revisions: tuple[str, ...] = (COMMIT,)) -> None:
        self.files, self.revisions = files, revisions
        self.faults = Faults()
        self.requests: list[tuple[str, str, int]] = []
        self.sent: dict[str, int] = {}
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def asked_for(self, name: str) -> list[int]:
        """First bytes of the requests for a file."""
        return [start for method, file, start in self.requests if (method, file) == ("GET", name)]


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_args: Any) -> None:
        """A client that went away is what is tested."""


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.hub.faults.status:
            self._fail(self.hub.faults.status, self.hub.faults.code)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(\w+)\?.*", self.path):
            self._list(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", self.path):
            self._file(match[1], match[2], match[3])
        else:
            self._fail(404, "")

    def _fail(self, status: int, code: str) -> None:
        body = json.dumps({"error": code or "no"}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _known(self, repo: str, revision: str) -> bool:
        if repo != REPO:
            self._fail(401, "RepoNotFound")
        elif revision not in self.hub.revisions:
            self._fail(404, "RevisionNotFound")
        else:
            return True
        return False

    def _list(self, repo: str, revision: str) -> None:
        if not self._known(repo, revision):
            return
        siblings = []
        for name, data in self.hub.files.items():
            row: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if name.endswith(".safetensors"):
                row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(row)
        body = json.dumps({"id": REPO, "modelId": REPO, "sha": revision, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, repo: str, revision: str, name: str) -> None:
        if not self._known(repo, revision):
            return
        hub, faults = self.hub, self.hub.faults
        data = hub.files.get(name)
        if data is None:
            self._fail(404, "EntryNotFound")
            return
        start = int(match[1]) if (match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        hub.requests.append((self.command, name, start))
        body = bytearray(data[start:] + b"x" * faults.longer.get(name, 0))
        if faults.garbled.get(name, 0) > 0:
            faults.garbled[name] -= 1
            body[len(body) // 2] ^= 1
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if faults.cut.get(name, 0) > 0:
            faults.cut[name] -= 1
            self._send(name, body[: faults.cut_after])
            self.close_connection = True
            self.connection.close()
            return
        if faults.gate is not None:
            self._send(name, body[: len(body) // 2])
            body = body[len(body) // 2 :]
            faults.gate.wait(30)
        self._send(name, body)

    def _send(self, name: str, body: bytes | bytearray) -> None:
        piece = 16_384
        for at in range(0, len(body), piece):
            if self.hub.faults.slow_s:
                time.sleep(self.hub.faults.slow_s)
            try:
                self.wfile.write(body[at : at + piece])
                self.wfile.flush()
            except OSError:
                self.close_connection = True
                return
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(body[at : at + piece])
