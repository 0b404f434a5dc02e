"""An arena, a control region, a simulated GPU and the pager of `fast` over them: decode passes that are compared with the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kernels.python.fast_pager import FastCosts, FastLayout, FastOptions, FastPager, Forced
from kernels.python.pager import HINT_WIDTH, WORDS_BYTES, PagerLayout, PagerPolicy
from tests.tier import harness
from tests.tier.harness import EXPERTS, HIDDEN, LAYERS, TOP_K, Batch, Oracle, Stage, bits_equal, random_batch
from tests.tier.simulated_gpu import COMPUTE, COPY, FastKernels, SimulatedGpu

ROWS = 8
PARTS = 3
PATIENT_MS = 60_000  # a busy machine is no fault: what is not about deadlines gives cpu_expert all the time it needs


def aligned(*shape: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes that begin at a multiple of 64."""
    memory = np.zeros(int(np.prod(shape)) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + int(np.prod(shape))].reshape(shape)


@dataclasses.dataclass
class LayerStep:
    """Device memory of one layer step."""

    batch: Batch
    x: npt.NDArray[np.float16]
    weights: npt.NDArray[np.float16]
    shared: npt.NDArray[np.float32] | None
    out: npt.NDArray[np.float32]


def fp16_batch(rng: np.random.Generator, rows: int, layer: int) -> Batch:
    """As a GPU has it: activations and weights that fp16 holds."""
    batch = random_batch(rng, rows, layer=layer)
    x, weights = batch.x.astype(np.float16), batch.weights.astype(np.float16)
    return dataclasses.replace(batch, x=x.astype(np.float32), weights=weights.astype(np.float32))


class FastWorld:
    """Close it before the stage."""

    # Where it is set each step gives a hint: [rows, top_k] picks of the next layer -> int64 [rows, width].
    guess: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]] | None = None

    def __init__(
        self,
        made: Stage,
        seed: int,
        num_slots: int,
        num_transit: int,
        *,
        lane: bool = True,
        costs: FastCosts | None = None,
        policy: PagerPolicy | None = None,
        timeout_ms: int = PATIENT_MS,
        heartbeat_ms: int = 0,
        gathers: bool = False,
    ) -> None:
        arena = made.arena
        stride = arena.record(0, 1).ctypes.data - arena.record(0, 0).ctypes.data
        self.gpu = SimulatedGpu(seed, stride, gathers=gathers)
        self.kernels = FastKernels(self.gpu, [arena.shape(layer) for layer in range(LAYERS)])
        self.rng = np.random.default_rng(seed)
        self.oracle = Oracle(arena)
        self.checked = 0
        self.slots, self.table = aligned(max(num_slots, 1), stride), np.zeros((LAYERS, PARTS, EXPERTS), np.int64)
        self.mirror, self.picks, self.words = self.table.copy(), np.zeros((LAYERS, ROWS * TOP_K), np.int64), np.zeros(WORDS_BYTES, np.uint8)
        self.records, self.records_mirror = np.zeros((LAYERS, EXPERTS), np.uint64), np.zeros((LAYERS, EXPERTS), np.uint64)
        self.y, self.own_rows = (np.full((ROWS * TOP_K, HIDDEN), np.nan, np.float32) for _ in range(2))
        self.hint_ids = np.zeros((LAYERS, ROWS * HINT_WIDTH), np.int64)
        self._kept: list[npt.NDArray[np.int64]] = []  # ids that the device has not read yet
        self.arrivals, self.rows_at = np.zeros(1, np.uint32), np.zeros(1, np.uint64)
        host = arena.record(0, 0).ctypes.data
        layout = PagerLayout(
            LAYERS, EXPERTS, num_slots, num_transit, ROWS, TOP_K, stride, host, host,
            *(a.ctypes.data for a in (self.slots, self.table, self.mirror, self.picks, self.words, self.words)), COPY,
            self.hint_ids.ctypes.data,
        )  # fmt: skip
        addresses = (
            self.records, self.records_mirror, self.picks, self.y, self.arrivals, self.own_rows, self.own_rows, self.rows_at, self.rows_at
        )  # fmt: skip
        fast = FastLayout(*(a.ctypes.data for a in addresses), region_device=made.region.address if lane else 0)
        self.pager = FastPager(
            layout,
            np.zeros((LAYERS, PARTS), np.int64),
            fast,
            arena,
            made.region if lane else None,
            self.kernels.handles,
            self.kernels.functions,
            FastOptions(costs or FastCosts(), job_timeout_ms=timeout_ms, heartbeat_timeout_ms=heartbeat_ms or timeout_ms),
            policy,
            self.gpu.driver,
        )
        self._made = made

    def wait_lane(self, timeout_s: float = 60.0) -> bool:
        """Waits for cpu_expert."""
        return harness.wait_until(lambda: self.pager.lane_up, timeout_s)

    def decode(self, rows: int | None = None) -> None:
        """One decode pass: every layer is enqueued, the host waits once, every output has the oracle's bits."""
        rows = int(self.rng.integers(1, ROWS + 1)) if rows is None else rows
        self._run([self._draw(fp16_batch(self.rng, rows, layer)) for layer in range(LAYERS)])

    def step(self, layer: int, selected: list[int]) -> None:
        """One layer step of one row with the picks `selected`, [top_k]: it is over, and what it taught is known, when this returns."""
        batch = fp16_batch(self.rng, 1, layer)
        self._run([self._draw(dataclasses.replace(batch, sel=np.array([selected], np.int64)))])

    def _run(self, steps: list[LayerStep]) -> None:
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            self._enqueue(step, following)
        self.gpu.synchronize()
        self._kept.clear()
        assert self.gpu.problems == []
        for step in steps:
            want = self.oracle(step.batch)
            if step.shared is not None:
                want = want + step.shared
            assert bits_equal(step.out, want), f"layer {step.batch.layer}, {len(want)} rows"
            self.checked += 1

    def _draw(self, batch: Batch) -> LayerStep:
        shared = self.rng.standard_normal(batch.x.shape).astype(np.float32) if self.rng.integers(2) else None
        return LayerStep(batch, batch.x.astype(np.float16), batch.weights.astype(np.float16), shared, np.full_like(batch.x, np.nan))

    def _enqueue(self, step: LayerStep, following: LayerStep | None) -> None:
        batch, rows = step.batch, len(step.batch.x)
        self.pager.publish(batch.layer, rows, batch.sel.ctypes.data, step.x.ctypes.data, COMPUTE)
        if self.guess is not None and following is not None:
            ids = self.guess(following.batch.sel)
            self._kept.append(ids)
            self.pager.hint(following.batch.layer, rows, ids.ctypes.data, ids.shape[1], COMPUTE)
        address = 0 if step.shared is None else step.shared.ctypes.data
        self.pager.finish(batch.layer, rows, step.weights.ctypes.data, step.out.ctypes.data, shared=address, stream=COMPUTE)

    def close(self) -> None:
        """Ends the pager before the memory that it works on."""
        self.gpu.synchronize()
        self.pager.close()
        self.gpu.close()


__all__ = ["FastWorld", "Forced"]
