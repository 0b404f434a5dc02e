"""Checks of gpu_worker."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping

from cli.doctor import hardware, network, sharedmem, traces
from cli.doctor.findings import Finding, fail, ok, warn
from cli.doctor.machine import Machine
from kernels.python import host
from services.common.errors import CheckpointError, ConfigError
from services.common.ops_http import split_address
from services.common.shm_room import GIB, size_in_words
from services.gpu_worker import download
from services.gpu_worker.backends import cpu, cpu_arena, select
from services.gpu_worker.backends.exl3 import resolve
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.patches import upstream
from services.gpu_worker.settings import GpuWorkerSettings
from services.gpu_worker.tokenizer_files import TokenizerFiles

MIN_NVME_CAP = 15 * GIB
# Of the default repository: the files, and a little; and the expert records in them.
CHECKPOINT_BYTES = 126_000_000_000
HEAT_BYTES = 1 << 20
RECORDS_BYTES = 42 * 288 * 9_474_048


def check(env: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    """Settings, checkpoint, device, shared memory, limits."""
    try:
        settings = GpuWorkerSettings.load(env)
    except ConfigError as error:
        yield fail("settings", error.message)
        return
    yield ok("settings", f"mode {settings.mode}, device {settings.device}")
    yield from traces.check(settings.otlp_endpoint)
    if unbuilt := list(sharedmem.kernels()):
        yield from unbuilt
        return
    if not settings.worker_address.startswith("unix:"):
        yield from network.listen("GLM53_WORKER_ADDRESS", *split_address(settings.worker_address), network.worker)
    if settings.http_address:
        yield from network.listen("GLM53_WORKER_HTTP", *split_address(settings.http_address), network.probe_endpoint)
    if settings.mode.startswith("nvme"):
        # The backend says so too, after the records have been read for minutes.
        yield fail("mode", f"GLM53_MODE={settings.mode} is not in this version", "Use GLM53_MODE=auto, fast or exact.")
        yield from nvme_cap(machine)
    yield from hardware.swap(machine, settings.mode)
    pinned = wants_gpu(settings)
    if pinned:
        yield from hardware.gpu(machine, env.get("CUDA_VISIBLE_DEVICES"), needed=settings.device != "auto")
    on_gpu = pinned and (settings.device != "auto" or bool(machine.gpus() or machine.gpu_nodes()))
    yield from _as_the_start(settings, on_gpu=on_gpu)
    yield from hardware.cpu(machine, settings.mode)
    yield from _heat_file(settings.heat_file)
    yield from sharedmem.in_use(settings.shm_dir, settings.instance, lambda: network.running(env) or _answers(settings))
    unusable = list(sharedmem.folder(settings.shm_dir))
    yield from unusable
    yield from _records(settings, machine, on_gpu=on_gpu, pinned=pinned, measure_room=not unusable)


class _WouldFetchError(Exception):
    """A start would ask the hub now."""


def _as_the_start(settings: GpuWorkerSettings, *, on_gpu: bool) -> Iterator[Finding]:
    """What the start looks at by itself before it reads the checkpoint, by the same functions."""
    if on_gpu and not upstream.installed():
        fix = f"Run {upstream.INSTALL}, or use GLM53_DEVICE=cpu."
        yield fail("device", f"GLM53_DEVICE={settings.device}: {upstream.PACKAGE} is not installed", fix)
    elif on_gpu:
        yield from _refused(upstream.check)
    if not settings.mode.startswith("nvme"):  # told already
        yield from _refused(lambda: resolve.check(settings) if on_gpu else select.check_for_cpu(settings))
    yield from _refused(lambda: _check_node(settings.ct_numa_node))
    yield from _refused(lambda: _check_source(settings))


def _refused(step: Callable[[], object]) -> Iterator[Finding]:
    try:
        step()
    except ConfigError as error:
        yield fail("settings", error.message)
    except CheckpointError as error:
        yield fail("checkpoint", error.message)


def _check_node(node: int) -> None:
    try:
        with host.memory_on(node):
            pass
    except host.NoSuchNodeError as error:
        raise ConfigError(f"GLM53_CT_NUMA_NODE={node}: {error}", param="GLM53_CT_NUMA_NODE") from None


def _check_source(settings: GpuWorkerSettings) -> None:
    """The folder is of the repository and the revision that are asked for, and what would be fetched is named in full."""

    def before_it_asks(_fraction: float, _what: str) -> None:
        raise _WouldFetchError

    with contextlib.suppress(_WouldFetchError):
        download.ensure(settings, before_it_asks)


def _answers(settings: GpuWorkerSettings) -> str | None:
    """Whether a worker runs where these settings put it: in a container there is no gateway to ask."""
    unix = settings.worker_address.startswith("unix:")
    return None if unix else network.worker(*split_address(settings.worker_address))


def wants_gpu(settings: GpuWorkerSettings) -> bool:
    """True when the model is to run on a GPU: asked for, or this installation was made for one."""
    return settings.device not in ("auto", "cpu") or (settings.device == "auto" and importlib.util.find_spec("exllamav3") is not None)


def nvme_cap(machine: Machine) -> Iterator[Finding]:
    """In the nvme modes the container's memory limit sizes the RAM tier: there must be one, and not too small a one."""
    memory = machine.memory()
    if not memory.capped:
        yield fail(
            "memory cap",
            "an nvme mode without a memory limit: the RAM tier is sized by it, and would take the whole host",
            "Set one of 15 GiB or more (compose: WORKER_MEMORY in .env; Kubernetes: limits.memory), or use GLM53_MODE=fast.",
        )
    elif memory.limit < MIN_NVME_CAP:
        yield fail(
            "memory cap",
            f"the memory limit is {size_in_words(memory.limit)}, an nvme mode needs at least {MIN_NVME_CAP // GIB} GiB",
            "Raise the limit.",
        )


def _heat_file(name: str) -> Iterator[Finding]:
    """A place where heat can be saved, now and while it serves."""
    try:
        cpu.check_heat_file(name)
    except ConfigError as error:
        yield fail("heat file", error.message, "In a container: a volume that user 10001 may write. Or unset it.")
        return
    if name and (free := shutil.disk_usage(pathlib.Path(name).resolve().parent).free) < HEAT_BYTES:
        text = (
            f"GLM53_HEAT_FILE={name}: {size_in_words(free)} are free there, so heat is not saved and the cache begins cold after a restart"
        )
        yield warn("heat file", text, "Free space there, or name another place.")


def _records(settings: GpuWorkerSettings, machine: Machine, *, on_gpu: bool, pinned: bool, measure_room: bool) -> Iterator[Finding]:
    """The checkpoint's headers, and the memory that its expert records will take."""
    if settings.model_download and not (settings.model_folder / "config.json").exists():
        yield _to_be_fetched(settings)
        # A machine that could not hold the records is told before it fetches them.
        if _is_default(settings) and measure_room and not settings.mode.startswith("nvme"):
            yield from sharedmem.room(settings.shm_dir, settings.instance, RECORDS_BYTES, machine.memory())
        return
    try:
        checkpoint = Checkpoint(settings.model_folder)
        TokenizerFiles.from_directory(settings.model_folder)
        shapes = [cpu_arena.expert_shape(checkpoint, layer) for layer in checkpoint.config.moe_layers]
    except CheckpointError as error:
        yield fail("checkpoint", error.message, _checkpoint_fix(settings.model_folder))
        return
    need = sum(shape.record_bytes for shape in shapes) * checkpoint.config.n_routed_experts
    yield ok("checkpoint", f"{settings.model_folder}: {len(shapes)} MoE layers of {checkpoint.config.n_routed_experts} experts")
    if settings.mode.startswith("nvme"):
        return
    if pinned:
        yield from hardware.memlock(machine, need, settings.mode)
    yield from _context(settings, checkpoint, on_gpu=on_gpu)
    if measure_room:
        yield from sharedmem.room(settings.shm_dir, settings.instance, need, machine.memory())


def _context(settings: GpuWorkerSettings, checkpoint: Checkpoint, *, on_gpu: bool) -> Iterator[Finding]:
    try:
        if on_gpu:
            resolve.resolve_context(settings.context_tokens, settings.cache_tokens, checkpoint.config)
        else:
            cpu.resolve_context(settings.context_tokens, checkpoint.config)
    except ConfigError as error:
        yield fail("context", error.message)


def _to_be_fetched(settings: GpuWorkerSettings) -> Finding:
    """A start would fetch the checkpoint: could it, and is that meant?"""
    folder = settings.model_folder
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    what = f"{folder} has no config.json, so a start fetches {settings.model_repo} into it"
    mounted = "If that is not meant: is the volume mounted there? GLM53_MODEL_DOWNLOAD=0 forbids it."
    if importlib.util.find_spec("huggingface_hub") is None:
        return fail("checkpoint", f"{what}, which needs the package huggingface_hub", f"Put the checkpoint there by hand. {mounted}")
    if not os.access(there, os.W_OK | os.X_OK):
        return fail("checkpoint", f"{what}, and {there} cannot be written", f"Mount it so that this user can write. {mounted}")
    free = shutil.disk_usage(there).free
    if _is_default(settings) and free < CHECKPOINT_BYTES:
        return fail("checkpoint", f"{what}: 125 GB, and {free / 1e9:.1f} GB are free", f"A larger disk's folder. {mounted}")
    return warn("checkpoint", f"{what}; {free / 1e9:.1f} GB are free", f"Nothing, if it may take its time. {mounted}")


def _is_default(settings: GpuWorkerSettings) -> bool:
    return bool(settings.model_repo == type(settings).model_fields["model_repo"].default)


def _checkpoint_fix(folder: pathlib.Path) -> str:
    if not folder.is_dir():
        return "GLM53_MODEL_DIR must be the folder that holds config.json; in a container: is the volume mounted there?"
    return "Fetch the missing or damaged file again; a download that was broken off leaves such files."
