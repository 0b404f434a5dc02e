"""Short messages between gateways over Redis: cancels of requests that another gateway runs, keys that were withdrawn.

Nothing depends on a message arriving: a cancel that is lost can be asked for again, a withdrawn key is gone with the next look at the
file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError

from services.gateway.shared.link import PREFIX, RedisLink

log = logging.getLogger(__name__)

CHANNEL = f"{PREFIX}:bus"
_POLL_S = 1.0
_RETRY_S = 1.0
_MAX_MESSAGE_BYTES = 64 * 1024

Handler = Callable[[dict[str, Any]], Awaitable[None]]


class Bus:
    """Sends and receives messages.

    Args:
        link: the way to Redis.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._handlers: dict[str, Handler] = {}
        self.is_listening = False

    def on(self, kind: str, handler: Handler) -> None:
        """Calls `handler` with every message of a kind, this gateway's own included."""
        self._handlers[kind] = handler

    async def send(self, kind: str, **fields: Any) -> int:
        """Sends a message; returns how many gateways heard it.

        Raises:
            SharedStateDown: Redis does not answer.
        """
        data = json.dumps({"kind": kind, **fields})
        return int(await self._link.call(lambda: self._link.client.publish(CHANNEL, data)))

    async def run(self) -> None:
        """Listens for ever, again after every loss of the connection."""
        while True:
            try:
                await self._listen()
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("the bus is away: %s", type(error).__name__)
            finally:
                self.is_listening = False
            await asyncio.sleep(_RETRY_S)

    async def _listen(self) -> None:
        pubsub = self._link.client.pubsub(ignore_subscribe_messages=True)
        try:
            await pubsub.subscribe(CHANNEL)
            self.is_listening = True
            while True:
                message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=_POLL_S)
                if message is not None:
                    await self._handle(message["data"])
        finally:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _handle(self, data: Any) -> None:
        try:
            if len(data) > _MAX_MESSAGE_BYTES:
                raise ValueError("too long")
            message = json.loads(data)
            handler = self._handlers.get(message["kind"])
            if handler is not None:
                await handler(message)
        except Exception:
            # Whatever somebody sends, the next message is read.
            log.exception("a message on the bus could not be used")
