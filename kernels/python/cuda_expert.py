"""Routed experts on a CUDA GPU for decode: libglm53_cuda.so (moe_cuda.h), by device addresses and a stream handle.

There is no torch here: who owns the memory passes `tensor.data_ptr()` and `stream.cuda_stream`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from kernels.python import expert, lib
from kernels.python.expert import ExpertShape

LIBRARY_PATH = lib.LIBRARY_PATH.with_name("libglm53_cuda.so")
MAX_ROWS = 8
MAX_TOP_K = 16

DTYPE_F32, DTYPE_F16 = 0, 1
INDEX_I32, INDEX_I64 = 0, 1
FLAG_SERIAL, FLAG_AFTER_KERNEL, FLAG_ALL_HERE = 1, 2, 4


class StepArguments(ctypes.Structure):
    """MoeCudaStep."""

    _fields_ = [
        ("records", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("selected", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("num_experts", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("top_k", ctypes.c_uint32),
        ("x_dtype", ctypes.c_uint32),
        ("selected_type", ctypes.c_uint32),
        ("weights_dtype", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    ]


class CombineArguments(ctypes.Structure):
    """MoeCudaCombine."""

    _fields_ = [
        ("records", ctypes.c_void_p),
        ("selected", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("other_y", ctypes.c_void_p),
        ("other_from", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("hidden", ctypes.c_uint32),
        ("num_experts", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("top_k", ctypes.c_uint32),
        ("selected_type", ctypes.c_uint32),
        ("weights_dtype", ctypes.c_uint32),
    ]


class PublishArguments(ctypes.Structure):
    """MoeCudaPublish."""

    _fields_ = [
        ("selected", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("selected_to", ctypes.c_void_p),
        ("x_to", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("word", ctypes.c_void_p),
        ("value", ctypes.c_uint32),
        ("hidden", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("top_k", ctypes.c_uint32),
    ]


class CopyRange(ctypes.Structure):
    """MoeCudaCopy."""

    _fields_ = [("to", ctypes.c_uint64), ("source", ctypes.c_uint64)]


@dataclasses.dataclass(frozen=True)
class Routing:
    """The picks of one step, in device memory. Pick p = row * top_k + slot belongs to expert selected[p].

    records: uint64 [num_experts], the address of an expert's record in VRAM or mapped host memory, 0 when it is not computed on the GPU.
    selected: int64 or int32 [rows, top_k]; numbers outside 0..num_experts-1 are left out. weights: fp16 or fp32 [rows, top_k].
    """

    records: int
    selected: int
    weights: int
    num_experts: int
    rows: int
    top_k: int
    selected_type: int = INDEX_I64
    weights_dtype: int = DTYPE_F16


class CudaExperts:
    """The expert kernels for records of one shape on one device. Steps of one object share its scratch memory: order them by stream."""

    def __init__(self, shape: ExpertShape, max_picks: int, device: int = 0) -> None:
        """Takes scratch memory on the device.

        max_picks: the largest rows * top_k of a step. device: CUDA ordinal.
        Raises ValueError naming what the shape or the device lacks, KernelsMissingError when the library is not built.
        """
        self._handle: int | None = None
        self._library = _signatures()
        handle = self._library.moe_cuda_create(ctypes.byref(shape), max_picks, device)
        if not handle:
            raise ValueError(self._library.moe_cuda_last_error().decode())
        self._handle = handle

    @property
    def handle(self) -> int:
        """What native callers of `step_functions` name these kernels by; valid until `close`."""
        return self._open()

    @property
    def description(self) -> str:
        """Device, blocks per multiprocessor, launches for one row, scratch memory."""
        text: bytes = self._library.moe_cuda_describe(self._open())
        return text.decode()

    def run(
        self,
        routing: Routing,
        x: int,
        *,
        y: int | None = None,
        out: int | None = None,
        shared: int | None = None,
        x_dtype: int = DTYPE_F16,
        serial: bool = False,
        after_kernel: bool = False,
        all_here: bool = False,
        stream: int = 0,
    ) -> None:
        """Enqueues one step. All addresses are device addresses, 16-byte aligned.

        x: fp16 or fp32 [rows, hidden]. y: fp32 [rows * top_k, hidden], one unweighted row per computed pick. out: fp32 [rows, hidden], the
        weighted sum over ascending slots, then plus shared (fp32 [rows, hidden]). At least one of y and out.
        serial: no kernel begins before the one before it has ended. after_kernel: the stream's last operation is a kernel, so that the
        step's launch may be prepared while it ends. all_here: no other lane takes part in the step, which lets one row run as one launch;
        the bits are the same. stream: cudaStream_t as an integer.
        Raises ValueError naming the argument; RuntimeError is left to the stream, where an error of the device shows up.
        """
        step = StepArguments(
            records=routing.records,
            x=x,
            selected=routing.selected,
            weights=routing.weights,
            y=y,
            out=out,
            shared=shared,
            num_experts=routing.num_experts,
            rows=routing.rows,
            top_k=routing.top_k,
            x_dtype=x_dtype,
            selected_type=routing.selected_type,
            weights_dtype=routing.weights_dtype,
            flags=FLAG_SERIAL * serial | FLAG_AFTER_KERNEL * after_kernel | FLAG_ALL_HERE * all_here,
        )
        if self._library.moe_cuda_run(self._open(), ctypes.byref(step), stream) != 0:
            raise ValueError(self._library.moe_cuda_last_error().decode())

    def close(self) -> None:
        """Waits for the device and gives the scratch memory back. Closing twice is harmless."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.moe_cuda_destroy(handle)

    def __enter__(self) -> CudaExperts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        if self._handle is None:
            raise ValueError("the experts are closed")
        return self._handle


def combine(
    routing: Routing,
    hidden: int,
    y: int,
    out: int,
    *,
    other_y: int | None = None,
    other_from: int | None = None,
    shared: int | None = None,
    stream: int = 0,
) -> None:
    """Enqueues the weighted sum of rows that were computed in different places, with the bits of `CudaExperts.run`'s `out`.

    A pick whose expert has a record takes its row from y, any other valid pick from other_y (fp32 [rows * top_k, hidden], for example
    mapped host memory that another lane has filled before the stream comes here). other_from: instead, the address of other_y's address.
    Raises ValueError naming the argument.
    """
    library = _signatures()
    arguments = CombineArguments(
        records=routing.records,
        selected=routing.selected,
        weights=routing.weights,
        y=y,
        other_y=other_y,
        other_from=other_from,
        shared=shared,
        out=out,
        hidden=hidden,
        num_experts=routing.num_experts,
        rows=routing.rows,
        top_k=routing.top_k,
        selected_type=routing.selected_type,
        weights_dtype=routing.weights_dtype,
    )
    if library.moe_cuda_combine(ctypes.byref(arguments), stream) != 0:
        raise ValueError(library.moe_cuda_last_error().decode())


def publish(
    routing: Routing,
    hidden: int,
    *,
    selected_to: int,
    word: int,
    value: int,
    arrivals: int,
    x: int | None = None,
    x_to: int | None = None,
    stream: int = 0,
) -> None:
    """Enqueues the copy of a step's picks (int64), and activations (fp16 [rows, hidden]), to mapped host memory; then word becomes value.

    selected_to, x_to, word: device addresses of mapped host memory. arrivals: uint32 in VRAM, zeroed before the first use.
    Raises ValueError naming the argument.
    """
    library = _signatures()
    arguments = PublishArguments(
        selected=routing.selected,
        x=x,
        selected_to=selected_to,
        x_to=x_to,
        arrivals=arrivals,
        word=word,
        value=value,
        hidden=hidden,
        rows=routing.rows,
        top_k=routing.top_k,
    )
    if library.moe_cuda_publish(ctypes.byref(arguments), stream) != 0:
        raise ValueError(library.moe_cuda_last_error().decode())


def gather(copies: Sequence[tuple[int, int]], num_bytes: int, *, stream: int = 0) -> None:
    """Enqueues a copy of ranges of num_bytes bytes each, from mapped host memory into VRAM, read by the multiprocessors.

    copies: (to, source), device addresses, 16-byte aligned. The first call in a process loads the kernel's code: nothing on the device may
    be waiting for this thread then.
    Raises ValueError naming the argument.
    """
    library = _signatures()
    ranges = (CopyRange * len(copies))(*(CopyRange(to, source) for to, source in copies))
    _check(library, library.moe_cuda_gather(ranges, len(copies), num_bytes, stream))


def gather_function() -> int:
    """The address of moe_cuda_gather, for a pager (`pager.gather_driver`)."""
    return ctypes.cast(_signatures().moe_cuda_gather, ctypes.c_void_p).value or 0


@dataclasses.dataclass(frozen=True)
class Words:
    """Measurements: two words of mapped host memory, by which the device and the host go through numbered rounds (moe_cuda.h).

    request, reply: addresses, the device's own for `spin` and `stamp`, the host's for `answer`.
    """

    request: int
    reply: int

    def spin(self, first: int, rounds: int, cycles: int, total_ns: int, *, limit_ns: int, stream: int = 0) -> None:
        """Enqueues the device's side. cycles: uint64 [rounds], total_ns: uint64, in device memory, zeroed.

        Raises ValueError when the kernel cannot be launched.
        """
        library = _signatures()
        _check(library, library.moe_cuda_spin_rounds(self.request, self.reply, cycles, total_ns, first, rounds, limit_ns, stream))

    def answer(self, first: int, rounds: int, *, limit_ns: int) -> None:
        """The host's side: polls and answers, without the GIL. Raises ValueError when a request does not come in time."""
        library = _signatures()
        _check(library, library.moe_cuda_answer_rounds(self.request, self.reply, first, rounds, limit_ns))


def stamp(ns: int, *, word: int | None = None, value: int = 0, stream: int = 0) -> None:
    """Enqueues a note of the device's time: uint64 nanoseconds at the device address ns; then the word, if there is one, becomes value.

    Raises ValueError when the kernel cannot be launched.
    """
    library = _signatures()
    _check(library, library.moe_cuda_stamp(ns, word, value, stream))


def _check(library: ctypes.CDLL, code: int) -> None:
    if code != 0:
        raise ValueError(library.moe_cuda_last_error().decode())


@dataclasses.dataclass(frozen=True)
class StepFunctions:
    """Addresses of moe_cuda_publish, moe_cuda_run and moe_cuda_combine, for native code that enqueues steps itself."""

    publish: int
    run: int
    combine: int


def step_functions() -> StepFunctions:
    """The library's own."""
    library = _signatures()
    names = ("moe_cuda_publish", "moe_cuda_run", "moe_cuda_combine")
    return StepFunctions(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names))


def why_not(shape: ExpertShape) -> str | None:
    """Why the GPU kernel cannot run this shape, or None when it can (a device is not looked for)."""
    library = _signatures()
    return None if library.moe_cuda_shape_check(ctypes.byref(shape)) == 0 else library.moe_cuda_last_error().decode()


def why_not_on(capability: str) -> str:
    """Why the library's kernels cannot run on a GPU of a compute capability such as 90, or "".

    Raises KernelsMissingError when the library is built and does not load, or is of another version.
    """
    if not is_built():
        return "libglm53_cuda.so is not built here: `make kernels` builds it where nvcc is"
    if capability in architectures():
        return ""
    return f"libglm53_cuda.so has machine code for compute capabilities {', '.join(architectures())}, this GPU has {capability}"


def architectures() -> list[str]:
    """Compute capabilities that the library has machine code for, such as "90"."""
    text: bytes = _signatures().moe_cuda_architectures()
    return text.decode().split(",")


def is_built() -> bool:
    """Whether the library exists. It is built with the other kernels where nvcc is found."""
    return LIBRARY_PATH.is_file()


@functools.cache
def _signatures() -> ctypes.CDLL:
    if not is_built():
        raise lib.KernelsMissingError(f"{LIBRARY_PATH} does not exist: `make kernels` builds it where nvcc is installed")
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise lib.KernelsMissingError(f"{LIBRARY_PATH} does not load ({error}): rebuild it with `make kernels`") from error
    pointer, number, text = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p
    signatures: dict[str, tuple[list[Any], Any]] = {
        "moe_cuda_shape_check": ([pointer], ctypes.c_int),
        "moe_cuda_create": ([pointer, number, ctypes.c_int32], pointer),
        "moe_cuda_destroy": ([pointer], None),
        "moe_cuda_run": ([pointer, pointer, pointer], ctypes.c_int),
        "moe_cuda_combine": ([pointer, pointer], ctypes.c_int),
        "moe_cuda_publish": ([pointer, pointer], ctypes.c_int),
        "moe_cuda_gather": ([pointer, number, ctypes.c_uint64, pointer], ctypes.c_int),
        "moe_cuda_spin_rounds": ([pointer, pointer, pointer, pointer, number, number, ctypes.c_uint64, pointer], ctypes.c_int),
        "moe_cuda_stamp": ([pointer, pointer, number, pointer], ctypes.c_int),
        "moe_cuda_answer_rounds": ([pointer, pointer, number, number, ctypes.c_uint64], ctypes.c_int),
        "moe_cuda_describe": ([pointer], text),
        "moe_cuda_last_error": ([], text),
        "moe_cuda_arithmetic_version": ([], number),
        "moe_cuda_architectures": ([], text),
        "moe_cuda_struct_layout": ([], text),
    }
    for name, (argument_types, result_type) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            raise lib.KernelsMissingError(f"{LIBRARY_PATH} has no {name}: it is of an earlier version, rebuild it with `make kernels`")
        function.argtypes = argument_types
        function.restype = result_type
    layouts = {
        "MoeCudaStep": StepArguments,
        "MoeCudaCombine": CombineArguments,
        "MoeCudaPublish": PublishArguments,
        "MoeCudaCopy": CopyRange,
    }
    expert.check_layout(library.moe_cuda_struct_layout().decode(), layouts)
    return library
