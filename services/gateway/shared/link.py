"""The way to Redis: every call has a deadline, and a Redis that fails is left alone for a while.

Redis is never needed: whoever calls handles `SharedStateDown`, and nothing waits for Redis at start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from services.common.errors import NotReady

log = logging.getLogger(__name__)

T = TypeVar("T")

_ERRORS_TO_OPEN = 5
_PROBE_INTERVAL_S = 5.0
_MAX_CONNECTIONS = 64
_MOST_CHARS = 200  # of what an error says
# Every name of ours in Redis begins so.
PREFIX = "glm53"


class SharedStateDown(NotReady):
    """Redis does not answer."""

    code = "shared_state_unavailable"


class RedisLink:
    """A client with deadlines and a circuit breaker: closed, open after five failures in a row, closed again by a probe.

    Args:
        client: made by `connect`, or a fake in tests.
        timeout_s: longest a call may take.
        probe_interval_s: how often an open breaker tries whether Redis is back.

    Attributes:
        failures: calls that failed, of all time.
    """

    def __init__(self, client: redis.asyncio.Redis, timeout_s: float, probe_interval_s: float = _PROBE_INTERVAL_S) -> None:
        self.client = client
        self._timeout_s = timeout_s
        self._probe_interval_s = probe_interval_s
        self._failures_in_a_row = 0
        self._open = False
        self.failures = 0

    @classmethod
    def connect(cls, url: str, timeout_s: float, probe_interval_s: float = _PROBE_INTERVAL_S) -> RedisLink:
        """A link to a server; the connection is made by the first call.

        Raises:
            ValueError: the URL is none.
        """
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            max_connections=_MAX_CONNECTIONS,
            # The breaker and the caller's own fallback are faster than any retry.
            retry=Retry(NoBackoff(), 0),
        )
        return cls(redis.asyncio.Redis.from_pool(pool), timeout_s, probe_interval_s)

    @property
    def is_up(self) -> bool:
        """False while the breaker is open."""
        return not self._open

    async def call(self, make: Callable[[], Awaitable[T]]) -> T:
        """Runs one call.

        Args:
            make: makes the awaitable; not called while the breaker is open.

        Raises:
            SharedStateDown: it failed, took too long, or the breaker is open.
        """
        if self._open:
            raise SharedStateDown("the shared state is away", retry_after_s=self._probe_interval_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await make()
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(error)
            raise SharedStateDown(f"the shared state did not answer: {type(error).__name__}", retry_after_s=1.0) from None
        self._failures_in_a_row = 0
        return result

    async def watch(self) -> None:
        """Closes the breaker when Redis is back; runs for ever."""
        while True:
            await asyncio.sleep(self._probe_interval_s)
            # Asked also while closed: an idle gateway must notice too, and say so in its health.
            await self.probe()

    async def probe(self) -> None:
        """Asks once whether Redis answers."""
        try:
            async with asyncio.timeout(max(self._timeout_s, 1.0)):
                await _awaited(self.client.ping())
        except (RedisError, OSError, TimeoutError) as error:
            if not self._open:
                self._failures_in_a_row = _ERRORS_TO_OPEN - 1
                self._failed(error)
            return
        if self._open:
            log.info("the shared state is back")
        self._open = False
        self._failures_in_a_row = 0

    async def close(self) -> None:
        """Lets the connections go."""
        await self.client.aclose()

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= _ERRORS_TO_OPEN and not self._open:
            self._open = True
            log.warning("the shared state is away; this gateway goes on by itself: %s", _reason(error))


async def problem_of(url: str, timeout_s: float) -> str:
    """Asks a server once; why it cannot be used, "" when it can."""
    client = RedisLink.connect(url, timeout_s).client
    try:
        async with asyncio.timeout(timeout_s):
            await _awaited(client.ping())
    except (RedisError, OSError, TimeoutError) as error:
        return _reason(error)
    finally:
        await client.aclose()
    return ""


def _reason(error: Exception) -> str:
    """Kind and beginning of an error's text: what Redis answers can be a page."""
    text = str(error)
    return f"{type(error).__name__}: {text[:_MOST_CHARS]}" if text else type(error).__name__


async def _awaited(value: Any) -> Any:
    """What redis-py types as a value or an awaitable of it."""
    return await value
