"""A step's records by one gather instead of a copy each: the same records into the same slots, and the same way out when it fails.

Beside test_pager.py, whose streams run in every order with gathers too.
"""

from __future__ import annotations

import ctypes
import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kernels.python import pager
from kernels.python.errors import KernelError
from kernels.python.fast_pager import Forced
from kernels.python.pager import PagerPolicy
from tests.tier.fast_world import FastWorld
from tests.tier.harness import Stage, cpu_expert
from tests.tier.simulated_gpu import COMPUTE, COPY
from tests.tier.test_pager import EXPERTS, LAYERS, STRIDE, World, step

REPLY = 32 * 4  # bytes into the pager's words


def decoded(gathers: bool, policy: PagerPolicy | None = None) -> World:
    """Some steps of every layer; the pager is closed, what its driver was asked for is known."""
    world = World(21, 9, 2, policy, num_passing=2, gathers=gathers)
    draw = random.Random(4)
    for _ in range(30):
        world.decode(draw, draw.randint(1, 8))
    assert world.gpu.problems == []
    return world


def records_of(world: World) -> list[tuple[str, int, int]]:
    """What the pager's thread asked for, by places that two worlds share: ("record", slot, bytes), ("table", 0, 0) or ("reply", 0, value).

    Without the requests, which are the other thread's.
    """
    slots, reply = world.slots.ctypes.data, world.words.ctypes.data + REPLY
    told: list[tuple[str, int, int]] = []
    for kind, address, size in world.gpu.asked:
        if kind == "word":
            told += [("reply", 0, size)] if address == reply else []
        elif slots <= address < slots + world.slots.nbytes:
            told.append(("record", (address - slots) // STRIDE, size))
        else:
            told.append(("table", 0, 0))
    return told


def test_a_gather_has_the_records_that_copies_would_have_had() -> None:
    """The same slots in the same order between the same words, one launch a step at most, and nothing but tables by the copy engine."""
    copied, gathered = decoded(False), decoded(True)
    try:
        assert records_of(gathered) == records_of(copied)
        assert gathered.pager.counters() == copied.pager.counters()
        assert (gathered.pager.where() == copied.pager.where()).all()
        launches, host = gathered.gpu.launches, gathered.host.ctypes.data
        counters = gathered.pager.counters()
        assert sum(map(len, launches)) == counters.admitted + counters.transit > len(launches) > 0
        assert len(launches) <= counters.steps
        assert all((source - host) % STRIDE == 0 for launch in launches for _to, source in launch)
        assert copied.gpu.launches == []
        sizes = {size for kind, _address, size in gathered.gpu.asked if kind == "copy"}
        assert STRIDE not in sizes
    finally:
        copied.close()
        gathered.close()


def test_the_reply_comes_behind_the_gather() -> None:
    """While the gather has not run the device waits, and goes on when it has."""
    world = World(22, 6, 1, gathers=True)
    try:
        world.gpu.hold(COPY)
        picks = np.array([[1, 2, 3, 4]], np.int64)
        world.pager.step(0, 1, picks.ctypes.data, COMPUTE)
        world.gpu.enqueue(COMPUTE, "run", lambda: world.kernel(0, [1, 2, 3, 4]))
        world.pager.catch_up()
        kinds = [kind for kind, _address, _value in world.gpu.asked]
        assert kinds[1:] == ["gather"] * 4 + ["copy", "word"]  # behind the request: the records, their table, the reply
        assert world.gpu.asked[-1] == ("word", world.words.ctypes.data + REPLY, 1)
        assert world.reads == 0
        world.gpu.release(COPY)
        world.gpu.synchronize()
        assert world.reads > 0
        assert world.gpu.problems == []
    finally:
        world.close()


def test_a_refused_gather_is_read_in_place_and_reported() -> None:
    """No step hangs, no kernel reads a wrong byte, no record that did not come is thought to be in a slot; the failure is told."""
    draw = random.Random(5)
    world = World(5, 10, 2, num_passing=3, gathers=True)
    try:
        world.decode(draw, 4)
        world.gpu.refuse_copies = True  # whole records: the tables go on
        world.slots[:] = 0xEE
        popularity = np.zeros(LAYERS * EXPERTS, np.float32)
        world.pager.vacate(0, 10)
        world.pager.set_heat(popularity, popularity)
        world.pager.flush(COMPUTE)
        before = len(world.gpu.launches)
        for _ in range(10):
            world.decode(draw, 4)
            assert (world.pager.where() == -1).all()
        assert world.gpu.problems == []
        assert len(world.gpu.launches) == before
        with pytest.raises(KernelError, match="a copy to the GPU failed"):
            world.pager.counters()
    finally:
        world.close()


def test_slots_of_a_gather_that_failed_are_used_again(made_to_fail: Callable[..., World]) -> None:
    """One launch fails; the next step brings the same records into slots."""
    world = made_to_fail(5, 1, times=1)
    step(world, 1, 2, 3, 4)
    assert world.reads_on_host == world.reads == 16
    assert (world.pager.where() == -1).all()
    step(world, 1, 2, 3, 4)
    assert world.reads_on_host == 16
    assert set(np.flatnonzero(world.pager.where() >= 0)) == {1, 2, 3, 4}


def test_a_record_whose_gather_failed_is_in_transit_no_more(made_to_fail: Callable[..., World]) -> None:
    """It was to pass through a transit slot; put into a slot of its own it is read there by the next step."""
    world = made_to_fail(3, 2, times=1)
    step(world, 1, 2, 3)
    assert world.reads_on_host == world.reads == 12
    world.slots[2] = world.host[2]
    world.pager.put(2, 2)
    world.pager.flush(COMPUTE)
    step(world, 2)
    assert (world.reads_on_host, world.reads) == (12, 16)


def test_what_a_failed_gather_was_to_bring_is_counted_as_read_in_place(made_to_fail: Callable[..., World]) -> None:
    """Whatever it was to be: admitted, through a transit slot, or through the coldest record's."""
    world = made_to_fail(5, 1, times=1000)
    for expert in range(0, EXPERTS, 4):
        step(world, *range(expert, expert + 4))
    counters = (ctypes.c_uint64 * 8)()
    assert pager.load().glm53_pager_stats(world.pager._pointer, counters) == -1
    assert list(counters[3:]) == [EXPERTS, 0, 0, EXPERTS, 0]


def test_the_reply_comes_behind_the_gather_also_without_a_table(made_to_fail: Callable[..., World]) -> None:
    """The table's copy fails: the step is worth nothing, and still nothing runs ahead of bytes that are on their way."""
    world = made_to_fail(5, 1, times=1000, kind="copy")
    picks = np.array([[1, 2, 3, 4]], np.int64)
    world.gpu.hold(COPY)
    world.pager.step(0, 1, picks.ctypes.data, COMPUTE)
    world.pager.catch_up()
    assert world.gpu.asked[-1] == ("word", world.words.ctypes.data + REPLY, 1)
    assert world.words.view(np.uint32)[REPLY // 4] == 0
    world.gpu.release(COPY)


@pytest.fixture
def made_to_fail() -> Iterator[Callable[..., World]]:
    """A world whose driver refuses so many calls of a kind."""
    worlds: list[World] = []

    def make(num_slots: int, num_transit: int, *, times: int, kind: str = "gather") -> World:
        world, left = World(25, num_slots, num_transit, num_passing=2, gathers=True), [times]

        def refuse(asked: str, _address: int) -> bool:
            left[0] -= asked == kind
            return asked == kind and left[0] >= 0

        world.gpu.refuse = refuse
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.gpu.synchronize()
        assert world.gpu.problems == []
        world.close()


def test_a_derated_link_gathers_every_record_several_times() -> None:
    """The same records, launched again; the counters tell what a whole link would have moved."""
    world = decoded(True, PagerPolicy(link_derate=3))
    try:
        counters, launches = world.pager.counters(), world.gpu.launches
        assert world.gpu.copied == 3 * (counters.admitted + counters.transit) > 0
        assert counters.bytes_copied == STRIDE * (counters.admitted + counters.transit)
        assert launches[0::3] == launches[1::3] == launches[2::3]
    finally:
        world.close()


@pytest.mark.parametrize("failing", [0.0, 0.2, 1.0])
def test_fast_has_the_oracle_s_bits_with_gathers(made: Stage, failing: float) -> None:
    """Records in slots, read in place, in transit; launches that fail now and then, or all: where picks were read is counted."""
    world = FastWorld(made, 31, 7, 1, lane=False, gathers=True)
    draw = random.Random(31)
    world.gpu.refuse = lambda kind, _address: kind == "gather" and draw.random() < failing
    try:
        for placement in (Forced.BY_COST, Forced.RANDOM, Forced.BY_COST):
            world.pager.force(placement, 7)
            for _ in range(8):
                world.decode()
        stats = world.pager.fast_stats()
        picks = stats["picks"]
        assert sum(picks.values()) > 0
        assert bool(world.gpu.launches) == bool(picks["admit"]) == (failing < 1)
        if failing:
            with pytest.raises(KernelError, match="a copy to the GPU failed"):
                world.pager.counters()
        else:
            counters = world.pager.counters()
            assert counters.missed == counters.admitted + counters.transit + counters.in_place
            assert counters.bytes_copied == sum(map(len, world.gpu.launches)) * world.gpu._record_bytes
        assert (stats["bytes_in_place"] > 0) == (stats["experts"]["zero_copy"] > 0)
    finally:
        world.close()


def test_hints_stay_with_the_copy_engine() -> None:
    """Their chunks are copies, also where a step's own records are gathered; what is late of one is finished by the copy engine."""
    world = World(23, 24, 2, PagerPolicy(hint_records=2, hint_chunk=64), gathers=True)

    def looked_at(hinted: int) -> None:
        """The device computes until the pager has looked at the hint, however busy the machine is."""
        deadline = time.monotonic() + 10
        while world.pager.hint_counters().hinted < hinted and time.monotonic() < deadline:
            time.sleep(0.0005)

    try:
        for turn in range(12):
            picks = np.array([[1, 2, 3, 4]], np.int64)
            ids = np.array([[5, 6]], np.int64)
            world.pager.vacate(0, 24)
            world.pager.flush(COMPUTE)
            world.pager.ask(0, 1, picks.ctypes.data, COMPUTE)
            world.pager.hint(1, 1, ids.ctypes.data, 2, COMPUTE)
            world.pager.wait(COMPUTE)
            world.gpu.enqueue(COMPUTE, "run", lambda: world.kernel(0, [1, 2, 3, 4]))
            world.gpu.enqueue(COMPUTE, "run", functools.partial(looked_at, 2 * turn + 2))
            late = np.array([[5, 6, 7, 8]], np.int64)
            world.pager.step(1, 1, late.ctypes.data, COMPUTE)
            world.gpu.enqueue(COMPUTE, "run", lambda: world.kernel(1, [5, 6, 7, 8]))
            world.gpu.synchronize()
        assert world.gpu.problems == []
        hints, launched = world.pager.hint_counters(), sum(map(len, world.gpu.launches))
        assert hints.started > 0
        counters = world.pager.counters()
        assert launched == counters.admitted + counters.transit
        chunks = [size for kind, to, size in world.gpu.asked if kind == "copy" and 0 <= to - world.slots.ctypes.data < world.slots.nbytes]
        assert sum(chunks) == hints.bytes_copied + counters.bytes_copied - launched * STRIDE
    finally:
        world.close()


@pytest.fixture
def unstarted() -> Iterator[Callable[..., Any]]:
    """Measures with a world's memory, whose pager has been closed, so that its words are nobody's."""
    worlds: list[World] = []

    def measure(num_slots: int = 6, **how: Any) -> Any:
        gathers = how.pop("gathers", True)
        world = World(24, num_slots, 0, gathers=gathers)
        world.pager.close()
        world.words[:] = 0
        for name, value in how.items():
            setattr(world.gpu, name, value)
        worlds.append(world)
        rates = pager.copy_rates(world.layout, world.offsets, world.gpu.driver, compute_stream=COMPUTE, group=4, budget_s=0.02)
        return world, rates

    yield measure
    for world in worlds:
        world.gpu.synchronize()
        world.gpu.close()


def test_both_ways_are_measured_with_the_same_records(unstarted: Callable[..., Any]) -> None:
    """Groups of real records by turns, behind one gather that loads the code and one beside a stream that waits; words end as they were."""
    world, (engine, gather) = unstarted()
    assert engine > 0
    assert gather > 0
    groups = [launch for launch in world.gpu.launches if len(launch) > 1]
    assert [len(launch) for launch in world.gpu.launches[:2]] == [1, 1]
    assert len(groups) >= 2
    assert {len(group) for group in groups} == {4}
    copies = [to for kind, to, size in world.gpu.asked if (kind, size) == ("copy", STRIDE)]
    assert len(copies) == 4 * len(groups)
    host = world.host.ctypes.data
    assert len({source for group in groups for _to, source in group}) > 4
    for to, source in groups[-1]:
        assert (source - host) % STRIDE == 0
        assert world.slots[(to - world.slots.ctypes.data) // STRIDE].tobytes() == world.host[(source - host) // STRIDE].tobytes()
    assert not world.words.any()


def test_a_group_has_no_more_records_than_slots(unstarted: Callable[..., Any]) -> None:
    """Nothing is written behind the last slot."""
    world, _rates = unstarted(2)
    assert max(len(launch) for launch in world.gpu.launches) == 2


def test_a_gather_that_stands_behind_the_wait_is_found_out(unstarted: Callable[..., Any]) -> None:
    """Where both streams share a queue the pager would wait for ever: here the host lets the device go on, and says so."""
    with pytest.raises(KernelError, match="a gather does not run beside a stream that waits"):
        unstarted(one_queue=True)


@pytest.mark.parametrize(
    ("kind", "said"), [("copy", "a copy is refused"), ("gather", "a gather is refused"), ("word", "a word is refused")]
)
def test_a_measurement_that_is_refused_leaves_nothing_waiting(unstarted: Callable[..., Any], kind: str, said: str) -> None:
    """Whichever call fails, also in the middle: the fixture waits for both streams to come to their end."""
    for after in (0, 1):
        calls: list[int] = []

        def refuse(asked: str, address: int, calls: list[int] = calls, after: int = after) -> bool:
            calls += [address] if asked == kind else []
            return asked == kind and len(calls) > after

        with pytest.raises(KernelError, match=f"a {kind} is refused"):
            unstarted(refuse=refuse)


def test_without_a_gather_there_is_nothing_to_measure(unstarted: Callable[..., Any]) -> None:
    """Nor without slots."""
    with pytest.raises(ValueError, match="there is no gather to measure"):
        unstarted(gathers=False)
    with pytest.raises(ValueError, match="there are none"):
        unstarted(0)


def test_the_link_is_timed_by_the_way_that_is_used(made: Stage) -> None:
    """What the costs of a split are measured with are gathers into the transit slot, when the CPU lane comes up; bits are the oracle's."""
    with cpu_expert(made):
        world = FastWorld(made, 33, 6, 1, gathers=True)
        try:
            assert world.wait_lane()
            world.decode()
            host, stride = made.arena.record(0, 0).ctypes.data, world.gpu._record_bytes
            slot = world.slots.ctypes.data
            assert world.gpu.launches[0] == [(slot, host + i * stride) for i in range(4)]
            assert world.pager.fast_stats()["ct_tzc_us"] > 0
        finally:
            world.close()
