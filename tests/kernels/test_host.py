"""CPUs for the kernel threads, and huge pages."""

from __future__ import annotations

import os
import pathlib
import re
import threading

import numpy as np
import pytest

from kernels.python import host


def cores_of(cpus: list[int]) -> list[str]:
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return [pathlib.Path(topology.format(cpu)).read_text().strip() for cpu in cpus]


def test_one_cpu_of_each_core_is_chosen() -> None:
    """No two of the CPUs share a core, all are allowed, and all cores are covered but the two that are left free on a large machine."""
    allowed = sorted(os.sched_getaffinity(0))
    chosen = host.physical_cpus()
    cores = set(cores_of(allowed))
    assert set(chosen) <= set(allowed)
    assert chosen == sorted(chosen)
    assert len(set(cores_of(chosen))) == len(chosen) == (len(cores) - 2 if len(cores) > 4 else len(cores))


def test_the_mask_of_the_calling_thread_counts() -> None:
    """A thread that may use one CPU only gets that one."""
    found: list[list[int]] = []
    last = max(os.sched_getaffinity(0))

    def confined() -> None:
        os.sched_setaffinity(0, {last})  # of this thread alone
        found.append(host.physical_cpus())

    thread = threading.Thread(target=confined)
    thread.start()
    thread.join(10)
    assert found == [[last]]


def huge_in_smaps(start: int, end: int) -> int:
    """Bytes of anonymous huge pages in the mappings that overlap these addresses, as the system tells them."""
    total, overlaps = 0, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            overlaps = int(mapping[1], 16) < end and start < int(mapping[2], 16)
        elif overlaps and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return total


def test_huge_pages_are_reported_as_the_system_gives_them() -> None:
    """After the advice and a first touch, the bytes in huge pages are those of /proc/self/smaps, however many the system has given."""
    memory = np.empty(16 << 20, np.uint8)
    host.advise_huge(memory)
    memory[:] = 1
    start = memory.ctypes.data
    for _ in range(20):  # the system may join pages between two looks
        given = host.huge_bytes(memory)
        if given == huge_in_smaps(start, start + memory.nbytes):
            break
    else:
        pytest.fail("what is reported is not what the system says, twenty times in a row")
    assert given % (2 << 20) == 0
    assert host.huge_bytes(np.zeros(64, np.uint8)) >= 0


def test_the_policy_for_shared_memory_is_the_systems(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word in brackets is the one in force; a system that does not tell gives none."""
    (tmp_path / "shmem_enabled").write_text("always within_size [advise] never deny force\n")
    monkeypatch.setattr(host, "_SHARED_HUGE", tmp_path / "shmem_enabled")
    assert host.shared_huge_policy() == "advise"
    monkeypatch.setattr(host, "_SHARED_HUGE", tmp_path / "nothing")
    assert host.shared_huge_policy() == ""


def test_memory_can_be_asked_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node: nothing to place, which is told. Several: asked of that one, of none again afterwards. Another one is refused."""
    node = host.numa_nodes()[0]
    host.prefer_node(node)
    host.prefer_node(None)
    with pytest.raises(OSError, match="node 5000"):
        host.prefer_node(5000)
    asked: list[int | None] = []
    monkeypatch.setattr(host, "prefer_node", asked.append)
    monkeypatch.setattr(host, "numa_nodes", lambda: [0])
    with host.memory_on(0) as told:
        assert "one memory node" in told
    with host.memory_on(-1) as told:
        assert told == ""
    assert asked == []
    monkeypatch.setattr(host, "numa_nodes", lambda: [0, 1])
    with host.memory_on(1) as told:
        assert (told, asked) == ("memory from node 1", [1])
    assert asked == [1, None]
    with pytest.raises(host.NoSuchNodeError, match=r"\[0, 1\]"), host.memory_on(2):
        pass


def test_memory_without_a_whole_page_needs_no_advice() -> None:
    """A small array is accepted and nothing happens."""
    assert host.advise_huge(np.zeros(100, np.uint8))
