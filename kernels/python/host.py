"""The machine as the kernel threads see it: CPUs to pin to, memory nodes, and huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from kernels.python import lib

_MOST_CPUS = 4096
_SHARED_HUGE = pathlib.Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_NODES = pathlib.Path("/sys/devices/system/node")


class NoSuchNodeError(ValueError):
    """This host has no memory node of that number; the text has those that there are."""


@functools.cache
def _signatures() -> ctypes.CDLL:
    library = lib.load()
    library.moe_last_error.argtypes = []
    library.moe_last_error.restype = ctypes.c_char_p
    library.moe_physical_cpus.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    library.moe_physical_cpus.restype = ctypes.c_int
    library.moe_hot_ns.argtypes = [ctypes.c_uint32] * 2
    library.moe_hot_ns.restype = ctypes.c_int64
    library.moe_hot_ns_among.argtypes = [ctypes.c_uint32] * 3
    library.moe_hot_ns_among.restype = ctypes.c_int64
    library.moe_quota_cpus.argtypes = [ctypes.c_char_p]
    library.moe_quota_cpus.restype = ctypes.c_uint32
    library.moe_own_quota_cpus.argtypes = [ctypes.c_char_p]
    library.moe_own_quota_cpus.restype = ctypes.c_uint32
    library.moe_prefer_node.argtypes = [ctypes.c_int32]
    library.moe_prefer_node.restype = ctypes.c_int
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


def hot_ns(threads: int, pinned: int = 0, usable: int | None = None) -> int:
    """How long a thread of a pool of so many polls for the next job before it sleeps, in nanoseconds.

    pinned: CPUs that the threads but the first are pinned to, 0 for none; usable: CPUs that may be used, None for this thread's own.
    """
    if usable is None:
        return int(_signatures().moe_hot_ns(threads, pinned))
    return int(_signatures().moe_hot_ns_among(threads, pinned, usable))


def quota_cpus(cpu_max: str) -> int:
    """CPUs' worth of time, rounded down, that the text of a control group's cpu.max grants; 2**32 - 1: it sets no limit."""
    return int(_signatures().moe_quota_cpus(cpu_max.encode()))


def own_quota_cpus(root: str = "") -> int:
    """The same of this process's control group and of those around it, whichever grants least. root: of the file system."""
    return int(_signatures().moe_own_quota_cpus(os.fsencode(root)))


def parse_cpus(text: str) -> list[int]:
    """[0, 1, 2, 16] of "0-2,16". Raises ValueError naming the part that is neither a number nor a range, or a number named twice."""
    cpus: list[int] = []
    for part in filter(None, (item.strip() for item in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f"{part!r} is neither a CPU number nor a range like 0-7")
        cpus.extend(range(int(first), int(last if dash else first) + 1))
    if len(set(cpus)) != len(cpus):
        raise ValueError("a CPU is named twice")
    return cpus


def numa_nodes() -> list[int]:
    """The nodes that have memory, ascending; [0] where the system does not tell."""
    try:
        return parse_cpus((_NODES / "has_memory").read_text()) or [0]
    except (OSError, ValueError):
        return [0]


def node_cpus(node: int) -> set[int]:
    """The CPUs of a node; empty for a node of memory alone. Raises OSError when there is no such node."""
    return set(parse_cpus((_NODES / f"node{node}" / "cpulist").read_text()))


def prefer_node(node: int | None) -> None:
    """From now on the calling thread's memory comes from this node while it has any; None: from where the thread runs.

    Threads that are started later inherit it. Raises OSError when the system refuses.
    """
    library = _signatures()
    if library.moe_prefer_node(-1 if node is None else node) != 0:
        raise OSError(library.moe_last_error().decode())


@contextlib.contextmanager
def memory_on(node: int) -> Iterator[str]:
    """Memory that this thread takes inside the block comes from this node while it has any; -1: from anywhere. Yields what came of it.

    A host with one node, and a system that refuses, are told in the yielded text and change nothing else.
    Raises NoSuchNodeError.
    """
    nodes = numa_nodes()
    if node >= 0 and node not in nodes:
        raise NoSuchNodeError(f"this host has the memory nodes {nodes}")
    if node < 0 or len(nodes) == 1:
        yield "" if node < 0 else "this host has one memory node, so there is nothing to place"
        return
    try:
        prefer_node(node)
    except OSError as error:
        yield str(error)
        return
    try:
        yield f"memory from node {node}"
    finally:
        prefer_node(None)


def advise_huge(memory: npt.NDArray[Any]) -> bool:
    """Asks for 2 MiB pages in an array's memory. False when the system refuses; whether it gave any says `huge_bytes`."""
    return bool(_signatures().moe_advise_huge(memory.ctypes.data, memory.nbytes) == 0)


def shared_huge_policy() -> str:
    """When the system gives shared memory 2 MiB pages: "never", "advise" (to who asks), "always", ...; "" where it does not tell."""
    try:
        text = _SHARED_HUGE.read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def huge_bytes(memory: npt.NDArray[Any]) -> int:
    """Bytes in huge pages of the mappings that hold this array. Raises OSError when the system does not tell."""
    library = _signatures()
    count = int(library.moe_huge_bytes(memory.ctypes.data, memory.nbytes))
    if count < 0:
        raise OSError(library.moe_last_error().decode())
    return count
