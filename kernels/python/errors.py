"""Errors of the shared-memory and tier bindings. Services map them to their own tree and exit codes.

KernelError
├── ShmMismatch   a segment is of another version, layout, size, generation or checkpoint; the text has both values
├── ShmNoSpace    the tmpfs is too small; the text has the size to pass
├── ShmAbsent     there is no such segment (yet)
├── ShmInUse      another live process holds the segment
└── TierTimeout   a deadline of the engine passed

An argument that is wrong is a plain ValueError.
"""

from __future__ import annotations

import ctypes
from typing import NoReturn


class KernelError(RuntimeError):
    """A call into the kernels' library failed."""


class ShmMismatch(KernelError):
    """The segment is not the one that this process can use; the text has both values."""


class ShmNoSpace(KernelError):
    """The tmpfs is too small; the text has the size to pass."""


class ShmAbsent(KernelError):
    """There is no such segment, or not yet."""


class ShmInUse(KernelError):
    """Another live process holds the segment's lock."""


class TierTimeout(KernelError):
    """A deadline passed."""


_INVALID = 1
_BY_CODE: dict[int, type[KernelError]] = {2: ShmMismatch, 3: ShmNoSpace, 4: ShmAbsent, 5: ShmInUse, 7: TierTimeout}


def raise_last(library: ctypes.CDLL) -> NoReturn:
    """Raises the calling thread's last error of the library."""
    code = int(library.glm53_error_code())
    text: str = library.glm53_error_text().decode(errors="replace")
    if code == _INVALID:
        raise ValueError(text)
    raise _BY_CODE.get(code, KernelError)(text)
