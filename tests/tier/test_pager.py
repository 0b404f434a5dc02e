"""The device pager against a simulated GPU: streams of operations that run when a scheduler says, in every order that streams allow.

The "kernels" of a layer read their records through the table when they run, so a byte that is late, or gone too early, is seen.
"""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

from kernels.python.errors import KernelError
from kernels.python.pager import HINT_WIDTH, WORDS_BYTES, Pager, PagerLayout, PagerPolicy
from tests.tier.simulated_gpu import COMPUTE, COPY, SimulatedGpu

LAYERS, EXPERTS, TOP_K, ROWS, STRIDE = 3, 12, 4, 8, 256
OFFSETS = np.array([[0, 64, 128, 192]] * LAYERS, np.int64)


class World:
    layers, experts, top_k = LAYERS, EXPERTS, TOP_K

    def __init__(
        self,
        seed: int,
        num_slots: int,
        num_transit: int,
        policy: PagerPolicy | None = None,
        num_passing: int = 0,
        *,
        gathers: bool = False,
    ) -> None:
        self.offsets = np.repeat(OFFSETS[:1], self.layers, axis=0)
        self.gpu = SimulatedGpu(seed, STRIDE, gathers=gathers)
        self.host = np.random.default_rng(seed).integers(0, 256, (self.layers * self.experts, STRIDE), np.uint8)
        self.slots = np.zeros((max(num_slots, 1), STRIDE), np.uint8)
        self.table = np.zeros((self.layers, OFFSETS.shape[1], self.experts), np.int64)
        self.mirror = np.zeros_like(self.table)
        self.picks = np.zeros((self.layers, ROWS * self.top_k), np.int64)
        self.words = np.zeros(WORDS_BYTES, np.uint8)
        self.hint_ids = np.zeros((self.layers, ROWS * HINT_WIDTH), np.int64)
        self.layout = layout = PagerLayout(
            self.layers,
            self.experts,
            num_slots,
            num_transit,
            ROWS,
            self.top_k,
            STRIDE,
            self.host.ctypes.data,
            self.host.ctypes.data,
            self.slots.ctypes.data,
            self.table.ctypes.data,
            self.mirror.ctypes.data,
            self.picks.ctypes.data,
            self.words.ctypes.data,
            self.words.ctypes.data,
            COPY,
            self.hint_ids.ctypes.data,
            num_passing,
        )
        self.pager = Pager(layout, self.offsets, policy, self.gpu.driver)
        self.kept: list[np.ndarray] = []
        self.reads_on_host = self.reads = 0

    def kernel(self, layer: int, experts: list[int]) -> None:
        """Runs on the simulated GPU: every picked record is read through the table, part by part."""
        for expert in experts:
            record = self.host[layer * self.experts + expert]
            for part, offset in enumerate(self.offsets[layer]):
                address = int(self.table[layer, part, expert])
                self.reads += 1
                self.reads_on_host += self.host.ctypes.data <= address < self.host.ctypes.data + self.host.nbytes
                if ctypes.string_at(address, 64) != record[offset : offset + 64].tobytes():
                    self.gpu.problems.append(f"layer {layer} expert {expert} part {part}")

    def decode(self, draw: random.Random, rows: int) -> None:
        """One step: all layers are enqueued, then the host waits once."""
        for layer in range(LAYERS):
            selected = np.array([draw.sample(range(EXPERTS), TOP_K) for _ in range(rows)], np.int64)
            self.kept.append(selected)
            self.pager.step(layer, rows, selected.ctypes.data, COMPUTE)
            experts = sorted(set(selected.ravel().tolist()))
            self.gpu.enqueue(COMPUTE, "run", lambda layer=layer, experts=experts: self.kernel(layer, experts))  # type: ignore[misc]
        self.gpu.synchronize()
        self.kept.clear()

    def read_everything(self) -> None:
        """What a prefill does: after a flush, kernels read every record of every layer."""
        self.pager.flush(COMPUTE)
        for layer in range(LAYERS):
            self.gpu.enqueue(COMPUTE, "run", lambda layer=layer: self.kernel(layer, list(range(EXPERTS))))  # type: ignore[misc]
        self.gpu.synchronize()

    def close(self) -> None:
        self.gpu.synchronize()
        self.pager.close()
        self.gpu.close()


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("num_passing", [0, 3])
@pytest.mark.parametrize(("num_slots", "num_transit"), [(0, 0), (1, 0), (3, 3), (6, 2), (20, 4), (LAYERS * EXPERTS, 0)])
def test_kernels_read_the_right_bytes_in_every_order_of_the_streams(
    num_slots: int, num_transit: int, num_passing: int, gathers: bool
) -> None:
    """Copies or gathers, tables, requests and replies run as late as their streams let them: no kernel reads a record that is not wholly
    there."""
    draw = random.Random(num_slots)
    world = World(num_slots, num_slots, num_transit, num_passing=num_passing, gathers=gathers)
    try:
        for step in range(60):
            world.decode(draw, draw.randint(1, ROWS))
            if step % 7 == 3:
                first = draw.randint(0, num_slots)
                world.pager.vacate(first, draw.randint(0, num_slots - first))
                world.read_everything()
        assert world.gpu.problems == []
        counters = world.pager.counters()
        assert counters.steps == 60 * LAYERS
        assert counters.missed == counters.admitted + counters.transit + counters.in_place
        assert (counters.admitted > 0) == (num_slots > num_transit)
        assert counters.bytes_copied == STRIDE * (counters.admitted + counters.transit)
    finally:
        world.close()


def test_with_a_slot_for_every_record_each_is_copied_once() -> None:
    """Then nothing is read on the host any more."""
    draw = random.Random(1)
    world = World(1, LAYERS * EXPERTS, 0)
    try:
        for _ in range(30):
            world.decode(draw, ROWS)
        assert world.pager.counters().admitted == LAYERS * EXPERTS
        assert world.reads_on_host == 0
        assert sorted(world.pager.where().tolist()) == list(range(LAYERS * EXPERTS))
    finally:
        world.close()


def test_transit_slots_spare_the_host_and_keep_nothing() -> None:
    """A record that is not worth a slot passes through a transit slot: read in device memory, on the host again afterwards."""
    world = World(2, 8, 8)
    try:
        for _ in range(10):
            world.decode(random.Random(2), 1)
        assert world.reads_on_host == 0
        counters = world.pager.counters()
        assert (counters.admitted, counters.in_place, counters.hits) == (0, 0, 0)
        assert counters.transit == counters.missed > 0
        assert (world.pager.where() == -1).all()
    finally:
        world.close()


def hot(world: World, experts: range) -> None:
    """Layer 0's experts become hotter than one pick makes a record, the first one most, and get the slots."""
    popularity = np.zeros(LAYERS * EXPERTS, np.float32)
    popularity[experts] = 1 - 0.01 * np.arange(len(experts))
    world.pager.set_heat(popularity, popularity)
    for slot, record in enumerate(experts):
        world.slots[slot] = world.host[record]
        world.pager.put(record, slot)


def step(world: World, *experts: int) -> None:
    """One step of layer 0 with these picks, every record read by a kernel."""
    picks = np.array([[*experts, *[-1] * (TOP_K - len(experts))]], np.int64)
    world.pager.step(0, 1, picks.ctypes.data, COMPUTE)
    world.gpu.enqueue(COMPUTE, "run", lambda: world.kernel(0, list(experts)))
    world.gpu.synchronize()


def test_what_passes_takes_the_coldest_slots_and_is_the_next_to_leave_them() -> None:
    """Colder than all that is resident, it is copied all the same; of the hot records only as many go as one step needs slots."""
    world = World(14, 6, 0, num_passing=2)
    try:
        hot(world, range(6))
        step(world, 6, 7)
        assert (world.pager.where()[:8] == [0, 1, 2, 3, -1, -1, 5, 4]).all()
        step(world, 8)
        assert (world.pager.where()[:9] == [0, 1, 2, 3, -1, -1, 5, -1, 4]).all()
        step(world, 9, 10)
        assert set(np.flatnonzero(world.pager.where() >= 0)) == {0, 1, 2, 3, 9, 10}
        assert world.gpu.problems == []
        assert world.reads_on_host == 0
        counters = world.pager.counters()
        # The later three are hotter than what passed before them.
        assert (counters.missed, counters.admitted, counters.transit, counters.in_place) == (5, 3, 2, 0)
    finally:
        world.close()


def test_no_more_pass_than_may_and_none_before_the_transit_slots_are_used() -> None:
    """Three cold records, a transit slot and one that may pass: the third is read in place."""
    world = World(15, 5, 1, num_passing=1)
    try:
        popularity = np.linspace(1, 0.9, LAYERS * EXPERTS, dtype=np.float32)
        world.pager.set_heat(popularity, popularity)
        for record in range(4):
            world.slots[record + 1] = world.host[record]
            world.pager.put(record, record + 1)
        world.pager.set_heat(*(np.where(np.arange(LAYERS * EXPERTS) < 4, values, 0) for values in world.pager.heat()))
        step(world, 5)
        assert (world.pager.where()[:4] >= 0).all()
        step(world, 5, 6, 7)
        assert (world.pager.where()[:4] >= 0).sum() == 3
        counters = world.pager.counters()
        assert (counters.admitted, counters.transit, counters.in_place) == (0, 3, 1)
        assert world.gpu.problems == []
    finally:
        world.close()


def test_an_admitted_record_takes_the_slot_of_one_that_passed() -> None:
    """That one is the coldest, however late it came."""
    world = World(16, 4, 0, num_passing=2)
    try:
        hot(world, range(4))
        step(world, 5)
        for _ in range(3):
            step(world, 6)  # passes, stays, and is soon as hot as the others
        where = world.pager.where()
        assert where[6] == 3
        assert where[[0, 1, 2, 3, 5]].tolist() == [0, 1, 2, -1, -1]
    finally:
        world.close()


def test_a_hot_record_is_not_driven_out_by_ones_that_come_once() -> None:
    """One slot: the record that every step picks keeps it."""
    world = World(3, 1, 0)
    try:
        for step in range(40):
            for layer in range(LAYERS):
                picks = np.array([[0, 1 + step % 11, 1 + (step + 3) % 11, 1 + (step + 7) % 11]] if layer == 0 else [[5, 6, 7, 8]], np.int64)
                world.kept.append(picks)
                world.pager.step(layer, 1, picks.ctypes.data, COMPUTE)
            world.gpu.synchronize()
        where = world.pager.where()
        assert (where >= 0).sum() == 1
        assert int(np.flatnonzero(where >= 0)[0]) in {0, *(layer * EXPERTS + e for layer in (1, 2) for e in (5, 6, 7, 8))}
    finally:
        world.close()


def test_put_makes_a_record_resident() -> None:
    """A record that the caller copied is a hit from the next step on; a taken slot and a transit slot are refused."""
    world = World(4, 6, 2)
    try:
        world.slots[3] = world.host[5]
        world.pager.put(5, 3)
        world.pager.flush(COMPUTE)
        picks = np.array([[5, 5, 5, 5]], np.int64)
        world.pager.step(0, 1, picks.ctypes.data, COMPUTE)
        world.gpu.enqueue(COMPUTE, "run", lambda: world.kernel(0, [5]))
        world.gpu.synchronize()
        assert world.gpu.problems == []
        assert world.pager.counters().hits == 4
        assert world.reads_on_host == 0
        for record, slot in ((6, 3), (5, 4), (7, 0)):
            with pytest.raises(ValueError, match=r"taken|transit"):
                world.pager.put(record, slot)
    finally:
        world.close()


@pytest.mark.parametrize(("num_slots", "num_transit"), [(6, 2), (20, 4), (LAYERS * EXPERTS, 0)])
def test_slots_beyond_the_limit_are_given_to_nobody(num_slots: int, num_transit: int) -> None:
    """Also when they are free and hot records miss; with the limit lifted they are used again."""
    draw = random.Random(num_slots)
    world = World(num_slots, num_slots, num_transit)
    try:
        for usable in (num_slots // 2, num_slots, num_transit, num_slots - 1, num_slots):
            world.pager.vacate(usable, num_slots - usable)
            world.pager.limit(usable)
            world.slots[usable:] = 0xEE
            for _ in range(12):
                world.decode(draw, draw.randint(1, ROWS))
                where = world.pager.where()
                assert where.max() < usable
                assert (world.slots[usable:] == 0xEE).all()
            assert (where >= num_transit).sum() == usable - num_transit, "a slot that may be used stays empty"
        assert world.gpu.problems == []
    finally:
        world.close()


def test_a_limit_never_takes_a_record_or_a_transit_slot() -> None:
    """Both are refused and change nothing; so is a record for a slot beyond it."""
    world = World(11, 6, 2)
    try:
        world.slots[5] = world.host[7]
        world.pager.put(7, 5)
        with pytest.raises(ValueError, match="holds a record"):
            world.pager.limit(3)
        world.pager.put(8, 4)
        for usable in (1, 7):
            with pytest.raises(ValueError, match="usable slots: out of range"):
                world.pager.limit(usable)
        world.pager.vacate(4, 2)
        world.pager.limit(4)
        with pytest.raises(ValueError, match="no memory"):
            world.pager.put(9, 4)
        world.pager.limit(6)
        world.pager.put(9, 4)
    finally:
        world.close()


def test_a_refused_copy_is_read_in_place_and_reported() -> None:
    """No step hangs and no kernel reads a wrong byte; the next look at the counters says that the device failed."""
    draw = random.Random(5)
    world = World(5, 10, 2)
    try:
        world.decode(draw, 4)
        world.gpu.refuse_copies = True
        for _ in range(10):
            world.decode(draw, 4)
        assert world.gpu.problems == []
        with pytest.raises(KernelError, match="a copy to the GPU failed"):
            world.pager.counters()
    finally:
        world.close()


def test_masked_picks_bring_nothing() -> None:
    """An index that is no expert (a pick of another lane) is left out."""
    world = World(6, 4, 0)
    try:
        picks = np.array([[EXPERTS, EXPERTS, 2, -1]], np.int64)
        world.pager.step(1, 1, picks.ctypes.data, COMPUTE)
        world.gpu.synchronize()
        assert (world.pager.counters().picks, world.pager.counters().missed) == (1, 1)
    finally:
        world.close()


def test_closing_answers_what_was_asked() -> None:
    """A stop in the middle of a step lets the device go on."""
    world = World(7, 4, 0)
    picks = np.array([[1, 2, 3, 4]], np.int64)
    for layer in range(LAYERS):
        world.pager.step(layer, 1, picks.ctypes.data, COMPUTE)
    world.pager.close()
    world.gpu.synchronize()
    world.gpu.close()


def test_heat_goes_on_where_an_earlier_run_ended() -> None:
    """What was hot then is hot now, before anything is picked."""
    first, second = World(9, 4, 0), World(10, 4, 0)
    try:
        for _ in range(5):
            picks = np.array([[1, 2, 3, 4]], np.int64)
            first.pager.step(0, 1, picks.ctypes.data, COMPUTE)
            first.gpu.synchronize()
        slow, fast = first.pager.heat()
        assert slow[1:5] == pytest.approx(5 / 6, abs=1e-3)  # five of five steps, and one more that touched nothing
        assert fast[1:5] == pytest.approx(1 - 0.5**0.5)  # half a half-life of ten steps
        assert slow[5:].sum() == 0
        second.pager.set_heat(slow, fast)
        assert np.array_equal(second.pager.heat(), (slow, fast))
        with pytest.raises(ValueError, match=r"expected float32 \[36\]"):
            second.pager.set_heat(slow[1:], fast)
    finally:
        first.close()
        second.close()


def test_wrong_sizes_are_refused_by_name() -> None:
    """Before a thread starts."""
    with pytest.raises(ValueError, match="more transit slots than slots"):
        World(8, 1, 2)


def test_a_derated_link_copies_every_record_several_times() -> None:
    """For measurements: the same bytes, more of the link's time; the counters tell what a whole link would have moved."""
    world = World(12, 8, 2, PagerPolicy(link_derate=3))
    try:
        for _ in range(10):
            world.decode(random.Random(12), 2)
        counters = world.pager.counters()
        assert world.gpu.problems == []
        assert world.gpu.copied == 3 * (counters.admitted + counters.transit) > 0
        assert counters.bytes_copied == STRIDE * (counters.admitted + counters.transit)
    finally:
        world.close()
    with pytest.raises(ValueError, match="link_derate is 0"):
        World(13, 1, 0, PagerPolicy(link_derate=0))
