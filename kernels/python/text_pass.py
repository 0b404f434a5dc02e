"""ctypes view of include/text_pass.h: a forward pass that is written down once and then run as one call, without the interpreter."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.python import text_ops

_MAX_ARGS = 12
_P = ctypes.c_void_p
_I64 = ctypes.c_int64
_U32 = ctypes.c_uint32

EXPERTS = ctypes.CFUNCTYPE(ctypes.c_int, _P, _U32, _U32, _U32, _P, _P, _P, ctypes.c_int, _P)


class Op(enum.IntEnum):
    """TextOp: the functions of text_ops.h, less the arguments that belong to a pass."""

    LINEAR = 0
    RMS_NORM = 1
    HYPER_MIX = 2
    HYPER_APPLY = 3
    KDA = 4
    MLA = 5
    ROUTE = 6
    SWIGLU = 7
    EXPERTS = 8
    LOGITS = 9


# Arguments of each: i count, f scalar, p address.
_KINDS = {
    Op.LINEAR: "pipiipi",
    Op.RMS_NORM: "pipfipi",
    Op.HYPER_MIX: "ppppp",
    Op.HYPER_APPLY: "iippppp",
    Op.KDA: "ppipipipiip",
    Op.MLA: "iifppiip",
    Op.ROUTE: "pppiiifipp",
    Op.SWIGLU: "pifp",
    Op.EXPERTS: "iipppp",
    Op.LOGITS: "piipfppii",
}


class _Arg(ctypes.Union):
    _fields_ = (("integer", _I64), ("number", ctypes.c_float), ("pointer", _P))


class _Call(ctypes.Structure):
    _fields_ = (("op", _I64), ("args", _Arg * _MAX_ARGS))


class _Rows(ctypes.Structure):
    _fields_ = (
        ("tokens", _I64),
        ("num_segments", _I64),
        ("seg_tokens", _P),
        ("seg_past", _P),
        ("conv_state", _P),
        ("recurrent", _P),
        ("latents", _P),
        ("logits", _P),
        ("prefill", ctypes.c_int32),
        ("all_rows", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Experts:
    """What evaluates the routed experts of a pass.

    Attributes:
        function: address of a TextExperts function.
        context: its first argument, an address.
        raise_error: called with a nonzero result of `function`; raises.
        keep: whatever must live as long as the function may be called.
    """

    function: int
    context: int
    raise_error: Callable[[int], None]
    keep: Any = None


@dataclass(frozen=True)
class Segments:
    """Where the rows of a pass belong: per stream its new tokens, its past, and the addresses of its state.

    Attributes:
        tokens: int64 [streams].
        past: int64 [streams].
        conv, recurrent, latents: uint64 [layers of the kind, streams].
    """

    tokens: NDArray[np.int64]
    past: NDArray[np.int64]
    conv: NDArray[np.uint64]
    recurrent: NDArray[np.uint64]
    latents: NDArray[np.uint64]


class TextPass:
    """Calls in the order in which they were added.

    Args:
        experts: evaluates the routed experts.
    """

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self._calls: list[_Call] = []
        self._table: ctypes.Array[_Call] | None = None
        self._progress = _I64(0)
        self._run = text_ops.functions().text_run
        self._run.argtypes = (_P, _I64, _P, _P, _P, _P)
        self._run.restype = ctypes.c_int

    @property
    def progress(self) -> int:
        """Calls done since the start; grows while a pass runs."""
        return self._progress.value

    def add(self, op: Op, *args: int | float | None) -> None:
        """Adds a call; what its addresses point to must stay where it is.

        Args:
            op: what is computed.
            args: as include/text_pass.h lists them for `op`; None is no address.
        """
        if self._table is not None:
            raise RuntimeError("the pass has run: its calls are fixed")
        call = _Call(op=op)
        for i, (kind, value) in enumerate(zip(_KINDS[op], args, strict=True)):
            if kind == "f":
                call.args[i].number = float(value or 0.0)
            elif kind == "i":
                call.args[i].integer = int(value or 0)
            else:
                call.args[i].pointer = value
        self._calls.append(call)

    def run(self, segments: Segments, logits: NDArray[np.float32] | None = None, *, prefill: bool, all_rows: bool = False) -> None:
        """Runs every call over the rows of `segments`, without the GIL.

        Args:
            segments: the rows.
            logits: fp32 [rows, outputs] for a pass with Op.LOGITS, written.
            prefill: passed on to the experts.
            all_rows: logits of every row, not of each segment's last one.

        Raises:
            whatever `Experts.raise_error` raises.
        """
        if self._table is None:
            self._table = (_Call * len(self._calls))(*self._calls)
        rows = _Rows(
            int(segments.tokens.sum()),
            len(segments.tokens),
            *_addresses((segments.tokens, segments.past, segments.conv, segments.recurrent, segments.latents)),
            None if logits is None else text_ops.address(logits),
            int(prefill),
            int(all_rows),
        )
        experts = self._experts
        code = self._run(self._table, len(self._table), ctypes.byref(rows), experts.function, experts.context, ctypes.byref(self._progress))
        if code != 0:
            experts.raise_error(code)
            raise RuntimeError(f"the pass ended with {code}")


def _addresses(arrays: Sequence[NDArray[Any]]) -> list[int]:
    return [text_ops.address(array) for array in arrays]


def from_python(call: Callable[[int, int, int, int, int, int, bool, int], None]) -> Experts:
    """Experts that a Python function evaluates: (layer, rows, top_k, x, selected, weights, prefill, out), addresses as `int`."""
    failures: list[BaseException] = []

    def run(_context: int, layer: int, rows: int, top_k: int, x: int, selected: int, weights: int, prefill: int, out: int) -> int:
        try:
            call(layer, rows, top_k, x, selected, weights, bool(prefill), out)
        except BaseException as error:  # noqa: BLE001 - it must not unwind through the native caller: raise_error raises it again
            failures.append(error)
            return -1
        return 0

    def raise_error(_code: int) -> None:
        if failures:
            raise failures.pop()

    function = EXPERTS(run)
    return Experts(ctypes.cast(function, _P).value or 0, 0, raise_error, function)
