"""What belongs to one running `glm53 serve`: its lock, its socket, its shared-memory segments, and what a dead one left."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import IO

from kernels.python import segments
from services.common.errors import ConfigError

log = logging.getLogger(__name__)

# sockaddr_un.sun_path has 108 bytes, the last one a zero.
MAX_SOCKET_PATH_BYTES = 107

# Tries to make a folder, and a lock file in it, that the ends of other servers remove.
MAX_ATTEMPTS = 100

# How long services of a killed supervisor get to end by themselves, and then to be gone after SIGKILL.
ORPHANS_TERM_S = 5.0
ORPHANS_KILL_S = 30.0


class Instance:
    """The files of one instance.

    Args:
        name: instance name, part of every file name.
        shm_dir: where the shared-memory segments live.
        state_dir: folder for lock, pid list and socket; made when missing (mode 0700).
        own_folder: it is ours by name: an orderly end removes it, and the one that it lies in, when they are empty.
    """

    def __init__(self, name: str, shm_dir: Path, state_dir: Path, *, own_folder: bool = False) -> None:
        self.name = name
        self._own_folder = own_folder
        self._shm_dir = shm_dir
        self._state_dir = state_dir
        self._lock: IO[str] | None = None

    def acquire(self) -> None:
        """Takes the instance's lock and clears what a dead predecessor left.

        Raises:
            ConfigError: another live server holds the instance, or its folders cannot be used.
        """
        self._check_folders()
        self._lock = self._take_lock()
        try:
            self._end_orphans()
            self._refuse_foreign_worker()
            # The arena stays: a worker takes it over when it holds the same checkpoint, and replaces it when it does not.
            for segment in self.segments():
                if not segment.name.endswith("-arena"):
                    log.info("removing %s, left by a dead server", segment)
                    segment.unlink(missing_ok=True)
            (self._state_dir / "worker.sock").unlink(missing_ok=True)
        except BaseException:
            self._give_lock_back()
            raise

    def check(self) -> None:
        """Tries the state folder as `acquire` uses it, and leaves everything as it was.

        Raises:
            ConfigError: `acquire` would not take it.
        """
        missing = [folder for folder in (self._state_dir, *self._state_dir.parents) if not os.path.exists(folder)]
        try:
            self._check_state_dir()
            self._try_lock()
        finally:
            # A server that starts at this moment and has put its lock there keeps its folder; one that has not makes it again.
            for folder in missing:
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def _try_lock(self) -> None:
        path = self._state_dir / "lock"
        try:
            if not path.exists():
                tempfile.TemporaryFile(dir=self._state_dir).close()
                return
            with path.open("a+") as lock:
                self._lock_now(lock)
        except OSError as error:
            raise self._state_dir_error(f"cannot open {path}: {error.strerror}") from None

    def _check_folders(self) -> None:
        if not (self._shm_dir.is_dir() and os.access(self._shm_dir, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"GLM53_SHM_DIR is {self._shm_dir}, which is no folder that this user can write to: name a tmpfs", param="GLM53_SHM_DIR"
            )
        self._check_state_dir()

    def _check_state_dir(self) -> None:
        socket_path = os.fsencode(self._state_dir / "worker.sock")
        if len(socket_path) > MAX_SOCKET_PATH_BYTES:
            raise self._state_dir_error(
                f"its worker.sock has a path of {len(socket_path)} bytes, a socket's path at most {MAX_SOCKET_PATH_BYTES}", "a shorter one"
            )
        try:
            self._make_folder()
            owner = self._state_dir.stat()
        except OSError as error:
            raise self._state_dir_error(f"cannot make the state folder: {error.strerror}") from None
        # The default lies in a folder that everybody can write to: what somebody else put there first is not ours.
        if owner.st_uid not in (os.getuid(), 0):
            raise self._state_dir_error(f"the folder belongs to another user ({owner.st_uid})")

    def _state_dir_error(self, problem: str, instead: str = "a folder that this user can make and write to") -> ConfigError:
        return ConfigError(f"GLM53_STATE_DIR is {self._state_dir}: {problem}: name {instead}", param="GLM53_STATE_DIR")

    def _make_folder(self) -> None:
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            try:
                self._state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            except (FileNotFoundError, FileExistsError):
                if not attempts_left or self._state_dir.exists():
                    raise
            else:
                return

    def _take_lock(self) -> IO[str]:
        path = self._state_dir / "lock"
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            try:
                self._make_folder()
                lock = path.open("a+")
            except OSError as error:
                if isinstance(error, FileNotFoundError) and attempts_left:
                    continue
                raise self._state_dir_error(f"cannot open {path}: {error.strerror}") from None
            try:
                self._lock_now(lock)
            except ConfigError:
                lock.close()
                raise
            # A holder removes the file before it lets go: a lock on a removed file excludes nobody.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                    break
            lock.close()
        else:
            raise self._state_dir_error(f"{path} comes and goes", "a folder that no other program clears")
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        return lock

    def _lock_now(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise ConfigError(
                f"instance {self.name!r} is already served by process {holder}: stop it, or choose another PORT or GLM53_INSTANCE",
                param="GLM53_INSTANCE",
            ) from None

    def _refuse_foreign_worker(self) -> None:
        """A worker of another server (with another state folder, or another user's) holds its arena's lock: its segments are not ours."""
        arena = Path(segments.arena_path(self._shm_dir, self.name))
        if not arena.exists():
            return
        try:
            with arena.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{arena} belongs to a running worker of another server: choose another PORT or GLM53_INSTANCE", param="GLM53_INSTANCE"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot open {arena}: {error.strerror}. Remove it, or choose another GLM53_INSTANCE", param="GLM53_INSTANCE"
            ) from None

    def segments(self) -> list[Path]:
        """Every shared-memory file of this instance, half-made ones too; none of another whose name merely begins like ours."""
        names = (segments.arena_path(self._shm_dir, self.name), segments.ctl_path(self._shm_dir, self.name))
        return sorted(path for name in map(Path, names) for path in [*name.parent.glob(name.name), *name.parent.glob(f"{name.name}.*")])

    def record_children(self, pids: dict[str, int]) -> None:
        """Remembers the children so that a successor can end them if we are killed."""
        lines = [f"{name} {pid} {started}" for name, pid in pids.items() if (started := _start_time(pid))]
        # Replaced in one step: whoever reads it, at whatever moment we are killed, finds whole lines.
        fresh = self._state_dir / "children.new"
        fresh.write_text("\n".join(lines))
        fresh.replace(self._state_dir / "children")

    def release(self) -> None:
        """Removes every segment and file of the instance and gives the lock back."""
        for segment in self.segments():
            segment.unlink(missing_ok=True)
        for name in ("children", "children.new", "worker.sock"):
            (self._state_dir / name).unlink(missing_ok=True)
        self._give_lock_back()

    def _give_lock_back(self) -> None:
        if self._lock is not None:
            (self._state_dir / "lock").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
            if self._own_folder:
                # Whatever is not empty stays. A start that finds its folder gone at this moment makes it again.
                with contextlib.suppress(OSError):
                    self._state_dir.rmdir()
                    self._state_dir.parent.rmdir()

    def _end_orphans(self) -> None:
        """Ends services whose supervisor was killed: they hold the socket and write into segments that we are about to make."""
        listed = self._state_dir / "children"
        if not listed.exists():
            return
        orphans = []
        for line in listed.read_text(errors="replace").splitlines():
            fields = line.split()
            if len(fields) != 3 or not fields[1].isdecimal():
                log.warning("%s has a line that names no process: %r", listed, line[:80])
                continue
            name, number, started = fields
            if _start_time(int(number)) == started:
                log.warning("ending %s (process %s), left by a dead server", name, number)
                orphans.append((int(number), started))
        for pid, _ in orphans:
            _send(pid, signal.SIGTERM)
        # A worker drains for up to half a minute when it has streams, but its clients went with the supervisor's gateway.
        if not _all_gone(orphans, ORPHANS_TERM_S):
            for pid, started in orphans:
                if _start_time(pid) == started:
                    _send(pid, signal.SIGKILL)
            # The kernel takes a moment to unmap what a big process held, and until then the arena's lock is taken.
            if not _all_gone(orphans, ORPHANS_KILL_S):
                left = ", ".join(str(pid) for pid, started in orphans if _start_time(pid) == started)
                raise ConfigError(f"process {left}, left by a dead server, does not end: end it by hand", param="GLM53_INSTANCE")
        listed.unlink()


def _all_gone(processes: list[tuple[int, str]], timeout_s: float) -> bool:
    """Waits until none of the (pid, start time) is left, at most `timeout_s`; says whether that came true."""
    deadline = time.monotonic() + timeout_s
    while any(_start_time(pid) == started for pid, started in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


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
