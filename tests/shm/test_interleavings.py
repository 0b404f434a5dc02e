"""Seeded interleavings of worker and server: stops, kills, timeouts, rewritten records, reused buffers. No stale row, no hang."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kernels.python.job_server import ServerStep
from tests.shm.lane import DONE, HEARTBEAT_NS, JOB_NS, PENDING, STATUS_STALE, Answer, Job
from tests.shm.test_ring import Pair
from tests.tier.harness import EXPERTS, Stage, bits_equal, random_record, stage

SEEDS = 250
ACTIONS = 160


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One arena for all seeds: every seed leaves it whole."""
    with stage(pathlib.Path(tmp_path_factory.mktemp("shm")), ring_len=4) as made:
        yield made


@dataclasses.dataclass
class OpenJob:
    seq: int
    job: Job
    expected: npt.NDArray[np.float32]
    touched: bool = False  # one of its records was rewritten while it was open


class World:
    """A lane, a server that can be stopped or dead, and a clock."""

    def __init__(self, made: Stage, seed: int) -> None:
        made.restart_region(ring_len=4)
        self.pair = Pair(made, seed)
        self.rng = self.pair.rng
        self.now = 1
        self.stopped = False
        self.dead = False
        self.open: list[OpenJob] = []
        self.held: list[tuple[Answer, npt.NDArray[np.float32]]] = []
        self.done = self.failed = self.stale = 0

    def act(self) -> None:
        """One random action of one side."""
        action = self.rng.choice(
            [self.serve, self.submit, self.poll, self.release, self.rewrite, self.pass_time, self.stop_or_wake, self.kill_or_start],
            p=[0.45, 0.15, 0.16, 0.07, 0.05, 0.06, 0.05, 0.01],
        )
        action()
        for answer, expected in self.held:
            assert answer.rows is not None
            assert bits_equal(answer.rows, expected), "a result changed while the consumer read it"

    def serve(self) -> None:
        if not self.stopped and not self.dead:
            self.pair.server.step(self.now)
            self.pair.server.beat(self.now)

    def submit(self) -> None:
        self.pair.lane.tick(self.now)
        job = self.pair.job(int(self.rng.integers(1, 4)))
        seq = self.pair.lane.submit(job, self.now)
        if seq:
            self.pair.lane.poison(seq)
            self.open.append(OpenJob(seq, job, self.pair.expected(job)))

    def poll(self) -> None:
        if not self.open:
            return
        job = self.open[int(self.rng.integers(len(self.open)))]
        answer = self.pair.lane.poll(job.seq, self.now, len(job.expected))
        if answer.poll == PENDING:
            return
        self.open.remove(job)
        if answer.poll == DONE:
            assert answer.rows is not None
            assert bits_equal(answer.rows, job.expected), "rows of another job, another epoch or another record"
            self.held.append((answer, job.expected))
            self.done += 1
        elif answer.status == STATUS_STALE:
            assert job.touched, "stale although nobody rewrote its records"
            self.stale += 1
        else:
            self.failed += 1

    def release(self) -> None:
        if self.held:
            answer, _ = self.held.pop(int(self.rng.integers(len(self.held))))
            self.pair.lane.release(answer.buffer)

    def rewrite(self) -> None:
        """Reuses a slot: mostly one that an open or abandoned job named."""
        expert = int(self.rng.integers(EXPERTS))
        if self.open and self.rng.integers(2):
            expert = self.open[0].job.experts[0][0] - EXPERTS
        for job in self.open:
            job.touched |= any(slot == EXPERTS + expert for slot, _, _ in job.job.experts)
        self.pair.made.arena.rewrite(1, expert, random_record(self.pair.made.arena.shape(1), self.rng))

    def pass_time(self) -> None:
        self.now += int(self.rng.choice([1, 10, JOB_NS // 2, JOB_NS + 1, HEARTBEAT_NS + 1], p=[0.3, 0.3, 0.2, 0.15, 0.05]))

    def stop_or_wake(self) -> None:
        self.stopped = not self.stopped

    def kill_or_start(self) -> None:
        if self.dead:
            self.pair.server = self.pair.attach()
            self.pair.server.beat(self.now)
        else:
            self.pair.server.close(kill=True)
        self.dead = not self.dead

    def settle(self) -> None:
        """The server runs again: everything that is open ends, the lane comes up, a job is answered, every buffer is free."""
        self.stopped = False
        if self.dead:
            self.kill_or_start()
        for _ in range(400):
            self.serve()
            self.poll()
            self.release()
            self.now += 10
            if self.pair.lane.tick(self.now) and not self.open and not self.held:
                break
        assert not self.open, "a job stayed open"
        assert self.pair.lane.tick(self.now), "the lane did not come back"
        assert self.pair.lane.free_buffers == self.pair.lane.words.num_buffers
        job = self.pair.job()
        expected = self.pair.expected(job)
        self.pair.server.beat(self.now)
        assert bits_equal(self.pair.finish(self.pair.lane.submit(job, self.now), self.now, len(expected)), expected)

    def close(self) -> None:
        if self.dead:
            self.pair.server = self.pair.attach()
        self.pair.close()


@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_no_interleaving_gives_a_stale_row(shared: Stage, first: int) -> None:
    """250 seeds: in any order of worker, server, clock, kills and slot reuse every answer is right or refused, and the lane returns."""
    done = failed = stale = 0
    for seed in range(first, first + 25):
        world = World(shared, seed)
        try:
            for _ in range(ACTIONS):
                world.act()
            world.settle()
        finally:
            world.close()
        done, failed, stale = done + world.done, failed + world.failed, stale + world.stale
    # The test has teeth only if all three outcomes happen.
    assert min(done, failed, stale) > 0


def test_the_clockwork_reaches_every_state(shared: Stage) -> None:
    """The random server is really stopped inside jobs: every action of the protocol is seen as the last one before a stop."""
    seen = set()
    for seed in range(40):
        world = World(shared, 10_000 + seed)
        try:
            for _ in range(ACTIONS):
                before = world.stopped
                world.act()
                if world.stopped and not before and not world.dead:
                    seen.add(world.pair.server.state)
            world.settle()
        finally:
            world.close()
    assert seen >= {s for s in ServerStep if s <= ServerStep.ACKNOWLEDGED}
