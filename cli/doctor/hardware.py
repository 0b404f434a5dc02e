"""Checks of the machine: GPU, container devices, CPU, memory."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
from collections.abc import Iterator

from cli.doctor.findings import Finding, fail, ok, warn
from cli.doctor.machine import Gpu, Machine
from services.common.shm_room import GIB, size_in_words

MIN_DRIVER = 580  # CUDA 13
# A "24 GB" card has 24,564 MiB or less.
MIN_VRAM = 23 * GIB
OTHERS_VRAM = 1 * GIB
CPU_FEATURES = ("avx2", "fma", "f16c")
_CAPABILITY = re.compile(r"\d+\.\d+")
_ARCHITECTURE = re.compile(r"(?P<version>\d+\.\d+)(?:(?P<only>a)|f)?(?P<ptx>\+PTX)?")
_CDI_PATH = re.compile(r"""^\s*-?\s*["']?(hostPath|path)["']?\s*:\s*["']?(/[^"',\s]+)""")


def gpu(machine: Machine, visible: str | None = None, *, needed: bool = True) -> Iterator[Finding]:
    """One usable NVIDIA GPU, and nobody else on it.

    Args:
        machine: where to look.
        visible: CUDA_VISIBLE_DEVICES, which nvidia-smi does not follow; None when it is not set.
        needed: False when the CPU serves in the place of a GPU that is not there.
    """
    gpus, nodes = machine.gpus(), machine.gpu_nodes()
    names = _chosen([(found.uuid, found.name) for found in gpus] if gpus else [("", node) for node in nodes], visible)
    if not names:
        reason = "nvidia-smi is not there or does not answer" if gpus is None else "nvidia-smi lists none"
        yield (fail if needed else warn)(
            "GPU",
            f"no NVIDIA GPU is visible: {reason if visible is None else f'CUDA_VISIBLE_DEVICES={visible}'}",
            "On the host: install the driver (>= 580). In a container: hand the device in (compose: devices: nvidia.com/gpu=0; Kubernetes:"
            " limits nvidia.com/gpu: 1 and the NVIDIA device plugin). To serve on the CPU: GLM53_DEVICE=cpu.",
        )
    elif len(names) > 1:
        listed = ", ".join(f"{number}: {name}" for number, name in names.items())
        yield fail(
            "GPU",
            f"{len(names)} GPUs are visible ({listed}); a worker uses one",
            "Choose one: CUDA_VISIBLE_DEVICES=0 on bare metal, devices: nvidia.com/gpu=0 instead of all in compose.",
        )
    elif gpus:
        yield from _one_gpu(machine, gpus[next(iter(names))])
    else:
        text = f"/dev/{nodes[next(iter(names))]} is there, but nvidia-smi does not answer: driver, memory and link are unknown"
        yield warn(
            "GPU", text, "In a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility. On the host: see dmesg for the driver's errors."
        )


def _chosen(found: list[tuple[str, str]], visible: str | None) -> dict[int, str]:
    """Number → name of those that CUDA_VISIBLE_DEVICES lets through, by number or the beginning of a UUID."""
    names = {number: name for number, (_, name) in enumerate(found)}
    if visible is None:
        return names
    words = [word.strip() for word in visible.split(",")]
    uuids = {number: uuid for number, (uuid, _) in enumerate(found)}
    return {
        number: name
        for number, name in names.items()
        if str(number) in words or any(word.startswith("GPU-") and uuids[number].startswith(word) for word in words)
    }


def _one_gpu(machine: Machine, found: Gpu) -> Iterator[Finding]:
    yield ok("GPU", f"{found.name}, {size_in_words(found.memory)}, driver {found.driver}")
    if int(found.driver.split(".")[0] or 0) < MIN_DRIVER:
        yield fail("GPU driver", f"driver {found.driver} is older than {MIN_DRIVER}, which CUDA 13 needs", "Install a newer NVIDIA driver.")
    if found.memory < MIN_VRAM:
        yield fail("VRAM", f"{found.name} has {size_in_words(found.memory)}, a 24 GB card is needed", "Use a card with 24 GB or more.")
    yield from _compiled_for(found.name, machine.compute_capability(found.uuid))
    if found.memory_used > OTHERS_VRAM:
        users = machine.run(["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]) or ""
        by = "; ".join(filter(None, map(str.strip, users.splitlines()))) or "a desktop, or processes of other containers"
        yield warn(
            "VRAM",
            f"{size_in_words(found.memory_used)} are taken already (by {by})",
            "End what uses the GPU, or move the desktop to another one; what is taken later makes the expert cache smaller.",
        )
    if 0 < found.link_width < found.link_width_max:
        yield warn(
            "PCIe link",
            f"the link has {found.link_width} of {found.link_width_max} lanes",
            "Seat the card in a x16 slot of the CPU; look for AER errors in dmesg. Fewer lanes slow every expert that is not in VRAM.",
        )


def _compiled_for(name: str, capability: str) -> Iterator[Finding]:
    """exllamav3's extension has machine code for some cards; on another one its first kernel fails, after the checkpoint has been read."""
    extension = importlib.util.find_spec("exllamav3_ext")
    if extension is None or not extension.origin or not _CAPABILITY.fullmatch(capability):
        return
    try:
        architectures = pathlib.Path(extension.origin).with_name("exllamav3_ext.archs").read_text().replace(";", " ").split()
    except OSError:  # built by hand: nothing is known of it
        return
    if architectures and not any(runs_on(capability, architecture) for architecture in architectures):
        yield fail(
            "exllamav3",
            f"its kernels were compiled for compute capability {', '.join(architectures)}; {name} has {capability}",
            f"Build the image with CUDA_ARCHS={capability} (compose: in .env, then docker compose build gpu-worker); on bare metal run"
            " scripts/install.sh again.",
        )


def runs_on(capability: str, architecture: str) -> bool:
    """Whether code for an architecture, as TORCH_CUDA_ARCH_LIST spells it, runs on a card. True for names that are not numbers."""
    named = _ARCHITECTURE.fullmatch(architecture)
    if named is None:
        return True
    card, built = _version(capability), _version(named["version"])
    if named["only"]:
        return card == built
    # Machine code runs on later cards of the same generation, PTX on all later ones.
    return card >= built and (card[0] == built[0] or bool(named["ptx"]))


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def cdi(machine: Machine) -> Iterator[Finding]:
    """Container device specifications that still fit the installed driver."""
    specs = [path for folder in ("etc/cdi", "var/run/cdi") for path in sorted((machine.root / folder).glob("*")) if path.is_file()]
    for spec in specs:
        missing = sorted({path for path in _cdi_paths(spec.read_text(errors="replace")) if not (machine.root / path.lstrip("/")).exists()})
        shown = spec.relative_to(machine.root)
        if missing:
            yield fail(
                "CDI",
                f"/{shown} is stale: it names {missing[0]}"
                + (f" and {len(missing) - 1} more files" if len(missing) > 1 else "")
                + ", gone",
                f"After a driver update: nvidia-ctk cdi generate --output=/{shown}",
            )
        else:
            yield ok("CDI", f"/{shown} fits")


def _cdi_paths(text: str) -> set[str]:
    """Paths of the host that a specification needs: device nodes and mounts."""
    if text.lstrip().startswith("{"):
        return _paths_in(json.loads(text))
    mounts, found = False, set()
    for line in text.splitlines():
        if line.strip().endswith(":"):
            mounts = line.strip() in ("mounts:", "deviceNodes:")
        match = _CDI_PATH.match(line)
        if match and mounts:
            found.add(match.group(2))
    return found


def _paths_in(node: object, inside: bool = False) -> set[str]:
    if isinstance(node, list):
        return set().union(*(_paths_in(item, inside) for item in node))
    if not isinstance(node, dict):
        return set()
    found = {value for name, value in node.items() if inside and name in ("hostPath", "path") and isinstance(value, str)}
    return found.union(*(_paths_in(value, name in ("mounts", "deviceNodes")) for name, value in node.items()))


def cpu(machine: Machine, mode: str) -> Iterator[Finding]:
    """The instruction sets that the CPU lane is written for."""
    missing = [name for name in CPU_FEATURES if name not in machine.cpu_flags()]
    if not missing:
        yield ok("CPU", f"{len(machine.affinity())} CPUs with AVX2, FMA and F16C")
        return
    text = f"this CPU lacks {', '.join(name.upper() for name in missing)}, which the CPU lane of fast and nvme is written for"
    fix = "Use GLM53_MODE=exact."
    yield fail("CPU", text, fix) if mode in ("fast", "nvme") else warn("CPU", text, fix)


def cpu_quota(machine: Machine) -> Iterator[Finding]:
    """A quota of CPU time stops all threads at once; a set of CPUs does not."""
    quota, usable = machine.cpu_quota(), len(machine.affinity())
    if quota is not None and quota < usable:
        yield warn(
            "CPU quota",
            f"{usable} CPUs may be used, but only {quota:g} CPUs' worth of time: threads are stopped in the middle of a step",
            "Give whole CPUs: cpuset in compose; on Kubernetes requests equal to limits, whole numbers, and the static CPU manager.",
        )


def memory_limit(machine: Machine, least: int, where: str) -> Iterator[Finding]:
    """A container below what its process takes is killed without a word in its log.

    Args:
        least: bytes that the process takes before anybody asks it for something.
        where: what sets the limit.
    """
    memory = machine.memory()
    if memory.capped and memory.limit < least:
        yield fail(
            "memory",
            f"the container's memory limit is {size_in_words(memory.limit)}; the process alone takes"
            f" {size_in_words(least)}, and the kernel would end it",
            f"Raise it: {where}.",
        )


def swap(machine: Machine, mode: str) -> Iterator[Finding]:
    """Memory that is swapped out is slower than anything this product does to avoid it."""
    memory = machine.memory()
    if memory.capped and memory.swap_limit != 0:
        taken = "any amount of swap" if memory.swap_limit is None else f"{size_in_words(memory.swap_limit)} of swap"
        text = f"the memory limit is {size_in_words(memory.limit)}, but {taken} may be used beyond it"
        fix = "Set the swap limit equal to the memory limit (compose: memswap_limit = mem_limit; docker run: --memory-swap = --memory)."
        # Without swap there is none to take, whatever the limit says.
        if _has_swap(machine):
            yield fail("swap", text, fix) if mode.startswith("nvme") else warn("swap", text, fix)


def _has_swap(machine: Machine) -> bool:
    return len(machine.read("proc/swaps").splitlines()) > 1


def memlock(machine: Machine, need: int, mode: str) -> Iterator[Finding]:
    """Pinned memory, where the system counts it."""
    limit = machine.memlock()
    if limit in (-1,) or limit >= need:
        return
    text = f"memlock is {size_in_words(limit)}, {size_in_words(need)} are pinned"
    fix = (
        "Raise it: ulimits: memlock: -1 in compose; LimitMEMLOCK=infinity of containerd's service on a Kubernetes node;"
        " * - memlock unlimited in /etc/security/limits.d on bare metal."
    )
    # The NVIDIA driver does not count what it pins; the buffers of direct reads from a drive are counted.
    yield fail("memlock", text, fix) if mode.startswith("nvme") else warn("memlock", text, fix)
