"""A small arena with random records, the answer it must give, and a real cpu_expert process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.python import reference, segments
from kernels.python.arena import Arena
from kernels.python.expert import ExpertPool, ExpertShape, ExpertTask
from kernels.python.region import Region
from kernels.python.tier import TierEngine

LAYERS, EXPERTS, HIDDEN, INTER, TOP_K = 3, 8, 128, 128, 4
CHECKPOINT = bytes(range(32))
_numbers = itertools.count()


def bits_equal(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """True when both arrays have the same bits (so -0.0 differs from 0.0 and equal NaNs are equal)."""
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


def random_record(shape: ExpertShape, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """A record of random trellis bits and sane scales."""
    record = shape.empty_records()[0]
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, part in shape.parts().items():
        if part.dtype == np.uint16:
            tensors[name] = rng.integers(0, 65536, part.shape).astype(np.uint16)
        else:
            tensors[name] = (rng.standard_normal(part.shape) * 0.3 + 0.1).astype(np.float16)
    shape.write_record(record, tensors)
    return record


def fill(arena: Arena, seed: int = 0) -> None:
    """Random records in every slot, then sealed."""
    rng = np.random.default_rng(seed)
    for layer in range(arena.num_layers):
        shape = arena.shape(layer)
        for expert in range(arena.experts_per_layer):
            arena.record(layer, expert)[:] = random_record(shape, rng)
    arena.seal()


def default_shapes() -> list[ExpertShape]:
    """Three layers of one width; the last with other bits per weight, so that records differ in size."""
    return [ExpertShape.create(HIDDEN, INTER, bits) for bits in (3, 3, 4)]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Inputs of one layer step."""

    layer: int
    x: npt.NDArray[np.float32]
    sel: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    prefill: bool = False


def random_batch(rng: np.random.Generator, rows: int | None = None, *, layer: int | None = None, prefill: bool = False) -> Batch:
    """Rows with distinct picks each, some experts more popular than others."""
    rows = int(rng.integers(1, 9)) if rows is None else rows
    popularity = np.exp(-0.4 * np.arange(EXPERTS))
    sel = np.stack([rng.choice(EXPERTS, TOP_K, replace=False, p=popularity / popularity.sum()) for _ in range(rows)])
    return Batch(
        int(rng.integers(LAYERS)) if layer is None else layer,
        rng.standard_normal((rows, HIDDEN)).astype(np.float32),
        sel.astype(np.int64),
        rng.random((rows, TOP_K)).astype(np.float32),
        prefill,
    )


class Oracle:
    """The answer without tiers: the scalar kernel on the arena's records, combined by the numpy reference. Remembers its own copy."""

    def __init__(self, arena: Arena) -> None:
        self._pool = ExpertPool("scalar")
        self._shapes = [arena.shape(layer) for layer in range(arena.num_layers)]
        self._records = [
            [self._aligned(arena.record(layer, expert)) for expert in range(arena.experts_per_layer)] for layer in range(arena.num_layers)
        ]

    @staticmethod
    def _aligned(record: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        memory = np.empty(record.size + 64, np.uint8)
        start = -memory.ctypes.data % 64
        copy = memory[start : start + record.size]
        copy[:] = record
        return copy

    def __call__(self, batch: Batch) -> npt.NDArray[np.float32]:
        rows, top_k = batch.sel.shape
        picks = np.zeros((rows * top_k, batch.x.shape[1]), np.float32)
        tasks = []
        for expert in np.unique(batch.sel):
            token, slot = np.nonzero(batch.sel == expert)
            tasks.append(
                ExpertTask(
                    self._shapes[batch.layer],
                    self._records[batch.layer][expert],
                    batch.x,
                    picks,
                    token.astype(np.uint32),
                    (token * top_k + slot).astype(np.uint32),
                )
            )
        self._pool.run(tasks)
        picks = picks.reshape(rows, top_k, -1)
        out = np.zeros_like(batch.x)
        for k in range(top_k):
            out = reference.fma(batch.weights[:, k, None], picks[:, k], out)
        return out


def forward(engine: TierEngine, batch: Batch) -> npt.NDArray[np.float32]:
    """The engine's answer; the output starts as NaN so that an unwritten element shows."""
    out = np.full_like(batch.x, np.nan)
    engine.forward(batch.layer, batch.x, batch.sel, batch.weights, batch.prefill, out)
    return out


@dataclasses.dataclass
class Stage:
    """One instance's segments: a sealed arena and a control region."""

    shm_dir: pathlib.Path
    instance: str
    arena: Arena
    region: Region

    @property
    def arena_path(self) -> str:
        return segments.arena_path(self.shm_dir, self.instance)

    @property
    def ctl_path(self) -> str:
        return segments.ctl_path(self.shm_dir, self.instance)

    def engine(self, **options: Any) -> TierEngine:
        """An engine with timeouts fit for tests that gives the CPU lane work in every step, unless told otherwise."""
        usual = {"ct_timeout_ms": 400, "heartbeat_timeout_ms": 400, "min_cpu_experts": 1}
        return TierEngine(self.arena, self.region, **{**usual, **options})

    def restart_region(self, **geometry: int) -> None:
        """What a restarted worker does: a new region over the old one."""
        self.region.close()
        self.region = Region.create(self.ctl_path, self.arena, **{"top_k": TOP_K, **geometry})

    def close(self) -> None:
        self.region.unlink()
        self.arena.unlink()
        self.region.close()
        self.arena.close()


@contextlib.contextmanager
def stage(shm_dir: pathlib.Path, **region: Any) -> Iterator[Stage]:
    """A filled arena and a region under fresh names; both are gone afterwards."""
    instance = f"t{os.getpid()}-{next(_numbers)}"
    arena = Arena.create(segments.arena_path(shm_dir, instance), default_shapes(), EXPERTS, CHECKPOINT)
    fill(arena)
    made = Stage(
        shm_dir, instance, arena, Region.create(segments.ctl_path(shm_dir, instance), arena, **{"top_k": TOP_K, "num_buffers": 4, **region})
    )
    try:
        yield made
    finally:
        made.close()


class CpuExpert:
    """A real cpu_expert process for an instance."""

    def __init__(self, made: Stage) -> None:
        env = {**os.environ, "GLM53_INSTANCE": made.instance, "GLM53_SHM_DIR": str(made.shm_dir), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cpu_expert"], env=env, stderr=subprocess.PIPE, text=True, cwd=pathlib.Path(__file__).parents[2]
        )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead: its lease is free then."""
        self.process.kill()
        self.process.wait(timeout=10)

    def terminate(self) -> tuple[int, str]:
        """SIGTERM; (exit code, log)."""
        self.process.terminate()
        _, log = self.process.communicate(timeout=20)
        return self.process.returncode, log

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        _, log = self.process.communicate(timeout=10)
        sys.stderr.write(log or "")  # shown beside a test that failed: why it did not attach, or ended


@contextlib.contextmanager
def cpu_expert(made: Stage) -> Iterator[CpuExpert]:
    """A cpu_expert process that is gone afterwards, whatever the test did to it."""
    process = CpuExpert(made)
    try:
        yield process
    finally:
        process.close()


def wait_until(condition: Any, timeout_s: float = 10.0) -> bool:
    """Polls until condition() is true; False at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
