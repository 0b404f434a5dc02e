"""Checks of the shared memory between gpu_worker and cpu_expert."""

from __future__ import annotations

import fcntl
import os
import pathlib
from collections.abc import Callable, Iterator

from cli.doctor.findings import Finding, fail, ok
from kernels.python import lib, segments
from kernels.python.arena import Arena
from kernels.python.errors import ShmAbsent, ShmMismatch
from services.common import shm_room
from services.common.memory import Memory
from services.common.shm_room import GIB, size_in_words

# A gpu_worker with the small checkpoint, without its records; measured.
OWN = 128 << 20
# What the engine adds to the records of a large checkpoint.
ENGINE = 6 * GIB


def kernels() -> Iterator[Finding]:
    """The kernels' library, which both of its processes load; silent when it is there."""
    try:
        lib.load()
    except lib.KernelsMissingError as error:
        yield fail("kernels", str(error), "Run `make kernels` in this installation's folder; an image without them is broken.")


def folder(shm_dir: str) -> Iterator[Finding]:
    """A folder that this process can make segments in."""
    if not os.access(shm_dir, os.W_OK | os.X_OK):
        yield fail(
            "shared memory",
            f"GLM53_SHM_DIR={shm_dir} is no folder that user {os.getuid()} can write to",
            "Mount one tmpfs there in both containers, writable for this user (Kubernetes: fsGroup; compose: uid and mode of the volume).",
        )


def room(shm_dir: str, instance: str, need: int, memory: Memory) -> Iterator[Finding]:
    """Place for the arena in the tmpfs, and in the memory that its pages are charged to.

    Args:
        need: bytes of the arena.
    """
    path = pathlib.Path(segments.arena_path(shm_dir, instance))
    # An arena that a dead worker left is taken over, or removed first.
    left = path.stat().st_blocks * 512 if path.exists() else 0
    file_system = os.statvfs(shm_dir)
    free = file_system.f_bavail * file_system.f_frsize + left
    if free < need:
        yield fail("shared memory", shm_room.too_small(shm_dir, free, need), shm_room.how_to_enlarge(shm_dir, need))
        return
    yield ok("shared memory", f"{shm_dir} has room for the expert records ({size_in_words(need)})")
    usable = memory.limit if memory.capped else memory.host_available + left
    if usable < need + OWN:
        wanted = need + shm_room.SLACK_BYTES
        where = "the container's memory limit is" if memory.capped else "the host has available"
        where_set = " (compose: WORKER_MEMORY in .env; Kubernetes: limits.memory)" if memory.capped else ""
        yield fail(
            "memory",
            f"{where} {size_in_words(usable)}; the expert records need {size_in_words(need)},"
            " count as this process's memory, and are not all of it",
            f"Give it at least {_gib_up(wanted + (OWN if need < GIB else ENGINE))} GiB{where_set}.",
        )


def _gib_up(num_bytes: int) -> int:
    return -(-num_bytes // GIB)


def in_use(shm_dir: str, instance: str, running: Callable[[], str | None]) -> Iterator[Finding]:
    """No other worker serves the same instance.

    Args:
        running: says what the server does that these settings name, None when none runs.
    """
    path = segments.arena_path(shm_dir, instance)
    if _is_held(path):
        if (own := running()) is not None:
            yield ok("instance", f"{instance!r} is served by the server that runs here ({own})")
            return
        yield fail(
            "instance",
            f"another gpu_worker serves instance {instance!r}: it holds {path}",
            "Stop it, or choose another GLM53_INSTANCE for both services.",
        )


def version(shm_dir: str, instance: str) -> Iterator[Finding]:
    """A running gpu_worker's segments have the version that this image reads. A dead one's are replaced by the next worker."""
    path = segments.arena_path(shm_dir, instance)
    try:
        Arena.attach(path).close()
    except ShmAbsent:
        yield ok("versions", "no gpu_worker has made its segments yet")
    except ShmMismatch as error:
        if _is_held(path):
            yield fail(
                "versions",
                f"the running gpu_worker's shared memory is not of this version: {error}",
                "Run gpu-worker and cpu-expert from images of the same version.",
            )
    else:
        yield ok("versions", f"the arena at {path} is of this version")


def _is_held(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
