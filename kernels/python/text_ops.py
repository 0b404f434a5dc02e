"""ctypes view of include/text_ops.h: the dense part of a glm5_next text model on the CPU.

The functions take addresses (`int`), not arrays: a forward pass makes a dozen calls per layer, and its buffers do not move, so the caller
looks their addresses up once. `address` checks what it is given.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.python import lib

POSITIONS = 8
PANEL = 64

_P = ctypes.c_void_p
_I = ctypes.c_int64
_F = ctypes.c_float
_I32 = ctypes.c_int32


class HyperSite(ctypes.Structure):
    """TextHyperSite: the weights of one hyper-connection site."""

    _fields_ = (
        ("fn_panels", _P),
        ("base", _P),
        ("scale", _F * 3),
        ("norm_eps", _F),
        ("eps", _F),
        ("sinkhorn_iters", _I32),
        ("num_streams", _I32),
        ("hidden", _I),
        ("sublayer_norm", _P),
        ("sublayer_eps", _F),
    )


class Kda(ctypes.Structure):
    """TextKda: the weights of one Kimi delta attention layer, without its projections."""

    _fields_ = (
        ("num_heads", _I32),
        ("head_dim", _I32),
        ("conv_kernel", _I32),
        ("has_lower_bound", _I32),
        ("lower_bound", _F),
        ("norm_eps", _F),
        ("conv", _P),
        ("dt_bias", _P),
        ("a_exp", _P),
        ("o_norm", _P),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "text_pack": (_P, _I, _I, _P),
    "text_linear": (_P, _I, _P, _I, _I, _P, _I, _I),
    "text_rms_norm": (_P, _I, _P, _F, _I, _P, _I, _I),
    "text_hyper_mix": (_P, _P, _I, _P, _P, _P),
    "text_hyper_apply": (_I, _I, _P, _P, _P, _P, _P, _I),
    "text_kda": (_P, _P, _I, _P, _I, _P, _I, _P, _I, _P, _I, _P, _P, _P),
    "text_mla": (_I, _I, _F, _P, _P, _I, _P, _P, _I, _P, _P),
    "text_route": (_P, _P, _P, _I, _I, _I, _F, _I32, _I, _P, _P),
    "text_swiglu": (_P, _I, _F, _P, _I),
    "text_hyper_head": (_P, _I, _I, _P, _F, _P, _I),
}


@functools.cache
def functions() -> ctypes.CDLL:
    """The library with the signatures of the text_* functions declared. Every call releases the GIL."""
    library = lib.load()
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    library.text_ops_select.argtypes = (ctypes.c_char_p,)
    library.text_ops_select.restype = ctypes.c_int
    library.text_ops_isa.argtypes = ()
    library.text_ops_isa.restype = ctypes.c_char_p
    return library


def isa() -> str:
    """The instruction set that the dense operations use here: ``avx2`` or ``base``."""
    name: bytes = functions().text_ops_isa()
    return name.decode()


def select(isa: str) -> None:
    """Uses ``avx2``, ``base`` or ``auto`` from now on: for tests and for finding faults.

    Raises:
        ValueError: this host lacks it, or there is no such name.
    """
    if functions().text_ops_select(isa.encode()) != 0:
        raise ValueError(f"the dense operations cannot use {isa!r} on this host")


def address(array: NDArray[Any]) -> int:
    """Address of a C-contiguous fp32, int64 or uint64 array.

    Raises:
        ValueError: the array is strided or of another type.
    """
    if not array.flags.c_contiguous or array.dtype not in (np.float32, np.int64, np.uint64):
        raise ValueError(f"need a contiguous float32 or int64 array, got {array.dtype} {array.shape} strides {array.strides}")
    return int(array.ctypes.data)


def pack(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Packs a weight [inputs, outputs] for text_linear; outputs are padded with zero columns to a multiple of 8.

    Returns:
        fp32 [inputs * padded outputs]; the padded width is `padded(outputs)`.
    """
    inputs, outputs = weight.shape
    width = padded(outputs)
    source = np.zeros((inputs, width), np.float32)
    source[:, :outputs] = weight
    panels = np.empty(inputs * width, np.float32)
    functions().text_pack(address(source), inputs, width, address(panels))
    return panels


def padded(width: int) -> int:
    """The next multiple of 8."""
    return (width + 7) // 8 * 8
