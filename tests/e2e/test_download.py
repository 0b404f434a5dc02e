"""`glm53 serve` with an empty model folder: it fetches, says so, and serves by itself."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bench import server as serving
from tests.support.hub_server import COMMIT, REPO, HubServer
from tests.worker.harness import until

pytestmark = pytest.mark.e2e
TINY = Path(__file__).resolve().parents[2] / "models" / "tiny" / "checkpoint"


def ask(url: str) -> str:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "glm-5.3-tiny", "messages": question, "temperature": 0, "max_tokens": 60}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def test_an_empty_folder_is_filled_and_served(tmp_path: Path) -> None:
    """/health tells how far the download is; afterwards the model answers; the next start asks the hub nothing."""
    hub = HubServer({path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()})
    hub.faults.gate = threading.Event()
    env = {"HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1", "GLM53_MODEL_REPO": REPO, "GLM53_MODEL_REVISION": COMMIT}
    model = tmp_path / "model"
    server = serving.start(tmp_path, "--model-dir", str(model), env=env, wait=False)
    seen: dict[str, Any] = {}

    def fetching() -> bool:
        try:
            seen.update(server.get_json("/health"))
        except OSError:
            return False
        return str(seen.get("step", "")).startswith(f"fetching {REPO}: ")

    try:
        until(fetching, "the download shows in /health", 90)
        assert seen["status"] != "ok"
        assert not (model / "config.json").exists()
        hub.faults.gate.set()
        server.wait_ready(120)
        assert "Paris" in ask(server.url)
        assert f"fetching {REPO}" in server.log.read_text()
    finally:
        hub.faults.gate.set()
        server.stop()
    requests = len(hub.requests)
    hub.close()
    with serving.running("--model-dir", str(model), env=env) as again:
        assert "Paris" in ask(again.url)
    assert len(hub.requests) == requests
