"""The pool under the things that an operating system does to its threads."""

from __future__ import annotations

import os
import pathlib
import threading
import time

import numpy as np
import numpy.typing as npt
import pytest

from kernels.python import expert, planar
from kernels.python.expert import ExpertPool, ExpertShape, ExpertTask
from tests.kernels.cases import Case, build
from tests.kernels.native_trace import force


def kernel_threads() -> list[int]:
    tasks = pathlib.Path("/proc/self/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text().startswith("moe-")]


def sample(rows: int = 4) -> tuple[ExpertShape, npt.NDArray[np.uint8], npt.NDArray[np.float16], npt.NDArray[np.float32]]:
    """An expert, inputs and the output of one thread."""
    shape, record, x = build(Case("", 900, hidden=512, inter=384, rows=rows))
    expected = np.empty((rows, 512), np.float32)
    with ExpertPool() as pool:
        pool.run([ExpertTask(shape, record, x, expected)])
    return shape, record, x, expected


@pytest.mark.parametrize("splits", [0, 1, 2, 4])
def test_more_threads_than_cpus_finish(splits: int) -> None:
    """With eight times as many threads as CPUs most are descheduled at any time, in the middle of units that others wait for."""
    shape, record, x, expected = sample()
    with ExpertPool(threads=8 * len(os.sched_getaffinity(0))) as pool:
        force(pool, splits, 0.0)
        out = np.empty_like(expected)
        call = pool.prepare([ExpertTask(shape, record, x, out)])
        deadline = time.monotonic() + 60
        for _ in range(150):
            out[:] = np.nan
            call()
            assert out.tobytes() == expected.tobytes()
            assert time.monotonic() < deadline


def test_a_worker_that_hardly_runs_delays_nobody_for_ever() -> None:
    """Workers at the lowest priority beside a busy thread on the same CPU: calls still end, with the same bits."""
    shape, record, x, expected = sample()
    stop = threading.Event()
    cpu = min(os.sched_getaffinity(0))

    def busy() -> None:
        os.sched_setaffinity(0, {cpu})
        while not stop.is_set():
            sum(range(1000))

    with ExpertPool(threads=3, cpus=[cpu]) as pool:
        force(pool, 4, 0.0)
        for thread in kernel_threads():
            os.setpriority(os.PRIO_PROCESS, thread, 19)
        rival = threading.Thread(target=busy)
        rival.start()
        try:
            out = np.empty_like(expected)
            call = pool.prepare([ExpertTask(shape, record, x, out)])
            deadline = time.monotonic() + 60
            for _ in range(20):
                out[:] = np.nan
                call()
                assert out.tobytes() == expected.tobytes()
            assert time.monotonic() < deadline
        finally:
            stop.set()
            rival.join(10)


def test_a_cpu_set_that_shrinks_while_the_pool_works() -> None:
    """All threads are squeezed onto one CPU between calls and spread again: nothing but the speed changes."""
    shape, record, x, expected = sample()
    allowed = os.sched_getaffinity(0)
    with ExpertPool(threads=3, cpus=sorted(allowed)) as pool:
        force(pool, 2, 0.0)
        out = np.empty_like(expected)
        call = pool.prepare([ExpertTask(shape, record, x, out)])
        for turn in range(60):
            mask = {min(allowed)} if turn % 2 else allowed
            for thread in [0, *kernel_threads()]:
                os.sched_setaffinity(thread, mask)
            out[:] = np.nan
            call()
            assert out.tobytes() == expected.tobytes()
    assert os.sched_getaffinity(0) == allowed or os.sched_setaffinity(0, allowed) is None


def test_a_long_call_is_computed_in_waves() -> None:
    """More groups of rows than a wave holds (64): every row is written, with the bits of a single call."""
    shape, record, x, expected = sample(rows=8)
    many = np.tile(x, (70, 1))
    out = np.full((560, 512), np.nan, np.float32)
    with ExpertPool(threads=2) as pool:
        force(pool, 0, 0.0)
        pool.run([ExpertTask(shape, record, many, out)])
    assert out.tobytes() == np.tile(expected, (70, 1)).tobytes()


def test_experts_of_different_layouts_in_one_call() -> None:
    """A native and a planar record of the same expert, shared between threads, give equal rows."""
    shape, record, x, expected = sample()
    packed, packed_shape = planar.repack(shape, record), planar.planar_shape(shape)
    outs = [np.full_like(expected, np.nan) for _ in range(2)]
    with ExpertPool(threads=2) as pool:
        force(pool, 0, 0.0)
        pool.run([ExpertTask(shape, record, x, outs[0]), ExpertTask(packed_shape, packed, x, outs[1])])
    assert outs[0].tobytes() == outs[1].tobytes() == expected.tobytes()


def test_a_tuned_pool_gives_the_same_bits() -> None:
    """Timing the variants on the real shape may change who computes, never what; a requested variant stays."""
    shape, record, x, expected = sample()
    with ExpertPool() as pool:
        pool.tune(shape)
        out = np.empty_like(expected)
        pool.run([ExpertTask(shape, record, x, out)])
        assert out.tobytes() == expected.tobytes()
        assert pool.variant in expert.variants()
        broken = ExpertShape.from_buffer_copy(shape)
        broken.hidden = 100
        with pytest.raises(ValueError, match="hidden = 100"):
            pool.tune(broken)
    with ExpertPool("scalar") as pool:
        pool.tune(shape)
        assert (pool.variant, pool.reason) == ("scalar", "requested")


def test_overrides_are_checked() -> None:
    """Only 0, 1, 2 or 4 parts exist."""
    with ExpertPool() as pool, pytest.raises(ValueError, match="splits = 3"):
        force(pool, 3, 0.0)
