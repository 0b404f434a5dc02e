"""Compiles exllamav3's CUDA extension and puts it where `import exllamav3` finds it instead of compiling it again.

Importing the package builds the extension (no GPU is needed for that); TORCH_CUDA_ARCH_LIST, MAX_JOBS and TORCH_EXTENSIONS_DIR steer it.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import shutil
import sys
import sysconfig


def main() -> None:
    """Builds, copies, and shows that the copy is what gets imported.

    Raises:
        RuntimeError: the build left not exactly one extension.
    """
    importlib.import_module("exllamav3")
    built = sorted(pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("exllamav3_ext*.so"))
    if len(built) != 1:
        raise RuntimeError(f"expected one exllamav3_ext*.so, found {[str(path) for path in built]}")
    target = pathlib.Path(sysconfig.get_path("platlib")) / "exllamav3_ext.so"
    shutil.copyfile(built[0], target)
    sys.stdout.write(f"{target}: {target.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
