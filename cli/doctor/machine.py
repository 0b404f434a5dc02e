"""The machine as the checks see it: files below a root, and programs with a time limit. Tests hand in another one."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.common import memory

PROGRAM_S = 5.0

Runner = Callable[[Sequence[str]], str | None]


def run_program(command: Sequence[str]) -> str | None:
    """Standard output of a program; None when it is not there, fails, or takes longer than PROGRAM_S."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _affinity() -> set[int]:
    return os.sched_getaffinity(0)


def _memlock() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return soft


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. Memory in bytes; link widths in lanes, 0 where unknown."""

    uuid: str
    name: str
    driver: str
    memory: int
    memory_used: int
    link_width: int
    link_width_max: int


@dataclass(frozen=True)
class Machine:
    """Where checks look.

    Attributes:
        root: of the file system.
        run: runs a program.
        affinity: CPUs that this process may use.
        memlock: bytes that this process may lock, -1 for any number.
    """

    root: pathlib.Path = pathlib.Path("/")
    run: Runner = run_program
    affinity: Callable[[], set[int]] = field(default=_affinity)
    memlock: Callable[[], int] = field(default=_memlock)

    def read(self, path: str) -> str:
        """A file's text, "" when it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return ""

    def memory(self) -> memory.Memory:
        """Memory of this process's cgroup or host."""
        return memory.read(self.root)

    def gpus(self) -> list[Gpu] | None:
        """The GPUs that this process sees; None when nvidia-smi cannot tell."""
        fields = "uuid,name,driver_version,memory.total,memory.used,pcie.link.width.current,pcie.link.width.max"
        text = self.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
        if text is None:
            return None
        found = []
        for line in filter(None, map(str.strip, text.splitlines())):
            uuid, name, driver, total, used, width, most = (part.strip() for part in line.split(","))
            found.append(Gpu(uuid, name, driver, _number(total) << 20, _number(used) << 20, _number(width), _number(most)))
        return found

    def compute_capability(self, uuid: str) -> str:
        """A GPU's compute capability, such as 8.6; empty when nvidia-smi is too old to tell."""
        text = self.run(["nvidia-smi", f"--id={uuid}", "--query-gpu=compute_cap", "--format=csv,noheader"]) or ""
        return text.strip()

    def gpu_nodes(self) -> list[str]:
        """Names of the GPUs' device files, which a container has even where nvidia-smi is missing."""
        return sorted(path.name for path in (self.root / "dev").glob("nvidia[0-9]*"))

    def cpu_flags(self) -> set[str]:
        """Features of the first CPU, as Linux names them; empty when it does not say."""
        for line in self.read("proc/cpuinfo").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return set(value.split())
        return set()

    def cpu_quota(self) -> float | None:
        """CPUs' worth of time that the cgroup may use; None when nothing limits it."""
        entries = [line.split(":", 2) for line in self.read("proc/self/cgroup").splitlines() if line.count(":") >= 2]
        for number, controllers, path in entries:
            folder = path.strip("/")
            if "cpu" in controllers.split(","):
                quota, period = self._first(("sys/fs/cgroup/cpu", folder), "cpu.cfs_quota_us"), 0
                period = self._first(("sys/fs/cgroup/cpu", folder), "cpu.cfs_period_us")
            elif number == "0" and controllers == "":
                parts = (self._text(("sys/fs/cgroup", folder), "cpu.max") or "max 0").split()
                quota, period = _number(parts[0]), _number(parts[1])
            else:
                continue
            if quota > 0 and period > 0:
                return quota / period
        return None

    def _first(self, where: tuple[str, str], name: str) -> int:
        return _number(self._text(where, name))

    def _text(self, where: tuple[str, str], name: str) -> str:
        """A file of the process's cgroup, which a container may see as the mount itself."""
        mount, folder = where
        return self.read(f"{mount}/{folder}/{name}") or self.read(f"{mount}/{name}")


def _number(text: str) -> int:
    """The number, 0 where there is none ("[N/A]", "max")."""
    try:
        return int(text)
    except ValueError:
        return 0
