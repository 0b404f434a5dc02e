"""What goes wrong when people set the system up: each is found by the preflight, with the exact fix, before anything slow.

One row for each; the container ends with exit code 78 where it could not serve, and is told and goes on where it would serve worse.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cli.doctor import command, store
from cli.doctor.machine import Machine
from kernels.python import segments
from kernels.python._layout import ABI_VERSION
from kernels.python.arena import Arena
from kernels.python.expert import ExpertShape
from services.common.errors import ConfigError
from services.common.lifecycle import ExitCode
from services.gpu_worker.backends import cpu
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.patches import upstream
from tests.support import missing
from tests.unit.test_doctor import CDI_YAML, FLAGS, GPU, capped, host, with_exllamav3, worker_env

ROOT = Path(__file__).resolve().parents[2]

SWAP = {"proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 8 0 5\n"}
EXT4 = {"proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"}
FUSE = {"proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:9 / {folder} rw - fuse.sshfs x rw\n"}


@dataclass(frozen=True)
class Row:
    """One thing that goes wrong.

    Attributes:
        said: what the report says is the case.
        fix: the step that it names; empty where what is said names it.
        service: whose preflight finds it; None: `glm53 doctor` on the machine.
        files: of the machine.
        gpus: what nvidia-smi lists; None: it is not there.
        env: settings.
        facts: of the process: affinity, memlock.
        code: how the preflight ends.
        before: what has happened on this machine before.
        store: the folder given with --store.
    """

    said: str
    fix: str
    service: str | None = "gpu-worker"
    files: Mapping[str, str] = field(default_factory=dict)
    gpus: list[str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)
    code: int = ExitCode.CONFIG
    before: Callable[[Path, pytest.MonkeyPatch], object] | None = None
    store: bool = False


def _no_direct_io(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del folder
    monkeypatch.setattr(store, "has_direct_io", lambda path: False)


def _full_drive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del folder
    monkeypatch.setattr(store, "STORE_BYTES", 1 << 60)


def _nothing_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del folder
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))


def _a_diary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch
    (folder / "diary").write_text("day 1")


def _no_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch
    shutil.copytree(ROOT / "models" / "tiny" / "checkpoint", folder / "model")
    (folder / "model" / "tokenizer.json").unlink()


def _no_exllamav3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del folder
    monkeypatch.setattr(upstream, "installed", lambda: False)


def _no_opentelemetry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del folder
    missing.hide(monkeypatch, "opentelemetry")


def _no_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch
    (folder / "store").rmdir()


def _small_shm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del folder
    real = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: argparse.Namespace(f_bavail=1, f_frsize=4096) if str(path).endswith("shm") else real(path)
    )


def _other_version(folder: Path, monkeypatch: pytest.MonkeyPatch, by: int = 1) -> Arena:
    """A running worker's arena, of an older or newer layout."""
    del monkeypatch
    path = Path(segments.arena_path(folder / "shm", "default"))
    made = Arena.create(str(path), [ExpertShape.create(128, 128, (3, 3, 3))], 1, bytes(32))
    made.record(0, 0)[:] = 0
    made.seal()
    with path.open("r+b") as file:
        file.seek(8)  # abi_version follows the magic
        file.write((ABI_VERSION + by).to_bytes(4, "little"))
    return made


ON_GPU = {"GLM53_DEVICE": "cuda"}
ROWS: dict[str, Row] = {
    "stale CDI specification": Row(
        "/etc/cdi/nvidia.yaml is stale: it names /usr/lib/libcuda.so.580.65.06",
        "After a driver update: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        service=None, files={"etc/cdi/nvidia.yaml": CDI_YAML, "dev/nvidia0": ""}, gpus=[GPU],
    ),
    "no GPU": Row("no NVIDIA GPU is visible", "hand the device in (compose: devices: nvidia.com/gpu=0;", env=ON_GPU),
    "several GPUs": Row(
        "2 GPUs are visible", "Choose one: CUDA_VISIBLE_DEVICES=0 on bare metal", gpus=[GPU, GPU.replace("GPU-1", "GPU-2")], env=ON_GPU
    ),
    "driver before CUDA 13": Row(
        "driver 570.1 is older than 580", "Install a newer NVIDIA driver.", gpus=[GPU.replace("590.12", "570.1")], env=ON_GPU
    ),
    "VRAM taken by a desktop": Row(
        "2.3 GiB are taken already (by 4242, /usr/bin/gnome-shell, 2000 MiB)",
        "End what uses the GPU, or move the desktop to another one",
        gpus=[GPU.replace(" 310,", " 2310,")], env=ON_GPU, code=ExitCode.OK,
    ),
    "PCIe link that lost lanes": Row(
        "the link has 8 of 16 lanes", "look for AER errors in dmesg", gpus=[GPU.replace("16, 16", "8, 16")], env=ON_GPU, code=ExitCode.OK
    ),
    "an nvme mode": Row(
        "GLM53_MODE=nvme is not in this version", "Use GLM53_MODE=auto, fast or exact.", files=capped(16), env={"GLM53_MODE": "nvme"}
    ),
    "no memory cap in an nvme mode": Row(
        "an nvme mode without a memory limit", "Set one of 15 GiB or more (compose: WORKER_MEMORY in .env;", env={"GLM53_MODE": "nvme"}
    ),
    "cap too small": Row(
        "the memory limit is 14.0 GiB, an nvme mode needs at least 15 GiB", "Raise the limit.", files=capped(14), env={"GLM53_MODE": "nvme"}
    ),
    "swap limit that is not the memory limit": Row(
        "the memory limit is 32.0 GiB, but any amount of swap may be used beyond it",
        "Set the swap limit equal to the memory limit (compose: memswap_limit = mem_limit; docker run: --memory-swap = --memory).",
        files={**capped(32, "max"), **SWAP}, code=ExitCode.OK,
    ),
    "memlock too small": Row(
        "memlock is 1 MiB", "ulimits: memlock: -1 in compose; LimitMEMLOCK=infinity of containerd's service",
        gpus=[GPU], env=ON_GPU, facts={"memlock": lambda: 1 << 20}, code=ExitCode.OK,
    ),
    "memory below the records": Row(
        "the container's memory limit is 1 MiB", "Give it at least 1 GiB (compose: WORKER_MEMORY", files=capped(1 / 1024)
    ),
    "memory for the records but not for the engine": Row(
        "the container's memory limit is 64 MiB", "Give it at least 1 GiB (compose: WORKER_MEMORY", files=capped(1 / 16)
    ),
    "memory below what the gateway takes": Row(
        "the container's memory limit is 64 MiB", "GATEWAY_MEMORY in compose's .env", "gateway", capped(1 / 16)
    ),
    "memory below what cpu_expert takes": Row(
        "the container's memory limit is 32 MiB", "EXPERT_MEMORY in compose's .env", "cpu-expert", capped(1 / 32)
    ),
    "heat that cannot be saved": Row(
        "GLM53_HEAT_FILE=/none/heat is in a folder that does not exist",
        "a volume that user 10001 may write", env={"GLM53_HEAT_FILE": "/none/heat"},
    ),
    "heat in the place of another file": Row(
        "/diary is not written to: it has 5 bytes that are no heat file of ours. Name a file that does not exist yet", "",
        env={"GLM53_HEAT_FILE": "{folder}/diary"}, before=_a_diary,
    ),
    "Triton's choices in the place of another file": Row(
        "/diary is not written to: it has 5 bytes that are no file of Triton's choices of ours", "",
        gpus=[GPU], env={**ON_GPU, "GLM53_TRITON_PIN": "{folder}/diary"}, before=_a_diary,
    ),
    "usage in another file": Row(
        "/diary is not written to: it has 5 bytes that are no usage lines of ours", "", "gateway",
        env={"GLM53_USAGE_FILE": "{folder}/diary"}, before=_a_diary,
    ),
    "usage in the key file": Row(
        "is the file of GLM53_API_KEYS_FILE, which the first request's line would destroy: name another file", "", "gateway",
        env={"GLM53_USAGE_FILE": "{folder}/diary", "GLM53_API_KEYS_FILE": "{folder}/diary"}, before=_a_diary,
    ),
    "heat on a full drive": Row(
        "0 MiB are free there, so heat is not saved", "Free space there",
        env={"GLM53_HEAT_FILE": "{folder}/heat"}, before=_nothing_free, code=ExitCode.OK,
    ),
    "usage that cannot be written": Row(
        "GLM53_USAGE_FILE=/none/usage cannot be written", "Name a file in a folder", "gateway", env={"GLM53_USAGE_FILE": "/none/usage"}
    ),
    "usage on a full drive": Row(
        "0 MiB are free there; lines wait in memory", "Free space there", "gateway",
        env={"GLM53_USAGE_FILE": "{folder}/usage"}, before=_nothing_free, code=ExitCode.OK,
    ),
    "spans that go nowhere": Row(
        "GLM53_OTLP_ENDPOINT: need a URL", "", "gateway", env={"GLM53_OTLP_ENDPOINT": "collector:4318"}
    ),
    "spans without the packages, in the gateway": Row(
        "GLM53_OTLP_ENDPOINT needs packages that are not installed: run `make setup-otel`", "", "gateway",
        env={"GLM53_OTLP_ENDPOINT": "http://collector:4318/v1/traces"}, before=_no_opentelemetry,
    ),
    "spans without the packages, in gpu_worker": Row(
        "GLM53_OTLP_ENDPOINT needs packages that are not installed: run `make setup-otel`", "",
        env={"GLM53_OTLP_ENDPOINT": "http://collector:4318/v1/traces"}, before=_no_opentelemetry,
    ),
    "a GPU without exllamav3": Row(
        "GLM53_DEVICE=cuda: exllamav3 is not installed", "Run `scripts/install.sh --gpu`", gpus=[GPU], env=ON_GPU, before=_no_exllamav3
    ),
    "a context that the checkpoint has not": Row(
        "GLM53_CONTEXT_TOKENS=99999 is more than the checkpoint's index_topk 16384: lower it", "", env={"GLM53_CONTEXT_TOKENS": "99999"}
    ),
    "a checkpoint without its tokenizer": Row(
        "tokenizer.json does not exist", "Fetch the missing or damaged file again",
        env={"GLM53_MODEL_DIR": "{folder}/model"}, before=_no_tokenizer,
    ),
    "keys that are a folder": Row(
        "cannot read the key file", "remove it on the host", "gateway", env={"GLM53_API_KEYS_FILE": "{folder}/store"}
    ),
    "keys that are missing": Row(
        "cannot read the key file", "keys create` (compose: see its README.md)", "gateway", env={"GLM53_API_KEYS_FILE": "{folder}/none"}
    ),
    "/dev/shm too small": Row("free, the expert records need", "Make it at least 1 GiB: SHM_SIZE in compose's .env", before=_small_shm),
    "CPU list outside the cpuset": Row(
        "usable are", "Name CPUs of the container's cpuset, or leave it at auto.",
        service="cpu-expert", env={"GLM53_CT_CPUS": str(max(os.sched_getaffinity(0)) + 1)},
    ),
    "CPU quota": Row(
        "only 1.5 CPUs' worth of time", "Give whole CPUs: cpuset in compose;",
        service="cpu-expert", files={"sys/fs/cgroup/cpu.max": "150000 100000\n"}, code=ExitCode.OK,
        facts={"affinity": lambda: {0, 1, 2, 3}},
    ),
    **{
        f"CPU without {feature.upper()}": Row(
            f"this CPU lacks {feature.upper()}", "Use GLM53_MODE=exact.",
            files={"proc/cpuinfo": f"flags : {' '.join(flag for flag in FLAGS.split() if flag != feature)}\n"}, env={"GLM53_MODE": "fast"},
        )
        for feature in ("avx2", "fma", "f16c")
    },
    "an older worker beside it": Row(
        "not of this version: ",
        "Run gpu-worker and cpu-expert from images of the same version.",
        service="cpu-expert", before=lambda folder, patch: _other_version(folder, patch, -1),
    ),
    "a newer worker beside it": Row(
        "not of this version: ", "Run gpu-worker and cpu-expert from images of the same version.",
        service="cpu-expert", before=_other_version,
    ),
    "checkpoint not mounted": Row(
        "nothing", "GLM53_MODEL_DIR must be the folder that holds config.json; in a container: is the volume mounted there?",
        env={"GLM53_MODEL_DIR": "/nothing", "GLM53_MODEL_DOWNLOAD": "0"},
    ),
    "store on a file system of the wrong kind": Row(
        "is on fuse.sshfs", "Use a local xfs or ext4 file system on NVMe.", files=FUSE, store=True
    ),
    "store without O_DIRECT": Row(
        "its file system refuses O_DIRECT", "Use a local xfs or ext4 file system, not tmpfs, FUSE or a network.",
        files=EXT4, store=True, before=_no_direct_io,
    ),
    "store that is missing": Row(
        "is no folder", "Name the folder that the store lies in, or will lie in.", files=EXT4, store=True, before=_no_store
    ),
    "store on a drive that is full": Row(
        "GB free, the store needs", "Free space, or use another.", files=EXT4, store=True, before=_full_drive
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_it_is_found_with_its_fix(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has what is the case and, in the line after it, the step that ends it; the exit code is what an orchestrator acts on."""
    row = ROWS[name]
    (tmp_path / "store").mkdir()
    files = {path: text.replace("{folder}", str(tmp_path)) for path, text in row.files.items()}
    box: Machine = host(tmp_path, files, row.gpus, **row.facts)
    env = worker_env(tmp_path, PORT="0", **{name: value.replace("{folder}", str(tmp_path)) for name, value in row.env.items()})
    if row.gpus:
        with_exllamav3(monkeypatch)
    held = row.before(tmp_path, monkeypatch) if row.before else None
    args = argparse.Namespace(service=row.service, store=tmp_path / "store" if row.store else None, json=False, then=[])
    assert command.run(args, box, env) == row.code
    lines = capsys.readouterr().out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if row.said in line and line.startswith(("FAIL", "warn"))]
    assert lines[at].startswith("warn" if row.code == ExitCode.OK else "FAIL")
    if row.fix:
        assert lines[at + 1].startswith("      fix: ")
        assert row.fix in lines[at + 1]
    del held


@pytest.mark.parametrize("mode", ["auto", "fast", "exact", "nvme", "nvme-exact"])
def test_the_preflight_refuses_the_modes_that_the_backends_refuse(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a backend would refuse after loading for minutes is refused at once, and nothing else."""
    for device, gpus, resolve in (("cpu", None, cpu.resolve_mode), ("cuda", [GPU], functools.partial(loader.resolve_mode, problem=""))):
        try:
            served = bool(resolve(mode))
        except ConfigError:
            served = False
        box = host(tmp_path, {**capped(128), "proc/meminfo": f"MemTotal: {256 << 20} kB\nMemAvailable: {250 << 20} kB\n"}, gpus)
        args = argparse.Namespace(service="gpu-worker", store=None, json=False, then=[])
        command.run(args, box, worker_env(tmp_path, GLM53_MODE=mode, GLM53_DEVICE=device))
        assert ("FAIL  mode:" in capsys.readouterr().out) is not served, device
