"""EXL3 tensors to dense fp32 weights, with the C++ decoder of the kernels' library."""

from __future__ import annotations

import ctypes
import enum
import functools

import numpy as np
import numpy.typing as npt

from kernels.python import lib

UInt16Array = npt.NDArray[np.uint16]
HalfArray = npt.NDArray[np.float16]
FloatArray = npt.NDArray[np.float32]


class Codebook(enum.IntEnum):
    """How a 16-bit state becomes a weight. Values equal MoeCodebook."""

    INST3 = 0
    MCG = 1
    MUL1 = 2


@functools.cache
def _signatures() -> ctypes.CDLL:
    library = lib.load()
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    library.exl3_decode.argtypes = [pointer, number, number, number, number, pointer]
    library.exl3_decode.restype = ctypes.c_int
    library.exl3_dequantize.argtypes = [pointer, pointer, pointer, number, number, number, number, pointer]
    library.exl3_dequantize.restype = ctypes.c_int
    library.moe_last_error.argtypes = []
    library.moe_last_error.restype = ctypes.c_char_p
    return library


def trellis_dims(trellis: npt.NDArray[np.generic]) -> tuple[int, int, int]:
    """(in_features, out_features, bits per weight) of a trellis of shape [in/16, out/16, 16 * K].

    Raises ValueError for another rank, for a half-integer K (last dimension 16 * K with K = 1.5, 2.5, ...), and for a last dimension
    that is no multiple of 16 in 16..128 (K = 1..8).
    """
    if trellis.ndim != 3:
        raise ValueError(f"trellis: expected [in/16, out/16, 16*K], got shape {trellis.shape}")
    tiles_in, tiles_out, halfwords = trellis.shape
    if halfwords % 16 == 8:
        raise ValueError(half_integer("trellis", halfwords / 16))
    if halfwords % 16 != 0 or not 16 <= halfwords <= 128:
        raise ValueError(f"trellis: last dimension {halfwords} is not 16*K with K = 1..8 (shape {trellis.shape})")
    return tiles_in * 16, tiles_out * 16, halfwords // 16


def half_integer(name: str, bits: float) -> str:
    """Why a matrix with K = 1.5, 2.5, ... is refused. Its tiles alternate between two numbers of bits, which no kernel here decodes."""
    return f"{name} = {bits:g} bits per weight: half-integer K is not supported, convert with a whole number (1..8)"


def decode(trellis: npt.NDArray[np.generic], codebook: Codebook) -> FloatArray:
    """The weights that a GPU decodes from the trellis, fp16 values widened to fp32, without scales and transforms.

    trellis: uint16 or int16 [in/16, out/16, 16*K]. Returns fp32 [in, out]. Raises ValueError for wrong shapes or dtypes.
    """
    tiles = _as_halfwords(trellis, "trellis")
    in_features, out_features, bits = trellis_dims(tiles)
    out = np.empty((in_features, out_features), np.float32)
    library = _signatures()
    code = library.exl3_decode(tiles.ctypes.data, in_features, out_features, bits, int(codebook), out.ctypes.data)
    _raise_on_failure(library, code)
    return out


def dequantize(trellis: npt.NDArray[np.generic], suh: HalfArray, svh: HalfArray, codebook: Codebook) -> FloatArray:
    """The dense weight diag(suh) H W H diag(svh): y = x @ result.

    trellis: uint16 or int16 [in/16, out/16, 16*K]; suh: fp16 [in]; svh: fp16 [out]. Returns fp32 [in, out].
    Raises ValueError for wrong shapes or dtypes, and for dimensions that are no multiples of 128.
    """
    tiles = _as_halfwords(trellis, "trellis")
    in_features, out_features, bits = trellis_dims(tiles)
    scales_in = _as_scales(suh, "suh", in_features)
    scales_out = _as_scales(svh, "svh", out_features)
    out = np.empty((in_features, out_features), np.float32)
    library = _signatures()
    code = library.exl3_dequantize(
        tiles.ctypes.data,
        scales_in.ctypes.data,
        scales_out.ctypes.data,
        in_features,
        out_features,
        bits,
        int(codebook),
        out.ctypes.data,
    )
    _raise_on_failure(library, code)
    return out


def _as_halfwords(trellis: npt.NDArray[np.generic], name: str) -> UInt16Array:
    if trellis.dtype not in (np.dtype(np.uint16), np.dtype(np.int16)):
        raise ValueError(f"{name}: expected uint16 or int16, got {trellis.dtype}")
    return np.ascontiguousarray(trellis).view(np.uint16)


def _as_scales(scales: HalfArray, name: str, count: int) -> HalfArray:
    if scales.dtype != np.float16 or scales.shape != (count,):
        raise ValueError(f"{name}: expected float16 [{count}], got {scales.dtype} {list(scales.shape)}")
    return np.ascontiguousarray(scales)


def _raise_on_failure(library: ctypes.CDLL, code: int) -> None:
    if code != 0:
        raise ValueError(library.moe_last_error().decode())
