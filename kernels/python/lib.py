"""Finds and loads the kernels' shared library. Each module declares the signatures of the functions that it calls itself."""

from __future__ import annotations

import ctypes
import functools
import pathlib

LIBRARY_PATH = pathlib.Path(__file__).with_name("lib") / "libglm53_kernels.so"


class KernelsMissingError(RuntimeError):
    """The shared library is not built, or does not load on this machine."""


@functools.cache
def load() -> ctypes.CDLL:
    """The kernels' library, loaded once per process.

    Raises KernelsMissingError when the library is not built or cannot be loaded.
    """
    if not LIBRARY_PATH.is_file():
        raise KernelsMissingError(f"{LIBRARY_PATH} does not exist: build it with `make kernels`")
    try:
        return ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise KernelsMissingError(f"{LIBRARY_PATH} does not load ({error}): rebuild it with `make kernels`") from error
