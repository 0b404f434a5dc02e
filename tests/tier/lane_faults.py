"""What a pager of `fast` does when its cpu_expert is stopped or crawls: the same scenes over a simulated GPU and over a real one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from kernels.python.fast_pager import FastPager, Forced
from tests.support.slow_process import crawling, is_felt, stopped
from tests.tier.harness import CpuExpert

SLOW = ("heartbeat lost", "job deadline passed")  # why a server that is there, and has no time, is left alone


class World(Protocol):
    """A pager and its device. `decode` is one pass, and raises when a bit is wrong."""

    pager: FastPager

    def decode(self) -> None: ...


def decode_until(world: World, done: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    """Right answers until done() is true.

    Raises:
        AssertionError: a wrong bit, or it did not become true in time.
    """
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}; {stats(world)['lane']}"
        world.decode()


def stats(world: World) -> dict[str, Any]:
    """The pager's counters and the lane's state."""
    return world.pager.fast_stats()


def use_the_lane(world: World) -> None:
    """Every pick is the lane's, until it has served some."""
    decode_until(world, lambda: world.pager.lane_up, "the lane is up")
    world.pager.force(Forced.ALL_LANE)
    serves_again(world)


def serves_again(world: World) -> None:
    """Passes until the lane is up and has served jobs after this call."""
    decode_until(world, lambda: world.pager.lane_up, "the lane is back")
    before = stats(world)
    decode_until(world, lambda: stats(world)["cpu_expert_bytes"] > before["cpu_expert_bytes"], "jobs are served again")
    assert stats(world)["lane"]["done"] > before["lane"]["done"]


def stop_and_wake(world: World, server: CpuExpert) -> None:
    """SIGSTOP: the lane goes down and passes go on without it. SIGCONT, with an old job in the server's hands: the lane serves again."""
    use_the_lane(world)
    before = stats(world)
    with stopped(server.process.pid):
        decode_until(world, lambda: stats(world)["lane"]["reason"] in SLOW, "the lane is down")
        picks = stats(world)["picks"]["cpu"]
        for _ in range(20):
            world.decode()
        after = stats(world)
        assert (after["lane"]["state"], after["picks"]["cpu"]) == ("DOWN", picks)
        assert after["aborts"] > before["aborts"]
    serves_again(world)
    assert stats(world)["lane"]["ups"] > before["lane"]["ups"]


def crawl(world: World, server: CpuExpert, stopped_s: float, timeout_ms: int) -> None:
    """A hundredth of the time: jobs are late, or are given up where a stop is longer than their deadline. Healthy again it serves again."""
    use_the_lane(world)
    before = stats(world)
    with crawling(server.process.pid, stopped_s, stopped_s / 100):
        decode_until(world, is_felt(world.pager.fast_stats), "a job is late or given up")
        if stopped_s * 1000 > timeout_ms:
            decode_until(world, lambda: stats(world)["lane"]["reason"] in SLOW, "the lane is down")
            assert stats(world)["aborts"] > before["aborts"]
        for _ in range(5):
            world.decode()
    serves_again(world)
