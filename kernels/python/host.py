"""The machine as the kernel threads see it: CPUs to pin to, and huge pages."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy.typing as npt

from kernels.python import expert, lib

_MOST_CPUS = 4096


@functools.cache
def _signatures() -> ctypes.CDLL:
    expert.variants()  # declares moe_last_error
    library = lib.load()
    library.moe_physical_cpus.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    library.moe_physical_cpus.restype = ctypes.c_int
    library.moe_advise_huge.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.moe_advise_huge.restype = ctypes.c_int
    library.moe_huge_bytes.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.moe_huge_bytes.restype = ctypes.c_int64
    return library


def physical_cpus() -> list[int]:
    """One logical CPU of each physical core in this thread's CPU mask, ascending; the first two are left out when there are more than four.

    Raises OSError when the mask cannot be read.
    """
    cpus = (ctypes.c_int32 * _MOST_CPUS)()
    library = _signatures()
    count = library.moe_physical_cpus(cpus, _MOST_CPUS)
    if count < 0:
        raise OSError(library.moe_last_error().decode())
    return list(cpus[: min(count, _MOST_CPUS)])


def advise_huge(memory: npt.NDArray[Any]) -> bool:
    """Asks for 2 MiB pages in an array's memory. False when the system refuses; whether it gave any says `huge_bytes`."""
    return bool(_signatures().moe_advise_huge(memory.ctypes.data, memory.nbytes) == 0)


def huge_bytes(memory: npt.NDArray[Any]) -> int:
    """Bytes in huge pages of the mappings that hold this array. Raises OSError when the system does not tell."""
    library = _signatures()
    count = int(library.moe_huge_bytes(memory.ctypes.data, memory.nbytes))
    if count < 0:
        raise OSError(library.moe_last_error().decode())
    return count
