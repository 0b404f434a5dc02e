"""How far the host may be ahead of the device: what the driver would block for, with its locks, the pager waits for by itself."""

from __future__ import annotations

import threading
import time

import pytest

from kernels.python.errors import TierTimeout
from tests.tier.fast_world import FastWorld, LayerStep, fp16_batch
from tests.tier.harness import LAYERS, Stage, bits_equal, wait_until
from tests.tier.simulated_gpu import COMPUTE

MOST_AHEAD = 8  # steps that wait for an answer, kernels/cuda/device_pager.h
PASSES = 2 + MOST_AHEAD // LAYERS


def draw(world: FastWorld, passes: int) -> list[LayerStep]:
    """Layer steps of so many decode passes of one row."""
    return [world._draw(fp16_batch(world.rng, 1, layer)) for _ in range(passes) for layer in range(LAYERS)]


def check(world: FastWorld, steps: list[LayerStep]) -> None:
    """Every output has the oracle's bits."""
    world.gpu.synchronize()
    assert world.gpu.problems == []
    for step in steps:
        want = world.oracle(step.batch)
        assert bits_equal(step.out, want if step.shared is None else want + step.shared)


def test_the_host_waits_before_the_driver_would(made: Stage) -> None:
    """A device that stands still gets a few layers' launches and no more; when it goes on the rest follows, with the same bits."""
    world = FastWorld(made, 3, 4, 2, lane=False)
    try:
        steps = draw(world, PASSES)
        enqueued: list[LayerStep] = []

        def enqueue() -> None:
            for step in steps:
                world._enqueue(step, None)
                enqueued.append(step)

        world.gpu.hold(COMPUTE)
        thread = threading.Thread(target=enqueue)
        thread.start()
        assert wait_until(lambda: len(enqueued) == MOST_AHEAD)
        time.sleep(0.3)
        assert len(enqueued) == MOST_AHEAD
        world.gpu.release(COMPUTE)
        thread.join(60)
        assert len(enqueued) == len(steps) == PASSES * LAYERS
        check(world, steps)
    finally:
        world.gpu.release(COMPUTE)
        world.close()


def test_after_catching_up_the_device_needs_nobody(made: Stage) -> None:
    """Every step is answered: the simulated device comes to its end while the pager's driver takes no call any more."""
    world = FastWorld(made, 4, 4, 2, lane=False)
    try:
        steps = draw(world, 1)
        for step in steps:
            world._enqueue(step, None)
            world.pager.catch_up()
            # A call of the pager's from here on would be lost, and the step with it.
            world.gpu.refuse = lambda _kind, _address: True
            world.gpu.synchronize()
            world.gpu.refuse = lambda _kind, _address: False
        check(world, steps)
        assert world.pager.counters().steps == LAYERS
    finally:
        world.close()


def test_a_device_that_does_not_come_is_not_waited_for_for_ever(made: Stage) -> None:
    """The wait has a deadline, and says how much is unanswered; the step can still be answered later."""
    world = FastWorld(made, 5, 4, 2, lane=False)
    try:
        steps = draw(world, 1)
        world.gpu.hold(COMPUTE)
        for step in steps[:2]:
            world._enqueue(step, None)
        with pytest.raises(TierTimeout, match="within 50 ms: 2 layers are unanswered"):
            world.pager.catch_up(0.05)
        world.gpu.release(COMPUTE)
        world.pager.catch_up()
        check(world, steps[:2])
    finally:
        world.gpu.release(COMPUTE)
        world.close()
