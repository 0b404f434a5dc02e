"""Values that outlive a request for a while: results under an idempotency key, stored responses.

One interface, three places: this process's memory, Redis, and Redis with the memory as its stand-in. Names and values are the
caller's; a value is bytes and may be large, a name is short and begins with the key's id, so that no key reads another's values.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.gateway.shared.link import PREFIX, RedisLink, SharedStateDown

log = logging.getLogger(__name__)

MAX_VALUE_BYTES = 16 * 1024 * 1024


class Store(Protocol):
    """Values with a time to live."""

    async def get(self, name: str) -> bytes | None:
        """The value, None when there is none or its time is over."""

    async def put(self, name: str, value: bytes, ttl_s: float) -> bool:
        """Writes a value over whatever was there; False when it is too large to keep."""

    async def add(self, name: str, value: bytes, ttl_s: float) -> bool:
        """Writes a value where there is none; False when there is one. Of many at the same time exactly one succeeds."""

    async def delete(self, name: str) -> bool:
        """Removes a value; False when there was none."""


@dataclass
class _Value:
    data: bytes
    until: float


class MemoryStore:
    """Values in this process, the oldest go first when there are too many.

    Args:
        max_bytes: most bytes of all values together.
        max_values: most values.
        clock: seconds.
    """

    def __init__(self, max_bytes: int = 256 * 1024 * 1024, max_values: int = 100_000, clock: Callable[[], float] = time.monotonic) -> None:
        self._values: collections.OrderedDict[str, _Value] = collections.OrderedDict()
        self._max_bytes = max_bytes
        self._max_values = max_values
        self._clock = clock
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return self._bytes

    async def get(self, name: str) -> bytes | None:
        """The value, None when there is none or its time is over."""
        value = self._alive(name)
        return None if value is None else value.data

    async def put(self, name: str, value: bytes, ttl_s: float) -> bool:
        """Writes a value over whatever was there; False when it is too large to keep."""
        self._drop(name)
        if len(value) > min(MAX_VALUE_BYTES, self._max_bytes):
            return False
        self._values[name] = _Value(value, self._clock() + ttl_s)
        self._bytes += len(value)
        while len(self._values) > self._max_values or self._bytes > self._max_bytes:
            self._drop(next(iter(self._values)))
        return True

    async def add(self, name: str, value: bytes, ttl_s: float) -> bool:
        """Writes a value where there is none; False when there is one."""
        if self._alive(name) is not None:
            return False
        return await self.put(name, value, ttl_s)

    async def delete(self, name: str) -> bool:
        """Removes a value; False when there was none."""
        found = self._alive(name) is not None
        self._drop(name)
        return found

    def _alive(self, name: str) -> _Value | None:
        value = self._values.get(name)
        if value is not None and value.until <= self._clock():
            self._drop(name)
            return None
        return value

    def _drop(self, name: str) -> None:
        value = self._values.pop(name, None)
        if value is not None:
            self._bytes -= len(value.data)


class RedisStore:
    """Values in Redis. Every method raises `SharedStateDown` when Redis does not answer.

    Args:
        link: the way to Redis.
        kind: separates the names of different uses.
    """

    def __init__(self, link: RedisLink, kind: str) -> None:
        self._link = link
        self._kind = kind

    async def get(self, name: str) -> bytes | None:
        """The value, None when there is none or its time is over."""
        value = await self._link.call(lambda: self._link.client.get(self._name(name)))
        return value if value is None or isinstance(value, bytes) else value.encode()

    async def put(self, name: str, value: bytes, ttl_s: float) -> bool:
        """Writes a value over whatever was there; False when it is too large to keep."""
        if len(value) > MAX_VALUE_BYTES:
            await self.delete(name)
            return False
        await self._link.call(lambda: self._link.client.set(self._name(name), value, px=_ms(ttl_s)))
        return True

    async def add(self, name: str, value: bytes, ttl_s: float) -> bool:
        """Writes a value where there is none; False when there is one."""
        if len(value) > MAX_VALUE_BYTES:
            return False
        return bool(await self._link.call(lambda: self._link.client.set(self._name(name), value, px=_ms(ttl_s), nx=True)))

    async def delete(self, name: str) -> bool:
        """Removes a value; False when there was none."""
        return bool(await self._link.call(lambda: self._link.client.delete(self._name(name))))

    def _name(self, name: str) -> str:
        return f"{PREFIX}:{self._kind}:{name}"


class FallbackStore:
    """Redis while it answers, this process's memory while it does not: best effort, and never an error.

    Args:
        shared: the store in Redis.
        local: this process's; also read where Redis has nothing, as it holds what was written while Redis was away.
    """

    def __init__(self, shared: RedisStore, local: MemoryStore) -> None:
        self._shared = shared
        self._local = local

    async def get(self, name: str) -> bytes | None:
        """The value, None when there is none or its time is over."""
        try:
            value = await self._shared.get(name)
        except SharedStateDown:
            value = None
        return await self._local.get(name) if value is None else value

    async def put(self, name: str, value: bytes, ttl_s: float) -> bool:
        """Writes a value over whatever was there; False when it is too large to keep."""
        try:
            kept = await self._shared.put(name, value, ttl_s)
        except SharedStateDown:
            return await self._local.put(name, value, ttl_s)
        # What Redis has now is the truth.
        await self._local.delete(name)
        return kept

    async def add(self, name: str, value: bytes, ttl_s: float) -> bool:
        """Writes a value where there is none; False when there is one."""
        if await self._local.get(name) is not None:
            return False
        try:
            return await self._shared.add(name, value, ttl_s)
        except SharedStateDown:
            return await self._local.add(name, value, ttl_s)

    async def delete(self, name: str) -> bool:
        """Removes a value; False when there was none."""
        found = await self._local.delete(name)
        try:
            return await self._shared.delete(name) or found
        except SharedStateDown:
            return found


def store_for(link: RedisLink | None, kind: str) -> Store:
    """The store of one use: Redis with a stand-in, or memory where there is no Redis."""
    local = MemoryStore()
    return local if link is None else FallbackStore(RedisStore(link, kind), local)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
