"""uvicorn with an orderly end: streams finish, newcomers hear 503, the exit code is 0."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from services.gateway.drain import Traffic
from services.gateway.http_protocol import protocol_with
from services.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

# Beyond what the gateway takes, so that slightly too large headers are refused in words and not with a closed socket.
_HEADER_SLACK_BYTES = 64 * 1024


class GatewayServer(uvicorn.Server):
    """A server whose first SIGTERM or SIGINT drains and whose second one ends at once.

    Args:
        app: made by `create_app`.
        settings: host, port and time for draining.
    """

    def __init__(self, app: FastAPI, settings: GatewaySettings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=protocol_with(settings.max_header_bytes + _HEADER_SLACK_BYTES),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
            )
        )
        self._traffic: Traffic = app.state.services.traffic
        self._drain_timeout_s = settings.drain_timeout_s
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals only schedule what is to be done; the default would end the process by the signal itself."""
        if threading.current_thread() is not threading.main_thread():
            # Embedded in another program, which has the signals.
            yield
            return
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT)
        for number in handled:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._traffic.drain(self._drain_timeout_s)
        self.should_exit = True
