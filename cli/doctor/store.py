"""Is a folder a suitable place for the expert store?"""

from __future__ import annotations

import errno
import os
import pathlib
from collections.abc import Iterator

from cli.doctor.findings import Finding, fail, ok
from cli.doctor.machine import Machine

# 12,384 records of 9,474,048 bytes.
STORE_BYTES = 117_326_610_432
GOOD = ("xfs", "ext4")


def check(folder: pathlib.Path, machine: Machine) -> Iterator[Finding]:
    """A local file system that reads past the page cache, with room. Nothing is left behind."""
    if not folder.is_dir():
        yield fail("store", f"{folder} is no folder", "Name the folder that the store lies in, or will lie in.")
        return
    kind = file_system(folder, machine)
    if kind not in GOOD:
        yield fail("store", f"{folder} is on {kind or 'an unknown file system'}", f"Use a local {' or '.join(GOOD)} file system on NVMe.")
    if not has_direct_io(folder):
        yield fail(
            "store", f"{folder}: its file system refuses O_DIRECT", "Use a local xfs or ext4 file system, not tmpfs, FUSE or a network."
        )
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    stored = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if free + stored < STORE_BYTES:
        yield fail(
            "store", f"{folder} has {free / 1e9:.1f} GB free, the store needs {STORE_BYTES / 1e9:.1f} GB", "Free space, or use another."
        )
    else:
        yield ok("store", f"{folder}: {kind}, {free / 1e9:.1f} GB free")


def file_system(folder: pathlib.Path, machine: Machine) -> str:
    """Type of the file system that holds the folder, "" when the system does not say."""
    path, best, kind = folder.resolve(), "", ""
    for line in machine.read("proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if (path == pathlib.Path(point) or pathlib.Path(point) in path.parents) and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def has_direct_io(folder: pathlib.Path) -> bool:
    """True when a file of this folder can be opened with O_DIRECT: tried on one without a name, which is gone when it is closed."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_DIRECT | os.O_RDWR, 0o600))
    except OSError as error:
        # Read-only or not ours: what is there already can be tried.
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return any(_opens_direct(path) for path in folder.iterdir() if path.is_file())
        return False
    return True


def _opens_direct(path: pathlib.Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True
