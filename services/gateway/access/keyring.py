"""The keys in force: read from the file at start, and again whenever it changes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from services.common.errors import ConfigError
from services.gateway.access.keys import ApiKey, KeyTable, digest_of, read_keys

log = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
# Hashes withdrawn by other gateways whose file is newer than ours.
_MAX_REVOKED = 10_000

# Called with the new table, the hashes (hex) that are gone and those that are new.
Listener = Callable[[KeyTable, set[str], set[str]], None]


class KeyRing:
    """Keys of one file.

    Args:
        path: the key file.
        interval_s: how often the file is looked at.

    Attributes:
        failed_reloads: how often a changed file could not be used; the keys before it stay in force then.

    Raises:
        ConfigError: the file cannot be used. Only at start: a gateway must not open up because somebody saved half a file.
    """

    def __init__(self, path: Path, interval_s: float = _LOOK_INTERVAL_S) -> None:
        self._path = path
        self._interval_s = interval_s
        self._stamp = self._look()
        self._table = read_keys(path)
        self._revoked: dict[bytes, None] = {}
        self._listeners: list[Listener] = []
        self.failed_reloads = 0

    @property
    def table(self) -> KeyTable:
        """The keys of the file."""
        return self._table

    def find(self, key: str) -> ApiKey | None:
        """The entry of a key that is valid now."""
        digest = digest_of(key)
        found = self._table.find(digest)
        if found is None or found.is_expired or digest in self._revoked:
            return None
        return found

    def listen(self, listener: Listener) -> None:
        """Calls `listener` after every reload."""
        self._listeners.append(listener)

    def revoke(self, sha256: str) -> None:
        """Another gateway says that a key is gone: it counts no more here, whatever our copy of the file says."""
        if len(self._revoked) < _MAX_REVOKED:
            self._revoked[bytes.fromhex(sha256)] = None

    def restore(self, sha256: str) -> None:
        """Another gateway says that a withdrawn key is back."""
        self._revoked.pop(bytes.fromhex(sha256), None)

    def is_revoked(self, digest: bytes) -> bool:
        """True for a key that another gateway has withdrawn."""
        return digest in self._revoked

    def reload_if_changed(self) -> bool:
        """Reads the file again if it is another one than last time; True when new keys are in force."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            table = read_keys(self._path)
        except ConfigError as error:
            self.failed_reloads += 1
            log.error("the key file changed and cannot be used; the keys before stay in force: %s", error.message)
            return False
        before, after = ({key.sha256 for key in keys.keys} for keys in (self._table, table))
        self._table = table
        # The file is newer than what others said about it.
        self._revoked.clear()
        log.info("the key file changed", extra={"keys": len(table.keys), "removed": len(before - after)})
        for listener in self._listeners:
            listener(table, before - after, after - before)
        return True

    async def run(self) -> None:
        """Looks at the file for ever."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                self.reload_if_changed()
            except Exception:
                # A listener's bug must not freeze the keys.
                log.exception("the key file could not be looked at")

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
