"""The tier engine: evaluates a layer's routed experts wherever they lie, with the same bits for every placement."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kernels.python import shm_lib, text_pass
from kernels.python.arena import Arena
from kernels.python.errors import raise_last
from kernels.python.expert import ExpertShape
from kernels.python.region import Region

DEFAULT_SLOT_FRACTION = 3


class TierEngine:
    """One call per MoE layer and batch of rows. Its controller and housekeeping threads run without the GIL.

    `fast`: hits, admissions, records read in place, and the CPU lane (cpu_expert over shared memory, or a thread of this process).
    `exact`: the same without the CPU lane. Results are equal bit for bit in both, for every number of slots and threads.
    """

    def __init__(
        self,
        arena: Arena,
        region: Region | None,
        *,
        mode: Literal["fast", "exact"] = "fast",
        num_slots: int | None = None,
        backend: Literal["shm", "in_process"] = "shm",
        variant: str = "auto",
        threads: int = 1,
        cpus: Sequence[int] = (),
        admit_after: int = 2,
        ct_timeout_ms: int = 500,
        heartbeat_timeout_ms: int = 1000,
        planner: Literal["cost", "fuzz"] = "cost",
        seed: int = 0,
        heat_file: str | None = None,
        heat_period_s: int = 180,
        min_cpu_experts: int | None = None,
        min_cpu_every: int | None = None,
        ct_a_us: float | None = None,
        ct_b_us: float | None = None,
        ct_tzc_us: float | None = None,
        spin_us: int = 30,
        caller_runs: bool = True,
    ) -> None:
        """Starts the engine over a sealed arena.

        region: needed for mode fast with backend shm. num_slots: records that fit into the device, default a third of all.
        admit_after: a record is admitted at its k-th touch. ct_timeout_ms: a lane job that takes longer is abandoned and computed here.
        min_cpu_experts: misses of a decode step that go to the CPU lane even without gain, default the device's (1 on the CPU).
        min_cpu_every: in every so manieth step of a layer, default 1 when min_cpu_experts is given, else the device's (11 on the CPU).
        ct_a_us, ct_b_us, ct_tzc_us: override the measured costs: fixed per lane job, per expert of it, per record read in place.
        caller_runs: the calling thread plans instead of handing each step to the controller's thread and waiting for it.
        planner "fuzz" (tests) draws random legal placements from `seed`.
        Raises ValueError naming an option, ShmMismatch when region and arena do not belong together.
        """
        self._library = shm_lib.load()
        self._arena = arena.handle  # keep the mappings for as long as the native engine reads them
        self._region = region.handle if region is not None else None
        self.experts_per_layer = arena.experts_per_layer
        self.num_layers = arena.num_layers
        self.hidden = arena.shape(0).hidden
        self.num_slots = arena.num_records // DEFAULT_SLOT_FRACTION if num_slots is None else num_slots
        options: dict[str, Any] = {
            "mode": mode,
            "backend": backend,
            "num_slots": self.num_slots,
            "variant": variant,
            "threads": threads,
            "cpus": ",".join(map(str, cpus)),
            "admit_after": admit_after,
            "ct_timeout_ms": ct_timeout_ms,
            "heartbeat_timeout_ms": heartbeat_timeout_ms,
            "planner": planner,
            "seed": seed,
            "heat_file": heat_file,
            "heat_period_s": heat_period_s,
            "min_cpu_experts": min_cpu_experts,
            "min_cpu_every": min_cpu_every,
            "ct_a_us": ct_a_us,
            "ct_b_us": ct_b_us,
            "ct_tzc_us": ct_tzc_us,
            "spin_us": spin_us,
            "caller_runs": int(caller_runs),
        }
        text = "\n".join(f"{name}={value}" for name, value in options.items() if value is not None)
        region_pointer = self._region.pointer if self._region is not None else None
        pointer = self._library.glm53_tier_create(self._arena.pointer, region_pointer, text.encode())
        if not pointer:
            raise_last(self._library)
        self._handle: shm_lib.Handle | None = shm_lib.Handle(pointer, self._library.glm53_tier_close)

    def forward(
        self,
        layer: int,
        x: npt.NDArray[np.float32],
        sel: npt.NDArray[np.int64],
        weights: npt.NDArray[np.float32],
        prefill: bool,
        out: npt.NDArray[np.float32],
    ) -> None:
        """out[t] = sum over k of weights[t, k] * expert sel[t, k] of x[t].

        layer: the arena's layer index. x, out: [T, H]; sel, weights: [T, k]; all C-contiguous. sel == experts_per_layer masks a pick.
        prefill, or more than 8 rows: never the CPU lane, no change of the cache. Raises ValueError naming the argument at fault.
        """
        rows, top_k = sel.shape if sel.ndim == 2 else (-1, -1)
        _check("x", x, np.float32, (rows, self.hidden))
        _check("sel", sel, np.int64, (rows, top_k))
        _check("weights", weights, np.float32, (rows, top_k))
        _check("out", out, np.float32, (rows, self.hidden))
        if rows == 0:
            return
        pointers = (x.ctypes.data, sel.ctypes.data, weights.ctypes.data)
        self.forward_ptr(layer, rows, top_k, *pointers, prefill=prefill, out=out.ctypes.data)

    def forward_ptr(self, layer: int, rows: int, top_k: int, x: int, sel: int, weights: int, *, prefill: bool, out: int) -> None:
        """`forward` on addresses (a torch tensor's data_ptr()) of C-contiguous arrays of those dtypes and shapes. Releases the GIL."""
        engine = self._open()
        code = self._library.glm53_tier_forward(engine.pointer, layer, rows, top_k, x, sel, weights, int(prefill), out)
        if code != 0:
            raise_last(self._library)

    def native(self) -> text_pass.Experts:
        """What a `TextPass` calls instead of `forward_ptr`; the engine must not be closed while one may run."""
        function = ctypes.cast(self._library.glm53_tier_forward, ctypes.c_void_p).value
        return text_pass.Experts(function or 0, self._open().pointer, lambda _code: raise_last(self._library), self)

    @property
    def lane_up(self) -> bool:
        """True while CPU-lane jobs can be submitted."""
        engine = self._open()
        return bool(self._library.glm53_tier_lane_up(engine.pointer))

    def wait_lane(self, timeout_s: float) -> bool:
        """Waits until the CPU lane is up; False when it was not within timeout_s."""
        deadline = time.monotonic() + timeout_s
        while not self.lane_up:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def stats(self) -> dict[str, Any]:
        """Counters and state; kernels/tier/stats.h explains each. Byte counts in bytes, `*_us` sums in microseconds."""
        engine = self._open()
        return self._json(self._library.glm53_tier_stats(engine.pointer))

    def flat_stats(self) -> dict[str, float]:
        """The numbers of `stats` under dotted names, e.g. `picks.hit`, `lane.aborts`."""
        flat: dict[str, float] = {}
        _flatten("", self.stats(), flat)
        return flat

    def verify(self) -> dict[str, Any]:
        """Re-reads every record against its checksum and every slot against its record.

        Returns records, slots (numbers checked), bad_records (arena slots), bad_slots (device slots).
        """
        engine = self._open()
        return self._json(self._library.glm53_tier_verify(engine.pointer))

    def repair(self, layer: int, expert: int, data: npt.NDArray[np.uint8]) -> None:
        """Replaces a record of the engine's own arena between two passes; a slot that holds a copy of it is emptied.

        layer: the arena's layer index. data: uint8 [record_bytes of the layer]. Raises ValueError for another size.
        """
        engine = self._open()
        shape_pointer = self._library.glm53_arena_shape(self._arena.pointer, layer)
        if not shape_pointer or not 0 <= expert < self.experts_per_layer:
            raise ValueError(f"layer {layer}, expert {expert}: the arena has no such record")
        num_bytes = ExpertShape.from_buffer_copy(ctypes.string_at(shape_pointer, ctypes.sizeof(ExpertShape))).record_bytes
        if data.dtype != np.uint8 or data.shape != (num_bytes,):
            raise ValueError(f"data: expected uint8 [{num_bytes}], got {data.dtype} {list(data.shape)}")
        held = np.ascontiguousarray(data)
        record = layer * self.experts_per_layer + expert
        if self._library.glm53_tier_repair(engine.pointer, self._arena.pointer, record, held.ctypes.data) != 0:
            raise_last(self._library)

    def close(self) -> None:
        """Saves the heat and stops the engine's threads, once no other thread is inside a call. Closing twice is harmless."""
        self._handle = None

    def __enter__(self) -> TierEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> shm_lib.Handle:
        # A call keeps the handle in a variable: another thread may close the engine meanwhile, and its memory goes with the last user.
        handle = self._handle
        if handle is None:
            raise ValueError("the engine is closed")
        return handle

    def _json(self, text: bytes | None) -> dict[str, Any]:
        if text is None:
            raise_last(self._library)
        result: dict[str, Any] = json.loads(text)
        return result


def _check(name: str, array: npt.NDArray[Any], dtype: Any, shape: tuple[int, int]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        wanted = f"C-contiguous {np.dtype(dtype)} {list(shape)}"
        raise ValueError(f"{name}: expected {wanted}, got {array.dtype} {list(array.shape)}")


def _flatten(prefix: str, value: Any, flat: dict[str, float]) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _flatten(f"{prefix}.{name}" if prefix else name, item, flat)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _flatten(f"{prefix}.{index}", item, flat)
    elif isinstance(value, int | float):
        flat[prefix] = value
