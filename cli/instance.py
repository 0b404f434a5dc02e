"""What belongs to one running `glm53 serve`: its lock, its socket, its shared-memory segments, and what a dead one left."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import time
from pathlib import Path
from typing import IO

from services.common.errors import ConfigError

log = logging.getLogger(__name__)


class Instance:
    """The files of one instance.

    Args:
        name: instance name, part of every file name.
        shm_dir: where the shared-memory segments live.
        state_dir: folder for lock, pid list and socket; made when missing (mode 0700).
    """

    def __init__(self, name: str, shm_dir: Path, state_dir: Path) -> None:
        self.name = name
        self._shm_dir = shm_dir
        self._state_dir = state_dir
        self._lock: IO[str] | None = None

    @property
    def worker_address(self) -> str:
        """gRPC address of the worker: a Unix socket that only this user can open."""
        return f"unix:{self._state_dir / 'worker.sock'}"

    def acquire(self) -> None:
        """Takes the instance's lock and clears what a dead predecessor left.

        Raises:
            ConfigError: another live server holds the instance.
        """
        self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (self._state_dir / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise ConfigError(
                f"instance {self.name!r} is already served by process {holder}: stop it, or choose another PORT or GLM53_INSTANCE",
                param="GLM53_INSTANCE",
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock
        self._end_orphans()
        # The arena stays: a worker takes it over when it holds the same checkpoint, and replaces it when it does not.
        for segment in self.segments():
            if not segment.name.endswith("-arena"):
                log.info("removing %s, left by a dead server", segment)
                segment.unlink(missing_ok=True)
        (self._state_dir / "worker.sock").unlink(missing_ok=True)

    def segments(self) -> list[Path]:
        """Every shared-memory file of this instance."""
        return sorted(self._shm_dir.glob(f"glm53-{self.name}-*"))

    def record_children(self, pids: dict[str, int]) -> None:
        """Remembers the children so that a successor can end them if we are killed."""
        lines = [f"{name} {pid} {_start_time(pid)}" for name, pid in pids.items()]
        (self._state_dir / "children").write_text("\n".join(lines))

    def release(self) -> None:
        """Removes every segment and file of the instance and gives the lock back."""
        for segment in self.segments():
            segment.unlink(missing_ok=True)
        for name in ("children", "worker.sock"):
            (self._state_dir / name).unlink(missing_ok=True)
        if self._lock is not None:
            (self._state_dir / "lock").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def _end_orphans(self) -> None:
        """Ends services whose supervisor was killed: they hold the socket and write into segments that we are about to make."""
        listed = self._state_dir / "children"
        if not listed.exists():
            return
        orphans = []
        for line in listed.read_text().splitlines():
            name, number, started = line.split()
            if _start_time(int(number)) == started:
                log.warning("ending %s (process %s), left by a dead server", name, number)
                orphans.append((int(number), started))
        deadline = time.monotonic() + 5
        for pid, started in orphans:
            _send(pid, signal.SIGTERM)
            while _start_time(pid) == started and time.monotonic() < deadline:
                time.sleep(0.05)
            if _start_time(pid) == started:
                _send(pid, signal.SIGKILL)
        listed.unlink()


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _start_time(pid: int) -> str:
    """Start time of a process in clock ticks since boot, "" when there is none: with the pid it names a process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rsplit(")", 1)[1].split()
    return "" if fields[0] == "Z" else fields[19]
