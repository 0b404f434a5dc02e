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
    if not _is_stream(path):
        own_file.refuse_another("GLM53_USAGE_FILE", path, _is_usage, "usage lines")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one is not there
        return os.path.realpath(one) == os.path.realpath(other)


def _is_stream(path: Path) -> bool:
    """/dev/stdout, a collector's pipe: nothing lies there that a line could spoil."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _is_usage(file: BinaryIO) -> bool:
    """Whether the last whole line is one of ours: the one after it may have been cut off with its gateway."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read()
    end = tail.rfind(b"\n")
    if end < 0:
        return tail[: len(_BEGINNING)] == _BEGINNING[: len(tail)]
    try:
        line = json.loads(tail[tail.rfind(b"\n", 0, end) + 1 : end])
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
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
