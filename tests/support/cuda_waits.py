"""The counter of waiting driver calls (native/cuda_waits.c) from Python: built here, preloaded into a process, asked in it."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

NATIVE = Path(__file__).resolve().parent / "native"
KINDS = ("waits", "memory", "copies", "code")


def build(folder: Path, name: str = "cuda_waits") -> Path:
    """Compiles a file of native/ into a shared library."""
    library = folder / f"lib{name}.so"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
    subprocess.run(["cc", *flags, "-o", str(library), str(NATIVE / f"{name}.c"), "-ldl", "-pthread"], check=True)
    return library


class Waits:
    """The library that this process was started with.

    Raises:
        RuntimeError: it was not.
    """

    def __init__(self) -> None:
        path = os.environ.get("LD_PRELOAD", "").split(":")[0]
        if not path.endswith("libcuda_waits.so"):
            raise RuntimeError("LD_PRELOAD does not name libcuda_waits.so")
        self._library = ctypes.CDLL(path)
        self._library.cuda_waits_count.restype = ctypes.c_long
        self._library.cuda_waits_call.restype = ctypes.c_char_p

    @property
    def hooked(self) -> int:
        """Lookups of counted functions that were given the counter."""
        return int(self._library.cuda_waits_hooked())

    def open(self) -> None:
        """Counts from now on; this thread's calls apart from others'."""
        self._library.cuda_waits_open()

    def close(self) -> dict[str, int]:
        """Stops, and gives this thread's counts by kind."""
        self._library.cuda_waits_close()
        return self.counts(others=False)

    def counts(self, *, others: bool) -> dict[str, int]:
        """Counts of the last window by kind."""
        return {kind: int(self._library.cuda_waits_count(int(others), i)) for i, kind in enumerate(KINDS)}

    def calls(self) -> list[str]:
        """Names of this thread's counted calls, in order."""
        names: list[str] = []
        while (name := self._library.cuda_waits_call(len(names))) is not None:
            names.append(name.decode())
        return names
