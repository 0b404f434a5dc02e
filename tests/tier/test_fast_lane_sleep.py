"""When the CPU lane sleeps, so that steps keep their activations on the device, and what wakes it: exact counts, and the oracle's bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.python.fast_pager import FastCosts
from kernels.python.pager import PagerPolicy
from tests.tier.fast_world import FastWorld
from tests.tier.harness import Stage, cpu_expert

SLEEP_AFTER, WAKE_AFTER = 512, 4
RESIDENT = 4  # experts of layer 0 that have a slot, from the first one on
HIT, DEAR, CHEAP = [0, 1, 2, 3], [0, 1, 2, 4], [4, 5, 6, 7]
# One record over the link takes 50 us and as a job 110: not worth it. Four take 200; with two of them in a job both sides need 120.
COSTS = FastCosts(kernel_a_us=10, kernel_b_us=5, ct_a_us=100, ct_b_us=10, ct_tzc_us=50)
CPU_PICKS = 2  # of a CHEAP step


class Lane:
    """A world in which every step is a HIT, DEAR (one miss that the link brings sooner) or CHEAP (misses that the lane pays for)."""

    def __init__(self, made: Stage) -> None:
        # No record is ever hot enough for a slot: the same picks always miss.
        self.world = FastWorld(made, 7, RESIDENT, 0, costs=COSTS, policy=PagerPolicy(admit_after=1_000_000))
        for expert in HIT:
            record = made.arena.record(0, expert)
            self.world.slots[expert, : record.size] = record
            self.world.pager.put(expert, expert)
        assert self.world.wait_lane()

    def steps(self, kind: list[int], count: int = 1) -> tuple[int, int]:
        """So many layer steps, one after the other: (how many published activations, picks that the CPU lane took)."""
        before = self.world.kernels.steps_with_x, self._cpu_picks()
        for _ in range(count):
            self.world.step(0, kind)
        return self.world.kernels.steps_with_x - before[0], self._cpu_picks() - before[1]

    @property
    def wanted(self) -> bool:
        return bool(self.world.pager.fast_stats()["lane"]["wanted"])

    def _cpu_picks(self) -> int:
        return int(self.world.pager.fast_stats()["picks"]["cpu"])


@pytest.fixture
def lane(made: Stage) -> Iterator[Lane]:
    """Beside a cpu_expert that is up."""
    with cpu_expert(made):
        opened = Lane(made)
        try:
            yield opened
        finally:
            opened.world.close()


def test_steps_without_misses_put_the_lane_to_sleep_and_misses_wake_it(lane: Lane) -> None:
    """After 512 hits activations stay on the device; the fourth step whose misses pay has the fifth one published, and served."""
    assert lane.steps(HIT, SLEEP_AFTER - 1) == (SLEEP_AFTER - 1, 0)
    assert lane.wanted
    assert lane.steps(HIT) == (1, 0)
    assert not lane.wanted
    assert lane.steps(HIT, 50) == (0, 0)
    assert lane.steps(CHEAP, WAKE_AFTER - 1) == (0, 0)
    assert not lane.wanted
    assert lane.steps(CHEAP) == (0, 0)
    assert lane.wanted
    assert lane.steps(CHEAP, 5) == (5, 5 * CPU_PICKS)


def test_a_use_of_the_lane_keeps_it_awake(lane: Lane) -> None:
    """The 512 steps without one begin anew, be they hits or misses that the link brings sooner; hits sleep no sooner than those."""
    assert lane.steps(HIT, SLEEP_AFTER - 1) == (SLEEP_AFTER - 1, 0)
    assert lane.steps(CHEAP) == (1, CPU_PICKS)
    assert lane.steps(DEAR, SLEEP_AFTER // 2) == (SLEEP_AFTER // 2, 0)
    assert lane.steps(HIT, SLEEP_AFTER // 2 - 1) == (SLEEP_AFTER // 2 - 1, 0)
    assert lane.wanted
    assert lane.steps(DEAR) == (1, 0)
    assert not lane.wanted


def test_hits_between_misses_do_not_keep_the_lane_asleep(lane: Lane) -> None:
    """Four steps whose misses pay wake it with hits among them; one whose misses do not, or 512 hits, begin the four anew."""
    lane.steps(HIT, SLEEP_AFTER)
    for between in ([HIT], [HIT, HIT], [DEAR], [HIT], [HIT]):
        assert lane.steps(CHEAP) == (0, 0)
        for kind in between:
            assert lane.steps(kind) == (0, 0)
    assert lane.steps(CHEAP) == (0, 0)
    assert not lane.wanted  # three since the dear one
    lane.steps(HIT, SLEEP_AFTER)
    assert lane.steps(CHEAP, WAKE_AFTER - 1) == (0, 0)
    assert not lane.wanted
    assert lane.steps(HIT, 3) == (0, 0)
    assert lane.steps(CHEAP) == (0, 0)
    assert lane.wanted
    assert lane.steps(CHEAP) == (1, CPU_PICKS)


def test_misses_that_do_not_pay_put_the_lane_to_sleep_as_before(lane: Lane) -> None:
    """512 of them in a row; and none of them wakes it."""
    assert lane.steps(DEAR, SLEEP_AFTER + 20) == (SLEEP_AFTER, 0)
    assert not lane.wanted
