"""Starts a real `glm53 serve` for a benchmark or a test, and stops it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Server:
    """A running `glm53 serve`.

    Attributes:
        url: http://127.0.0.1:PORT without a path.
        log: file with the output of all its processes.
        ready_s: seconds from start to the first 200 of /health.
    """

    url: str
    port: int
    instance: str
    log: Path
    state_dir: Path
    process: subprocess.Popen[bytes]
    ready_s: float = 0.0

    def get_json(self, path: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """GET of a JSON document; an HTTP error's body is returned too."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout_s) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))

    def pid_of(self, service: str) -> int:
        """Process id of one of the three services."""
        for line in (self.state_dir / "children").read_text().splitlines():
            name, pid, _ = line.split()
            if name == service:
                return int(pid)
        raise KeyError(service)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Waits for /health to answer 200.

        Raises:
            RuntimeError: it ended or did not become ready; the message holds the end of the log.
        """
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"glm53 serve ended with {self.process.returncode}:\n{self.tail()}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2) as reply:
                    if reply.status == 200:
                        return
            except (OSError, urllib.error.HTTPError):
                pass
            time.sleep(0.05)
        raise RuntimeError(f"glm53 serve was not ready after {timeout_s} s:\n{self.tail()}")

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, then waits; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError(f"glm53 serve did not stop within {timeout_s} s:\n{self.tail()}") from None


def start(work: Path, *flags: str, env: Mapping[str, str] | None = None, wait: bool = True, port: int | None = None) -> Server:
    """Starts `glm53 serve` on a free port with its log in `work`."""
    port = port or free_port()
    log = work / f"serve-{port}-{time.monotonic_ns()}.log"
    state_dir = work / f"state-{port}"
    full_env = {**{k: v for k, v in os.environ.items() if not k.startswith("GLM53_")}, "GLM53_STATE_DIR": str(state_dir), **(env or {})}
    command = [sys.executable, "-m", "cli.start", "serve", "--port", str(port), *flags]
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=full_env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", port, f"p{port}", log, state_dir, process)
    if wait:
        try:
            server.wait_ready()
        except RuntimeError:
            process.kill()
            raise
        server.ready_s = time.monotonic() - began
    return server


@contextlib.contextmanager
def running(*flags: str, env: Mapping[str, str] | None = None, ready_s: float = 120.0) -> Iterator[Server]:
    """A server for the length of a `with` block."""
    with tempfile.TemporaryDirectory(prefix="glm53-bench-") as work:
        began = time.monotonic()
        server = start(Path(work), *flags, env=env, wait=False)
        try:
            server.wait_ready(ready_s)
            server.ready_s = time.monotonic() - began
            yield server
        finally:
            server.stop()
