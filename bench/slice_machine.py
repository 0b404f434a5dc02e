"""Memory while something runs: VRAM as the driver counts it, ten times a second, and what processes hold beside the expert records."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD_S = 0.1


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Nvml:
    """The driver's own count of a device's memory.

    Args:
        index: the device's.
        library: another one in tests.

    Raises:
        OSError: there is no such library, or it fails.
    """

    def __init__(self, index: int = 0, library: str = "libnvidia-ml.so.1") -> None:
        self._nvml = ctypes.CDLL(library)
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._device))

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._nvml, name)(*args)
        if code != 0:
            raise OSError(f"{name} gives {code}")

    def used(self) -> int:
        """Bytes in use, by whomever."""
        memory = _NvmlMemory()
        self._call("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(memory))
        return int(memory.used)


class PeakSampler:
    """The largest of many readings, taken by a thread.

    Args:
        read: gives bytes.
    """

    def __init__(self, read: object, period_s: float = PERIOD_S) -> None:
        assert callable(read)
        self._read, self._period_s = read, period_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._peak, self._samples = 0, 0
        self._thread = threading.Thread(target=self._run, name="peak", daemon=True)

    def take(self) -> tuple[int, int]:
        """(peak, readings) since the last call."""
        now = int(self._read())
        with self._lock:
            peak, samples = max(self._peak, now), self._samples + 1
            self._peak, self._samples = 0, 0
        return peak, samples

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                value = int(self._read())
            except OSError:
                continue  # `take` reads too, and tells it
            with self._lock:
                self._peak, self._samples = max(self._peak, value), self._samples + 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(5)


def vram_of(sampler: PeakSampler) -> dict[str, int]:
    """The peak since the last call, as fields of a row; none when the driver does not answer."""
    try:
        peak, samples = sampler.take()
    except OSError as error:
        print(f"no peak of VRAM: {error}", flush=True)
        return {}
    return {"vram_peak_mib": round(peak / 2**20), "vram_samples": samples}


def own_bytes(pids: list[int] | None = None, proc: Path = Path("/proc")) -> int | None:
    """Anonymous memory and files' pages of processes, shared ones by their share; shared memory is counted with its segments.

    Args:
        pids: None for this process alone.

    Returns:
        None where the kernel does not tell; where it tells no shares, whole pages.
    """
    total = 0
    for pid in pids or [os.getpid()]:
        own = _fields(proc / str(pid) / "smaps_rollup", ("Pss_Anon", "Pss_File"))
        if own is None:
            own = _fields(proc / str(pid) / "status", ("RssAnon", "RssFile"))
        if own is None:
            return None
        total += own
    return total


def _fields(path: Path, names: tuple[str, ...]) -> int | None:
    """Bytes of these lines together; None when one is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if name in names}
    return sum(found.values()) if len(found) == len(names) else None


def ram_extra_gib(arena_bytes: int, segments: list[Path], pids: list[int] | None = None) -> float | None:
    """What all of it takes beside the arena: the processes' own memory and the shared-memory segments, less the arena."""
    own = own_bytes(pids)
    shared = sum(path.stat().st_blocks * 512 for path in segments if path.exists())
    return round((own + shared - arena_bytes) / 2**30, 2) if own is not None else None
