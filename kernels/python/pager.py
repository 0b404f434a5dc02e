"""The device pager: brings picked records into slots while the device waits for its word (expert_pager.h)."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.python import shm_lib
from kernels.python.cuda_expert import CopyRange
from kernels.python.errors import raise_last

WORDS_BYTES = 256
HINT_WIDTH = 16  # most ids of a row of a hint
CATCH_UP_S = 45.0  # for the device to come to a decode step, a prefill may be before it; less than the watchdog's, which knows less


class PagerDriver(ctypes.Structure):
    """The driver calls that the pager makes. With a gather the records that a step misses are copied by it, else by the copy engine."""

    CONTEXT_GET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
    CONTEXT_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    COPY_TO_HOST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    COPY_TO_DEVICE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    WORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
    GATHER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(CopyRange), ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p)
    _fields_ = [
        ("context_get", CONTEXT_GET),
        ("context_set", CONTEXT_SET),
        ("copy_to_host", COPY_TO_HOST),
        ("copy_to_device", COPY_TO_DEVICE),
        ("write_word", WORD),
        ("wait_word", WORD),
        ("gather", GATHER),
    ]


class PagerSpec(ctypes.Structure):
    """What a pager is made from (expert_pager.h)."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("num_layers", "experts_per_layer", "num_slots", "num_transit", "max_rows", "top_k")),
        *((name, ctypes.c_uint32) for name in ("num_parts", "max_copies")),
        *((name, ctypes.c_uint64) for name in ("record_stride", "host", "host_on_device", "slots", "table", "offsets", "mirror", "picks")),
        *((name, ctypes.c_uint64) for name in ("words", "words_on_device", "copy_stream")),
        ("driver", ctypes.POINTER(PagerDriver)),
        *((name, ctypes.c_float) for name in ("slow_half_life", "fast_half_life", "fast_weight", "admit_margin")),
        ("admit_after", ctypes.c_uint32),
        ("link_derate", ctypes.c_uint32),
        ("hints", ctypes.c_uint64),
        ("hint_records", ctypes.c_uint32),
        ("hint_chunk", ctypes.c_uint32),
        ("forget_below", ctypes.c_float),
        ("num_passing", ctypes.c_uint32),
    ]


@dataclasses.dataclass(frozen=True)
class PagerLayout:
    """Sizes and addresses. Host memory is pinned; addresses end in _address, those of the device in _device."""

    num_layers: int
    experts_per_layer: int
    num_slots: int
    num_transit: int  # of these, the first ones hold records for one step at a time
    max_rows: int
    top_k: int
    record_stride: int
    host_address: int  # records [layers * experts][stride]
    host_device: int
    slots_device: int  # [slots][stride]
    table_device: int  # int64 [layers, parts, experts]
    mirror_address: int  # the same on the host
    picks_address: int  # int64 [layers, max_rows * top_k]
    words_address: int  # WORDS_BYTES, zeroed, mapped
    words_device: int
    copy_stream: int
    hints_address: int = 0  # int64 [layers, max_rows * HINT_WIDTH]; 0 when the policy's hint_records is 0
    num_passing: int = 0  # most records of a step that take the coldest records' slots although they are colder, beside num_transit


@dataclasses.dataclass(frozen=True)
class PagerPolicy:
    """When a missing record gets a slot. Half-lives in decode steps; see bench/routing_trace.py for the traces they were chosen on."""

    slow_half_life: float = 400.0
    fast_half_life: float = 10.0
    fast_weight: float = 1.0
    admit_margin: float = 1.0
    admit_after: int = 1
    forget_below: float = 0.85  # picks that have less than this share of their usual chance may be of another subject; 0: never
    max_copies: int = 64  # records of one layer step; the rest are read in place
    link_derate: int = 1  # measurements: every record is copied so many times, as over a link of that fraction of the rate
    # Most records that one hint brings ahead of its layer's step, 0: there are no hints. Twice as many slots, a quarter at most, are set
    # aside for them.
    hint_records: int = 0
    hint_chunk: int = 1 << 20  # bytes of one copy of a hint; the copies of a step wait for two of them at most


@dataclasses.dataclass(frozen=True)
class PagerCounters:
    """What the pager did since it was made. `missed` counts each record once a step, `picks` and `hits` every pick."""

    steps: int
    picks: int
    hits: int
    missed: int
    admitted: int
    transit: int
    in_place: int
    bytes_copied: int


@dataclasses.dataclass(frozen=True)
class HintCounters:
    """What hints did since the pager was made. Every copy that was started ends as used, late or dropped."""

    hinted: int  # distinct records that hints named and that were in no slot; a hint that came too late to be looked at counts none
    started: int  # copies begun
    used: int  # picked, and every byte was there when the step asked
    late: int  # picked, and the step had to wait for its last bytes
    dropped: int  # not picked
    bytes_copied: int  # before a step asked; what a late one still needed is in PagerCounters.bytes_copied


class Pager:
    """A running pager. Everything that `layout` names must outlive it; close it when the device is idle."""

    def __init__(
        self, layout: PagerLayout, offsets: npt.NDArray[np.int64], policy: PagerPolicy | None = None, driver: PagerDriver | None = None
    ) -> None:
        """Starts its thread in the calling thread's CUDA context.

        offsets: int64 [layers, parts], where a record's parts begin. driver: tests' own, else the CUDA driver's.
        Raises ValueError naming a size, OSError-like KernelError when there is no driver or no context.
        """
        self._library = load()
        self._driver = driver  # callbacks must live as long as the thread
        self.num_records = layout.num_layers * layout.experts_per_layer
        offsets = np.ascontiguousarray(offsets, np.int64)  # read while it is created
        pointer = self._create(_spec(layout, offsets, policy or PagerPolicy(), driver))
        if not pointer:
            raise_last(self._library)
        self._handle: shm_lib.Handle | None = shm_lib.Handle(pointer, self._library.glm53_pager_close)

    def _create(self, spec: PagerSpec) -> int | None:
        pointer: int | None = self._library.glm53_pager_create(ctypes.byref(spec))
        return pointer

    def step(self, layer: int, rows: int, selected: int, stream: int) -> None:
        """Enqueues a layer step: the device goes on when its records are where the tables say.

        selected: device address of int64 [rows, top_k]. stream: the compute stream.
        """
        self._done(self._library.glm53_pager_step(self._pointer, layer, rows, selected, stream))

    def ask(self, layer: int, rows: int, selected: int, stream: int) -> None:
        """The first half of `step`: the host learns the picks. What is enqueued before `wait` runs while missing records are on their way.

        selected: device address of int64 [rows, top_k].
        """
        self._done(self._library.glm53_pager_ask(self._pointer, layer, rows, selected, stream))

    def wait(self, stream: int) -> None:
        """The second half of `step`. Raises ValueError when no step was asked for."""
        self._done(self._library.glm53_pager_wait(self._pointer, stream))

    def catch_up(self, timeout_s: float = CATCH_UP_S) -> None:
        """Waits until every step that was enqueued is answered: from then on the device needs nobody to come to its end.

        In the stepping thread, before anything that may wait for the device inside the driver. Raises TierTimeout.
        """
        self._done(self._library.glm53_pager_catch_up(self._pointer, round(timeout_s * 1e9)))

    def hint(self, layer: int, rows: int, ids: int, width: int, stream: int) -> None:
        """Says what `layer` will probably pick, while the device waits in the step of the layer before. It moves bytes only.

        To be called between the two halves of that step, once. ids: device address of int64 [rows, width], best first, at most HINT_WIDTH
        wide; one that is no expert is skipped. Never waits. Raises ValueError anywhere else, and where the policy has no hint_records.
        """
        self._done(self._library.glm53_pager_hint(self._pointer, layer, rows, ids, width, stream))

    def hint_counters(self) -> HintCounters:
        """All 0 where there are no hints."""
        values = (ctypes.c_uint64 * 6)()
        self._done(self._library.glm53_pager_hints(self._pointer, values))
        return HintCounters(*(int(value) for value in values))

    def put(self, record: int, slot: int) -> None:
        """Says that a record's bytes are in an empty slot. The device must be idle; `flush` sends the tables."""
        self._done(self._library.glm53_pager_put(self._pointer, record, slot))

    def vacate(self, first_slot: int, count: int) -> None:
        """Empties slots. The device must be idle as far as decode steps go; `flush` sends the tables."""
        self._done(self._library.glm53_pager_vacate(self._pointer, first_slot, count))

    def limit(self, usable_slots: int) -> None:
        """Slots from there on are given to no record until a higher limit is set. They must be empty, and the device idle.

        Raises ValueError when one holds a record, or a transit slot would go.
        """
        self._done(self._library.glm53_pager_limit(self._pointer, usable_slots))

    def flush(self, stream: int) -> None:
        """Enqueues every table that changed."""
        self._done(self._library.glm53_pager_flush(self._pointer, stream))

    def where(self) -> npt.NDArray[np.int32]:
        """The slot of every record, -1 for none: int32 [layers * experts]."""
        slots = np.empty(self.num_records, np.int32)
        self._done(self._library.glm53_pager_where(self._pointer, slots.ctypes.data))
        return slots

    def heat(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """How hot every record is now: popularity, and fast without its weight, float32 [layers * experts] each."""
        slow, fast = np.empty(self.num_records, np.float32), np.empty(self.num_records, np.float32)
        self._done(self._library.glm53_pager_heat_read(self._pointer, slow.ctypes.data, fast.ctypes.data))
        return slow, fast

    def set_heat(self, slow: npt.NDArray[np.float32], fast: npt.NDArray[np.float32]) -> None:
        """Goes on with the heat of an earlier run, float32 [layers * experts] each."""
        for values in (slow, fast):
            if values.dtype != np.float32 or values.shape != (self.num_records,):
                raise ValueError(f"heat: expected float32 [{self.num_records}], got {values.dtype} {list(values.shape)}")
        slow, fast = np.ascontiguousarray(slow), np.ascontiguousarray(fast)
        self._done(self._library.glm53_pager_heat_write(self._pointer, slow.ctypes.data, fast.ctypes.data))

    def counters(self) -> PagerCounters:
        """Raises KernelError when a driver call failed: what ran since may be wrong."""
        values = (ctypes.c_uint64 * 8)()
        self._done(self._library.glm53_pager_stats(self._pointer, values))
        return PagerCounters(*(int(value) for value in values))

    def close(self) -> None:
        """Answers what is outstanding and ends the thread."""
        self._handle = None

    @property
    def _pointer(self) -> int:
        if self._handle is None:
            raise ValueError("the pager is closed")
        return self._handle.pointer

    def _done(self, code: int) -> None:
        if code != 0:
            raise_last(self._library)


def _spec(layout: PagerLayout, offsets: npt.NDArray[np.int64], policy: PagerPolicy, driver: PagerDriver | None) -> PagerSpec:
    return PagerSpec(
        layout.num_layers,
        layout.experts_per_layer,
        layout.num_slots,
        layout.num_transit,
        layout.max_rows,
        layout.top_k,
        offsets.shape[1],
        policy.max_copies,
        layout.record_stride,
        layout.host_address,
        layout.host_device,
        layout.slots_device,
        layout.table_device,
        offsets.ctypes.data,
        layout.mirror_address,
        layout.picks_address,
        layout.words_address,
        layout.words_device,
        layout.copy_stream,
        ctypes.pointer(driver) if driver is not None else None,
        policy.slow_half_life,
        policy.fast_half_life,
        policy.fast_weight,
        policy.admit_margin,
        policy.admit_after,
        policy.link_derate,
        layout.hints_address,
        policy.hint_records,
        policy.hint_chunk,
        policy.forget_below,
        layout.num_passing,
    )


def gather_driver(gather: int) -> PagerDriver:
    """The CUDA driver's calls and a gather. gather: the address of moe_cuda_gather (`cuda_expert.gather_function`).

    Raises KernelError without a driver.
    """
    library, driver = load(), PagerDriver()
    if library.glm53_pager_cuda_driver(ctypes.byref(driver)) != 0:
        raise_last(library)
    driver.gather = PagerDriver.GATHER(gather)
    return driver


def copy_rates(
    layout: PagerLayout,
    offsets: npt.NDArray[np.int64],
    driver: PagerDriver,
    *,
    compute_stream: int,
    group: int,
    budget_s: float,
) -> tuple[float, float]:
    """Bytes per second at which groups of records come into slots: (by the copy engine, by the driver's gather).

    Before a pager is made of `layout`: the device must be idle, and the first `group` slots are overwritten. Waits for budget_s, longer
    only where four groups take longer. compute_stream: waits for a word while a gather runs, as it does in a step.
    Raises KernelError when a call fails or a gather does not run beside a stream that waits, ValueError when there is nothing to copy.
    """
    library, rates = load(), (ctypes.c_double * 2)()
    spec = _spec(layout, np.ascontiguousarray(offsets, np.int64), PagerPolicy(), driver)
    if library.glm53_pager_copy_rates(ctypes.byref(spec), compute_stream, group, round(budget_s * 1e9), rates) != 0:
        raise_last(library)
    return float(rates[0]), float(rates[1])


def load() -> Any:
    """The kernels' library with the signatures of every glm53_pager_* function."""
    library = shm_lib.load()
    if library.glm53_pager_create.argtypes is None:
        pointer, u32, u64, real = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_double
        signatures: dict[str, tuple[list[Any], Any]] = {
            "glm53_pager_cuda_driver": ([pointer], ctypes.c_int),
            "glm53_pager_copy_rates": ([pointer, pointer, u32, u64, pointer], ctypes.c_int),
            "glm53_pager_create": ([pointer], pointer),
            "glm53_pager_step": ([pointer, u32, u32, u64, pointer], ctypes.c_int),
            "glm53_pager_ask": ([pointer, u32, u32, u64, pointer], ctypes.c_int),
            "glm53_pager_wait": ([pointer, pointer], ctypes.c_int),
            "glm53_pager_catch_up": ([pointer, u64], ctypes.c_int),
            "glm53_pager_hint": ([pointer, u32, u32, u64, u32, pointer], ctypes.c_int),
            "glm53_pager_hints": ([pointer, pointer], ctypes.c_int),
            "glm53_pager_create_fast": ([pointer, pointer], pointer),
            "glm53_pager_publish": ([pointer, u32, u32, u64, u64, pointer], ctypes.c_int),
            "glm53_pager_finish": ([pointer, u32, u32, u64, u64, u64, pointer], ctypes.c_int),
            "glm53_pager_force": ([pointer, u32, u64], ctypes.c_int),
            "glm53_pager_lane_up": ([pointer], ctypes.c_int),
            "glm53_pager_fast_stats": ([pointer], ctypes.c_char_p),
            "glm53_pager_split": ([real, real, real, real, pointer, u32, pointer, u32, pointer], ctypes.c_int),
            "glm53_pager_rates": ([pointer, pointer, pointer, u32, pointer], ctypes.c_int),
            "glm53_pager_learn": ([pointer, pointer, u32, pointer], ctypes.c_int),
            "glm53_pager_forecast": ([u32, pointer, pointer, pointer, pointer, u32, pointer], ctypes.c_int64),
            "glm53_pager_put": ([pointer, u32, u32], ctypes.c_int),
            "glm53_pager_vacate": ([pointer, u32, u32], ctypes.c_int),
            "glm53_pager_limit": ([pointer, u32], ctypes.c_int),
            "glm53_pager_flush": ([pointer, pointer], ctypes.c_int),
            "glm53_pager_where": ([pointer, pointer], ctypes.c_int),
            "glm53_pager_heat_read": ([pointer, pointer, pointer], ctypes.c_int),
            "glm53_pager_heat_write": ([pointer, pointer, pointer], ctypes.c_int),
            "glm53_pager_stats": ([pointer, pointer], ctypes.c_int),
            "glm53_pager_close": ([pointer], None),
        }
        for name, (argument_types, result_type) in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = argument_types, result_type
    return library
