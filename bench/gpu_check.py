"""Whether a GPU machine has what the benches need: `python -m bench.gpu_check`. Exit 2, with what is wrong and the fix, when it has not.

Says in seconds what a bench would say after minutes: the time of a rented machine is short.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.kept_rows import boot_id

SHM = Path("/dev/shm")
GIB = 1 << 30
LAYER_GIB = 2.7  # of routed experts
FIXED_GIB = 12.0  # the rest of the checkpoint, and what the processes take
# Files in /dev/shm, the arena in it, and stock's own copy of what its CPU split computes.
SHM_COPIES, RAM_COPIES = 2, 3
MODULES = ("torch", "numpy", "tokenizers", "prometheus_client", "pydantic_settings", "pytest", "pytest_timeout")
Problem = str | None


def modules() -> Problem:
    """Python packages."""
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    return f"Python {sys.version.split()[0]} lacks {', '.join(missing)}: install them, or put them on PYTHONPATH" if missing else None


def stubs() -> Problem:
    """What is generated or built here and lies in no repository."""
    try:
        from kernels.python.expert import kernel_info

        kernel_info()
    except (ImportError, OSError, RuntimeError) as error:
        return f"the kernels do not load: {error}"
    return None


def gpu() -> Problem:
    """Driver, torch, exllamav3, and the integer kernels for this GPU."""
    from kernels.python import cuda_expert
    from services.common.errors import Glm53Error
    from services.gpu_worker.backends import select
    from services.gpu_worker.patches import upstream

    if problem := select.gpu_problem():
        return f"{problem}: install {upstream.PACKAGE}=={upstream.VERSION} beside a torch with CUDA, or take a machine with an NVIDIA GPU"
    try:
        upstream.check()
    except Glm53Error as error:
        return str(error)
    import torch

    if not cuda_expert.is_built():
        return "libglm53_cuda.so is not here: build it with `make kernels` where nvcc is, and bring kernels/python/lib along"
    major, minor = torch.cuda.get_device_capability()
    if f"{major}{minor}" not in cuda_expert.architectures():
        built = ", ".join(cuda_expert.architectures())
        return f"libglm53_cuda.so is built for {built}, this GPU has {major}{minor}: build it again with that one"
    import exllamav3  # noqa: F401 - loads its extension, or compiles it for minutes

    return None


def memory(
    layers: int, total: int | None = None, free_shm: int | None = None, there: int | None = None, *, experts_in_files: bool = True
) -> Problem:
    """Room for the slice. What is available now says less: memory of rented machines may grow when it is touched.

    Args:
        layers: MoE layers of it.
        total: bytes of RAM; free_shm: of /dev/shm; there: what earlier commands left in /dev/shm. None: as they are.
        experts_in_files: experts lie in files too, and stock may get its copy of them.
    """
    there = slice_bytes() if there is None else there
    total = mem_info("MemTotal") if total is None else total
    free_shm = (shutil.disk_usage(SHM).free if free_shm is None else free_shm) + there
    in_ram, in_shm = (RAM_COPIES, SHM_COPIES) if experts_in_files else (1, 1)
    ram, shm = (FIXED_GIB + copies * layers * LAYER_GIB for copies in (in_ram, in_shm))
    fewer = "take fewer with GPU_SESSION_LAYERS, or empty /dev/shm"
    if free_shm < shm * GIB:
        return f"{layers} MoE layers need {shm:.0f} GiB of /dev/shm, {free_shm / GIB:.0f} are free: {fewer}"
    if 0 < total < ram * GIB:
        beside = " beside stock's split" if experts_in_files else ""
        return f"{layers} MoE layers need {ram:.0f} GiB of RAM{beside}, there are {total / GIB:.0f}: {fewer}"
    return None


def slice_bytes() -> int:
    """What earlier commands left in /dev/shm."""
    total = 0
    for path in SHM.glob("glm53-slice*"):
        files = path.rglob("*") if path.is_dir() else [path]
        total += sum(file.stat().st_blocks * 512 for file in files if file.is_file())
    return total


def mem_info(name: str) -> int:
    """Bytes, 0 where the kernel does not tell."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def compiler() -> Problem:
    """For the counter of driver calls that tests/gpu/test_waits.py preloads."""
    return None if shutil.which("cc") else "there is no C compiler `cc`: tests/gpu/test_waits.py builds a small library"


def main(argv: list[str] | None = None) -> int:
    """Prints every check; 0 when the benches can run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12, choices=range(1, 43), help="MoE layers of the slice")
    parser.add_argument("--arena-only", action="store_true", help="no file holds the experts")
    parser.add_argument("--ram-gib", type=int, help="what the machine has, where the system says less until it is used")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: everything but it and the room for the slice")
    args = parser.parse_args(argv)
    needed: dict[str, Callable[[], Problem]] = {"Python packages": modules, "kernels": stubs}
    if not args.dry_run:
        total = args.ram_gib * GIB if args.ram_gib else None
        needed |= {"GPU": gpu, "memory": lambda: memory(args.layers, total, experts_in_files=not args.arena_only)}
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 20} MiB"
    ram = " of ".join(f"{mem_info(name) / GIB:.0f}" for name in ("MemAvailable", "MemTotal"))
    print(f"boot {boot_id()}, {os.cpu_count()} CPUs, {ram} GiB of RAM to be had, memlock {told}")
    wrong = 0
    for name, check in needed.items():
        began = time.monotonic()
        problem = check()
        wrong += problem is not None
        print(f"{name}: {problem or 'fine'} ({time.monotonic() - began:.1f} s)", flush=True)
        if problem is not None and name == "Python packages":
            break  # the others would say the same in other words
    if (problem := compiler()) is not None:
        print(f"C compiler: {problem}")  # one test is less, the figures are not
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
