"""Requests in flight, and how they end when the gateway stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Protocol

from services.common.errors import Glm53Error
from services.gateway.errors import ShuttingDown

log = logging.getLogger(__name__)

# After their time is up, streams still get an error event and [DONE].
FAREWELL_S = 5.0


class Abortable(Protocol):
    """Generations of a request."""

    @property
    def last_token_at(self) -> float:
        """When the newest token came, on the monotonic clock; 0 before the first."""

    def abort(self, error: Glm53Error) -> None:
        """Makes their reader fail with `error`."""


class Traffic:
    """Counts requests that are being answered; refuses new ones while draining."""

    def __init__(self) -> None:
        self.draining = False
        self._num_requests = 0
        self._last_token_at = float("-inf")
        self._running: set[Abortable] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._hurried = asyncio.Event()
        self._over: Glm53Error | None = None

    @property
    def in_flight(self) -> int:
        """Requests whose answer is not complete."""
        return self._num_requests

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """A request is being answered inside this block."""
        self._num_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_requests -= 1
            if self._num_requests == 0:
                self._idle.set()

    def check_open(self) -> None:
        """Raises `ShuttingDown` while draining."""
        if self.draining:
            raise ShuttingDown("This server is shutting down; try again.", retry_after_s=5.0)

    def add(self, work: Abortable) -> None:
        """Remembers what may have to be ended; ends it when that time has come."""
        self._running.add(work)
        if self._over is not None:
            work.abort(self._over)

    @property
    def silent_s(self) -> float:
        """Seconds since any generation gave a token."""
        newest = max((work.last_token_at for work in self._running), default=0.0)
        return time.monotonic() - max(newest, self._last_token_at)

    def remove(self, work: Abortable) -> None:
        """Forgets what has ended."""
        self._last_token_at = max(self._last_token_at, work.last_token_at)
        self._running.discard(work)

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new, waits for what runs, and ends what still runs after `timeout_s` seconds, or when `hurry` is called."""
        self.draining = True
        if self._num_requests:
            log.info("draining: %d requests run", self._num_requests)
        if await self._wait_idle(timeout_s):
            return
        log.warning("ending %d requests that still run%s", self._num_requests, "" if self._hurried.is_set() else f" after {timeout_s:g} s")
        self._over = ShuttingDown("The server shut down before the answer was complete.", retry_after_s=5.0)
        for work in list(self._running):
            work.abort(self._over)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._idle.wait()

    def hurry(self) -> None:
        """Ends the time that `drain` gives to running requests."""
        self._hurried.set()

    async def _wait_idle(self, timeout_s: float) -> bool:
        waits = [asyncio.create_task(event.wait()) for event in (self._idle, self._hurried)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return self._idle.is_set()
