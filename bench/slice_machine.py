"""Memory while something runs: VRAM as the driver counts it, ten times a second, and what processes hold beside the expert records; and
memory before anything runs, on machines whose memory comes when it is used.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD_S = 0.1
GROW_PIECE, GROW_THREADS = 1 << 30, 8
GROW_LEAST = 4 << 30  # bytes that must be there before the next piece is touched, as long as
GROW_WAIT_S = 30.0  # the waits took no longer than this in all


class _NvmlMemory(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


_MEMORY_VERSION = ctypes.sizeof(_NvmlMemory) | 2 << 24  # as nvml.h makes it


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
        """Bytes in use, by whomever; without what the driver keeps for itself, which CUDA gives nobody, and more of on a larger GPU.

        NVML's own count of what is used has that in it or not, by the driver's version.
        """
        memory = self._memory()
        return int(memory.total - memory.free - memory.reserved)

    def reserved(self) -> int:
        """Bytes that the driver keeps for itself."""
        return int(self._memory().reserved)

    def _memory(self) -> _NvmlMemory:
        memory = _NvmlMemory(version=_MEMORY_VERSION)
        self._call("nvmlDeviceGetMemoryInfo_v2", self._device, ctypes.byref(memory))
        return memory


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


def card_spare(card_bytes: int, device: int) -> int:
    """VRAM that torch could have on a card of so many bytes: what nobody uses of it, and what torch holds and does not use.

    Less than nothing where the device has more in use than the card has.
    """
    import torch  # late: estimates and dry runs do without

    from services.gpu_worker.backends.exl3.slots import kept_by_torch

    free, total = torch.cuda.mem_get_info(device)
    return int(card_bytes - (total - free)) + kept_by_torch(device)


def vram_of(sampler: PeakSampler) -> dict[str, int]:
    """The peak since the last call, as fields of a row; none when the driver does not answer."""
    try:
        peak, samples = sampler.take()
    except OSError as error:
        print(f"no peak of VRAM: {error}", flush=True)
        return {}
    return {"vram_peak_mib": round(peak / 2**20), "vram_samples": samples}


def own_bytes(pids: list[int] | None = None, proc: Path = Path("/proc"), *, shares: bool = True) -> int | None:
    """Anonymous memory and files' pages of processes, shared ones by their share; shared memory is counted with its segments.

    Args:
        pids: None for this process alone.
        shares: False for whole pages without a look at each: that takes seconds for 100 GiB of shared memory.

    Returns:
        None where the kernel does not tell; where it tells no shares, whole pages.
    """
    total = 0
    for pid in pids or [os.getpid()]:
        own = _fields(proc / str(pid) / "smaps_rollup", ("Pss_Anon", "Pss_File")) if shares else None
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


def ram_extra_gib(arena_bytes: int, segments: list[Path], pids: list[int] | None = None, *, shares: bool = True) -> float | None:
    """What all of it takes beside the arena: the processes' own memory (`own_bytes`) and the shared-memory segments, less the arena."""
    own = own_bytes(pids, shares=shares)
    shared = sum(path.stat().st_blocks * 512 for path in segments if path.exists())
    return round((own + shared - arena_bytes) / 2**30, 2) if own is not None else None


def available() -> int:
    """Bytes that the system could give now."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def grow(
    wanted: int, *, read: Callable[[], int] = available, piece_bytes: int = GROW_PIECE, least: int = GROW_LEAST, wait_s: float = GROW_WAIT_S
) -> dict[str, float]:
    """Touches so much memory and gives it back, where the system does not have it yet.

    The memory of a virtual machine may come when it is used. A process that takes all it needs at once may be faster than that, and is
    ended for it: pieces wait for memory, though not for ever, since it may come no sooner than it is short.

    Args:
        wanted: bytes that should be available in the end.
        read: tells how many are.
        piece_bytes: touched at once.
        least: bytes that must be available before the next piece.
        wait_s: seconds of waiting in all.

    Returns:
        GiB available before and after, GiB that were touched, seconds, and seconds of waiting.
    """
    began, before, waited = time.monotonic(), read(), 0.0
    pieces: list[mmap.mmap] = []
    step = piece_bytes // GROW_THREADS
    with concurrent.futures.ThreadPoolExecutor(GROW_THREADS) as pool:
        while before < wanted and len(pieces) * piece_bytes < wanted:
            while read() < least and waited < wait_s:
                time.sleep(PERIOD_S)
                waited += PERIOD_S
            piece = mmap.mmap(-1, piece_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                piece.madvise(mmap.MADV_HUGEPAGE)
            pieces.append(piece)
            first = ctypes.addressof(ctypes.c_char.from_buffer(piece))
            list(pool.map(lambda start: ctypes.memset(start, 1, step), range(first, first + piece_bytes, step)))
    touched = len(pieces) * piece_bytes
    for piece in pieces:
        piece.close()
    gib = {"available_gib_before": before, "available_gib": read(), "touched_gib": touched}
    told = {name: round(size / 2**30, 1) for name, size in gib.items()}
    return told | {"seconds": round(time.monotonic() - began, 1), "waited_s": round(waited, 1)}
