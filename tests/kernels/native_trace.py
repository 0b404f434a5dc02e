"""ctypes access to moe_trace.h: the intermediates of a compiled variant, in the reference's form."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.python import expert, lib, reference
from kernels.python.expert import ExpertShape, Variant

_LINEAR_FIELDS = ("v", "h", "scale", "q", "z", "out")


class _LinearTrace(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _LINEAR_FIELDS]


class _Trace(ctypes.Structure):
    _fields_ = [("gate", _LinearTrace), ("up", _LinearTrace), ("down", _LinearTrace), ("a", ctypes.c_void_p)]


@functools.cache
def signatures() -> ctypes.CDLL:
    """The library with the signatures of moe_trace.h."""
    expert.variants()  # declares the signatures of moe_expert.h
    library = lib.load()
    pointer = ctypes.c_void_p
    library.moe_trace.argtypes = [ctypes.c_uint32, pointer, pointer]
    library.moe_trace.restype = ctypes.c_int
    library.moe_exp.argtypes = [pointer, pointer, ctypes.c_size_t]
    library.moe_exp.restype = None
    library.moe_activate.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_float, pointer, pointer, pointer, ctypes.c_size_t]
    library.moe_activate.restype = ctypes.c_int
    library.moe_pool_force.argtypes = [pointer, ctypes.c_uint32, ctypes.c_double]
    library.moe_pool_force.restype = ctypes.c_int
    library.moe_pool_force_hot.argtypes = [pointer, ctypes.c_int64]
    library.moe_pool_force_hot.restype = None
    library.moe_explain_choice.argtypes = [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t]
    library.moe_explain_choice.restype = ctypes.c_uint32
    return library


def force(pool: expert.ExpertPool, splits: int, inline_cost: float) -> None:
    """Overrides how a pool cuts its work: parts of a band (0 = its own choice), and the cost below which it does not share a call."""
    if signatures().moe_pool_force(pool._open(), splits, inline_cost) != 0:
        raise ValueError(signatures().moe_last_error().decode())


def expert_steps(variant: str, shape: ExpertShape, record: npt.NDArray[np.uint8], x: npt.NDArray[Any]) -> reference.ExpertSteps:
    """What `reference.expert` computes, from a compiled variant. Also checks that the task's output equals the traced one."""
    rows = x.shape[0]
    steps = [_empty_linear(rows, shape.hidden, shape.inter) for _ in range(2)] + [_empty_linear(rows, shape.inter, shape.hidden)]
    a = np.empty((rows, shape.inter), np.float32)
    trace = _Trace(*(_pointers(linear) for linear in steps), a.ctypes.data)
    out = np.empty((rows, shape.hidden), np.float32)
    native = expert._Task()
    keep = expert._fill_task(native, expert.ExpertTask(shape, record, x, out))
    code = signatures().moe_trace(int(Variant[variant.upper()]), ctypes.byref(native), ctypes.byref(trace))
    del keep
    if code != 0:
        raise ValueError(signatures().moe_last_error().decode())
    gate, up, down = steps
    np.testing.assert_array_equal(out.view(np.uint32), down.out.view(np.uint32))
    return reference.ExpertSteps(gate if "gate_trellis" in shape.parts() else None, up, a, down)


def _empty_linear(rows: int, in_features: int, out_features: int) -> reference.LinearSteps:
    return reference.LinearSteps(
        v=np.empty((rows, in_features), np.float32),
        h=np.empty((rows, in_features), np.float32),
        scale=np.empty((rows, in_features // 128), np.float32),
        q=np.empty((rows, in_features), np.int16),
        z=np.empty((rows, out_features), np.float32),
        out=np.empty((rows, out_features), np.float32),
    )


def _pointers(linear: reference.LinearSteps) -> _LinearTrace:
    return _LinearTrace(*(getattr(linear, name).ctypes.data for name in _LINEAR_FIELDS))


def force_hot(pool: expert.ExpertPool, hot_ns: int) -> None:
    """Sets how long the pool's threads poll before they sleep, in nanoseconds."""
    signatures().moe_pool_force_hot(pool._open(), hot_ns)
