"""Compiles exllamav3's CUDA extension and puts it where `import exllamav3` finds it instead of compiling it again.

Importing the package builds the extension (no GPU is needed for that); TORCH_CUDA_ARCH_LIST, MAX_JOBS and TORCH_EXTENSIONS_DIR steer it.
Beside it lies exllamav3_ext.archs, the compute capabilities that it was built for: `glm53 doctor` compares them with the card's.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import shutil
import sys
import sysconfig


def main() -> None:
    """Builds, copies, and says what was built for which cards.

    Raises:
        RuntimeError: the build left not exactly one extension.
    """
    target = pathlib.Path(sysconfig.get_path("platlib")) / "exllamav3_ext.so"
    # One that lies there already would be imported instead of being built: for another card, or another version of exllamav3.
    target.unlink(missing_ok=True)
    importlib.import_module("exllamav3")
    built = sorted(pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("exllamav3_ext*.so"))
    if len(built) != 1:
        raise RuntimeError(f"expected one exllamav3_ext*.so, found {[str(path) for path in built]}")
    shutil.copyfile(built[0], target)
    # Where the list was not given, exllamav3 has set it to the cards that are there.
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    target.with_suffix(".archs").write_text(f"{architectures}\n")
    sys.stdout.write(f"{target}: {target.stat().st_size} bytes for compute capability {architectures}\n")


if __name__ == "__main__":
    main()
