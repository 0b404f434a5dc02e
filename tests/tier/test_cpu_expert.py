"""The cpu_expert service: settings, exit codes, waiting and refusing."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest

from kernels.python import _layout, host
from kernels.python.expert import variants
from kernels.python.job_server import JobServer
from services.common.errors import ConfigError, PeerError
from services.common.lifecycle import ExitCode
from services.cpu_expert import placement, worker
from services.cpu_expert.settings import CpuExpertSettings, parse_cpus
from services.cpu_expert.worker import ExpertWorker
from tests.shm.test_region import patch
from tests.tier.harness import Stage, cpu_expert

ROOT = pathlib.Path(__file__).parents[2]


class NoSignal:
    """Never told to stop; counts the waits."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.waits = 0
        self._stop_after = stop_after

    def wait(self, timeout_s: float) -> object | None:
        self.waits += 1
        return "SIGTERM" if self._stop_after is not None and self.waits >= self._stop_after else None


def settings_for(made: Stage, **overrides: object) -> CpuExpertSettings:
    return CpuExpertSettings.load({}, instance=made.instance, shm_dir=str(made.shm_dir), **overrides)


def run_service(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cpu_expert"]
    return subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("text", "cpus"), [("", []), ("3", [3]), ("0-2,16", [0, 1, 2, 16]), (" 1 , 2 ", [1, 2])])
def test_cpu_lists_are_read(text: str, cpus: list[int]) -> None:
    """Numbers and ranges, in the order given."""
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize(("text", "part"), [("a", "'a'"), ("3-1", "'3-1'"), ("1,,x-2", "'x-2'"), ("1,1", "named twice"), ("-1", "'-1'")])
def test_bad_cpu_lists_are_refused(text: str, part: str) -> None:
    """The part that cannot be read is named, under the setting's name."""
    with pytest.raises(ConfigError, match=part) as caught:
        CpuExpertSettings.load({"GLM53_CT_CPUS": text})
    assert caught.value.param == "GLM53_CT_CPUS"


BIG, SMALL = 9 << 20, 40960


def machine(monkeypatch: pytest.MonkeyPatch, mask: set[int], cores: list[int]) -> None:
    """A process that may use `mask` on a host whose list of physical cores for the kernel is `cores`."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mask)
    monkeypatch.setattr(host, "physical_cpus", lambda: cores)


@pytest.mark.parametrize(
    ("env", "record_bytes", "threads", "cpus"),
    [
        ({}, BIG, 6, (2, 3, 4, 5, 6, 7)),
        ({}, SMALL, 1, ()),
        ({"GLM53_CT_THREADS": "3"}, BIG, 3, (2, 3, 4)),
        ({"GLM53_CT_THREADS": "9"}, BIG, 9, (2, 3, 4, 5, 6, 7)),
        ({"GLM53_CT_CPUS": "none"}, BIG, 6, ()),
        ({"GLM53_CT_CPUS": "1,9-11"}, BIG, 4, (1, 9, 10, 11)),
        ({"GLM53_CT_CPUS": "1,9-11"}, SMALL, 4, (1, 9, 10, 11)),
        ({"GLM53_CT_CPUS": "1,9-11", "GLM53_CT_THREADS": "2"}, BIG, 2, (1, 9)),
    ],
)
def test_threads_are_placed_on_a_large_machine(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], record_bytes: int, threads: int, cpus: tuple[int, ...]
) -> None:
    """Eight cores with two logical CPUs each: one CPU of each core but two for big experts; what is given wins; small experts float."""
    machine(monkeypatch, set(range(16)), [2, 3, 4, 5, 6, 7])
    where = placement.place(CpuExpertSettings.load(env), record_bytes)
    assert (where.threads, where.cpus) == (threads, cpus)
    assert where.own_cpu == (cpus[0] if cpus else None)
    assert where.other_cpus == (cpus[1:] or cpus)


@pytest.mark.parametrize(("mask", "cores", "threads"), [({0}, [0], 1), ({0, 1}, [0, 1], 1), (set(range(8)), [0, 1, 2, 3], 2)])
def test_few_cores_are_shared_with_the_other_processes(
    monkeypatch: pytest.MonkeyPatch, mask: set[int], cores: list[int], threads: int
) -> None:
    """Up to four cores, nothing is pinned and half of the cores compute, so that gateway and gpu_worker find room."""
    machine(monkeypatch, mask, cores)
    where = placement.place(CpuExpertSettings.load({}), BIG)
    assert (where.threads, where.cpus) == (threads, ())


def test_an_absent_memory_node_is_refused_and_a_single_one_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that the host lacks is named with those that it has; with one node there is nothing to place, which the log says."""
    with pytest.raises(ConfigError, match=r"GLM53_CT_NUMA_NODE=999: this host has the memory nodes \[0") as caught:
        placement.check(CpuExpertSettings.load({"GLM53_CT_NUMA_NODE": "999"}))
    assert caught.value.param == "GLM53_CT_NUMA_NODE"
    monkeypatch.setattr(host, "numa_nodes", lambda: [0])
    settings = CpuExpertSettings.load({"GLM53_CT_NUMA_NODE": "0"})
    caplog.set_level("INFO")
    placement.check(settings)
    assert placement.settle_on_node(settings) == os.sched_getaffinity(0)
    assert "one memory node" in caplog.text


def test_a_node_confines_the_threads_that_are_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with several nodes only the node's CPUs are used and memory is asked of it; explicit CPUs stay as they are."""
    preferred: list[int | None] = []
    masks: list[set[int]] = []
    monkeypatch.setattr(host, "numa_nodes", lambda: [0, 1])
    monkeypatch.setattr(host, "node_cpus", lambda node: {8 * node + i for i in range(8)})
    monkeypatch.setattr(host, "prefer_node", preferred.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: masks.append(set(mask)))
    assert placement.settle_on_node(CpuExpertSettings.load({"GLM53_CT_NUMA_NODE": "1"})) == set(range(8, 16))
    assert placement.settle_on_node(CpuExpertSettings.load({"GLM53_CT_NUMA_NODE": "1", "GLM53_CT_CPUS": "9"})) == set(range(16))
    assert (masks, preferred) == ([set(range(8, 16))], [1, 1])


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"GLM53_CT_THREADS": "many"}, "GLM53_CT_THREADS"),
        ({"GLM53_CT_ISA": "sse2"}, "GLM53_CT_ISA"),
        ({"GLM53_CT_CPU": "0"}, "GLM53_CT_CPUS"),
    ],
)
def test_a_bad_setting_ends_with_the_config_code(env: dict[str, str], words: str) -> None:
    """Exit code 78 and the setting's name, or the closest one for a typo: respawning cannot help."""
    result = run_service(env)
    assert result.returncode == ExitCode.CONFIG
    assert words in result.stderr


def test_cpus_that_may_not_be_used_are_refused_before_anything_is_attached(tmp_path: pathlib.Path) -> None:
    """GLM53_CT_CPUS with a CPU that the machine or the container lacks ends with the settings' code and names the CPU."""
    usable = sorted(os.sched_getaffinity(0))
    placement.check(CpuExpertSettings.load({"GLM53_CT_CPUS": ",".join(map(str, usable))}))
    with pytest.raises(ConfigError, match=r"\[1023\]") as caught:
        placement.check(CpuExpertSettings.load({"GLM53_CT_CPUS": f"{usable[0]},1023"}))
    assert caught.value.param == "GLM53_CT_CPUS"
    done = run_service({"GLM53_CT_CPUS": "1023", "GLM53_SHM_DIR": str(tmp_path)})
    assert done.returncode == ExitCode.CONFIG
    assert "GLM53_CT_CPUS names CPUs [1023]" in done.stderr


def test_a_kernel_that_the_host_lacks_is_refused_by_name_at_once(tmp_path: pathlib.Path) -> None:
    """An instruction set that this CPU does not have ends the service with the settings' code, before any worker exists."""
    missing = [isa for isa in ("avx512vbmi", "avxvnni", "avx512bw") if isa not in variants()]
    if not missing:
        pytest.skip("this CPU has every instruction set")
    done = run_service({"GLM53_CT_ISA": missing[0], "GLM53_SHM_DIR": str(tmp_path)})
    assert done.returncode == ExitCode.CONFIG
    assert f"GLM53_CT_ISA={missing[0]}: this host cannot run it; it has scalar" in done.stderr


@pytest.mark.parametrize("isa", variants())
def test_the_kernel_that_was_asked_for_serves(made: Stage, isa: str) -> None:
    """GLM53_CT_ISA overrides the choice, and the service says what runs and why."""
    server = JobServer(made.ctl_path, made.arena_path, variant=isa, tune=True)
    try:
        assert (server.stats()["kernel"], server.stats()["kernel_reason"].split(";")[0].split(",")[0]) == (isa, "requested")
    finally:
        server.close()


def test_the_attachment_tells_kernel_threads_and_huge_pages(made: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a real service has the variant with its reason, the threads with their CPUs, and the bytes in huge pages."""
    cpu = min(os.sched_getaffinity(0))
    monkeypatch.setenv("GLM53_CT_CPUS", str(cpu))
    with cpu_expert(made) as server:
        lines = [server.process.stderr.readline() for _ in range(3)] if server.process.stderr is not None else []
        text = "".join(lines)
        assert "same bits as scalar" in text or "kernel scalar" in text
        assert f"kernel threads: 1 on CPUs {cpu} (the CPUs of GLM53_CT_CPUS)" in text
        assert re.search(r"arena in 2 MiB pages: (\d+ MiB|unknown) \(.+\)", text)
        main_thread = os.sched_getaffinity(server.process.pid)
        others = [os.sched_getaffinity(int(task.name)) for task in pathlib.Path(f"/proc/{server.process.pid}/task").iterdir()]
        assert main_thread == {cpu}
        assert len(others) >= 2  # the heartbeat has a thread of its own, which is not kept on the kernel's CPU
        assert os.sched_getaffinity(0) in others
        assert server.terminate()[0] == ExitCode.OK


def test_cpus_that_went_away_do_not_end_the_service(caplog: pytest.LogCaptureFixture) -> None:
    """A CPU set that shrank while the service ran: pinning is given up with a warning, and what is left may be used."""
    before = os.sched_getaffinity(0)
    ran: list[set[int]] = []

    def serving() -> None:
        worker.pin(1023)
        worker.unpin({1022, 1023})
        ran.append(os.sched_getaffinity(0))
        worker.pin(min(before))
        ran.append(os.sched_getaffinity(0))
        worker.unpin(before)
        ran.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=serving)
    thread.start()
    thread.join(10)
    assert ran == [before, {min(before)}, before]
    assert "not pinned to CPU 1023" in caplog.text


def test_a_mismatch_is_refused_with_both_values_in_the_end(made: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of another layout are waited on for a while (a worker may be restarting), then PeerError with both values."""
    monkeypatch.setattr(worker, "MISMATCH_PATIENCE_S", 0.0)
    expected = patch(made.ctl_path, _layout.AbiCtlHeader, "layout_hash", 0xBAD)
    signals = NoSignal()
    with pytest.raises(PeerError, match=f"layout_hash is 0xbad, expected 0x{expected:x}"):
        ExpertWorker(settings_for(made), signals).run()
    assert signals.waits >= 1


def test_waiting_ends_with_a_signal(tmp_path: pathlib.Path) -> None:
    """Without a worker the service waits with back-off, and stops as soon as it is told to."""
    settings = CpuExpertSettings.load({}, instance="nobody", shm_dir=str(tmp_path))
    signals = NoSignal(stop_after=4)
    ExpertWorker(settings, signals).run()
    assert signals.waits == 4


def test_a_worker_without_a_cpu_lane_is_told_once(made: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """As in mode exact: records in shared memory and nothing to do for this process. One line says that, however long it stays so."""
    caplog.set_level("INFO")
    away = made.ctl_path + ".away"
    os.rename(made.ctl_path, away)
    signals = NoSignal(stop_after=8)
    ExpertWorker(settings_for(made), signals).run()
    os.rename(away, made.ctl_path)
    assert signals.waits == 8
    lines = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert lines == [f"waiting for a gpu_worker: {worker.NO_LANE}", "stopped while waiting for a gpu_worker"]


def test_sigterm_while_waiting_is_a_clean_exit(made: Stage) -> None:
    """SIGTERM before any worker exists: exit code 0."""
    elsewhere = Stage(made.shm_dir, "nobody", made.arena, made.region)
    with cpu_expert(elsewhere) as server:
        assert server.process.stderr is not None
        assert "waiting for a gpu_worker" in server.process.stderr.readline()
        code, _ = server.terminate()
        assert code == ExitCode.OK
