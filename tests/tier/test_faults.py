"""A cpu_expert that stops, dies or comes back: never a wrong bit, never a hang, and the lane returns."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

from kernels.python.tier import TierEngine
from tests.support.slow_process import crawling, is_felt
from tests.tier.harness import Oracle, Stage, bits_equal, cpu_expert, forward, random_batch, wait_until


def run_steps(engine: TierEngine, oracle: Oracle, rng: np.random.Generator, count: int) -> None:
    for _ in range(count):
        batch = random_batch(rng)
        assert bits_equal(forward(engine, batch), oracle(batch))


class Background:
    """Steps without pause in a thread, so that a fault meets one in work; join() raises what went wrong."""

    def __init__(self, engine: TierEngine, oracle: Oracle, seed: int) -> None:
        self.steps = 0
        self._engine, self._oracle, self._rng = engine, oracle, np.random.default_rng(seed)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                run_steps(self._engine, self._oracle, self._rng, 1)
                self.steps += 1
        except BaseException as error:  # noqa: BLE001 - carried to the test's thread
            self._error = error

    def join(self) -> None:
        self._stop.set()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive(), "the engine hangs"
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_server_costs_no_bit_and_the_next_one_is_used(made: Stage, seed: int) -> None:
    """kill -9 in mid-run: every answer keeps its bits, the lane goes down, and it comes back with a new process."""
    oracle = Oracle(made.arena)
    with made.engine(num_slots=6) as engine:
        with cpu_expert(made) as first:
            assert engine.wait_lane(20)
            background = Background(engine, oracle, seed)
            assert wait_until(lambda: engine.stats()["cpu_expert_bytes"] > 0)
            first.kill()
            assert wait_until(lambda: engine.stats()["lane"]["state"] == "DOWN")
            assert engine.stats()["lane"]["reason"] == "cpu_expert died"
            steps = background.steps
            assert wait_until(lambda: background.steps > steps + 20), "requests must go on without the lane"
        served = engine.stats()["cpu_expert_bytes"]
        with cpu_expert(made):
            assert engine.wait_lane(20)
            assert wait_until(lambda: engine.stats()["cpu_expert_bytes"] > served)
            background.join()
        stats = engine.stats()
        assert stats["lane"]["ups"] >= 2
        assert stats["aborts"] >= 1


def test_a_killed_server_is_noticed_without_its_deadlines(made: Stage) -> None:
    """The kernel gives a dead process's lease back: a kill does not cost the step a missed heartbeat or a job deadline."""
    oracle = Oracle(made.arena)
    with made.engine(num_slots=0, ct_timeout_ms=60_000, heartbeat_timeout_ms=60_000) as engine, cpu_expert(made) as server:
        assert engine.wait_lane(20)
        background = Background(engine, oracle, 9)
        assert wait_until(lambda: engine.stats()["cpu_expert_bytes"] > 0)
        server.kill()
        assert wait_until(lambda: not engine.lane_up), "only the lease can have told"
        background.join()


def test_a_stopped_server_is_left_alone_and_welcomed_back(made: Stage) -> None:
    """SIGSTOP in mid-run, many steps later SIGCONT: no hang, no wrong bit, also not when it wakes with an old job in its hands."""
    oracle = Oracle(made.arena)
    with made.engine(num_slots=6) as engine, cpu_expert(made) as server:
        assert engine.wait_lane(20)
        background = Background(engine, oracle, 42)
        for _ in range(3):
            assert wait_until(lambda: engine.lane_up)
            served = engine.stats()["cpu_expert_bytes"]
            assert wait_until(lambda served=served: engine.stats()["cpu_expert_bytes"] > served)
            server.signal(signal.SIGSTOP)
            assert wait_until(lambda: not engine.lane_up)
            assert engine.stats()["lane"]["reason"] in ("heartbeat lost", "job deadline passed")
            steps = background.steps
            assert wait_until(lambda steps=steps: background.steps > steps + 50)
            server.signal(signal.SIGCONT)
        assert engine.wait_lane(20)
        background.join()
        assert engine.stats()["aborts"] >= 3


@pytest.mark.parametrize("stopped_s", [0.1, 0.6])
def test_a_server_that_crawls_costs_no_bit(made: Stage, stopped_s: float) -> None:
    """It gets a hundredth of the time, with a job in every step that misses: late, or given up again and again; nothing hangs."""
    timeout_ms = 400
    oracle = Oracle(made.arena)
    timeouts = {"ct_timeout_ms": timeout_ms, "heartbeat_timeout_ms": timeout_ms}
    with made.engine(num_slots=6, min_cpu_experts=1, **timeouts) as engine, cpu_expert(made) as server:
        assert engine.wait_lane(20)
        background = Background(engine, oracle, 17)
        try:
            assert wait_until(lambda: engine.stats()["cpu_expert_bytes"] > 0)
            before = engine.stats()
            with crawling(server.process.pid, stopped_s, stopped_s / 100):
                assert wait_until(is_felt(engine.stats), 60)
                if stopped_s * 1000 > timeout_ms:
                    assert wait_until(lambda: engine.stats()["lane"]["reason"] in ("heartbeat lost", "job deadline passed"), 60)
                    # It has a moment between two stops, says that it is there again, and gets the next job.
                    assert wait_until(lambda: engine.stats()["aborts"] >= before["aborts"] + 2, 60)
                    assert engine.stats()["lane"]["ups"] > before["lane"]["ups"]
                steps = background.steps
                assert wait_until(lambda: background.steps >= steps + 10, 60)
            assert engine.wait_lane(60)
            healthy = engine.stats()
            assert wait_until(lambda: engine.stats()["cpu_expert_bytes"] > healthy["cpu_expert_bytes"], 60)
            assert wait_until(lambda: engine.stats()["lane"]["done"] > healthy["lane"]["done"], 60)
        finally:
            background.join()


def test_a_drained_server_finishes_and_exits_cleanly(made: Stage) -> None:
    """SIGTERM under load: exit code 0, no abandoned bit, the lane is down for the reason `drained`."""
    oracle = Oracle(made.arena)
    with made.engine(num_slots=6) as engine, cpu_expert(made) as server:
        assert engine.wait_lane(20)
        background = Background(engine, oracle, 1)
        assert wait_until(lambda: engine.stats()["cpu_expert_bytes"] > 0)
        code, log = server.terminate()
        assert code == 0, log
        assert "drained" in log
        assert wait_until(lambda: engine.stats()["lane"]["state"] == "DOWN")
        background.join()
        assert engine.stats()["lane"]["reason"] == "cpu_expert drained"


def test_a_restarted_worker_is_found_again(made: Stage) -> None:
    """A worker that restarts makes a new region over the old one; cpu_expert attaches to it by itself."""
    oracle = Oracle(made.arena)
    rng = np.random.default_rng(3)
    with cpu_expert(made) as server:
        for _ in range(3):
            with made.engine(num_slots=6) as engine:
                assert engine.wait_lane(20)
                run_steps(engine, oracle, rng, 10)
                assert engine.stats()["cpu_expert_bytes"] > 0
            made.restart_region()
        made.region.unlink()
        made.restart_region()
        with made.engine(num_slots=6) as engine:
            assert engine.wait_lane(20)
            run_steps(engine, oracle, rng, 5)
        code, log = server.terminate()
        assert code == 0, log
        assert log.count("attached to") >= 4


def test_a_second_server_waits_for_the_lease(made: Stage) -> None:
    """Two cpu_expert processes never write the same words: the second one waits and takes over when the first is dead."""
    with made.engine(num_slots=6) as engine, cpu_expert(made) as first:
        assert engine.wait_lane(20)
        owner = made.region.field("server_id")
        with cpu_expert(made):
            time.sleep(1.5)
            assert made.region.field("server_id") == owner
            first.kill()
            assert wait_until(lambda: made.region.field("server_id") != owner)
            assert wait_until(lambda: engine.lane_up)


def test_an_idle_server_sleeps(made: Stage) -> None:
    """Without jobs the process uses next to no CPU time and still beats."""
    with made.engine(num_slots=6) as engine, cpu_expert(made) as server:
        assert engine.wait_lane(20)
        before = cpu_seconds(server.process.pid)
        beat = made.region.field("server_beat")
        time.sleep(2.0)
        assert cpu_seconds(server.process.pid) - before <= 0.1
        assert made.region.field("server_beat") > beat
        assert engine.lane_up


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100.0


def test_no_server_is_no_failure(made: Stage) -> None:
    """A worker without cpu_expert serves from the start, with the lane down and the reason told."""
    oracle = Oracle(made.arena)
    with made.engine(num_slots=6) as engine:
        run_steps(engine, oracle, np.random.default_rng(5), 20)
        stats = engine.stats()
    assert stats["picks"]["cpu"] == 0
    assert stats["lane"]["state"] == "DOWN"
    assert stats["lane"]["reason"] == "no cpu_expert has attached"
