"""What each request used, one JSON line each, for whoever bills or plans: who, how much, when; never what was said.

Lines are written beside the requests, about once a second. A file that cannot be written costs no request: its lines wait, within a bound.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

from prometheus_client import Counter

from services.common import own_file
from services.common.errors import ConfigError
from services.gateway.access.admission import Admission

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
# Some minutes of a busy server.
_MAX_WAITING = 65_536
_TAIL_BYTES = 1 << 16  # more than any line has
# What every line has; ours begin with the first of them.
_FIELDS = ("ts", "request_id", "key_id", "path", "tokens", "generations", "prompt_tokens", "cached_tokens", "completion_tokens")
_BEGINNING = b'{"ts": '


def check_place(path: Path, keys: Path | None) -> None:
    """Refuses a file that usage must not be appended to; one that is not there yet is fine.

    Args:
        path: GLM53_USAGE_FILE.
        keys: GLM53_API_KEYS_FILE.

    Raises:
        ConfigError: it is the key file, or holds something else than usage.
    """
    if keys is not None and _same(path, keys):
        raise ConfigError(
            f"GLM53_USAGE_FILE={path} is the file of GLM53_API_KEYS_FILE, which the first request's line would destroy: name another file",
            param="GLM53_USAGE_FILE",
        )
    # A link to a file that was moved away is where the next one will be.
    if not _is_stream(path) and (path.exists() or not path.is_symlink()):
        own_file.refuse_another("GLM53_USAGE_FILE", path, _is_usage, "usage lines")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one is not there
        return os.path.realpath(one) == os.path.realpath(other)


def _is_stream(path: Path) -> bool:
    """/dev/stdout, a collector's pipe: nothing lies there that a line could spoil, and what the process writes its log to is meant."""
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISCHR(found.st_mode) or stat.S_ISFIFO(found.st_mode) or any(_is_open_as(fd, found) for fd in (1, 2))


def _is_open_as(fd: int, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), found)
    except OSError:  # closed
        return False


def _is_usage(file: BinaryIO) -> bool:
    """Whether one of the last lines is ours: others may have been cut off with their gateway, or spoiled by a loss of power."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    *whole, last = file.read().split(b"\n")
    if not whole:
        return last[: len(_BEGINNING)] == _BEGINNING[: len(last)]
    return any(map(_is_line, reversed(whole)))


def _is_line(text: bytes) -> bool:
    if not text.startswith(_BEGINNING):
        return False
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(line, dict) and line.keys() >= set(_FIELDS)


class UsageLedger:
    """Appends to a file that may be moved away at any time: it is opened anew for every batch.

    Args:
        path: the file; made when it does not exist.
        lost: counts lines that found no place.
        keys: the file of API keys, which it must not be.

    Raises:
        ConfigError: the file cannot be written, or is another's.
    """

    def __init__(self, path: Path, lost: Counter, keys: Path | None = None) -> None:
        check_place(path, keys)
        try:
            path.open("a").close()
        except OSError as error:
            raise ConfigError(f"GLM53_USAGE_FILE: {path} cannot be written: {error}", param="GLM53_USAGE_FILE") from None
        self._path = path
        self._lost = lost
        self._waiting: deque[str] = deque()
        self._writing = asyncio.Lock()
        self._failing = False

    def note(self, admission: Admission, path: str) -> None:
        """A request has ended; one that reached no model used nothing and has no line.

        Args:
            path: the URL's path.
        """
        if not admission.real_tokens:
            return
        done = admission.finished
        line = json.dumps(
            {
                "ts": round(time.time(), 3),
                "request_id": admission.request_id,
                "key_id": admission.key.id,
                "path": path,
                "tokens": admission.real_tokens,
                # What is known of generations that ended by themselves; one that was cut off is in `tokens` alone.
                "generations": len(done),
                "prompt_tokens": sum(finished.prompt_tokens for finished in done),
                "cached_tokens": sum(finished.cached_tokens for finished in done),
                "completion_tokens": sum(finished.completion_tokens for finished in done),
            }
        )
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.popleft()
            self._lost.inc()
        self._waiting.append(line)

    async def run(self) -> None:
        """Writes what came, for as long as the gateway runs."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            await self.flush()

    async def flush(self) -> None:
        """Writes what waits; what cannot be written waits on."""
        async with self._writing:
            batch = list(self._waiting)
            if not batch:
                return
            try:
                await asyncio.to_thread(self._append, batch)
            except OSError as error:
                if not self._failing:
                    log.error("usage cannot be written to %s: %s; it is kept in memory and tried again", self._path, error)
                self._failing = True
                return
            self._failing = False
            # Meanwhile others may have come, or the oldest may have gone.
            written = set(batch)
            self._waiting = deque(line for line in self._waiting if line not in written)

    def _append(self, lines: list[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        if self._ends_within_a_line():
            data = b"\n" + data
        # In one call where the system takes it whole: several gateways may append to one file.
        with self._path.open("ab", buffering=0) as file:
            while data:
                data = data[file.write(data) :]

    def _ends_within_a_line(self) -> bool:
        """True when a writer was cut off there: what is appended would be one line with what it left."""
        try:
            if not self._path.is_file():
                return False
            with self._path.open("rb") as file:
                return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        except OSError:  # a file that may be written and not read
            return False
