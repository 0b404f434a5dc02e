"""What memory this process may use and what is used of it: its cgroup's limit where there is one, else the host's memory."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_ROOT = pathlib.Path("/")
# cgroup v1 writes "no limit" as the largest multiple of a page; no machine has a tenth of that.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        limit: what may be used: the tightest limit of the process's cgroups, else the host's memory.
        used: what cannot be dropped of it: without file pages that are not in use; shared memory counts.
        swap_limit: swap beyond `limit` that the cgroup may take; None when nothing limits it or there is no cgroup limit.
        capped: True when a cgroup sets the limit.
        host_available: what the host could give now.
    """

    limit: int
    used: int
    swap_limit: int | None
    capped: bool
    host_available: int


def read(root: pathlib.Path = _ROOT) -> Memory:
    """The process's memory now.

    Args:
        root: where /proc and /sys are; another one in tests.

    Raises:
        OSError: /proc/meminfo cannot be read.
    """
    host = _host(root)
    total, available = host["MemTotal"], host["MemAvailable"]
    tightest = min(_levels(root), key=lambda level: level.limit, default=None)
    if tightest is None or tightest.limit >= total:
        return Memory(total, total - available, None, capped=False, host_available=available)
    return Memory(tightest.limit, tightest.used, tightest.swap_limit, capped=True, host_available=available)


@dataclass(frozen=True)
class _Level:
    limit: int
    used: int
    swap_limit: int | None


def _host(root: pathlib.Path) -> dict[str, int]:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _levels(root: pathlib.Path) -> Iterator[_Level]:
    """Every limit on the way from the process's memory cgroup to the root."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        number, controllers, path = entry.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _walk(root / "sys/fs/cgroup/memory", path, _level_v1)
        elif number == "0" and (root / "sys/fs/cgroup/cgroup.controllers").exists():
            yield from _walk(root / "sys/fs/cgroup", path, _level_v2)


def _walk(mount: pathlib.Path, path: str, read_level: Callable[[pathlib.Path], _Level | None]) -> Iterator[_Level]:
    folder = mount / path.lstrip("/")
    # A container whose cgroup namespace is the host's sees its own folder as the mount itself.
    folder = folder if folder.is_dir() else mount
    while True:
        level = read_level(folder)
        if level is not None:
            yield level
        if folder == mount:
            return
        folder = folder.parent


def _level_v1(folder: pathlib.Path) -> _Level | None:
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is None or limit >= _NO_LIMIT:
        return None
    both = _number(folder / "memory.memsw.limit_in_bytes")
    swap = max(0, both - limit) if both is not None and both < _NO_LIMIT else None
    return _Level(limit, _used(folder, "memory.usage_in_bytes", "total_inactive_file"), swap)


def _level_v2(folder: pathlib.Path) -> _Level | None:
    limit = _number(folder / "memory.max")
    if limit is None:
        return None
    return _Level(limit, _used(folder, "memory.current", "inactive_file"), _number(folder / "memory.swap.max"))


def _used(folder: pathlib.Path, name: str, droppable: str) -> int:
    used = _number(folder / name) or 0
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return used
    return max(0, used - int(stat.get(droppable, 0)))


def _number(path: pathlib.Path) -> int | None:
    """The file's number; None when there is none, or it says max."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


class MemoryCollector(Collector):
    """Prometheus view of the process's memory and of the file system of its shared memory.

    Args:
        service: label of all families; a gateway may pass on another service's text.
        shm_dir: where the shared-memory segments live; empty for a service that makes none.
        prefix: of the names; a gateway has its own, because it may show a worker's beside them.
    """

    def __init__(self, service: str, shm_dir: str = "", prefix: str = "glm53") -> None:
        self._service = service
        self._prefix = prefix
        self._shm_dir = shm_dir

    def collect(self) -> Iterator[Metric]:
        """One reading; what the system does not tell is left out."""
        try:
            memory = read()
        except OSError:
            return
        values = {
            f"{self._prefix}_memory_limit_bytes": ("What the process's cgroup, else the host, has of memory.", memory.limit),
            f"{self._prefix}_memory_used_bytes": ("Of that, in use and not to be dropped; shared memory counts.", memory.used),
        }
        with contextlib.suppress(OSError):
            shm = os.statvfs(self._shm_dir)
            values["glm53_shm_size_bytes"] = ("Size of the file system of shared memory.", shm.f_blocks * shm.f_frsize)
            values["glm53_shm_free_bytes"] = ("Of that, free.", shm.f_bavail * shm.f_frsize)
        for name, (text, value) in values.items():
            family = GaugeMetricFamily(name, text, labels=["service"])
            family.add_metric([self._service], value)
            yield family
