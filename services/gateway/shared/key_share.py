"""Keys between gateways: a key that is new in one gateway's file counts in all, one that was withdrawn counts in none.

Each gateway writes the keys of its file to Redis, where they live for a minute; a gateway that does not know a key looks there. A
withdrawn key leaves a mark that outlives every old copy of the file. Redis holds hashes and limits, never keys.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import secrets
import time
from typing import Any

from pydantic import ValidationError

from services.gateway.access.keyring import KeyRing
from services.gateway.access.keys import ApiKey, KeyTable, digest_of
from services.gateway.shared.bus import Bus
from services.gateway.shared.link import PREFIX, RedisLink, SharedStateDown

log = logging.getLogger(__name__)

_TTL_S = 60
_PUBLISH_INTERVAL_S = 20.0
_REVOKED_TTL_S = 7 * 86_400
# Unknown keys are looked up once in so many seconds, so that guessing does not load Redis.
_MISS_S = 5.0
_MAX_MISSES = 10_000
_BATCH = 500
_REVOKED = b"revoked"

# KEYS: names of keys. ARGV: ms to live, ms that a mark lives, 1 to lift marks, then one record a key. Returns 1 where a mark stays.
_PUBLISH = """
local marked = {}
for i, name in ipairs(KEYS) do
  if ARGV[3] ~= '1' and redis.call('GET', name) == 'revoked' then
    redis.call('PEXPIRE', name, ARGV[2])
    marked[i] = 1
  else
    redis.call('SET', name, ARGV[3 + i], 'PX', ARGV[1])
    marked[i] = 0
  end
end
return marked
"""


class KeyShare:
    """Publishes this gateway's keys and finds those of others.

    Args:
        ring: the keys of our file.
        link: the way to Redis.
        bus: tells others at once what was withdrawn.
    """

    def __init__(self, ring: KeyRing, link: RedisLink, bus: Bus) -> None:
        self._ring = ring
        self._link = link
        self._bus = bus
        self._sender = secrets.token_hex(8)
        self._script = link.client.register_script(_PUBLISH)
        self._misses: collections.OrderedDict[bytes, float] = collections.OrderedDict()
        self._changes: set[asyncio.Task[None]] = set()
        ring.listen(self._file_changed)
        bus.on("keys", self._heard)

    async def find(self, key: str) -> ApiKey | None:
        """The entry that another gateway has for a key which our file does not have.

        Args:
            key: was not found in the ring.
        """
        digest = digest_of(key)
        if self._ring.is_revoked(digest) or self._ring.table.find(digest) is not None:
            return None
        now = time.monotonic()
        if self._misses.get(digest, 0.0) > now:
            return None
        try:
            text = await self._link.call(lambda: self._link.client.get(_name(digest.hex())))
        except SharedStateDown:
            return None
        found = _parsed(text, digest.hex())
        if found is None or found.is_expired:
            self._misses[digest] = now + _MISS_S
            self._misses.move_to_end(digest)
            while len(self._misses) > _MAX_MISSES:
                self._misses.popitem(last=False)
            return None
        return found

    async def publish(self, keys: tuple[ApiKey, ...], *, lift: bool = False) -> None:
        """Writes entries; of those that somebody has withdrawn, ours count no more.

        Args:
            keys: entries of our file.
            lift: they are new in our file: lift the marks.

        Raises:
            SharedStateDown: Redis does not answer.
        """
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            names = [_name(key.sha256) for key in batch]
            args: list[Any] = [_TTL_S * 1000, _REVOKED_TTL_S * 1000, int(lift), *(key.model_dump_json() for key in batch)]
            marked = await self._link.call(lambda names=names, args=args: self._script(keys=names, args=args))  # type: ignore[misc]
            for key, mark in zip(batch, marked, strict=True):
                if mark:
                    self._ring.revoke(key.sha256)

    async def withdraw(self, hashes: set[str]) -> None:
        """Marks entries as withdrawn.

        Raises:
            SharedStateDown: Redis does not answer; the other gateways see it in their files.
        """
        for sha256 in sorted(hashes):
            await self._link.call(lambda name=_name(sha256): self._link.client.set(name, _REVOKED, ex=_REVOKED_TTL_S))  # type: ignore[misc]

    async def run(self) -> None:
        """Publishes for ever."""
        while True:
            try:
                await self.publish(self._ring.table.keys)
            except SharedStateDown:
                log.debug("keys could not be published")
            except Exception:
                log.exception("keys could not be published")
            await asyncio.sleep(_PUBLISH_INTERVAL_S)

    def _file_changed(self, table: KeyTable, gone: set[str], added: set[str]) -> None:
        self._misses.clear()
        task = asyncio.get_running_loop().create_task(self._tell(table, gone, added))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _tell(self, table: KeyTable, gone: set[str], added: set[str]) -> None:
        try:
            await self.withdraw(gone)
            await self.publish(tuple(key for key in table.keys if key.sha256 in added), lift=True)
            await self._bus.send("keys", sender=self._sender, gone=sorted(gone)[:_BATCH], added=sorted(added)[:_BATCH])
            await self.publish(table.keys)
        except SharedStateDown:
            log.warning("the other gateways could not be told of changed keys; they see them in their files")

    async def _heard(self, message: dict[str, Any]) -> None:
        if message["sender"] == self._sender:
            return
        for sha256 in message["gone"]:
            self._ring.revoke(str(sha256))
        for sha256 in message["added"]:
            self._ring.restore(str(sha256))
        self._misses.clear()


def _name(sha256: str) -> str:
    # One hash tag: a script writes many at once.
    return f"{PREFIX}:{{keys}}:{sha256}"


def _parsed(text: Any, sha256: str) -> ApiKey | None:
    if text is None or text == _REVOKED:
        return None
    try:
        found = ApiKey.model_validate_json(text)
    except ValidationError:
        log.warning("an entry in Redis is no key")
        return None
    return found if found.sha256 == sha256 else None
