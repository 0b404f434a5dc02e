"""Names of a deployment's shared-memory segments, and the half-made ones that a dead maker left."""

from __future__ import annotations

import fcntl
import os
import pathlib
import time

_UNLOCKED_TEMPORARY_S = 60.0  # a control region is made in far less


def arena_path(shm_dir: str | os.PathLike[str], instance: str) -> str:
    """Where the records of the instance live."""
    return str(pathlib.Path(shm_dir) / f"glm53-{instance}-arena")


def ctl_path(shm_dir: str | os.PathLike[str], instance: str) -> str:
    """Where the control region of the instance lives."""
    return str(pathlib.Path(shm_dir) / f"glm53-{instance}-ctl")


def reclaim_temporaries(path: str) -> list[str]:
    """Removes half-made segments of `path` whose maker is dead, and returns their names."""
    removed = []
    for candidate in pathlib.Path(path).parent.glob(pathlib.Path(path).name + ".*.tmp"):
        if _is_abandoned(candidate):
            candidate.unlink(missing_ok=True)
            removed.append(str(candidate))
    return removed


def _is_locked(path: pathlib.Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_abandoned(path: pathlib.Path) -> bool:
    """A live maker of an arena holds its lock; a control region's maker holds none, but is through in no time."""
    try:
        age_s = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    is_arena = "-arena." in path.name
    return not _is_locked(path) and (is_arena or age_s > _UNLOCKED_TEMPORARY_S)
