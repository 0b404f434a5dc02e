"""The job ring, one protocol action at a time."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kernels.python.expert import ExpertPool, ExpertTask
from kernels.python.job_server import JobServer, ServerStep
from tests.shm.lane import DONE, FAILED, JOB_NS, PENDING, STATUS_BAD, STATUS_OK, STATUS_STALE, Job, Lane
from tests.tier.harness import EXPERTS, HIDDEN, Stage, bits_equal, random_record, stage


class Pair:
    """A lane and a server on one region, and the answers that jobs must get."""

    def __init__(self, made: Stage, seed: int = 0) -> None:
        self.made = made
        self.rng = np.random.default_rng(seed)
        self.lane = Lane(made.region)
        self._pool = ExpertPool()
        self.server = self.attach()

    def attach(self) -> JobServer:
        return JobServer(self.made.ctl_path, self.made.arena_path, beat_thread=False, experts_per_step=1)

    def up(self, now: int) -> bool:
        """Lets the server look, beat and acknowledge; True when the lane is up."""
        self.server.step(now)
        self.server.beat(now)
        return self.lane.tick(now)

    def job(self, num_experts: int = 2) -> Job:
        """A random job on layer 1 that names the records by their present generation."""
        rows = int(self.rng.integers(1, 4))
        experts = []
        for expert in self.rng.choice(EXPERTS, num_experts, replace=False):
            picked = sorted(self.rng.choice(rows, int(self.rng.integers(1, rows + 1)), replace=False).tolist())
            experts.append((EXPERTS + int(expert), self.made.arena.generation_of(1, int(expert)), picked))
        return Job(1, self.rng.standard_normal((rows, HIDDEN)).astype(np.float32), experts)

    def expected(self, job: Job) -> npt.NDArray[np.float32]:
        """The rows that the job must give if the records stay as they are now."""
        picks = [row for _, _, rows in job.experts for row in rows]
        out = np.zeros((len(picks), HIDDEN), np.float32)
        tasks, first = [], 0
        for slot, _, rows in job.experts:
            number = np.arange(first, first + len(rows), dtype=np.uint32)
            record = self.made.arena.record(1, slot - EXPERTS)
            tasks.append(ExpertTask(self.made.arena.shape(1), record, job.x, out, np.array(rows, np.uint32), number))
            first += len(rows)
        self._pool.run(tasks)
        return out

    def advance_to(self, step: ServerStep, now: int) -> None:
        """Steps until the server has just done `step`."""
        for _ in range(50):
            if self.server.step(now) is step:
                return
        raise AssertionError(f"the server never did {step.name}")

    def finish(self, seq: int, now: int, picks: int) -> npt.NDArray[np.float32]:
        """Serves the job and returns a copy of its rows; the buffer is free again."""
        for _ in range(50):
            answer = self.lane.poll(seq, now, picks)
            if answer.poll == DONE:
                assert answer.rows is not None
                rows = answer.rows.copy()
                self.lane.release(answer.buffer)
                return rows
            assert answer.poll == PENDING
            self.server.step(now)
        raise AssertionError("the job is never done")

    def close(self) -> None:
        self.lane.close()
        self.server.close()


@pytest.fixture
def pair(made: Stage) -> Iterator[Pair]:
    """A lane that is up."""
    pair = Pair(made)
    assert pair.up(1)
    yield pair
    pair.close()


def test_jobs_wrap_around_the_ring(pair: Pair) -> None:
    """Many times the ring's length of jobs, two open at a time, each with its own rows."""
    for now in range(2, 60):
        jobs = [pair.job(), pair.job()]
        seqs = [pair.lane.submit(job, now) for job in jobs]
        assert all(seqs)
        for seq, job in zip(seqs, jobs, strict=True):
            expected = pair.expected(job)
            assert bits_equal(pair.finish(seq, now, len(expected)), expected)
        pair.server.beat(now)
    assert pair.lane.free_buffers == pair.lane.words.num_buffers
    assert pair.server.stats()["jobs"] == 116


def test_a_full_ring_refuses(shm_dir: pathlib.Path) -> None:
    """More jobs than ring entries or buffers are not taken, never waited for; served ones make room again."""
    for geometry in ({"ring_len": 3, "num_buffers": 8}, {"ring_len": 8, "num_buffers": 4}):
        with stage(shm_dir, **geometry) as made:
            pair = Pair(made)
            assert pair.up(1)
            room = min(geometry.values())
            jobs = [pair.job() for _ in range(room)]
            seqs = [pair.lane.submit(job, 2) for job in jobs]
            assert seqs == list(range(1, room + 1))
            assert pair.lane.submit(pair.job(), 2) == 0
            expected = pair.expected(jobs[0])
            assert bits_equal(pair.finish(1, 3, len(expected)), expected)
            for _ in range(3):
                pair.server.step(3)
            assert pair.lane.submit(pair.job(), 3) == room + 1
            pair.close()


def test_a_held_buffer_is_not_given_out(pair: Pair) -> None:
    """A result stays readable until the consumer releases it, however many jobs go by."""
    job = pair.job()
    expected = pair.expected(job)
    seq = pair.lane.submit(job, 2)
    pair.advance_to(ServerStep.PASSED, 2)
    held = pair.lane.poll(seq, 2, len(expected))
    assert held.poll == DONE
    assert held.status == STATUS_OK
    for now in range(3, 20):
        other = pair.job()
        seq = pair.lane.submit(other, now)
        assert seq
        pair.lane.poison(seq)
        pair.finish(seq, now, len(pair.expected(other)))
        assert held.rows is not None
        assert bits_equal(held.rows, expected)
    pair.lane.release(held.buffer)


def test_nothing_is_submitted_while_down(made: Stage) -> None:
    """Before a server attached, and after it drained, no job is taken."""
    lane = Lane(made.region)
    assert not lane.tick(1)
    pair = Pair(made)
    assert lane.submit(pair.job(), 1) == 0
    assert lane.reason == "no cpu_expert has attached"
    assert pair.up(2)
    pair.server.drain()
    pair.server.step(3)
    assert not pair.lane.tick(3)
    assert pair.lane.reason == "cpu_expert drained"
    assert pair.lane.submit(pair.job(), 3) == 0
    lane.close()
    pair.close()


def test_a_draining_server_serves_what_was_published(pair: Pair) -> None:
    """A job that was published before the worker could see the drain is answered."""
    job = pair.job()
    expected = pair.expected(job)
    pair.server.drain()
    seq = pair.lane.submit(job, 2)
    assert bits_equal(pair.finish(seq, 2, len(expected)), expected)
    pair.advance_to(ServerStep.DRAINED, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("layer", 3), ("num_rows", 9), ("num_experts", 4000), ("num_picks", 60000), ("x_dtype", 2), ("buffer", 4), ("flags", 1), ("seq", 9)],
)
def test_a_bad_descriptor_is_refused(pair: Pair, field: str, value: int) -> None:
    """The server checks its own copy of every field; a bad job is answered BAD_JOB and the lane stays up."""
    seq = pair.lane.submit(pair.job(), 2)
    setattr(pair.lane.descriptor(seq), field, value)
    pair.advance_to(ServerStep.PASSED if field != "seq" else ServerStep.FILLED, 2)
    if field == "seq":
        return  # the answer goes to the entry that the broken descriptor names; the worker's deadline covers it
    answer = pair.lane.poll(seq, 2)
    assert (answer.poll, answer.status) == (FAILED, STATUS_BAD)
    assert pair.server.stats()["bad"] == 1
    assert pair.lane.tick(2)
    job = pair.job()
    expected = pair.expected(job)
    assert bits_equal(pair.finish(pair.lane.submit(job, 3), 3, len(expected)), expected)


@pytest.mark.parametrize("slot", [3 * EXPERTS, 2**31])
def test_a_slot_outside_the_arena_is_refused(pair: Pair, slot: int) -> None:
    """A record that does not exist is never read."""
    job = pair.job()
    job.experts[1] = (slot, 2, [0])
    seq = pair.lane.submit(job, 2)
    pair.advance_to(ServerStep.PASSED, 2)
    assert pair.lane.poll(seq, 2).status == STATUS_BAD


@pytest.mark.parametrize("step", [ServerStep.IDLE, ServerStep.CLAIMED, ServerStep.CHECKED, ServerStep.COMPUTING, ServerStep.COMPUTED])
def test_a_rewritten_record_makes_the_job_stale(pair: Pair, step: ServerStep) -> None:
    """Whenever the record changes before the rows are published, the job is STALE_RECORD, never a mixture."""
    job = pair.job(num_experts=3)
    seq = pair.lane.submit(job, 2)
    if step is not ServerStep.IDLE:
        pair.advance_to(step, 2)
    slot = job.experts[0][0]
    pair.made.arena.rewrite(1, slot - EXPERTS, random_record(pair.made.arena.shape(1), pair.rng))
    pair.advance_to(ServerStep.PASSED, 2)
    answer = pair.lane.poll(seq, 2)
    assert (answer.poll, answer.status) == (FAILED, STATUS_STALE)
    assert pair.lane.tick(2), "a stale record is not the lane's fault"


def test_a_stale_generation_in_the_job_is_refused(pair: Pair) -> None:
    """Empty and odd generations, and an older one, name no record."""
    for generation in (0, 1, 3, 4):
        job = pair.job()
        job.experts[0] = (job.experts[0][0], generation, job.experts[0][2])
        seq = pair.lane.submit(job, 2)
        pair.advance_to(ServerStep.PASSED, 2)
        assert pair.lane.poll(seq, 2).status == STATUS_STALE


INSIDE = [s for s in ServerStep if ServerStep.CLAIMED <= s <= ServerStep.PASSED]


@pytest.mark.parametrize("step", [ServerStep.IDLE, *INSIDE])
@pytest.mark.parametrize("death", [False, True], ids=["stopped", "killed"])
def test_the_worker_goes_on_wherever_the_server_stood(pair: Pair, step: ServerStep, death: bool) -> None:
    """Stopped or killed after any action: the job fails at its deadline, buffers are quarantined until the next acknowledgement, the record
    may be rewritten, and a server that wakes publishes nothing of the old epoch into the new one.
    """
    job = pair.job(num_experts=3)
    expected = pair.expected(job)
    now = 10
    pair.server.beat(now)
    seq = pair.lane.submit(job, now)
    pair.lane.poison(seq)
    if step is not ServerStep.IDLE:
        pair.advance_to(step, now)
    published = step >= ServerStep.PUBLISHED
    now += JOB_NS + 1
    answer = pair.lane.poll(seq, now, len(expected))
    if published:
        assert answer.poll == DONE
        assert answer.rows is not None
        assert bits_equal(answer.rows, expected)
        pair.lane.release(answer.buffer)
        pair.lane.abort(now)
    else:
        assert (answer.poll, pair.lane.reason) == (FAILED, "job deadline passed")
    assert not pair.lane.tick(now)
    assert pair.lane.submit(pair.job(), now) == 0
    assert pair.lane.free_buffers == 4 - (not published)
    for slot, _, _ in job.experts:
        pair.made.arena.rewrite(1, slot - EXPERTS, random_record(pair.made.arena.shape(1), pair.rng))
    if death:
        pair.server.close(kill=True)
        pair.server = pair.attach()
        pair.server.beat(now)
    for _ in range(10):
        pair.server.step(now)
        pair.server.beat(now)
    assert pair.lane.poll(seq, now, len(expected)).poll == FAILED
    assert pair.lane.tick(now)
    assert pair.lane.free_buffers == 4
    assert pair.server.stats()["jobs"] == (0 if death else int(step >= ServerStep.FILLED))
    for _ in range(12):
        fresh = pair.job()
        rows = pair.expected(fresh)
        assert bits_equal(pair.finish(pair.lane.submit(fresh, now), now, len(rows)), rows)


def test_a_dead_heart_aborts_open_jobs(pair: Pair) -> None:
    """Without heartbeats the lane goes down before the job's deadline."""
    pair.server.beat(2)
    seq = pair.lane.submit(pair.job(), 900)
    assert pair.lane.poll(seq, 1000).poll == PENDING
    assert pair.lane.poll(seq, 1003).poll == FAILED
    assert pair.lane.reason == "heartbeat lost"


def test_a_new_server_while_a_job_is_open_is_an_abort(pair: Pair) -> None:
    """A server that took the place of a dead one never answers the dead one's job; the worker does not wait for the deadline."""
    seq = pair.lane.submit(pair.job(), 2)
    pair.server.close(kill=True)
    pair.server = pair.attach()
    pair.server.beat(2)
    assert pair.lane.poll(seq, 2).poll == FAILED
    assert pair.lane.reason == "cpu_expert restarted"
    pair.server.step(2)
    assert pair.lane.tick(2)
