"""The benches' server harness tells how long a start took."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import server


def test_a_server_tells_how_long_its_start_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start of the process to its first healthy answer."""
    made = server.Server("http://127.0.0.1:1", 1, "p1", Path("log"), Path("state"), SimpleNamespace(poll=lambda: 0, wait=lambda timeout: 0))  # type: ignore[arg-type]
    monkeypatch.setattr(server, "start", lambda *args, **kwargs: made)
    monkeypatch.setattr(server.Server, "wait_ready", lambda self, timeout_s: time.sleep(0.05))
    with server.running() as started:
        assert started.ready_s >= 0.05
