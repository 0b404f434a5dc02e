"""Configures (once) and builds kernels/ with the pinned cmake and ninja of the virtual environment.

Where nvcc is found, the GPU kernels are built too, for every supported architecture. `--cuda 90` builds them for one alone (quick work),
`--cuda none` leaves them out; the choice stays until it is made anew with `--cuda all`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "kernels"
BIN = Path(sys.executable).parent
CUDA_ARCHITECTURES = ("86", "89", "90", "120")
CUDA_CHOICE = BUILD / "cuda_choice"


def find_nvcc() -> str | None:
    """The CUDA compiler: on PATH, or in CUDA_HOME or /usr/local/cuda."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return shutil.which("nvcc") or next((found for home in homes if home and (found := shutil.which("nvcc", path=f"{home}/bin"))), None)


def cuda_options(choice: str, nvcc: str | None) -> list[str]:
    """CMake options for the GPU kernels. choice: all, none, or architectures such as 90 or 86,90."""
    if choice == "none" or nvcc is None:
        return ["-DGLM53_CUDA=OFF"]
    wanted = CUDA_ARCHITECTURES if choice == "all" else tuple(choice.split(","))
    unknown = [name for name in wanted if name not in CUDA_ARCHITECTURES]
    if unknown:
        raise SystemExit(f"--cuda {choice}: {', '.join(unknown)} is not one of {', '.join(CUDA_ARCHITECTURES)}, all, none")
    return ["-DGLM53_CUDA=ON", f"-DGLM53_CUDA_ARCHITECTURES={';'.join(wanted)}", f"-DCMAKE_CUDA_COMPILER={nvcc}"]


def configuration(choice: str, nvcc: str | None) -> str:
    """What the build folder must have been configured with."""
    return f"{choice} {nvcc}\n"


def recorded_choice() -> str:
    """The `--cuda` choice of the last build; all when nothing was built yet."""
    return CUDA_CHOICE.read_text().split()[0] if CUDA_CHOICE.exists() else "all"


def main() -> int:
    """Builds quietly; shows the compiler's output when something fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", help="all, none, or compute capabilities such as 90 or 86,90 (default: what was chosen last, else all)")
    args = parser.parse_args()
    nvcc = find_nvcc()
    recorded = CUDA_CHOICE.read_text() if CUDA_CHOICE.exists() else ""
    choice = args.cuda or recorded_choice()
    steps = [[str(BIN / "cmake"), "--build", str(BUILD)]]
    if not (BUILD / "build.ninja").exists() or recorded != configuration(choice, nvcc):
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}"]
        options = cuda_options(choice, nvcc)
        steps.insert(0, [str(BIN / "cmake"), "-S", str(ROOT / "kernels"), "-B", str(BUILD), *generator, *options])
        print("Building the kernels", flush=True)
        if nvcc is None:
            print("The GPU kernels are skipped: nvcc is not on PATH, nor in CUDA_HOME or /usr/local/cuda", flush=True)
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout + done.stderr, file=sys.stderr)
            return done.returncode
    CUDA_CHOICE.write_text(configuration(choice, nvcc))
    return 0


if __name__ == "__main__":
    sys.exit(main())
