"""Configures (once) and builds kernels/ with the pinned cmake and ninja of the virtual environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "kernels"
BIN = Path(sys.executable).parent


def main() -> int:
    """Builds quietly; shows the compiler's output when something fails."""
    steps = [[str(BIN / "cmake"), "--build", str(BUILD)]]
    if not (BUILD / "build.ninja").exists():
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}"]
        steps.insert(0, [str(BIN / "cmake"), "-S", str(ROOT / "kernels"), "-B", str(BUILD), *generator])
        print("Building the kernels", flush=True)
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout + done.stderr, file=sys.stderr)
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
