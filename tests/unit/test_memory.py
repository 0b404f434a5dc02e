"""What memory a process may use, read from made-up /proc and /sys trees of both cgroup versions."""

from __future__ import annotations

from pathlib import Path

from services.common import memory

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    """Makes the files below root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def host(total_gib: int = 64, available_gib: int = 48) -> dict[str, str]:
    """A host's /proc/meminfo."""
    return {"proc/meminfo": f"MemTotal: {total_gib << 20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib << 20} kB\nHugePages_Total: 0\n"}


def test_without_a_limit_the_host_counts(tmp_path: Path) -> None:
    """No cgroup limit: the limit is the host's memory, used is what is not available."""
    root = write(tmp_path, {**host(), "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cgroup.controllers": "memory"})
    assert memory.read(root) == memory.Memory(64 * GIB, 16 * GIB, None, capped=False, host_available=48 * GIB)


def test_the_tightest_level_of_version_2_counts(tmp_path: Path) -> None:
    """A pod's limit above a container without one is the container's limit; file pages that are not in use do not count."""
    pod, box = "sys/fs/cgroup/pod", "sys/fs/cgroup/pod/box"
    files = {
        **host(),
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/cgroup.controllers": "memory",
        f"{box}/memory.max": "max\n",
        f"{pod}/memory.max": str(20 * GIB),
        f"{pod}/memory.current": str(12 * GIB),
        f"{pod}/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
        f"{pod}/memory.swap.max": "0\n",
    }
    assert memory.read(write(tmp_path, files)) == memory.Memory(20 * GIB, 10 * GIB, 0, capped=True, host_available=48 * GIB)


def test_version_1_tells_swap_as_memory_and_swap(tmp_path: Path) -> None:
    """memsw is the sum of both; a container that sees the host's path reads its own folder at the mount."""
    base = "sys/fs/cgroup/memory"
    files = {
        **host(),
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n",
        f"{base}/memory.limit_in_bytes": str(8 * GIB),
        f"{base}/memory.memsw.limit_in_bytes": str(16 * GIB),
        f"{base}/memory.usage_in_bytes": str(5 * GIB),
        f"{base}/memory.stat": f"total_inactive_file {GIB}\n",
    }
    assert memory.read(write(tmp_path, files)) == memory.Memory(8 * GIB, 4 * GIB, 8 * GIB, capped=True, host_available=48 * GIB)


def test_a_limit_above_the_host_is_none(tmp_path: Path) -> None:
    """Version 1 writes an unlimited group as a huge number, and a limit beyond the host's memory caps nothing."""
    base = "sys/fs/cgroup/memory"
    files = {**host(), "proc/self/cgroup": "4:memory:/\n", f"{base}/memory.limit_in_bytes": "9223372036854771712"}
    assert not memory.read(write(tmp_path, files)).capped
    files[f"{base}/memory.limit_in_bytes"] = str(100 * GIB)
    assert not memory.read(write(tmp_path, files)).capped


def test_the_collector_names_the_service_and_its_shared_memory(tmp_path: Path) -> None:
    """Two services' families can stand in one text; a service without segments tells nothing of shared memory."""
    worker = {family.name: family.samples[0] for family in memory.MemoryCollector("gpu_worker", str(tmp_path)).collect()}
    assert set(worker) == {"glm53_memory_limit_bytes", "glm53_memory_used_bytes", "glm53_shm_size_bytes", "glm53_shm_free_bytes"}
    assert 0 < worker["glm53_memory_used_bytes"].value < worker["glm53_memory_limit_bytes"].value
    assert worker["glm53_shm_size_bytes"].labels == {"service": "gpu_worker"}
    assert len(list(memory.MemoryCollector("cpu_expert").collect())) == 2
    gateway = [family.name for family in memory.MemoryCollector("gateway", prefix="glm53_gateway").collect()]
    assert not set(gateway) & set(worker), "a gateway shows a worker's families beside its own"
