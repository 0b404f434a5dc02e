"""Routed experts on the CPU: the shape of a record, and a pool of kernel threads that evaluates records."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.python import lib
from kernels.python.exl3 import Codebook, half_integer

ABSENT = 0xFFFFFFFF
MAX_ROWS = 8
RECORD_ALIGNMENT = 4096


class Activation(enum.IntEnum):
    """The function between the gate and the down matrix. Values equal MoeActivation."""

    SILU = 0
    GELU = 1
    SWIGLU_OAI = 2
    RELU2 = 3


class Variant(enum.IntEnum):
    """An implementation of the kernel. Values equal MoeVariant."""

    AUTO = 0
    SCALAR = 1
    AVX2 = 2
    AVX512BW = 3
    AVX512VBMI = 4
    AVXVNNI = 5


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor's place in a record."""

    offset: int  # bytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class ExpertShape(ctypes.Structure):
    """Where the parts of one expert lie inside its record, and how they are to be read (MoeExpertShape).

    Make one with `ExpertShape.create`. Matrices: gate and up are [hidden, inter], down is [inter, hidden].
    """

    _fields_ = [
        ("hidden", ctypes.c_uint32),
        ("inter", ctypes.c_uint32),
        ("record_bytes", ctypes.c_uint32),
        ("k_gate", ctypes.c_uint8),
        ("k_up", ctypes.c_uint8),
        ("k_down", ctypes.c_uint8),
        ("codebook", ctypes.c_uint8),
        ("activation", ctypes.c_uint8),
        ("layout", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 2),
        ("act_limit", ctypes.c_float),
        ("gate_trellis", ctypes.c_uint32),
        ("up_trellis", ctypes.c_uint32),
        ("down_trellis", ctypes.c_uint32),
        ("gate_suh", ctypes.c_uint32),
        ("gate_svh", ctypes.c_uint32),
        ("up_suh", ctypes.c_uint32),
        ("up_svh", ctypes.c_uint32),
        ("down_suh", ctypes.c_uint32),
        ("down_svh", ctypes.c_uint32),
        ("gate_bias", ctypes.c_uint32),
        ("up_bias", ctypes.c_uint32),
        ("down_bias", ctypes.c_uint32),
    ]

    @classmethod
    def create(
        cls,
        hidden: int,
        inter: int,
        bits: float | tuple[float, float, float] = 3,
        *,
        codebook: Codebook = Codebook.MUL1,
        activation: Activation = Activation.SILU,
        act_limit: float = 0.0,
        gateless: bool = False,
        has_bias: bool = False,
    ) -> ExpertShape:
        """Lays out a record: trellis parts, then scales, then biases.

        bits: bits per weight, one whole number or (gate, up, down). act_limit: 0 means no clamp.
        Raises ValueError naming the value that is not supported.
        """
        k_gate, k_up, k_down = (whole_bits(name, k) for name, k in _by_matrix(bits).items())
        for name, value in (("hidden", hidden), ("inter", inter), ("k_gate", k_gate), ("k_up", k_up), ("k_down", k_down)):
            if not 0 <= value < 1 << 32:
                raise ValueError(f"{name} = {value} is not supported")
        shape = cls()
        library = _signatures()
        code = library.moe_shape_init(
            ctypes.byref(shape),
            hidden,
            inter,
            k_gate,
            k_up,
            k_down,
            int(codebook),
            int(activation),
            act_limit,
            int(gateless),
            int(has_bias),
        )
        if code != 0:
            raise ValueError(library.moe_last_error().decode())
        return shape

    def parts(self) -> dict[str, Part]:
        """Every tensor of the record by name: `gate_trellis` uint16 [in/16, out/16, 16*K], `gate_suh`, `gate_svh`, `gate_bias` fp16, ..."""
        parts: dict[str, Part] = {}
        for name, in_features, out_features, bits in (
            ("gate", self.hidden, self.inter, self.k_gate),
            ("up", self.hidden, self.inter, self.k_up),
            ("down", self.inter, self.hidden, self.k_down),
        ):
            shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
                "trellis": (np.uint16, (in_features // 16, out_features // 16, 16 * bits)),
                "suh": (np.float16, (in_features,)),
                "svh": (np.float16, (out_features,)),
                "bias": (np.float16, (out_features,)),
            }
            for kind, (dtype, dims) in shapes.items():
                offset = getattr(self, f"{name}_{kind}")
                if offset != ABSENT:
                    parts[f"{name}_{kind}"] = Part(offset, np.dtype(dtype), dims)
        return parts

    def view(self, record: npt.NDArray[np.uint8], name: str) -> npt.NDArray[Any]:
        """The tensor `name` of a record, as a view of its bytes. Raises ValueError when the record is too short."""
        if record.dtype != np.uint8 or record.ndim != 1 or record.size < self.record_bytes:
            raise ValueError(f"record: expected uint8 [{self.record_bytes}], got {record.dtype} {list(record.shape)}")
        part = self.parts()[name]
        return record[part.offset : part.offset + part.nbytes].view(part.dtype).reshape(part.shape)

    def write_record(self, record: npt.NDArray[np.uint8], tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Copies an expert's tensors into a record and zeroes the gaps.

        tensors: exactly the names of `parts()`; a trellis may be int16.
        Raises ValueError naming a tensor that is missing, unknown or of the wrong shape or dtype.
        """
        parts = self.parts()
        for name in tensors.keys() - parts.keys():
            raise ValueError(f"{name}: the record has no such part")
        filled = np.zeros(self.record_bytes, np.uint8)
        for name, part in parts.items():
            if name not in tensors:
                raise ValueError(f"{name}: missing")
            tensor = tensors[name]
            if part.dtype == np.uint16 and tensor.dtype == np.int16:
                tensor = tensor.view(np.uint16)
            if name.endswith("trellis") and tensor.ndim == 3 and tensor.shape[2] % 16 == 8:
                raise ValueError(half_integer(name, tensor.shape[2] / 16))
            if tensor.dtype != part.dtype or tensor.shape != part.shape:
                raise ValueError(f"{name}: expected {part.dtype} {list(part.shape)}, got {tensor.dtype} {list(tensor.shape)}")
            self.view(filled, name)[...] = tensor
        record[: self.record_bytes] = filled

    def empty_records(self, count: int = 1) -> npt.NDArray[np.uint8]:
        """Uninitialised, page-aligned memory for records: uint8 [count, record_bytes]."""
        memory = np.empty(count * self.record_bytes + RECORD_ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % RECORD_ALIGNMENT
        return memory[start : start + count * self.record_bytes].reshape(count, self.record_bytes)


class _Task(ctypes.Structure):
    _fields_ = [
        ("shape", ctypes.POINTER(ExpertShape)),
        ("record", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_uint32),
        ("x_dtype", ctypes.c_uint32),
    ]


@dataclasses.dataclass(frozen=True)
class ExpertTask:
    """One expert evaluated for some rows: out[out_rows[i]] = expert(x[x_rows[i]]), not weighted.

    record: uint8, at least shape.record_bytes, 64-byte aligned. x: fp32 or fp16 [*, hidden]. out: fp32 [*, hidden].
    Rows default to 0, 1, 2, ... Tasks of one call must not write the same row of out.
    """

    shape: ExpertShape
    record: npt.NDArray[np.uint8]
    x: npt.NDArray[Any]
    out: npt.NDArray[np.float32]
    x_rows: npt.NDArray[np.uint32] | None = None
    out_rows: npt.NDArray[np.uint32] | None = None


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """The variant that runs on this host and why."""

    variant: str
    reason: str
    arithmetic_version: int


class ExpertPool:
    """A pool of kernel threads. One caller at a time."""

    def __init__(self, variant: str = "auto", threads: int = 1, cpus: Sequence[int] | None = None) -> None:
        """Starts the pool.

        variant: "auto" or a name of `variants()`. threads: counts the caller, so 1 computes in the calling thread alone.
        cpus: logical CPUs for the other threads.
        Raises ValueError when the variant is unknown or cannot run here, or a CPU does not exist.
        """
        self._handle: int | None = None
        self._library = _signatures()
        if threads < 1:
            raise ValueError(f"threads = {threads}: at least 1 is needed")
        pins = None if cpus is None else (ctypes.c_int32 * len(cpus))(*cpus)
        handle = self._library.moe_pool_create(_variant(variant), threads, pins, 0 if cpus is None else len(cpus))
        if not handle:
            raise ValueError(self._library.moe_last_error().decode())
        self._handle = handle

    @property
    def variant(self) -> str:
        """The name of the variant that runs."""
        return _variant_name(self._library.moe_pool_variant(self._open()))

    @property
    def reason(self) -> str:
        """Why this variant was chosen."""
        reason: bytes = self._library.moe_pool_reason(self._open())
        return reason.decode()

    def tune(self, shape: ExpertShape) -> None:
        """Times the eligible variants on a band of this shape, 0.1 s each, and keeps the fastest for each number of rows ("auto" only).

        Raises ValueError for a malformed shape.
        """
        if self._library.moe_pool_tune(self._open(), ctypes.byref(shape)) != 0:
            raise ValueError(self._library.moe_last_error().decode())

    def run(self, tasks: Sequence[ExpertTask]) -> None:
        """Evaluates the tasks and returns when every output row is written. Raises ValueError for a malformed task, naming the field."""
        self.prepare(tasks)()

    def prepare(self, tasks: Sequence[ExpertTask]) -> Callable[[], None]:
        """A call that evaluates these tasks as often as it is made, with whatever their arrays hold then.

        Raises ValueError for a malformed task, naming the field.
        """
        native = (_Task * len(tasks))()
        keep = [(task, _fill_task(native[i], task)) for i, task in enumerate(tasks)]

        def call() -> None:
            if self._library.moe_pool_run(self._open(), native, len(keep)) != 0:  # keep: the arrays live as long as the call
                raise ValueError(self._library.moe_last_error().decode())

        return call

    def close(self) -> None:
        """Ends the threads. Closing twice is harmless."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.moe_pool_destroy(handle)

    def __enter__(self) -> ExpertPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        if self._handle is None:
            raise ValueError("the pool is closed")
        return self._handle


def whole_bits(name: str, bits: float) -> int:
    """`bits` as an integer. Raises ValueError naming the field and the number, and a half-integer K by its name."""
    if bits == int(bits):
        return int(bits)
    if 2 * bits == int(2 * bits):
        raise ValueError(half_integer(name, bits))
    raise ValueError(f"{name} = {bits:g} bits per weight is not supported (1..8)")


def _by_matrix(bits: float | tuple[float, float, float]) -> dict[str, float]:
    each = bits if isinstance(bits, tuple) else (bits, bits, bits)
    return dict(zip(("k_gate", "k_up", "k_down"), each, strict=True))


def variants() -> list[str]:
    """The variants that this host can run."""
    library = _signatures()
    return [_variant_name(v) for v in Variant if v is not Variant.AUTO and library.moe_variant_available(int(v))]


def kernel_info() -> KernelInfo:
    """What "auto" resolves to on this host. The first call of a process runs the self-test, less than 0.1 s."""
    with ExpertPool() as pool:
        return KernelInfo(pool.variant, pool.reason, int(_signatures().moe_arithmetic_version()))


def _fill_task(native: _Task, task: ExpertTask) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Checks a task's arrays and points the native task at them. The row arrays that it returns must outlive the call."""
    hidden = task.shape.hidden
    if task.record.dtype != np.uint8 or task.record.ndim != 1 or task.record.size < task.shape.record_bytes:
        raise ValueError(f"record: expected uint8 [{task.shape.record_bytes}], got {task.record.dtype} {list(task.record.shape)}")
    if not task.record.flags.c_contiguous:
        raise ValueError(f"record: expected contiguous bytes, got a view with a stride of {task.record.strides[0]}")
    if task.x.dtype not in (np.dtype(np.float32), np.dtype(np.float16)):
        raise ValueError(f"x: expected float32 or float16, got {task.x.dtype}")
    if task.out.dtype != np.float32:
        raise ValueError(f"out: expected float32, got {task.out.dtype}")
    for name, array in (("x", task.x), ("out", task.out)):
        if array.ndim != 2 or array.shape[1] != hidden or not array.flags.c_contiguous:
            raise ValueError(f"{name}: expected contiguous [rows, {hidden}], got {list(array.shape)}")
    if not task.out.flags.writeable:
        raise ValueError("out: is read-only")
    x_rows = _rows("x_rows", task.x_rows, task.x.shape[0])
    out_rows = _rows("out_rows", task.out_rows, task.out.shape[0])
    if task.x_rows is None and task.out_rows is not None:
        x_rows = x_rows[: len(out_rows)]
    if task.out_rows is None:
        out_rows = out_rows[: len(x_rows)]
    if len(x_rows) != len(out_rows):
        raise ValueError(f"x_rows and out_rows: {len(x_rows)} and {len(out_rows)} rows")
    native.shape = ctypes.pointer(task.shape)
    native.record = task.record.ctypes.data
    native.x = task.x.ctypes.data
    native.x_rows = x_rows.ctypes.data
    native.out = task.out.ctypes.data
    native.out_rows = out_rows.ctypes.data
    native.num_rows = len(x_rows)
    native.x_dtype = 1 if task.x.dtype == np.float16 else 0
    return x_rows, out_rows


def _rows(name: str, rows: npt.NDArray[np.uint32] | None, limit: int) -> npt.NDArray[np.uint32]:
    if rows is None:
        return np.arange(limit, dtype=np.uint32)
    if rows.dtype != np.uint32 or rows.ndim != 1:
        raise ValueError(f"{name}: expected uint32 [rows], got {rows.dtype} {list(rows.shape)}")
    if rows.size and int(rows.max()) >= limit:
        raise ValueError(f"{name}: row {int(rows.max())} of {limit}")
    return np.ascontiguousarray(rows)


def _variant(name: str) -> int:
    try:
        return int(Variant[name.upper()])
    except KeyError:
        names = ", ".join(v.name.lower() for v in Variant)
        raise ValueError(f"variant: {name!r} is not one of {names}") from None


def _variant_name(variant: int) -> str:
    return Variant(variant).name.lower()


@functools.cache
def _signatures() -> ctypes.CDLL:
    library = lib.load()
    pointer, number, text = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p
    signatures: dict[str, tuple[list[Any], Any]] = {
        "moe_shape_init": ([pointer, *[number] * 7, ctypes.c_float, number, number], ctypes.c_int),
        "moe_struct_layout": ([], text),
        "moe_arithmetic_version": ([], number),
        "moe_last_error": ([], text),
        "moe_pool_create": ([number, number, pointer, number], pointer),
        "moe_pool_destroy": ([pointer], None),
        "moe_pool_run": ([pointer, pointer, number], ctypes.c_int),
        "moe_pool_tune": ([pointer, pointer], ctypes.c_int),
        "moe_pool_variant": ([pointer], number),
        "moe_pool_reason": ([pointer], text),
        "moe_variant_available": ([number], ctypes.c_int),
    }
    for name, (argument_types, result_type) in signatures.items():
        function = getattr(library, name)
        function.argtypes = argument_types
        function.restype = result_type
    check_layout(library.moe_struct_layout().decode(), {"MoeExpertShape": ExpertShape, "MoeTask": _Task})
    return library


def check_layout(layout: str, mirrors: Mapping[str, type[ctypes.Structure]]) -> None:
    """Compares ctypes mirrors with the compiler's layout ("struct.field=offset:size" a line).

    Raises KernelsMissingError at the first difference: the library and the Python code are of different versions.
    """
    for line in layout.splitlines():
        name, _, numbers = line.partition("=")
        struct, _, field = name.partition(".")
        mirror = mirrors[struct]
        expected = tuple(int(number) for number in numbers.split(":"))
        descriptor = getattr(mirror, field, None) if field else None
        found = (descriptor.offset, descriptor.size) if descriptor is not None else (0, ctypes.sizeof(mirror))
        if found != expected or (field and descriptor is None):
            raise lib.KernelsMissingError(f"{name}: the library has (offset, size) {expected}, Python {found}: rebuild with `make kernels`")
