"""`fast` on a GPU against a simulated one and a real cpu_expert: the same bits wherever a pick is computed, and no step that hangs."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kernels.python.errors import KernelError
from kernels.python.fast_pager import FastCosts, Forced
from kernels.python.job_server import JobServer, ServerStep
from kernels.python.pager import PagerPolicy
from tests.support.slow_process import crawling, is_felt
from tests.tier.fast_world import PATIENT_MS, FastWorld
from tests.tier.harness import EXPERTS, LAYERS, Stage, cpu_expert, stage, wait_until


@contextlib.contextmanager
def world(made: Stage, seed: int, num_slots: int, num_transit: int, **options: object) -> Iterator[FastWorld]:
    """A world that is closed whatever the test did."""
    opened = FastWorld(made, seed, num_slots, num_transit, **options)  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize("forced", list(Forced))
def test_every_placement_gives_the_reference_bits(made: Stage, forced: Forced) -> None:
    """Slots, transit slots, host memory and cpu_expert, in every mixture: the oracle's bits, shared expert included."""
    with cpu_expert(made), world(made, int(forced), 7, 2) as w:
        assert w.wait_lane()
        w.pager.force(forced, seed=5)
        for _ in range(40):
            w.decode()
        stats, counters = w.pager.fast_stats(), w.pager.counters()
    used = {lane for lane, picks in stats["picks"].items() if picks}
    assert stats["recomputed_picks"] == 0
    assert sum(stats["picks"].values()) == counters.picks
    assert stats["picks"]["hit"] == counters.hits
    assert counters.missed >= counters.admitted + counters.transit + counters.in_place
    assert counters.missed <= counters.admitted + counters.transit + counters.in_place + stats["experts"]["cpu"]
    if forced == Forced.ALL_LANE:
        assert used == {"cpu"}
        assert stats["cpu_expert_bytes"] > 0
    elif forced == Forced.RANDOM:
        assert used == {"hit", "admit", "zero_copy", "cpu"}
        assert stats["evictions"] > 0
    elif forced == Forced.ALL_IN_PLACE:
        assert used == {"zero_copy"}
    elif forced == Forced.NEVER_LANE:
        assert "cpu" not in used


@pytest.mark.parametrize(("num_slots", "num_transit"), [(0, 0), (1, 0), (4, 4), (LAYERS * EXPERTS, 0)])
def test_any_number_of_slots_gives_the_reference_bits(made: Stage, num_slots: int, num_transit: int) -> None:
    """From none to one for every record, with random lanes."""
    with cpu_expert(made), world(made, num_slots, num_slots, num_transit) as w:
        assert w.wait_lane()
        w.pager.force(Forced.RANDOM, seed=num_slots)
        for step in range(30):
            w.decode()
            if step % 9 == 4:
                first = int(w.rng.integers(0, num_slots + 1))
                w.pager.vacate(first, int(w.rng.integers(0, num_slots - first + 1)))
                w.pager.flush(1)
        assert w.pager.fast_stats()["picks"]["cpu"] > 0


def test_without_a_lane_nothing_crosses_the_link_but_picks(made: Stage) -> None:
    """No control region, or nobody attached: activations stay on the device, the kernels sum themselves, same bits."""
    for lane in (False, True):
        with world(made, 3, 6, 2, lane=lane) as w:
            for _ in range(10):
                w.decode()
            stats = w.pager.fast_stats()
            assert w.kernels.steps == 10 * LAYERS
            assert w.kernels.steps_with_x == 0
        assert stats["picks"]["cpu"] == 0
        assert stats["lane"]["state"] == ("DOWN" if lane else "OFF")


class Decoding:
    """Passes without pause in a thread, so that a fault meets one in work."""

    def __init__(self, w: FastWorld) -> None:
        self.passes = 0
        self._world = w
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._world.decode()
                self.passes += 1
        except BaseException as error:  # noqa: BLE001 - carried to the test's thread
            self._error = error

    def more(self, passes: int) -> bool:
        """Waits until so many more passes are over."""
        target = self.passes + passes
        return wait_until(lambda: self.passes >= target or self._error is not None, 60) and self._error is None

    def join(self) -> None:
        self._stop.set()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive(), "a step hangs"
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def decoding(made: Stage, forced: Forced = Forced.ALL_LANE, **options: int) -> Iterator[tuple[FastWorld, Decoding]]:
    """A world that decodes all the time; the last check is that it never stopped."""
    with world(made, 11, 5, 2, **options) as w:
        assert w.wait_lane()
        w.pager.force(forced, seed=3)
        background = Decoding(w)
        try:
            yield w, background
        finally:
            background.join()


def served(w: FastWorld) -> int:
    return int(w.pager.fast_stats()["cpu_expert_bytes"])


@pytest.mark.parametrize("forced", [Forced.ALL_LANE, Forced.RANDOM])
def test_a_killed_server_costs_no_bit_and_the_next_one_is_used(made: Stage, forced: Forced) -> None:
    """kill -9 in mid-step, noticed by the lease long before a deadline: every answer keeps its bits, and a new process brings it back."""
    with cpu_expert(made) as first, decoding(made, forced) as (w, background):
        assert wait_until(lambda: served(w) > 0, 60)
        first.kill()
        assert wait_until(lambda: not w.pager.lane_up, 60)
        assert background.more(10)
        # The flag is a moment ahead of the statistics.
        assert wait_until(lambda: w.pager.fast_stats()["lane"]["reason"] == "cpu_expert died", 10)
        before = served(w)
        with cpu_expert(made):
            assert wait_until(lambda: served(w) > before, 90)
            assert background.more(3)
        assert w.pager.fast_stats()["aborts"] >= 1


def test_a_stopped_server_is_left_alone_and_welcomed_back(made: Stage) -> None:
    """SIGSTOP in mid-step, SIGCONT many steps later, when it wakes with an old job in its hands: same bits, and the lane returns."""
    with cpu_expert(made) as server, decoding(made, timeout_ms=1000) as (w, background):
        for _ in range(2):
            before = served(w)
            assert wait_until(lambda before=before: served(w) > before, 90)
            server.signal(signal.SIGSTOP)
            assert wait_until(lambda: not w.pager.lane_up, 60)
            assert wait_until(lambda: w.pager.fast_stats()["lane"]["reason"] in ("heartbeat lost", "job deadline passed"), 10)
            assert background.more(10)
            server.signal(signal.SIGCONT)
            assert wait_until(lambda: w.pager.lane_up, 60)
        before = served(w)
        assert wait_until(lambda: served(w) > before, 90)
        stats = w.pager.fast_stats()
        assert stats["recomputed_picks"] > 0
        assert stats["lane"]["ups"] >= 3


@pytest.mark.parametrize("stopped_s", [0.1, 0.6])
def test_a_server_that_crawls_costs_no_bit(made: Stage, stopped_s: float) -> None:
    """It gets a hundredth of the time: jobs come late or are given up, answers keep their bits, nothing hangs, and the lane returns."""
    timeout_ms = 400
    with cpu_expert(made) as server, decoding(made, timeout_ms=timeout_ms) as (w, background):
        assert wait_until(lambda: served(w) > 0, 60)
        given_up = w.pager.fast_stats()["aborts"]
        with crawling(server.process.pid, stopped_s, stopped_s / 100):
            assert wait_until(is_felt(w.pager.fast_stats), 60)
            if stopped_s * 1000 > timeout_ms:
                assert wait_until(lambda: w.pager.fast_stats()["lane"]["reason"] in ("heartbeat lost", "job deadline passed"), 60)
                assert w.pager.fast_stats()["aborts"] > given_up
            assert background.more(10)
        assert wait_until(lambda: w.pager.lane_up, 90)
        before = w.pager.fast_stats()
        assert wait_until(lambda: served(w) > before["cpu_expert_bytes"], 90)
        assert w.pager.fast_stats()["lane"]["done"] > before["lane"]["done"]
        assert background.more(5)


@pytest.mark.parametrize(("heartbeat_ms", "reason"), [(PATIENT_MS, "job deadline passed"), (100, "heartbeat lost")])
def test_a_server_that_is_always_late_costs_few_deadlines(made: Stage, heartbeat_ms: int, reason: str) -> None:
    """Each one is a step's time, so the next try comes twice as late: after half a second, one, two. Steps in between wait for nobody."""
    stop = threading.Event()
    server = JobServer(made.ctl_path, made.arena_path)

    def serve() -> None:
        while not stop.is_set():
            # It is there and takes up every new epoch, but never has a job done in time.
            late = server.step(time.monotonic_ns()) is ServerStep.CLAIMED
            stop.wait(0.3 if late else 0.001)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        with decoding(made, timeout_ms=150, heartbeat_ms=heartbeat_ms) as (w, background):
            assert wait_until(lambda: w.pager.fast_stats()["aborts"] >= 1, 60)
            began = time.monotonic()
            time.sleep(5)
            stats, took = w.pager.fast_stats(), time.monotonic() - began
            assert background.more(20)
    finally:
        stop.set()
        serving.join(60)
        server.close()
    assert stats["lane"]["reason"] == reason
    assert stats["lane"]["done"] == 0
    assert 3 <= stats["aborts"] <= 3 + np.log2(1 + took / 0.5)


def test_a_restarted_server_is_never_taken_for_its_predecessor(made: Stage) -> None:
    """Processes that come and go while every pick is theirs."""
    with world(made, 21, 3, 0) as w:
        background = None
        for _ in range(3):
            with cpu_expert(made) as server:
                assert wait_until(lambda: w.pager.lane_up, 60)
                w.pager.force(Forced.ALL_LANE)
                background = background or Decoding(w)
                before = served(w)
                assert wait_until(lambda before=before: served(w) > before, 90)
                server.kill()
        assert background is not None
        background.join()
        assert w.pager.fast_stats()["lane"]["ups"] >= 3


def test_a_drained_server_leaves_in_order(made: Stage) -> None:
    """SIGTERM under load: exit code 0, same bits."""
    with cpu_expert(made) as server, decoding(made) as (w, _):
        assert wait_until(lambda: served(w) > 0, 60)
        code, log = server.terminate()
        assert code == 0, log
        assert wait_until(lambda: not w.pager.lane_up, 60)
        assert wait_until(lambda: w.pager.fast_stats()["lane"]["reason"] == "cpu_expert drained", 10)


def test_a_record_that_is_rewritten_is_refused_and_computed_from_what_is_there(made: Stage) -> None:
    """A job that names an older generation is stale: its picks are computed in the worker, from the record as it is now."""
    with cpu_expert(made), world(made, 31, 0, 0) as w:
        assert w.wait_lane()
        w.pager.force(Forced.ALL_LANE)
        w.decode()
        for expert in range(EXPERTS):
            made.arena.rewrite(1, expert, made.arena.record(1, (expert + 1) % EXPERTS).copy())
        w.oracle = type(w.oracle)(made.arena)
        for _ in range(5):
            w.decode()


@pytest.mark.alone
def test_a_lane_that_pays_is_used_and_one_that_does_not_sleeps(made: Stage) -> None:
    """By cost alone: a slow link brings the lane its picks, a fast one ends the publication of activations."""
    with cpu_expert(made):
        slow_link = FastCosts(ct_a_us=10, ct_b_us=10, ct_tzc_us=5000)
        with world(made, 41, 4, 0, costs=slow_link, policy=PagerPolicy(admit_after=1000)) as w:
            assert w.wait_lane()
            for _ in range(20):
                w.decode()
            stats = w.pager.fast_stats()
            assert stats["picks"]["cpu"] > stats["picks"]["admit"] + stats["picks"]["zero_copy"]
        made.restart_region()
        fast_link = FastCosts(ct_a_us=5000, ct_b_us=5000, ct_tzc_us=1)
        with world(made, 42, 4, 0, costs=fast_link) as w:
            assert w.wait_lane()
            for _ in range(220):
                w.decode(1)
            stats = w.pager.fast_stats()
            assert stats["picks"]["cpu"] == 0
            assert stats["lane"]["wanted"] == 0
            seen = w.kernels.steps_with_x
            for _ in range(5):
                w.decode(1)
            assert w.kernels.steps_with_x == seen


@pytest.mark.alone
def test_a_lane_without_jobs_is_timed_while_steps_go_on(made: Stage) -> None:
    """Beside a link that costs nothing the lane gets no pick, yet it is looked at again and again; one whose costs were given is not."""
    with cpu_expert(made):
        with world(made, 48, 4, 0, costs=FastCosts(kernel_a_us=0.001, kernel_b_us=0.001, ct_tzc_us=0.001)) as w:
            assert w.wait_lane()
            background = Decoding(w)
            assert wait_until(lambda: w.pager.fast_stats()["lane"]["samples"] >= 2, 60)
            background.join()
            stats = w.pager.fast_stats()
            assert stats["picks"]["cpu"] == 0
            assert stats["recomputed_picks"] == 0
            assert stats["lane"]["jobs"] >= 2 * 10 + 12
        made.restart_region()
        with world(made, 49, 4, 0, costs=FastCosts(ct_a_us=5000, ct_b_us=5000, ct_tzc_us=0.01)) as w:
            assert w.wait_lane()
            background = Decoding(w)
            assert background.more(3)
            probed = w.pager.fast_stats()["lane"]["jobs"]
            time.sleep(0.6)
            background.join()
            assert w.pager.fast_stats()["lane"]["jobs"] == probed


def test_a_timed_job_is_not_lost_behind_jobs_of_steps(made: Stage) -> None:
    """More jobs follow than the ring keeps answers of: its answer has been seen by then, nothing is given up, and the series goes on."""
    with cpu_expert(made), world(made, 52, 4, 0) as w:
        assert w.wait_lane()
        w.pager.force(Forced.NEVER_LANE)
        w.decode()
        begun = w.pager.fast_stats()["lane"]["jobs"]

        def goes_on() -> bool:
            w.pager.force(Forced.NEVER_LANE)
            w.decode(1)
            return bool(w.pager.fast_stats()["lane"]["jobs"] > begun)

        def series_ends() -> bool:
            w.pager.force(Forced.ALL_LANE)
            for _ in range(4):
                w.decode(1)
            goes_on()
            return bool(w.pager.fast_stats()["lane"]["samples"] > 0)

        assert wait_until(goes_on, 30)
        assert wait_until(series_ends, 30)
        assert w.pager.fast_stats()["aborts"] == 0


def test_a_lane_that_was_dear_when_it_was_probed_is_taken_once_it_is_cheap(made: Stage) -> None:
    """cpu_expert pauses before each action while it is probed and hurries later: a lane that had no job gets jobs."""
    slow, stop = threading.Event(), threading.Event()
    slow.set()
    server = JobServer(made.ctl_path, made.arena_path)

    def serve() -> None:
        while not stop.is_set():
            if slow.is_set():
                server.step(time.monotonic_ns())
                time.sleep(0.002)
            else:
                server.run(20)

    serving = threading.Thread(target=serve)
    serving.start()
    # A record takes 1.5 ms over this link: all four of a step less than a job of the slow server, which has eight actions of 2 ms, and far
    # more than one of the quick.
    costs = FastCosts(ct_tzc_us=1500)
    try:
        with world(made, 50, 4, 0, costs=costs, policy=PagerPolicy(admit_after=1000)) as w:
            assert w.wait_lane()
            for _ in range(2):
                w.decode(1)
            dear = w.pager.fast_stats()
            slow.clear()
            background = Decoding(w)
            taken = wait_until(lambda: w.pager.fast_stats()["picks"]["cpu"] > 0, 60)
            background.join()
    finally:
        stop.set()
        serving.join(60)
        server.close()
    assert dear["picks"]["cpu"] == 0
    assert dear["ct_a_us"] + dear["ct_b_us"] > 10_000
    assert taken


def test_an_idle_pager_uses_no_cpu_time(made: Stage) -> None:
    """Between requests its thread looks at the lane now and then, and sleeps: it polls after a step alone."""

    def cpu_ns() -> int:
        tasks = [task for task in pathlib.Path("/proc/self/task").iterdir() if (task / "comm").read_text().strip() == "pager"]
        assert len(tasks) == 1
        return int((tasks[0] / "schedstat").read_text().split()[0])

    with cpu_expert(made), world(made, 51, 4, 0) as w:
        assert w.wait_lane()
        w.decode()
        time.sleep(0.2)
        before = cpu_ns()
        time.sleep(1)
        assert cpu_ns() - before < 10_000_000


def test_the_cache_learns_although_the_lane_is_quicker_than_the_link(made: Stage) -> None:
    """The hottest record that is worth a slot is copied even when the lane would take every miss."""
    with cpu_expert(made), world(made, 43, LAYERS * EXPERTS, 0, costs=FastCosts(ct_a_us=1, ct_b_us=1, ct_tzc_us=1000)) as w:
        assert w.wait_lane()
        for _ in range(40):
            w.decode(2)
        stats = w.pager.fast_stats()
        assert (w.pager.where() >= 0).sum() == LAYERS * EXPERTS
        assert stats["picks"]["hit"] > 0
        assert stats["picks"]["cpu"] > 0


def test_measured_costs_are_reported(made: Stage) -> None:
    """A probe and every job and copy leave numbers; an override stands for its measurement."""
    with cpu_expert(made), world(made, 44, 6, 3, costs=FastCosts(ct_tzc_us=77.0)) as w:
        assert w.wait_lane()
        for _ in range(30):
            w.decode()
        stats = w.pager.fast_stats()
    assert stats["ct_b_us"] > 0
    assert stats["ct_tzc_us"] == 77.0
    assert stats["planner_steps"] >= 0
    assert stats["plan_us"] > 0


def test_a_refused_copy_is_read_in_place_and_reported(made: Stage) -> None:
    """A copy engine that fails: no hang, no wrong bit, and the counters say that the device failed."""
    with world(made, 45, 10, 2, lane=False) as w:
        w.decode()
        w.gpu.refuse_copies = True
        for _ in range(10):
            w.decode()
        with pytest.raises(KernelError, match="a copy to the GPU failed"):
            w.pager.counters()


def test_closing_in_the_middle_of_a_step_lets_the_device_go_on(made: Stage) -> None:
    """A published step whose second half never came is answered."""
    w = FastWorld(made, 46, 4, 0)
    picks, x = np.array([[1, 2, 3, 4]], np.int64), np.zeros((1, 128), np.float16)
    w.pager.publish(0, 1, picks.ctypes.data, x.ctypes.data, 1)
    w.pager.close()
    w.gpu.synchronize()
    w.gpu.close()


def test_wrong_calls_are_refused_by_name(made: Stage) -> None:
    """A second half without its first; a placement that does not exist; a region that is too small."""
    with world(made, 47, 4, 0) as w:
        with pytest.raises(ValueError, match="no such step was published"):
            w.pager.finish(0, 1, 0, 0, stream=1)
        with pytest.raises(ValueError, match="made for fast"):
            w.pager.step(0, 1, 0, 1)
        with pytest.raises(ValueError, match="rows: out of range"):
            w.pager.publish(0, 9, 0, 0, 1)


def test_a_region_that_cannot_hold_a_step_is_refused(shm_dir: object) -> None:
    """Rows, picks and buffers are checked before a thread starts."""
    with stage(shm_dir, num_buffers=4, max_rows=4) as small, pytest.raises(ValueError, match="holds 4 rows"):  # type: ignore[arg-type]
        FastWorld(small, 1, 4, 0)
