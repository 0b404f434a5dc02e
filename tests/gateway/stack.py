"""The gateway on a real socket with a fake worker on real gRPC, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import openai

from services.common.event_loop import new_event_loop
from services.gateway.app import create_app
from services.gateway.fleet import worker_for
from services.gateway.server import GatewayServer
from services.gateway.settings import GatewaySettings
from services.gateway.worker_client import GrpcWorkerClient, Pings
from tests.gateway.fake_worker import FakeWorker, Script
from tests.gateway.language import CHAT_TEMPLATE

MODEL = "tiny"
HELLO = [{"role": "user", "content": "Hello"}]


class Stack:
    """Runs worker and gateway until `close`."""

    def __init__(
        self, *, start_worker: bool = True, chat_template: str = CHAT_TEMPLATE, pings: Pings | None = None, **settings: Any
    ) -> None:
        self._pings = pings or Pings()
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.worker = FakeWorker(chat_template=chat_template)
        if start_worker:
            self.run(self.worker.start())
        defaults = {"port": 0, "worker_address": self.worker.address, "connect_timeout_s": 2.0, "drain_timeout_s": 2.0}
        self.settings = GatewaySettings.load({}, **(defaults | settings))
        self.app = self.run(self._make_app())
        self.services = self.app.state.services
        self.server = GatewayServer(self.app, self.settings)
        self._serving = asyncio.run_coroutine_threadsafe(self.server.serve(), self._loop)
        until(lambda: self.server.started, "the server listens")
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=20)

    async def _make_app(self) -> Any:
        # A worker that does not listen yet has no port, which no setting may say.
        alone = GrpcWorkerClient(self.settings.worker_address, self.settings.connect_timeout_s, self._pings)
        return create_app(self.settings, worker_for(self.settings) if "," in self.settings.worker_address else alone)

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 20.0) -> Any:
        """Runs a coroutine on the stack's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def client(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def play(self, *steps: Any, admit: bool = True) -> None:
        """What the worker does with the next requests."""
        self.worker.script = Script(steps, admit)

    def post(self, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        """A chat (or other) request with sensible defaults; a field given as `...` is left out."""
        base: dict[str, Any] = {"model": MODEL}
        base |= {"messages": HELLO} if "chat" in path else {"prompt": "Hello"}
        body = {name: value for name, value in (base | fields).items() if value is not ...}
        return self.http.post(path, json=body)

    def message(self, **fields: Any) -> dict[str, Any]:
        """The first choice of a successful chat request."""
        response = self.post(**fields)
        assert response.status_code == 200, response.text
        return dict(response.json()["choices"][0])

    @property
    def sampling(self) -> Any:
        """What the worker was told last."""
        return self.worker.requests[-1].sampling

    def close(self) -> None:
        """Stops everything."""
        self.http.close()
        self.server.should_exit = True
        self._serving.result(20)
        if self.worker.server is not None:
            self.run(self.worker.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()


def until(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> None:
    """Waits until `condition()` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.005)
