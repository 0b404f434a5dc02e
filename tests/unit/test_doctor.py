"""`glm53 doctor`: every error that users meet is found before anything slow, with the exact fix, and ends with exit code 78."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import errno
import http.server
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import redis
from grpc_health.v1 import health, health_pb2_grpc

from cli.doctor import command, expert, gateway, hardware, machine, sharedmem, state, store, worker
from cli.doctor.findings import Finding, Level
from cli.doctor.machine import Machine
from cli.instance import Instance
from cli.main import build_parser
from cli.settings import ServeSettings
from kernels.python import lib, segments
from kernels.python._layout import ABI_VERSION
from kernels.python.arena import Arena
from kernels.python.expert import ExpertShape
from services.common import memory, shm_room
from services.common.errors import ConfigError
from services.common.shm_room import GIB
from services.gpu_worker import download
from services.gpu_worker.patches import upstream
from services.gpu_worker.settings import GpuWorkerSettings
from tests.gateway.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "fpu sse2 avx avx2 fma f16c"
GPU = "GPU-1, NVIDIA GeForce RTX 3090, 590.12, 24576, 310, 16, 16"


def write(root: Path, files: dict[str, str]) -> Path:
    """Makes the files below root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def host(tmp_path: Path, files: dict[str, str] | None = None, gpus: Sequence[str] | None = None, **facts: object) -> Machine:
    """A made-up machine of 64 GiB with AVX2; gpus: lines that nvidia-smi prints, None when it is not there."""
    base = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n",
        "proc/cpuinfo": f"processor\t: 0\nflags\t\t: {FLAGS}\n",
        "proc/swaps": "Filename Type Size Used Priority\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
    }
    write(tmp_path / "root", {**base, **(files or {})})

    def run(program: Sequence[str]) -> str | None:
        if gpus is None or program[0] != "nvidia-smi":
            return None
        if "--query-gpu=compute_cap" in program:
            return "8.6\n"
        return "4242, /usr/bin/gnome-shell, 2000 MiB\n" if "compute-apps" in program[1] else "\n".join(gpus) + "\n"

    return Machine(tmp_path / "root", run, **facts)  # type: ignore[arg-type]


def capped(limit_gib: float, swap: str = "0") -> dict[str, str]:
    """Files of a container with a memory limit."""
    return {"sys/fs/cgroup/memory.max": str(int(limit_gib * GIB)), "sys/fs/cgroup/memory.swap.max": swap, "sys/fs/cgroup/memory.stat": ""}


def failed(found: Iterable[Finding]) -> dict[str, Finding]:
    """What fails, by check."""
    return {finding.check: finding for finding in found if finding.level is Level.FAIL}


def warned(found: Iterable[Finding]) -> dict[str, Finding]:
    """What is warned about, by check."""
    return {finding.check: finding for finding in found if finding.level is Level.WARN}


def worker_env(tmp_path: Path, **env: str) -> dict[str, str]:
    """A worker on this machine with a shared-memory folder of its own."""
    (tmp_path / "shm").mkdir(exist_ok=True)
    base = {"GLM53_SHM_DIR": str(tmp_path / "shm"), "GLM53_MODEL_DIR": str(ROOT / "models/tiny/checkpoint"), "GLM53_DEVICE": "cpu"}
    return {**base, "GLM53_WORKER_ADDRESS": f"unix:{tmp_path}/worker.sock", **env}


def with_exllamav3(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation for GPUs."""
    monkeypatch.setattr(upstream, "installed", lambda: True)
    monkeypatch.setattr(upstream, "check", lambda: None)


# ---- GPU -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "check", "said", "fix"),
    [
        (None, "GPU", "nvidia-smi is not there", "GLM53_DEVICE=cpu"),
        ([], "GPU", "nvidia-smi lists none", "nvidia.com/gpu"),
        ([GPU, GPU], "GPU", "2 GPUs are visible", "CUDA_VISIBLE_DEVICES=0"),
        (["GPU-1, NVIDIA GeForce RTX 3090, 550.90.07, 24576, 0, 16, 16"], "GPU driver", "550.90.07", "newer NVIDIA driver"),
        (["GPU-1, NVIDIA GeForce RTX 4070, 590.12, 12282, 0, 16, 16"], "VRAM", "12.0 GiB", "24 GB"),
    ],
    ids=["no driver", "none", "several", "old driver", "small"],
)
def test_a_gpu_that_cannot_serve_is_refused(tmp_path: Path, gpus: list[str] | None, check: str, said: str, fix: str) -> None:
    """No GPU, several, a driver before CUDA 13 and a card below 24 GB each fail with their own fix."""
    found = failed(hardware.gpu(host(tmp_path, gpus=gpus)))[check]
    assert said in found.message
    assert fix in found.fix


def test_a_gpu_that_auto_does_not_find_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` on an installation for GPUs serves on the CPU without one, which is told; `cuda` is refused."""
    with_exllamav3(monkeypatch)
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: object())
    for device, findings in (("auto", warned), ("cuda", failed)):
        env = worker_env(tmp_path, GLM53_DEVICE=device)
        assert "no NVIDIA GPU" in findings(worker.check(env, host(tmp_path)))["GPU"].message


def test_vram_that_a_desktop_took_and_a_narrow_link_are_told(tmp_path: Path) -> None:
    """A card that serves, but not at its best, is a warning that names who has the memory and how many lanes are missing."""
    found = list(hardware.gpu(host(tmp_path, gpus=["GPU-1, NVIDIA GeForce RTX 3090, 590.12, 24576, 2310, 8, 16"])))
    assert not failed(found)
    assert "gnome-shell" in warned(found)["VRAM"].message
    assert "8 of 16 lanes" in warned(found)["PCIe link"].message
    assert not warned(hardware.gpu(host(tmp_path, gpus=[GPU])))


def test_unknown_link_widths_are_no_fault(tmp_path: Path) -> None:
    """A virtual GPU that does not tell its link is not accused of a narrow one."""
    assert not warned(hardware.gpu(host(tmp_path, gpus=["GPU-1, NVIDIA GeForce RTX 3090, 590.12, 24576, 310, [N/A], [N/A]"])))


@pytest.mark.parametrize(
    ("architectures", "fits"),
    [
        ("8.6", True),
        ("8.0", True),
        ("8.9", False),
        ("9.0;12.0", False),
        ("8.9;8.6", True),
        ("7.5+PTX", True),
        ("9.0+PTX", False),
        ("8.6a", True),
        ("8.0a", False),
        ("8.0f", True),
        ("7.5", False),
        ("Ampere", True),
        ("", True),
        (None, True),
    ],
)
def test_kernels_compiled_for_another_card_are_refused_before_the_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architectures: str | None, fits: bool
) -> None:
    """Machine code runs on later cards of its generation, PTX on all later ones; what is not known is not judged."""
    site = write(tmp_path / "site", {"exllamav3_ext.so": ""})
    if architectures is not None:
        write(site, {"exllamav3_ext.archs": f"{architectures}\n"})
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(site / f"{name}.so")))
    found = failed(hardware.gpu(host(tmp_path, gpus=[GPU])))
    assert ("exllamav3" not in found) == fits
    if not fits:
        assert "RTX 3090 has 8.6" in found["exllamav3"].message
        assert "CUDA_ARCHS=8.6" in found["exllamav3"].fix
        assert "scripts/install.sh" in found["exllamav3"].fix


@pytest.mark.parametrize("said", [None, "", 'Field "compute_cap" is not a valid field to query.'])
def test_a_driver_that_does_not_tell_its_capability_is_not_judged_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    """An nvidia-smi from before that field: the other findings are told as they are."""
    site = write(tmp_path / "site", {"exllamav3_ext.so": "", "exllamav3_ext.archs": "12.0\n"})
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(site / f"{name}.so")))
    made = host(tmp_path, gpus=[GPU])
    silent = Machine(made.root, lambda program: said if "--query-gpu=compute_cap" in program else made.run(program))
    assert not failed(hardware.gpu(silent))


@pytest.mark.parametrize(
    ("visible", "fails"), [(None, True), ("0", False), ("1", False), ("GPU-2", False), ("0,1", True), ("", True), ("7", True)]
)
def test_the_advice_to_choose_one_gpu_is_heard(tmp_path: Path, visible: str | None, fails: bool) -> None:
    """CUDA_VISIBLE_DEVICES chooses among several, by number or UUID; none or two are refused as before."""
    two = host(tmp_path, gpus=[GPU, GPU.replace("GPU-1", "GPU-2")])
    assert bool(failed(hardware.gpu(two, visible))) is fails


def test_a_device_without_nvidia_smi_is_no_missing_gpu(tmp_path: Path) -> None:
    """A container that got the device but not the tool serves; what is unknown is told. Two devices are refused by count."""
    one = host(tmp_path, {"dev/nvidia0": "", "dev/nvidiactl": ""})
    assert not failed(hardware.gpu(one))
    assert "NVIDIA_DRIVER_CAPABILITIES" in warned(hardware.gpu(one))["GPU"].fix
    write(tmp_path / "root", {"dev/nvidia1": ""})
    assert "2 GPUs" in failed(hardware.gpu(one))["GPU"].message
    assert not failed(hardware.gpu(one, "1"))


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_gpu_is_wanted_where_it_was_installed_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without exllamav3 `auto` means the CPU; with it, a missing GPU is an error; `cpu` never wants one."""
    settings = GpuWorkerSettings.load({"GLM53_DEVICE": device})
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: None)
    assert not worker.wants_gpu(settings)
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: object())
    assert worker.wants_gpu(settings) is (device == "auto")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"GLM53_CHUNK_SIZE": "100"}, "GLM53_CHUNK_SIZE=100 is less than a cache page"),
        ({"GLM53_CONTEXT_TOKENS": "4096", "GLM53_CACHE_TOKENS": "1024"}, "GLM53_CONTEXT_TOKENS=4096 is more than GLM53_CACHE_TOKENS 1024"),
        ({"GLM53_MODE": "exact", "GLM53_EC_ADMISSION": "between_steps", "GLM53_EC_HINTS": "3"}, "GLM53_EC_HINTS=3 needs decode steps"),
        ({"GLM53_MODE": "exact", "GLM53_EC_ADMISSION": "between_steps", "GLM53_EC_COPY": "gather"}, "GLM53_EC_COPY=gather needs decode"),
    ],
)
def test_settings_that_a_gpu_does_not_take_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], said: str
) -> None:
    """By the functions that the start resolves them with; the CPU has other rules, and each device is judged by its own."""
    with_exllamav3(monkeypatch)
    box = host(tmp_path, gpus=[GPU])
    found = list(worker.check(worker_env(tmp_path, GLM53_DEVICE="cuda", **env), box))
    assert any(said in finding.message for finding in found if finding.level is Level.FAIL)
    assert not any(said in finding.message for finding in worker.check(worker_env(tmp_path, GLM53_DEVICE="cpu", **env), box))


def test_hints_are_refused_where_the_cpu_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `auto` comes to the CPU too, for want of a GPU; on a GPU they are what they are for."""
    env = worker_env(tmp_path, GLM53_EC_HINTS="3")
    assert "GLM53_EC_HINTS=3 is for a GPU" in failed(worker.check(env, host(tmp_path)))["settings"].message
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: SimpleNamespace(origin="nowhere"))
    with_exllamav3(monkeypatch)
    env["GLM53_DEVICE"] = "auto"
    assert "settings" in failed(worker.check(env, host(tmp_path)))
    assert "settings" not in failed(worker.check(env, host(tmp_path, gpus=[GPU])))


def test_another_version_of_exllamav3_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its patches were written against one: the start looks at its source before anything of it is imported, and so does the doctor."""

    def refuse() -> None:
        raise ConfigError("exllamav3 9.9 is installed", param="GLM53_DEVICE")

    with_exllamav3(monkeypatch)
    monkeypatch.setattr(upstream, "check", refuse)
    env = worker_env(tmp_path, GLM53_DEVICE="cuda")
    assert "9.9" in failed(worker.check(env, host(tmp_path, gpus=[GPU])))["settings"].message


# ---- what serve keeps ------------------------------------------------------------------------------------------------------------------


def test_the_folder_of_a_server_that_runs_is_left_alone(tmp_path: Path) -> None:
    """Its lock stays its own. With its gateway it is a fact, without one it is in the way."""
    folder = tmp_path / "state"
    with answering(OWN_HEALTH) as port:
        env = {"GLM53_SHM_DIR": str(tmp_path), "GLM53_STATE_DIR": str(folder), "PORT": str(port)}
        settings = ServeSettings.load(env)
        running = Instance(settings.instance_name, tmp_path, folder)
        running.acquire()
        (found,) = state.check(settings, env)
        assert (found.level, "is held by the server that runs here" in found.message) == (Level.OK, True)
    assert f"already served by process {os.getpid()}" in failed(state.check(settings, env))["state folder"].message
    assert (folder / "lock").read_text() == str(os.getpid())
    running.release()
    assert not failed(state.check(settings, env))
    assert folder.is_dir()
    assert not list(folder.iterdir())


def test_a_state_folder_is_tried_and_gone_again(tmp_path: Path) -> None:
    """With every folder above it that was not there before, and none that was."""
    env = {"GLM53_SHM_DIR": str(tmp_path), "GLM53_STATE_DIR": str(tmp_path / "a/b/c")}
    (tmp_path / "a").mkdir()
    (found,) = state.check(ServeSettings.load(env), env)
    assert found.level is Level.OK
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


# ---- container devices -----------------------------------------------------------------------------------------------------------------

CDI_YAML = """cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
containerEdits:
  hooks:
  - hookName: createContainer
    path: /usr/bin/nvidia-ctk
  mounts:
  - hostPath: /usr/lib/libcuda.so.580.65.06
    containerPath: /usr/lib/libcuda.so.580.65.06
"""
CDI_JSON = json.dumps(
    {
        "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
        "containerEdits": {"mounts": [{"hostPath": "/usr/lib/libcuda.so.580.65.06", "containerPath": "/x"}]},
    }
)


@pytest.mark.parametrize("text", [CDI_YAML, CDI_JSON], ids=["yaml", "json"])
def test_a_stale_cdi_specification_is_refused(tmp_path: Path, text: str) -> None:
    """After a driver update the specification names libraries that are gone; the fix is the command that makes it anew."""
    machine_of = host(tmp_path, {"etc/cdi/nvidia.yaml": text, "dev/nvidia0": ""})
    found = failed(hardware.cdi(machine_of))["CDI"]
    assert "libcuda.so.580.65.06" in found.message
    assert found.fix.endswith("nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
    write(tmp_path / "root", {"usr/lib/libcuda.so.580.65.06": ""})
    assert [finding.level for finding in hardware.cdi(machine_of)] == [Level.OK]


# ---- CPU -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", hardware.CPU_FEATURES)
def test_a_missing_instruction_set_is_named(tmp_path: Path, feature: str) -> None:
    """fast is refused and exact proposed; auto serves, slowly, and is told."""
    flags = " ".join(flag for flag in FLAGS.split() if flag != feature)
    poor = host(tmp_path, {"proc/cpuinfo": f"flags : {flags}\n"})
    found = failed(hardware.cpu(poor, "fast"))["CPU"]
    assert feature.upper() in found.message
    assert "GLM53_MODE=exact" in found.fix
    assert "CPU" in warned(hardware.cpu(poor, "auto"))
    assert not failed(hardware.cpu(host(tmp_path), "fast"))


def test_cpus_outside_the_cpuset_are_refused(tmp_path: Path) -> None:
    """GLM53_CT_CPUS may name only CPUs of this process; the message has those that there are."""
    outside = max(os.sched_getaffinity(0)) + 1
    found = failed(expert.check(worker_env(tmp_path, GLM53_CT_CPUS=str(outside)), host(tmp_path)))["settings"]
    assert f"[{outside}]" in found.message
    assert "usable are" in found.message
    assert "cpuset" in found.fix


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
    ],
    ids=["v2", "v2 unlimited", "v1"],
)
def test_a_quota_below_the_cpus_is_told(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    """A CFS quota smaller than the set of CPUs stops threads in mid-step; whole CPUs do not."""
    box = host(tmp_path, files, affinity=lambda: {0, 1, 2, 3})
    assert box.cpu_quota() == quota
    assert ("CPU quota" in warned(hardware.cpu_quota(box))) is (quota is not None)


# ---- memory ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["nvme", "nvme-exact"])
def test_nvme_modes_need_a_memory_cap_that_is_large_enough(tmp_path: Path, mode: str) -> None:
    """None is refused, 14 GiB is refused with the size, 16 GiB is taken."""
    env = worker_env(tmp_path, GLM53_MODE=mode)
    assert "without a memory limit" in failed(worker.check(env, host(tmp_path)))["memory cap"].message
    assert "at least 15 GiB" in failed(worker.check(env, host(tmp_path, capped(14))))["memory cap"].message
    assert "memory cap" not in failed(worker.check(env, host(tmp_path, capped(16))))


@pytest.mark.parametrize(("swap", "told"), [("max", True), (str(GIB), True), ("0", False)])
def test_swap_beyond_the_memory_limit_is_told(tmp_path: Path, swap: str, told: bool) -> None:
    """A swap limit that differs from the memory limit fails nvme modes and warns the others, on a host that has swap."""
    files = {**capped(32, swap), "proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 8 0 5\n"}
    box = host(tmp_path, files)
    assert ("swap" in failed(hardware.swap(box, "nvme"))) is told
    assert ("swap" in warned(hardware.swap(box, "fast"))) is told
    write(tmp_path / "root", {"proc/swaps": "Filename Type Size Used Priority\n"})
    assert not list(hardware.swap(box, "nvme"))


def test_a_small_memlock_is_told(tmp_path: Path) -> None:
    """8 MiB of memlock: nvme modes fail, others are warned; unlimited and enough are fine."""
    small = host(tmp_path, memlock=lambda: 8 << 20)
    assert "LimitMEMLOCK=infinity" in failed(hardware.memlock(small, 106 * GIB, "nvme"))["memlock"].fix
    assert "memlock" in warned(hardware.memlock(small, 106 * GIB, "fast"))
    assert not list(hardware.memlock(host(tmp_path, memlock=lambda: -1), 106 * GIB, "nvme"))
    assert not list(hardware.memlock(host(tmp_path, memlock=lambda: 107 * GIB), 106 * GIB, "nvme"))


def test_a_small_tmpfs_is_refused_with_the_size_to_pass(tmp_path: Path) -> None:
    """The records do not fit: the message has both sizes, the fix the size to pass in each way of deploying."""
    room = os.statvfs(tmp_path)
    need = room.f_bavail * room.f_frsize + 10 * GIB
    roomy = memory.Memory(10 * need, 0, 0, capped=True, host_available=10 * need)
    found = failed(sharedmem.room(str(tmp_path), "x", need, roomy))["shared memory"]
    size = -(-(need + shm_room.SLACK_BYTES) // GIB)
    assert f"size={size}G" in found.fix
    assert "sizeLimit" in found.fix


def test_records_that_a_dead_worker_left_count_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs that is full of the records of an earlier worker has room for the next one: it takes them over or replaces them."""
    left = Path(segments.arena_path(tmp_path, "x"))
    left.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(sharedmem.os, "statvfs", lambda path: argparse.Namespace(f_bavail=0, f_frsize=4096))
    roomy = memory.Memory(GIB, 0, 0, capped=True, host_available=GIB)
    assert not failed(sharedmem.room(str(tmp_path), "x", 1 << 20, roomy))
    left.unlink()
    assert failed(sharedmem.room(str(tmp_path), "x", 1 << 20, roomy))


def test_memory_below_the_records_is_refused(tmp_path: Path) -> None:
    """Pages of the arena count as the worker's: a container limit, or a host, below them is refused."""
    small = memory.Memory(2 * GIB, 0, 0, capped=True, host_available=64 * GIB)
    assert "container's memory limit" in failed(sharedmem.room(str(tmp_path), "x", 3 * GIB, small))["memory"].message
    full = memory.Memory(64 * GIB, 0, None, capped=False, host_available=2 * GIB)
    assert "the host has available" in failed(sharedmem.room(str(tmp_path), "x", 3 * GIB, full))["memory"].message
    assert not failed(sharedmem.room(str(tmp_path), "x", 1 * GIB, full))


# ---- shared memory of two versions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    """A sealed arena that this process holds, as a running worker does."""
    (tmp_path / "shm").mkdir(exist_ok=True)
    return held_arena(tmp_path / "shm", "default")


def held_arena(shm: Path, instance: str) -> Arena:
    """A sealed arena of an instance."""
    made = Arena.create(segments.arena_path(shm, instance), [ExpertShape.create(128, 128, (3, 3, 3))], 2, bytes(32))
    for slot in range(2):
        made.record(0, slot)[:] = slot
    made.seal()
    return made


def test_a_worker_of_another_abi_is_refused(tmp_path: Path, arena: Arena) -> None:
    """An image of another version beside a running worker: both versions are told, and the fix. A dead worker's segments are no fault."""
    path, env, box = Path(segments.arena_path(tmp_path / "shm", "default")), worker_env(tmp_path), host(tmp_path)
    assert "versions" not in failed(expert.check(env, box))
    with path.open("r+b") as file:
        file.seek(8)  # abi_version follows the magic
        file.write((ABI_VERSION + 1).to_bytes(4, "little"))
    found = failed(expert.check(env, box))["versions"]
    assert str(ABI_VERSION) in found.message
    assert str(ABI_VERSION + 1) in found.message
    assert "same version" in found.fix
    arena.close()
    assert "versions" not in failed(expert.check(env, box))


def test_a_second_worker_of_an_instance_is_refused(tmp_path: Path, arena: Arena) -> None:
    """Who holds the arena is told before anything is read; when it has gone, the arena is free to be taken over."""
    assert "another gpu_worker" in failed(worker.check(worker_env(tmp_path), host(tmp_path)))["instance"].message
    arena.close()
    assert "instance" not in failed(worker.check(worker_env(tmp_path), host(tmp_path)))


def test_a_folder_that_cannot_hold_segments_is_refused(tmp_path: Path) -> None:
    """GLM53_SHM_DIR that does not exist fails in both services."""
    for check in (worker.check, expert.check):
        env = worker_env(tmp_path, GLM53_SHM_DIR=str(tmp_path / "missing"))
        assert "fsGroup" in failed(check(env, host(tmp_path)))["shared memory"].fix


# ---- checkpoint, settings, addresses ---------------------------------------------------------------------------------------------------


def test_without_a_named_checkpoint_the_shipped_one_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start from another folder neither misses it nor would fetch another model; a folder that is named is taken as it is."""
    monkeypatch.chdir(tmp_path)
    env = worker_env(tmp_path)
    del env["GLM53_MODEL_DIR"]
    found = next(found for found in worker.check(env, host(tmp_path)) if found.check == "checkpoint")
    assert found.level is Level.OK
    assert found.message.startswith(f"{ROOT / 'models/tiny/checkpoint'}: ")
    assert not download.ensure(GpuWorkerSettings.load(env), lambda *_: pytest.fail("it fetches"), "http://127.0.0.1:9")
    named = GpuWorkerSettings.load({**env, "GLM53_MODEL_DIR": "models/tiny/checkpoint"})
    assert named.model_folder == Path("models/tiny/checkpoint")


def test_a_checkpoint_that_would_be_fetched_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room it is worth a word, not a refusal; without room, package or right to write nothing could come."""
    env = worker_env(tmp_path, GLM53_MODEL_DIR=str(tmp_path / "a" / "b"))
    usage = shutil.disk_usage(tmp_path)

    def finding() -> Finding:
        return next(found for found in worker.check(env, host(tmp_path)) if found.check == "checkpoint")

    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=200_000_000_000))
    assert finding().level is Level.WARN
    assert "has no config.json, so a start fetches turboderp/GLM-5.3-Flash-exl3 into it; 200.0 GB are free" in finding().message
    assert "is the volume mounted there?" in finding().fix
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=100_000_000_000))
    assert (finding().level, "125 GB, and 100.0 GB are free" in finding().message) == (Level.FAIL, True)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    assert "cannot be written" in finding().message
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "huggingface_hub" else real(name, *more))
    assert "needs the package huggingface_hub" in finding().message


def test_memory_for_a_checkpoint_that_is_not_there_yet_is_looked_at(tmp_path: Path) -> None:
    """A machine that cannot hold GLM-5.3-Flash's records is told before it fetches 125 GB; another repository's size is not known."""
    env = worker_env(tmp_path, GLM53_MODEL_DIR=str(tmp_path / "model"))
    assert "106.7 GiB" in failed(worker.check(env, host(tmp_path)))["shared memory"].message
    other = {**env, "GLM53_MODEL_REPO": "somebody/small", "GLM53_MODEL_REVISION": "0" * 40}
    assert "shared memory" not in failed(worker.check(other, host(tmp_path)))


def test_a_missing_or_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    """A folder that is not there points at the mount, a truncated file at the download."""
    env = worker_env(tmp_path, GLM53_MODEL_DIR=str(tmp_path / "nothing"), GLM53_MODEL_DOWNLOAD="0")
    assert "volume mounted" in failed(worker.check(env, host(tmp_path)))["checkpoint"].fix
    broken = tmp_path / "broken"
    shutil.copytree(ROOT / "models/tiny/checkpoint", broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    found = failed(worker.check(worker_env(tmp_path, GLM53_MODEL_DIR=str(broken)), host(tmp_path)))["checkpoint"]
    assert "model.safetensors" in found.message
    assert "broken off" in found.fix


def test_the_shipped_checkpoint_passes(tmp_path: Path) -> None:
    """On a sound machine nothing fails and nothing is warned about."""
    for check in (worker.check, expert.check):
        found = list(check(worker_env(tmp_path), host(tmp_path)))
        assert not failed(found)
        assert not warned(found)


@pytest.mark.parametrize("check", [gateway.check, worker.check, expert.check], ids=["gateway", "worker", "expert"])
def test_an_unknown_setting_is_refused(tmp_path: Path, check: Callable[..., Iterable[Finding]]) -> None:
    """A typo fails with the closest name, in every service."""
    assert "GLM53_INSTANCE" in failed(check({"GLM53_INSTANCES": "a"}, host(tmp_path)))["settings"].message


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    """What listens on the address already would answer in our place."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in failed(gateway.check({"PORT": str(port)}, host(tmp_path)))["address"].message
        env = worker_env(tmp_path, GLM53_WORKER_HTTP=f"127.0.0.1:{port}")
        assert "GLM53_WORKER_HTTP" in failed(worker.check(env, host(tmp_path)))["address"].message


@contextlib.contextmanager
def answering(body: str, **headers: str) -> Iterator[int]:
    """An HTTP server that says the same to everybody; yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(503)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


OWN_HEALTH = '{"status": "loading", "worker": "loading", "model": "glm-5.3-tiny"}'


def test_a_port_of_our_own_running_server_is_no_fault(tmp_path: Path) -> None:
    """It answers as ours does: told as a fact, with what to do before starting another."""
    with answering(OWN_HEALTH) as port:
        for address in ("127.0.0.1", "0.0.0.0"):
            env = {"PORT": str(port), "HOST": address, "GLM53_ALLOW_PUBLIC_WITHOUT_KEYS": "1"}
            (found,) = [finding for finding in gateway.check(env, host(tmp_path)) if finding.check == "address"]
            assert found.level is Level.OK
            assert "status loading, model glm-5.3-tiny" in found.message
            assert "Stop it" in found.message
    with answering("{}", Server="glm53") as port:
        env = worker_env(tmp_path, GLM53_WORKER_HTTP=f"127.0.0.1:{port}")
        assert "address" not in failed(worker.check(env, host(tmp_path)))
        assert "address" not in failed(expert.check({"GLM53_EXPERT_HTTP": f"127.0.0.1:{port}"}, host(tmp_path)))


@pytest.mark.parametrize("body", ["hello", "[]", "{}", '{"status": "ok"}', '{"worker": 1}'])
def test_a_port_of_somebody_elses_server_is_refused(tmp_path: Path, body: str) -> None:
    """Whatever answers, it must answer as ours does."""
    with answering(body, Server="nginx") as port:
        assert "address" in failed(gateway.check({"PORT": str(port)}, host(tmp_path)))
        assert "address" in failed(worker.check(worker_env(tmp_path, GLM53_WORKER_HTTP=f"127.0.0.1:{port}"), host(tmp_path)))


def test_a_running_worker_is_recognised_by_its_health(tmp_path: Path, arena: Arena) -> None:
    """A gRPC server with a health service on GLM53_WORKER_ADDRESS is one, and the arena is its own, with no gateway in its container."""
    assert arena
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    env = worker_env(tmp_path, GLM53_WORKER_ADDRESS=f"127.0.0.1:{port}")
    assert not {"address", "instance"} & failed(worker.check({**env, "PORT": "1"}, host(tmp_path))).keys()
    server.stop(None).wait()
    assert "instance" in failed(worker.check({**env, "PORT": "1"}, host(tmp_path)))


def test_the_instance_of_our_own_running_server_is_no_fault(tmp_path: Path, arena: Arena) -> None:
    """Its worker holds the arena, and its gateway answers."""
    assert arena
    with answering(OWN_HEALTH) as port:
        assert "instance" not in failed(worker.check(worker_env(tmp_path, PORT=str(port)), host(tmp_path)))


def test_the_whole_machine_is_looked_at_as_serve_would_use_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The instance is that of the port, so that a running server's records are seen as its own."""
    shm = tmp_path / "shm"
    shm.mkdir(exist_ok=True)
    args = build_parser().parse_args(["doctor"])
    with answering(OWN_HEALTH) as port:
        own = held_arena(shm, f"p{port}")
        code = command.run(args, host(tmp_path), worker_env(tmp_path, PORT=str(port)))
        own.close()
    said = capsys.readouterr().out
    assert code == 0, said
    assert f"'p{port}' is served by the server that runs here" in said


def test_a_port_that_serve_would_not_use_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without GLM53_WORKER_ADDRESS the worker of `glm53 serve` listens on a socket of its own: whoever holds the services' default port."""
    (tmp_path / "shm").mkdir(exist_ok=True)
    env = {name: value for name, value in worker_env(tmp_path).items() if name != "GLM53_WORKER_ADDRESS"}
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # somebody else's will do
            held.enter_context(socket.create_server(("127.0.0.1", 30051)))
        code = command.run(build_parser().parse_args(["doctor"]), host(tmp_path), env)
    said = capsys.readouterr().out
    assert code == 0, said
    assert "30051" not in said


@pytest.mark.parametrize("check", [worker.check, expert.check])
def test_kernels_that_are_not_built_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[..., Iterable[Finding]]
) -> None:
    """A finding with the command, no traceback."""
    monkeypatch.setattr(lib, "LIBRARY_PATH", tmp_path / "none.so")
    # Around the cache, not through an empty one: modules that have declared their functions would be left with another handle.
    monkeypatch.setattr(lib, "load", lib.load.__wrapped__)
    found = failed(check(worker_env(tmp_path), host(tmp_path)))["kernels"]
    assert "none.so does not exist" in found.message
    assert "make kernels" in found.fix


def test_keys_and_redis_of_the_gateway(tmp_path: Path) -> None:
    """A key file that is missing and a URL that is none fail; a Redis that does not answer is a warning."""
    env = {"PORT": "0", "GLM53_API_KEYS_FILE": str(tmp_path / "keys.json"), "GLM53_REDIS_URL": "http://redis:6379"}
    found = failed(gateway.check(env, host(tmp_path)))
    assert "glm53 keys create" in found["API keys"].fix
    assert "redis://" in found["Redis"].fix
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        env = {"PORT": "0", "GLM53_REDIS_URL": f"redis://127.0.0.1:{closed.getsockname()[1]}/0"}
        assert "does not answer" in warned(gateway.check(env, host(tmp_path)))["Redis"].message


def test_a_redis_that_refuses_is_told_from_one_that_answers(tmp_path: Path) -> None:
    """A connection alone says nothing: the question is asked, with the password of the URL, and what Redis says is passed on."""
    server = RedisServer()
    try:
        env = {"PORT": "0", "GLM53_REDIS_URL": server.url}
        (found,) = [finding for finding in gateway.check(env, host(tmp_path)) if finding.check == "Redis"]
        assert (found.level, found.message) == (Level.OK, f"127.0.0.1:{server.port} answers")
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", "open sesame")
        assert "AuthenticationError" in warned(gateway.check(env, host(tmp_path)))["Redis"].message
        wrong = {**env, "GLM53_REDIS_URL": server.url.replace("//", "//:wrong-one@")}
        refused = warned(gateway.check(wrong, host(tmp_path)))["Redis"]
        assert "AuthenticationError" in refused.message
        assert "GLM53_REDIS_URL" in refused.fix
        assert "wrong-one" not in refused.message + refused.fix
        right = {**env, "GLM53_REDIS_URL": server.url.replace("//", "//:open%20sesame@")}
        assert "Redis" not in warned(gateway.check(right, host(tmp_path)))
    finally:
        server.close()


# ---- the expert store's place ----------------------------------------------------------------------------------------------------------


def test_a_store_on_the_wrong_file_system_is_refused(tmp_path: Path) -> None:
    """The type of the file system decides: ext4 is taken, FUSE is not; the longest mount point counts."""
    folder = tmp_path / "store"
    folder.mkdir()
    mounts = f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:9 / {tmp_path} rw - fuse.sshfs x rw\n"
    box = host(tmp_path, {"proc/self/mountinfo": mounts})
    assert store.file_system(folder, box) == "fuse.sshfs"
    assert any("fuse.sshfs" in finding.message for finding in store.check(folder, box) if finding.level is Level.FAIL)
    assert store.file_system(Path("/"), box) == "ext4"


def test_direct_reads_are_tried_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file system answers to O_DIRECT decides, and no file stays behind."""
    whole, asked = os.open, []

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        asked.append(flags)
        raise OSError(errno.EINVAL, "no direct reads here")

    def accept(path: Path, flags: int, mode: int = 0o777) -> int:
        return whole(path, flags & ~os.O_DIRECT, mode)

    monkeypatch.setattr(store.os, "open", refuse)
    assert not store.has_direct_io(tmp_path)
    assert asked
    assert asked[0] & os.O_DIRECT
    found = failed(store.check(tmp_path, host(tmp_path, {"proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"})))
    assert "store" in found
    monkeypatch.setattr(store.os, "open", accept)
    before = sorted(tmp_path.iterdir())
    assert store.has_direct_io(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_store_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space and what is stored already must hold every record."""
    monkeypatch.setattr(store, "STORE_BYTES", 1 << 60)
    mounts = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
    assert "the store needs" in failed(store.check(tmp_path, host(tmp_path, {"proc/self/mountinfo": mounts})))["store"].message


# ---- the command -----------------------------------------------------------------------------------------------------------------------


def doctor(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own."""
    full = {**{name: value for name, value in os.environ.items() if not name.startswith("GLM53_")}, **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "cli.doctor", *arguments], cwd=ROOT, env=full, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_failure_is_exit_code_78_and_nothing_is_started() -> None:
    """A preflight that fails ends the container with its message; the command behind `--` does not run."""
    done = doctor("--for", "cpu-expert", "--", sys.executable, "-c", "print('started')", env={"GLM53_CT_CPU": "0"})
    assert done.returncode == 78
    assert "did you mean GLM53_CT_CPUS" in done.stdout
    assert "started" not in done.stdout


def test_a_sound_preflight_becomes_the_service() -> None:
    """The command takes the doctor's place, with its own exit code."""
    done = doctor("--for", "cpu-expert", "--", sys.executable, "-c", "print('started'); raise SystemExit(9)")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (9, "started")


@pytest.mark.parametrize(
    ("service", "foreign"),
    [("gateway", ["numpy", "kernels"]), ("cpu-expert", ["grpc", "fastapi"]), ("gpu-worker", ["fastapi", "uvicorn"])],
)
def test_a_service_is_checked_without_the_packages_of_others(service: str, foreign: list[str]) -> None:
    """In an image that lacks other services' packages the preflight still runs."""
    block = f"import sys; sys.modules.update(dict.fromkeys({foreign!r})); sys.argv = ['doctor', '--for', {service!r}]; import runpy;"
    done = subprocess.run(
        [sys.executable, "-c", block + " runpy.run_module('cli.doctor', run_name='__main__')"],
        cwd=ROOT, env={"PATH": os.environ["PATH"], "PORT": "0", "GLM53_WORKER_ADDRESS": "unix:/nowhere/x", "GLM53_INSTANCE": "doctor-test"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_report_can_be_read_by_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json lists every finding with check, level, message and fix; the exit code is the same."""
    args = build_parser().parse_args(["doctor", "--for", "gpu-worker", "--json"])
    env = worker_env(tmp_path, GLM53_MODE="nvme")
    assert command.run(args, host(tmp_path), env) == 78
    findings = json.loads(capsys.readouterr().out)
    assert {"check", "level", "message", "fix"} == set(findings[0])
    assert "memory cap" in [finding["check"] for finding in findings if finding["level"] == "fail"]


def test_the_whole_machine_is_checked_without_a_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Machine and all three services in one report, a stale CDI specification included."""
    args = argparse.Namespace(service=None, store=None, json=False, then=[])
    box = host(tmp_path, {"etc/cdi/nvidia.yaml": CDI_YAML}, gpus=[GPU])
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    assert command.run(args, box, worker_env(tmp_path, PORT=str(port))) == 78
    report = capsys.readouterr().out
    assert "RTX 3090" in report
    assert "nvidia-ctk cdi generate" in report
    assert "1 failed" in report


def test_a_program_that_hangs_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every probe has a time limit: "unavailable" after it."""
    monkeypatch.setattr(machine, "PROGRAM_S", 0.2)
    assert machine.run_program(["sleep", "30"]) is None
    assert machine.run_program(["true"]) == ""
    assert machine.run_program(["false"]) is None
    assert machine.run_program(["no-such-program"]) is None
