"""uvicorn with an orderly end: streams finish, newcomers hear 503, the exit code is 0."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import threading
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from services.common.lifecycle import heed_stop_signals
from services.gateway.drain import Traffic
from services.gateway.http_head import HeadRules
from services.gateway.http_protocol import HttpLimits, protocol_with
from services.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

# Of the files that the process may open, these are not for connections.
_OTHER_FILES = 64
_LEAST_CONNECTIONS = 16


class GatewayServer(uvicorn.Server):
    """A server whose first SIGTERM or SIGINT drains. The second one ends running requests with an error, the third the process.

    Args:
        app: made by `create_app`.
        settings: host, port and time for draining.
    """

    def __init__(self, app: FastAPI, settings: GatewaySettings) -> None:
        limits = HttpLimits(
            HeadRules(settings.max_header_bytes),
            settings.header_timeout_s,
            settings.slow_client_s,
            max(_LEAST_CONNECTIONS, min(settings.max_connections, _open_files() - _OTHER_FILES)),
        )
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=protocol_with(limits, app.state.services.metrics),
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
        self._num_signals = 0

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
        heed_stop_signals()
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        elif self._num_signals == 2:
            log.warning("second signal: running requests end now")
            self._traffic.hurry()
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._traffic.drain(self._drain_timeout_s)
        self.should_exit = True


def _open_files() -> int:
    """How many files this process may open; the limit that shells set for interactive programs is lifted as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft
