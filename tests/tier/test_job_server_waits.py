"""How cpu_expert waits, and that its page table is ready: neither costs anything while nobody asks."""

from __future__ import annotations

import os
import pathlib
import re
import resource
import tempfile
import time

import numpy as np
import pytest

from kernels.python import host
from kernels.python.job_server import JobServer
from tests.shm.lane import DONE, Job, Lane
from tests.tier.harness import EXPERTS, HIDDEN, LAYERS, Stage, wait_until


def mapped(path: str) -> list[int]:
    """Bytes in the page table of each mapping of a file, in the order of its addresses."""
    found, ours = [], False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(path)
        elif ours and line.startswith("Rss:"):
            found.append(int(line.split()[1]) * 1024)
    return found


def test_an_idle_server_does_not_poll(made: Stage) -> None:
    """It polls after a job alone: rounds of a server that may poll for as long as it likes cost next to nothing."""
    server = JobServer(made.ctl_path, made.arena_path, spin_us=100_000)
    try:
        server.run(50)  # acknowledges the epoch
        time.sleep(0.11)
        before = time.thread_time()
        for _ in range(6):
            server.run(50)
        assert time.thread_time() - before < 0.1
    finally:
        server.close()


@pytest.mark.parametrize(("spin_us", "sleeps"), [(100_000, False), (0, True)])
def test_a_server_stays_awake_after_a_job(made: Stage, spin_us: int, sleeps: bool) -> None:
    """The next one is near then: it polls for as long as it may, and sleeps where it may not."""
    server = JobServer(made.ctl_path, made.arena_path, spin_us=spin_us, beat_thread=False)
    lane = Lane(made.region)
    try:
        server.beat(1000)
        server.run(0)
        assert lane.tick(1000)
        x = np.ones((1, HIDDEN), np.float32)
        seq = lane.submit(Job(0, x, [(0, made.arena.generation_of(0, 0), [0])]), 1000)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        server.run(30)
        slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > before
        assert lane.poll(seq, 1000, 1).poll == DONE
    finally:
        lane.close()
        server.close()
    assert slept == sleeps


def test_the_page_table_holds_every_record_before_one_is_asked_for(made: Stage) -> None:
    """With huge_pages all records are entered, whatever the size of their pages; without it none is."""
    server = JobServer(made.ctl_path, made.arena_path)
    try:
        assert server.stats()["mapped_bytes"] == 0
        without = sorted(mapped(made.arena_path))
    finally:
        server.close()
    records = LAYERS * EXPERTS * (made.arena.record(0, 1).ctypes.data - made.arena.record(0, 0).ctypes.data)
    server = JobServer(made.ctl_path, made.arena_path, huge_pages=True, threads=2)
    try:
        assert wait_until(lambda: server.stats()["mapped_bytes"] == records)
        whole = sorted(mapped(made.arena_path))
    finally:
        server.close()
    assert len(without) == len(whole) == 2  # the maker's own mapping, and the server's
    assert without[-1] < records <= whole[-1]


def test_threads_poll_for_long_only_where_there_are_cpus_to_spare() -> None:
    """Two CPUs beside the pool's are enough; otherwise a poll would take them from who computes."""
    cpus = len(os.sched_getaffinity(0))
    expected = [4_000_000 if threads + 2 <= cpus else 20_000 for threads in range(1, cpus + 2)]
    assert [host.hot_ns(threads) for threads in range(1, cpus + 2)] == expected
    assert [host.hot_ns(threads, usable=cpus) for threads in range(1, cpus + 2)] == expected


@pytest.mark.parametrize(
    ("threads", "pinned", "long"),
    [(6, 0, True), (7, 0, False), (6, 5, True), (6, 4, False), (3, 1, False), (2, 1, True), (2**32 - 1, 0, False)],
)
def test_threads_that_share_a_cpu_do_not_poll_for_long(threads: int, pinned: int, long: bool) -> None:
    """However many CPUs lie idle beside those that the threads are pinned to, one would poll while the other has work. Eight are usable."""
    assert host.hot_ns(threads, pinned, usable=8) == (4_000_000 if long else 20_000)


@pytest.mark.parametrize(
    ("cpu_max", "cpus"),
    [("150000 100000\n", 1), ("1600000 100000\n", 16), ("50000 100000", 0), ("max 100000\n", 2**32 - 1), ("", 2**32 - 1)],
)
def test_a_quota_of_cpu_time_counts_as_so_many_cpus(cpu_max: str, cpus: int) -> None:
    """What a control group grants, and the two ways of granting everything."""
    assert host.quota_cpus(cpu_max) == cpus


def test_the_least_quota_of_a_group_and_those_around_it_counts(tmp_path: pathlib.Path) -> None:
    """Version 2 and 1, below the mount or the mount itself; without any there is no limit."""
    unlimited = 2**32 - 1

    def found(groups: str, **files: str) -> int:
        root = pathlib.Path(tempfile.mkdtemp(dir=tmp_path))
        for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return host.own_quota_cpus(str(root))

    inside = "0::/a.slice/b.service\n"
    assert found(inside, **{"a.slice/b.service/cpu.max": "300000 100000\n"}) == 3
    assert found(inside, **{"a.slice/b.service/cpu.max": "max 100000\n", "a.slice/cpu.max": "200000 100000\n"}) == 2
    assert found(inside, **{"a.slice/b.service/cpu.max": "max 100000\n", "cpu.max": "400000 100000\n"}) == 4
    assert found("0::/\n", **{"cpu.max": "500000 100000\n"}) == 5
    assert found(inside, **{"cpu.max": "600000 100000\n"}) == 6
    assert found(inside) == unlimited
    old = "5:memory:/box\n3:cpu,cpuacct:/box\n0::/\n"
    quota = {"cpu/box/cpu.cfs_quota_us": "200000\n", "cpu/box/cpu.cfs_period_us": "100000\n"}
    assert found(old, **quota) == 2
    assert found(old, **{name.replace("/box", ""): text for name, text in quota.items()}) == 2
    assert found(old, **{**quota, "cpu/box/cpu.cfs_quota_us": "-1\n"}) == unlimited
    assert found("2:cpuset,cpuacct:/box\n", **quota) == unlimited
    assert found("nonsense\n3:cpu\n0::") == unlimited
    assert found("") == unlimited
