"""Records in the planar layout: the same bytes in another order, which the CPU kernel decodes with fewer instructions.

A GPU cannot read such a record, so the arena stays native; this is for a machine that serves from the CPU alone.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import numpy.typing as npt

from kernels.python import expert, lib
from kernels.python.expert import ExpertShape


@functools.cache
def _signatures() -> ctypes.CDLL:
    expert.variants()  # declares the signatures of the other functions and checks the structs
    library = lib.load()
    pointer = ctypes.c_void_p
    library.moe_shape_planar.argtypes = [pointer, pointer]
    library.moe_shape_planar.restype = ctypes.c_int
    library.moe_repack_planar.argtypes = [pointer, pointer, pointer]
    library.moe_repack_planar.restype = ctypes.c_int
    return library


def planar_shape(shape: ExpertShape) -> ExpertShape:
    """The planar twin of a native shape: equal sizes and offsets. Raises ValueError when the codebook is not MUL1."""
    planar = ExpertShape()
    library = _signatures()
    if library.moe_shape_planar(ctypes.byref(planar), ctypes.byref(shape)) != 0:
        raise ValueError(library.moe_last_error().decode())
    return planar


def repack(shape: ExpertShape, record: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A native record (uint8 [record_bytes]) in planar layout. Raises ValueError for a shape that is not native MUL1 or a short record."""
    if record.dtype != np.uint8 or record.ndim != 1 or record.size < shape.record_bytes:
        raise ValueError(f"record: expected uint8 [{shape.record_bytes}], got {record.dtype} {list(record.shape)}")
    source = np.ascontiguousarray(record)
    packed: npt.NDArray[np.uint8] = shape.empty_records()[0]
    library = _signatures()
    if library.moe_repack_planar(ctypes.byref(shape), source.ctypes.data, packed.ctypes.data) != 0:
        raise ValueError(library.moe_last_error().decode())
    return packed
