"""CPUs for the kernel threads, and huge pages."""

from __future__ import annotations

import os
import pathlib
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


def times_refused() -> int:
    """How often this machine's kernel gave small pages where huge ones were asked for."""
    counts = dict(line.split() for line in pathlib.Path("/proc/vmstat").read_text().splitlines())
    return int(counts.get("thp_fault_fallback", 0))


def test_huge_pages_are_reported_as_the_system_gives_them() -> None:
    """After the advice and a first touch, the bytes in huge pages are a multiple of 2 MiB that the array's mapping can hold."""
    memory = np.empty(16 << 20, np.uint8)
    accepted = host.advise_huge(memory)
    refused = times_refused()
    memory[:] = 1
    given = host.huge_bytes(memory)
    assert given % (2 << 20) == 0
    assert given >= 0
    enabled = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if accepted and enabled.exists() and "[never]" not in enabled.read_text():
        # The kernel may have no 2 MiB pages left at the moment; then it says so.
        assert given >= 8 << 20 or times_refused() > refused
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
