"""The device pager of `fast`: decode steps on the integer expert kernels, with picks for cpu_expert (expert_pager.h, PagerFast)."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.python.arena import Arena
from kernels.python.cuda_expert import StepFunctions
from kernels.python.errors import raise_last
from kernels.python.pager import Pager, PagerDriver, PagerLayout, PagerPolicy, PagerSpec, load
from kernels.python.region import Region

VARIANT_AUTO = 0
UNMEASURED_LINK_US = 200.0  # one record, until the first copies have been timed


class Forced(enum.IntEnum):
    """Where picks are computed: as the costs say, or forced, for tests and measurements."""

    BY_COST = 0
    NEVER_LANE = 1  # by cost, without the CPU lane
    ALL_LANE = 2  # every pick in the CPU lane while it is up
    ALL_IN_PLACE = 3  # nothing is admitted: what is in no slot is read in host memory
    RANDOM = 4  # any lane for any pick, slots emptied at random


class _Fast(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("arena", "region")),
        *((name, ctypes.c_uint64) for name in ("region_on_device", "records", "records_mirror", "picks_on_device", "y", "arrivals")),
        *((name, ctypes.c_uint64) for name in ("own_rows", "own_rows_on_device", "rows_at", "rows_at_on_device")),
        ("experts", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("publish", "run", "combine")),
        *((name, ctypes.c_uint64) for name in ("heartbeat_timeout_ns", "job_timeout_ns")),
        *((name, ctypes.c_double) for name in ("kernel_a_us", "kernel_b_us", "link_us", "ct_a_us", "ct_b_us", "ct_tzc_us")),
        ("variant", ctypes.c_uint32),
    ]


@dataclasses.dataclass(frozen=True)
class FastLayout:
    """Addresses of what a step works with, beside those of `PagerLayout`. The same endings: _address on the host, _device on the device.

    All host memory is pinned and mapped for the device.
    """

    records_device: int  # uint64 [layers, experts]: where the kernels find a record, 0 for a pick of the CPU lane
    records_mirror_address: int  # the same on the host
    picks_device: int  # of PagerLayout.picks_address
    y_device: int  # float32 [max_rows * top_k, hidden]
    arrivals_device: int  # uint32, zeroed
    own_rows_address: int  # float32 [max_rows * top_k, hidden]: picks that the worker computes for a broken lane
    own_rows_device: int
    rows_at_address: int  # uint64: where the device finds the CPU lane's rows of the current step
    rows_at_device: int
    region_device: int = 0  # the control region's first byte, where there is one


@dataclasses.dataclass(frozen=True)
class FastCosts:
    """Microseconds. Unset ct_*: measured. A step's kernels with n experts in slots take kernel_a_us + kernel_b_us * n."""

    kernel_a_us: float = 10.0
    kernel_b_us: float = 5.0
    link_us: float = UNMEASURED_LINK_US
    ct_a_us: float | None = None  # CPU lane: fixed cost of a job
    ct_b_us: float | None = None  # CPU lane: one expert
    ct_tzc_us: float | None = None  # one record over the link


@dataclasses.dataclass(frozen=True)
class FastOptions:
    """When the CPU lane is given up."""

    costs: FastCosts = FastCosts()
    job_timeout_ms: int = 500
    heartbeat_timeout_ms: int = 1000
    variant: int = VARIANT_AUTO


class FastPager(Pager):
    """A running pager of `fast`. Arena, region and everything that the layouts name must outlive it."""

    def __init__(
        self,
        layout: PagerLayout,
        offsets: npt.NDArray[np.int64],
        fast: FastLayout,
        arena: Arena,
        region: Region | None,
        experts: Sequence[int],
        functions: StepFunctions,
        options: FastOptions | None = None,
        policy: PagerPolicy | None = None,
        driver: PagerDriver | None = None,
    ) -> None:
        """Starts its thread in the calling thread's CUDA context.

        experts: [layers], the kernels' handle of each layer's shape (`CudaExperts.handle`). region: None means never a CPU lane.
        functions, driver: tests' own, else the CUDA library's and driver's.
        Raises ValueError naming a size, ShmMismatch when region and arena do not belong together, KernelError without a driver.
        """
        if len(experts) != layout.num_layers:
            raise ValueError(f"experts: {len(experts)} handles for {layout.num_layers} layers")
        options = options or FastOptions()
        self._segments = (arena.handle, region.handle if region is not None else None)  # mapped for as long as the thread reads them
        handles = (ctypes.c_void_p * len(experts))(*experts)
        costs, unset = options.costs, -1.0
        self._fast = _Fast(
            arena=self._segments[0].pointer,
            region=region.handle.pointer if region is not None else None,
            region_on_device=fast.region_device,
            records=fast.records_device,
            records_mirror=fast.records_mirror_address,
            picks_on_device=fast.picks_device,
            y=fast.y_device,
            arrivals=fast.arrivals_device,
            own_rows=fast.own_rows_address,
            own_rows_on_device=fast.own_rows_device,
            rows_at=fast.rows_at_address,
            rows_at_on_device=fast.rows_at_device,
            experts=ctypes.addressof(handles),
            publish=functions.publish,
            run=functions.run,
            combine=functions.combine,
            heartbeat_timeout_ns=options.heartbeat_timeout_ms * 1_000_000,
            job_timeout_ns=options.job_timeout_ms * 1_000_000,
            kernel_a_us=costs.kernel_a_us,
            kernel_b_us=costs.kernel_b_us,
            link_us=costs.link_us,
            ct_a_us=unset if costs.ct_a_us is None else costs.ct_a_us,
            ct_b_us=unset if costs.ct_b_us is None else costs.ct_b_us,
            ct_tzc_us=unset if costs.ct_tzc_us is None else costs.ct_tzc_us,
            variant=options.variant,
        )
        super().__init__(layout, offsets, policy, driver)

    def _create(self, spec: PagerSpec) -> int | None:
        pointer: int | None = self._library.glm53_pager_create_fast(ctypes.byref(spec), ctypes.byref(self._fast))
        return pointer

    def publish(self, layer: int, rows: int, selected: int, x: int, stream: int) -> None:
        """Enqueues the first half of a layer step: the host learns its picks, and its activations when the CPU lane may want them.

        selected: device address of int64 [rows, top_k]; x: of fp16 [rows, hidden]. Both keep their values until the step is over.
        """
        self._done(self._library.glm53_pager_publish(self._pointer, layer, rows, selected, x, stream))

    def finish(self, layer: int, rows: int, weights: int, out: int, *, shared: int = 0, stream: int) -> None:
        """Enqueues the second half: the sum of all picks in slot order, wherever they are computed.

        weights: device address of fp16 [rows, top_k]; out: of float32 [rows, hidden]; shared: of float32 [rows, hidden] that is added
        last, 0 for none, and may be out itself.
        """
        self._done(self._library.glm53_pager_finish(self._pointer, layer, rows, weights, shared, out, stream))

    def force(self, placement: Forced, seed: int = 0) -> None:
        """From the next step on picks are computed where `placement` says."""
        self._done(self._library.glm53_pager_force(self._pointer, int(placement), seed))

    @property
    def lane_up(self) -> bool:
        """True while cpu_expert takes jobs."""
        return bool(self._library.glm53_pager_lane_up(self._pointer))

    def fast_stats(self) -> dict[str, Any]:
        """Picks by lane, the lane's state, measured costs (`ct_*_us`), and how well steps were foretold (`planner_error_pct`)."""
        text: bytes | None = self._library.glm53_pager_fast_stats(self._pointer)
        if text is None:
            raise_last(self._library)
        result: dict[str, Any] = json.loads(text)
        return result


def split(
    hits: int, misses: Sequence[int], *, kernel_us: tuple[float, float], link_us: float, job_us: float | None, expert_us: Sequence[float]
) -> tuple[int, tuple[float, float]]:
    """What the costs make of one step, without a device: (misses for the CPU lane, (device, lane) in microseconds).

    misses: rows of each missing record, coldest first. expert_us: [8], one expert of the CPU lane with 1..8 rows. job_us: a job's fixed
    cost, None when no lane was probed.
    """
    library = load()
    rows, lane, predicted = (ctypes.c_uint32 * len(misses))(*misses), (ctypes.c_double * 8)(*expert_us), (ctypes.c_double * 2)()
    chosen = library.glm53_pager_split(
        *kernel_us, link_us, -1.0 if job_us is None else job_us, lane, hits, ctypes.cast(rows, ctypes.c_void_p), len(misses), predicted
    )
    if chosen < 0:
        raise_last(library)
    return int(chosen), (float(predicted[0]), float(predicted[1]))


Rates = tuple[float, list[float]]  # microseconds of a job by itself, and [8] of one expert with 1..8 rows


def rates(jobs: Sequence[tuple[int, int, float]], before: Rates = (0.0, [0.0] * 8)) -> Rates:
    """What timed jobs, (experts, rows, microseconds) each, say about the CPU lane. before: what was known."""
    experts, rows, us = zip(*jobs, strict=True)
    values = (ctypes.c_double * 9)(before[0], *before[1])
    count, words = len(jobs), ctypes.c_uint32 * len(jobs)
    arguments = (words(*experts), words(*rows), (ctypes.c_double * count)(*us))
    if load().glm53_pager_rates(*(ctypes.addressof(a) for a in arguments), count, values) < 0:
        raise_last(load())
    return values[0], list(values[1:])


def learn(jobs: Sequence[tuple[int, float]], before: Rates) -> Rates:
    """What the CPU lane is thought to cost after jobs, (experts, microseconds) each, of one row. before: what the probe said."""
    experts, us = zip(*jobs, strict=True)
    values, count = (ctypes.c_double * 9)(before[0], *before[1]), len(jobs)
    arguments = ((ctypes.c_uint32 * count)(*experts), (ctypes.c_double * count)(*us))
    if load().glm53_pager_learn(*(ctypes.addressof(a) for a in arguments), count, values) < 0:
        raise_last(load())
    return values[0], list(values[1:])


def forecast(
    num_layers: int,
    layers: npt.NDArray[np.uint32],
    rows: npt.NDArray[np.uint32],
    now_ns: npt.NDArray[np.uint64],
    predicted_us: npt.NDArray[np.float64],
) -> tuple[int, float]:
    """What `planner_error_pct` makes of a sequence of layer steps, without a device: (whole steps that count, median error in percent).

    One entry for each request, in the order in which they were seen.
    """
    library = load()
    arrays = [np.ascontiguousarray(a, dtype) for a, dtype in ((layers, np.uint32), (rows, np.uint32), (now_ns, np.uint64))]
    predicted = np.ascontiguousarray(predicted_us, np.float64)
    error = ctypes.c_double()
    steps = library.glm53_pager_forecast(
        num_layers, *(a.ctypes.data for a in arrays), predicted.ctypes.data, len(predicted), ctypes.byref(error)
    )
    if steps < 0:
        raise_last(library)
    return int(steps), float(error.value)
