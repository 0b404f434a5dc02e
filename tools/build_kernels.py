"""Configures (once) and builds kernels/ with the pinned cmake and ninja of the virtual environment.

Without options: the library that serving needs. `--test` adds the test programs, and the GPU kernels everywhere. Otherwise these are built
where nvcc is found, on a machine with an NVIDIA GPU. `--cuda all` builds them for every supported architecture, `--cuda 90` for one alone
(quick work), `--cuda none` leaves them out; such a choice stays.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "kernels"
BIN = Path(sys.executable).parent
CUDA_ARCHITECTURES = ("86", "89", "90", "120")
CUDA_CHOICE = BUILD / "cuda_choice"  # what `--cuda` said last
CUDA_BUILT = BUILD / "cuda_built"  # what the build folder is configured for
GPU_DEVICE = Path("/dev/nvidiactl")
TELL_S = 3.0  # between two lines of progress


def find_nvcc() -> str | None:
    """The CUDA compiler: on PATH, or in CUDA_HOME or /usr/local/cuda."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return shutil.which("nvcc") or next((found for home in homes if home and (found := shutil.which("nvcc", path=f"{home}/bin"))), None)


def choose(asked: str | None, recorded: str | None, built: str | None, wanted: bool) -> str:
    """all, none, or architectures such as 90 or 86,90.

    asked: `--cuda`. recorded: what it said last. built: what there is already, which is not thrown away. wanted: by the tests or for a GPU.
    """
    return asked or recorded or ("all" if wanted else built or "none")


def cuda_options(choice: str, nvcc: str | None) -> list[str]:
    """CMake options for the GPU kernels."""
    if choice == "none" or nvcc is None:
        return ["-DGLM53_CUDA=OFF"]
    wanted = CUDA_ARCHITECTURES if choice == "all" else tuple(choice.split(","))
    unknown = [name for name in wanted if name not in CUDA_ARCHITECTURES]
    if unknown:
        raise SystemExit(f"--cuda {choice}: {', '.join(unknown)} is not one of {', '.join(CUDA_ARCHITECTURES)}, all, none")
    return ["-DGLM53_CUDA=ON", f"-DGLM53_CUDA_ARCHITECTURES={';'.join(wanted)}", f"-DCMAKE_CUDA_COMPILER={nvcc}"]


def read(path: Path) -> str | None:
    """The file's text, or None when there is no such file."""
    return path.read_text().strip() if path.exists() else None


def skipped(choice: str, nvcc: str | None) -> str | None:
    """Why the GPU kernels are not built, or None when they are."""
    if nvcc is None:
        return "nvcc is not on PATH, nor in CUDA_HOME or /usr/local/cuda"
    return (
        "no NVIDIA GPU here, or left out by choice (`python tools/build_kernels.py --cuda all` builds them)" if choice == "none" else None
    )


def has_tests(cache: str | None) -> bool:
    """True when the build folder is configured with the test programs."""
    return cache is not None and "GLM53_NATIVE_TESTS:BOOL=ON" in cache


def targets(now: str, *, test: bool) -> list[str]:
    """What the build tool is asked for: everything for the tests, else what serving loads."""
    if test:
        return []
    return ["--target", "glm53_kernels", *(["glm53_cuda"] if now != "none" else [])]


def progress(lines: Iterable[str], tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> str:
    """Everything a build tool said; `tell` gets a line of progress every TELL_S seconds, and none for a build that is quicker."""
    said, next_at = [], clock() + TELL_S
    for line in lines:
        said.append(line)
        step = re.match(r"\[(\d+)/(\d+)\]", line)
        if step and clock() >= next_at:
            tell(f"  {step[1]} of {step[2]} files")
            next_at = clock() + TELL_S
    return "".join(said)


def run(command: Sequence[str]) -> int:
    """Runs a step with lines of progress; its output is shown when it fails."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process:
        assert process.stdout is not None
        said = progress(process.stdout, lambda line: print(line, flush=True))
    if process.returncode != 0:
        print(said, file=sys.stderr)
    return process.returncode


def main() -> int:
    """Builds, with a few lines of progress; shows the compiler's output when something fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", help="all, none, or compute capabilities such as 90 or 86,90; stays until it is given again")
    parser.add_argument(
        "--test", action="store_true", help="build the test programs too, and the GPU kernels also on a machine without a GPU"
    )
    args = parser.parse_args()
    nvcc = find_nvcc()
    built = read(CUDA_BUILT)
    choice = choose(args.cuda, read(CUDA_CHOICE), built, args.test or GPU_DEVICE.exists())
    now = choice if nvcc is not None else "none"
    with_tests = has_tests(read(BUILD / "CMakeCache.txt"))
    steps = [[str(BIN / "cmake"), "--build", str(BUILD), *targets(now, test=args.test)]]
    if not (BUILD / "build.ninja").exists() or (built or "none") != now or (args.test and not with_tests):
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}"]
        # A folder that has them keeps them: who serves between two test runs builds nothing anew.
        tests = f"-DGLM53_NATIVE_TESTS={'ON' if args.test or with_tests else 'OFF'}"
        steps.insert(0, [str(BIN / "cmake"), "-S", str(ROOT / "kernels"), "-B", str(BUILD), *generator, tests, *cuda_options(choice, nvcc)])
        reason = skipped(choice, nvcc)
        print("Building the kernels: some minutes" + (f". The GPU kernels are skipped: {reason}" if reason else ""), flush=True)
    for step in steps:
        if code := run(step):
            return code
    CUDA_BUILT.write_text(now + "\n")
    if args.cuda:
        CUDA_CHOICE.write_text(args.cuda + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
