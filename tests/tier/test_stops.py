"""The whole engine against a server that stops after every single action of the protocol, in real time."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from kernels.python import shm_lib
from kernels.python.job_server import JobServer, ServerStep
from kernels.python.tier import TierEngine
from tests.shm.lane import Lane
from tests.tier.harness import EXPERTS, Oracle, Stage, bits_equal, forward, random_batch, random_record

STOPS = [s for s in ServerStep if ServerStep.CLAIMED <= s <= ServerStep.PASSED]


class SteppedServer:
    """Steps in a thread; `stop_at` freezes it right after that action, as SIGSTOP would."""

    def __init__(self, made: Stage) -> None:
        self.server = JobServer(made.ctl_path, made.arena_path, beat_thread=False, experts_per_step=1)
        self.spoil = False  # zero what the kernel computed before it is published
        self._lane = Lane(made.region)
        self._clock = shm_lib.load().abi_now_ns
        self._stop_at: ServerStep | None = None
        self.frozen = threading.Event()
        self._thaw = threading.Event()
        self._end = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end:
            now = self._clock()
            step = self.server.step(now)
            self.server.beat(now)
            if step is ServerStep.COMPUTED and self.spoil:
                self._zero_rows()
            if step is self._stop_at:
                self._stop_at = None
                self.frozen.set()
                self._thaw.wait(30)
            elif step is ServerStep.IDLE:
                time.sleep(0.0002)

    def _zero_rows(self) -> None:
        """Empties the result rows of every buffer."""
        words = self._lane.words
        for buffer in range(words.num_buffers):
            address = self._lane.base + words.buffers_offset + buffer * words.buffer_stride + words.out_offset
            ctypes.memset(address, 0, words.max_picks * words.hidden * 4)

    def stop_at(self, step: ServerStep) -> None:
        self.frozen.clear()
        self._thaw.clear()
        self._stop_at = step

    def thaw(self) -> None:
        self._thaw.set()

    def close(self) -> None:
        self._end = True
        self.thaw()
        self._thread.join(10)
        self.server.close()
        self._lane.close()


def steps_until(engine: TierEngine, oracle: Oracle, rng: np.random.Generator, layer: int, done: Callable[[], bool]) -> None:
    """Right answers until done() is true."""
    for _ in range(400):
        if done():
            return
        batch = random_batch(rng, layer=layer)
        assert bits_equal(forward(engine, batch), oracle(batch))
    raise AssertionError("it never happened")


@pytest.mark.parametrize("caller_runs", [False, True], ids=["thread", "caller"])
@pytest.mark.parametrize("step", STOPS, ids=lambda s: s.name.lower())
def test_a_server_stopped_at_any_action(made: Stage, step: ServerStep, caller_runs: bool) -> None:
    """Right bits while the server is stopped and after it wakes up late, with its old job in hand; the lane returns."""
    oracle = Oracle(made.arena)
    rng = np.random.default_rng(int(step) * 2 + caller_runs)
    server = SteppedServer(made)
    try:
        with made.engine(num_slots=3, ct_timeout_ms=25, heartbeat_timeout_ms=200, min_cpu_experts=3, caller_runs=caller_runs) as engine:
            assert engine.wait_lane(10)
            server.stop_at(step)
            steps_until(engine, oracle, rng, 1, server.frozen.is_set)
            # A stop after PUBLISHED loses no answer: the next job meets the stopped server.
            steps_until(engine, oracle, rng, 1, lambda: not engine.lane_up)
            aborts = engine.stats()["aborts"]
            assert aborts >= 1
            # The records that the frozen job names become others, under new generations, before it wakes.
            for expert in range(EXPERTS):
                made.arena.rewrite(1, expert, random_record(made.arena.shape(1), rng))
            server.thaw()
            assert engine.wait_lane(10)
            served = engine.stats()["cpu_expert_bytes"]
            steps_until(engine, oracle, rng, 0, lambda: engine.stats()["cpu_expert_bytes"] > served)
            for _ in range(30):
                batch = random_batch(rng, layer=0)
                assert bits_equal(forward(engine, batch), oracle(batch))
            assert engine.stats()["recomputed_picks"] > 0
    finally:
        server.close()


def test_an_emptied_kernel_output_makes_the_answers_wrong(made: Stage) -> None:
    """The rows that cpu_expert publishes are the ones that are used: with zeros in their place the answer is wrong."""
    oracle = Oracle(made.arena)
    batch = random_batch(np.random.default_rng(20), rows=2, layer=0)
    server = SteppedServer(made)
    try:
        with made.engine(num_slots=0, ct_timeout_ms=20_000, heartbeat_timeout_ms=20_000) as engine:
            assert engine.wait_lane(10)
            assert bits_equal(forward(engine, batch), oracle(batch))
            assert engine.stats()["picks"]["cpu"] > 0
            server.spoil = True
            assert not bits_equal(forward(engine, batch), oracle(batch))
            server.spoil = False
            assert bits_equal(forward(engine, batch), oracle(batch))
    finally:
        server.close()
