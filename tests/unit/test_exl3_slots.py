"""Slots that are lent to long prefills: no pass reads or writes one meanwhile, and afterwards all is as it was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from kernels.python.pager import PagerPolicy
from services.gpu_worker.backends.exl3 import slots as slots_module
from services.gpu_worker.backends.exl3.experts import ExpertOptions, ExpertStore
from services.gpu_worker.backends.exl3.placement import NONE, Placement, PlacementOptions
from services.gpu_worker.backends.exl3.slots import ActivationNeed, ElasticSlots
from services.gpu_worker.patches import pointer_tables
from tests.support.lent_slots import LentMemory, Vram, elastic_slots
from tests.tier import conftest, harness
from tests.tier.harness import Stage
from tests.tier.simulated_gpu import array
from tests.unit import test_exl3_experts as base
from tests.unit import test_exl3_fast as fast_base
from tests.unit import test_exl3_on_demand as pager_base
from tests.unit.test_exl3_experts import EXPERTS, LAYERS, SHAPE

host_as_device = base.host_as_device
driver = pager_base.driver
made, shm_dir = conftest.made, conftest.shm_dir
STRIDE = SHAPE.record_bytes
SHORT, LONG = 20, 100  # rows


class Lent:
    """What was put under the stores of a test."""

    def __init__(self, reserve: int = STRIDE) -> None:
        self.vram = Vram(free=reserve)
        self.reserve = reserve
        self.most = 1 << 40
        self.synchronised = 0

    def make(self, records: Any, table: torch.Tensor, layers: Any, num_slots: int, top_k: int, options: ExpertOptions) -> ExpertStore:
        self.slots, self.memory = elastic_slots(self.vram, num_slots, records.stride, most=self.most, reserve=self.reserve)
        self.memory.idle = lambda: base.FakeEvent.done
        return ExpertStore(records, table, layers, num_slots, top_k, options, self.slots)

    slots: ElasticSlots
    memory: LentMemory

    @property
    def usable_bytes(self) -> int:
        return self.slots.usable * int(self.slots.tensor.shape[1])


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch, host_as_device: None) -> Lent:
    made = Lent()
    monkeypatch.setattr(base, "ExpertStore", made.make)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.vram.empty_cache)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: made.vram.cached)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 0)
    before = torch.cuda.synchronize

    def synchronize(*arguments: Any) -> None:
        made.synchronised += 1
        before(*arguments)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return made


def world_of(num_slots: int, *, on_demand: bool = False) -> base.World:
    options = ExpertOptions(
        PlacementOptions(admit_after=1, max_admissions=6), stage_min_rows=9, on_demand=on_demand, pager=PagerPolicy(max_copies=6)
    )
    return base.World(num_slots, options)


def prefill(world: base.World, lent: Lent, rows: int, layers: int = LAYERS) -> None:
    """A prefill that really takes what it is said to need."""
    world.store.begin_prefill(rows)
    lent.vram.activations(lent.slots.need.of(rows) or 0)
    for layer in range(layers):
        world.store.before_experts(layer, rows, None)
        for expert in range(EXPERTS):
            world.read(layer, expert)
            world.read_tensors(layer, expert)
        world.store.after_experts(layer)
    world.store.between_passes()


@pytest.mark.parametrize("on_demand", [False, True])
@pytest.mark.parametrize("num_slots", [2, 9, 20, LAYERS * EXPERTS])
def test_every_pass_reads_the_right_bytes(lent: Lent, driver: pager_base.ImmediateDriver, num_slots: int, on_demand: bool) -> None:
    """Decode steps, short and long prefills in any order, with more and less to lend: right bytes, and a prefill finds its memory."""
    draw = random.Random(num_slots)
    world = world_of(num_slots, on_demand=on_demand)
    lent.slots.need = ActivationNeed({SHORT: STRIDE // 4, LONG: max(1, num_slots // 2 - 2) * STRIDE})
    for _ in range(50):
        base.FakeEvent.done = on_demand or draw.random() < 0.6
        if draw.random() < 0.5:
            world.decode(draw, draw.randint(1, 8))
            assert lent.slots.usable == num_slots
        else:
            rows = draw.choice((SHORT, 60, LONG))
            prefill(world, lent, rows, draw.choice((LAYERS, LAYERS - 1)))
            base.FakeEvent.done = True  # what verify() waits for
            report = world.store.verify()
            assert (report.records_bad, report.slots_bad) == (0, 0)
    stats = world.store.stats()
    assert stats["admissions"] > 0
    assert stats["slot_lendings"] > 0
    assert stats["slot_bytes_lent"] > 0
    prefill(world, lent, LONG)
    world.store.close()
    lent.memory.tensor.fill_(0)
    assert lent.memory.closed
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            world.read(layer, expert)


immediate = fast_base.immediate


@pytest.mark.usefixtures("immediate")
def test_fast_decodes_on_between_long_prefills(lent: Lent, monkeypatch: pytest.MonkeyPatch, made: Stage) -> None:
    """The pager gives no record a slot that is lent, tables are whole for the prefill, and every step has the reference's bits."""
    monkeypatch.setattr(fast_base, "ExpertStore", lent.make)
    world = fast_base.World(made, 16, lane=False)
    stride = world.records.stride
    lent.vram.free = lent.reserve = stride
    lent.slots._reserve = stride
    lent.slots.need = ActivationNeed({LONG: 6 * stride})
    for _ in range(5):
        world.decode()
        assert lent.slots.usable == 16
        world.store.begin_prefill(LONG)
        assert 2 <= lent.slots.usable <= 10
        lent.vram.activations(6 * stride)
        for layer in range(harness.LAYERS):
            world.store.before_experts(layer, LONG, None)
            for expert in range(harness.EXPERTS):
                record = world.records.host[layer * harness.EXPERTS + expert].numpy()
                for row, name in enumerate(pointer_tables.ROWS):
                    start = int(getattr(world.records.shapes[layer], name))
                    assert array(int(world.table[layer, row, expert]), np.uint8, 64).tobytes() == record[start : start + 64].tobytes()
            world.store.after_experts(layer)
    # The memory does not come back: steps go on in fewer slots.
    lent.vram.empty_cache()
    lent.vram.free = 0
    for _ in range(6):
        world.decode()
        assert world.store._on_demand is not None
        assert int(world.store._on_demand.where().max()) < lent.slots.usable < 16
    assert lent.slots.usable >= 2, "transit slots are never lent"
    lent.vram.free, lent.vram.now = 100 * stride, 60.0
    world.decode()
    assert lent.slots.usable == 16
    world.store.close()


def test_a_prefill_that_fits_lends_nothing(lent: Lent) -> None:
    """Nor does it wait for the device."""
    world = world_of(9)
    lent.slots.need = ActivationNeed({SHORT: STRIDE // 4, LONG: 3 * STRIDE})
    world.decode(random.Random(1))
    prefill(world, lent, SHORT)
    assert (world.store.stats()["slot_lendings"], lent.synchronised, lent.slots.usable) == (0, 0, 9)
    lent.vram.free = 10 * STRIDE
    prefill(world, lent, LONG)
    assert (world.store.stats()["slot_lendings"], lent.synchronised, lent.slots.usable) == (0, 0, 9)


def test_as_much_is_lent_as_the_pass_needs_beside_the_reserve(lent: Lent) -> None:
    """No more than may be; a second chunk finds it lent; a short prefill brings it back."""
    world = world_of(20)
    lent.slots.need = ActivationNeed({SHORT: STRIDE // 4, LONG: 8 * STRIDE})
    prefill(world, lent, LONG)
    wanted = 8 * STRIDE + 8 * STRIDE // 16  # and the reserve stays, which is what was free
    assert lent.memory.num_bytes - lent.memory.chunk_bytes - wanted <= lent.memory.mapped_bytes <= lent.memory.num_bytes - wanted
    assert lent.usable_bytes <= lent.memory.mapped_bytes < lent.usable_bytes + STRIDE
    usable = lent.slots.usable
    prefill(world, lent, LONG)
    assert (lent.slots.usable, world.store.stats()["slot_lendings"]) == (usable, 1)
    prefill(world, lent, SHORT)
    assert (lent.slots.usable, lent.memory.mapped_bytes) == (20, lent.memory.num_bytes)
    lent.slots._most = 2 * STRIDE
    world.store.begin_prefill(LONG)
    assert lent.memory.num_bytes - lent.memory.mapped_bytes < 4 * STRIDE


@pytest.mark.parametrize("wasted", [0, STRIDE // 3])
def test_half_of_the_reserve_stays_free(lent: Lent, wasted: int) -> None:
    """Also where torch cannot use all that it kept from the pass before; a short prefill that would take more of it is lent slots."""
    world = world_of(20)
    lent.vram.wasted = wasted
    lent.slots.need = ActivationNeed({SHORT: STRIDE // 4, 60: STRIDE * 3 // 4, LONG: 8 * STRIDE})
    for rows, lendings in ((SHORT, 0), (60, 1), (LONG, 2), *[(LONG, 2)] * 5, (SHORT, 2), (LONG, 3), (60, 3)):
        if rows == SHORT:
            lent.vram.empty_cache()  # what a decode step between two prompts leaves is not what this is about
        prefill(world, lent, rows)
        assert world.store.stats()["slot_lendings"] == lendings
    assert lent.reserve // 2 <= lent.vram.least_free < lent.reserve


def test_what_torch_keeps_of_short_prefills_does_not_pile_up_in_the_reserve(lent: Lent) -> None:
    """They live on the reserve, and lend nothing: what none of them can use again is cleared once it has more than half of it."""
    world = world_of(20)
    lent.vram.wasted = STRIDE * 2 // 3
    lent.slots.need = ActivationNeed({SHORT: STRIDE // 4, LONG: 8 * STRIDE})
    for _ in range(8):
        prefill(world, lent, SHORT)
    assert world.store.stats()["slot_lendings"] == 0
    assert lent.vram.least_free >= lent.reserve // 2 - STRIDE // 4


@pytest.mark.parametrize("reserve", [STRIDE, 1, 0])
def test_what_torch_keeps_and_can_use_again_is_not_cleared(lent: Lent, reserve: int) -> None:
    """It costs milliseconds of every pass: also where there is next to no reserve, or none."""
    lent.reserve = lent.vram.free = reserve
    world, calls, empty_cache = world_of(20), [], lent.vram.empty_cache
    lent.slots.need = ActivationNeed({SHORT: STRIDE // 4, LONG: 8 * STRIDE})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", lambda: (calls.append(1), empty_cache()))
        for _ in range(6):
            prefill(world, lent, LONG)
    assert (world.store.stats()["slot_lendings"], calls) == (1, [])


def test_staged_halves_lie_in_front_of_what_is_lent(lent: Lent) -> None:
    """The last usable slots are the halves, and records in front of them stay."""
    world = world_of(LAYERS * EXPERTS)
    world.store.place(range(12))
    lent.slots.need = ActivationNeed({LONG: 6 * STRIDE})
    world.store.begin_prefill(LONG)
    staging = world.store._staging.now
    assert staging is not None
    first, second = staging.first
    half = second - first
    assert second + half == lent.slots.usable < LAYERS * EXPERTS - 6
    assert half == EXPERTS
    assert [world.store.placement.slot(record) for record in range(first)] == [*range(first)][:12] + [NONE] * (first - 12)


@pytest.mark.parametrize("on_demand", [False, True])
def test_the_decode_set_comes_back(lent: Lent, driver: pager_base.ImmediateDriver, on_demand: bool) -> None:
    """Records whose slots were lent are resident again a few decode steps later."""
    world = world_of(8, on_demand=on_demand)
    lent.slots.need = ActivationNeed({LONG: 3 * STRIDE})

    def step() -> None:
        for layer in range(LAYERS):
            world.store.before_experts(layer, 1, torch.tensor([[0, 1, 2, 3]]) if layer < 2 else torch.tensor([[0, 0, 0, 0]]))
        world.store.between_passes()

    def resident() -> set[int]:
        return {record for slot in range(8) if (record := world.store._record_in(slot)) != NONE}

    for _ in range(4):
        step()
    before = resident()
    assert len(before) >= 7
    prefill(world, lent, LONG)
    assert max((slot for slot in range(8) if world.store._record_in(slot) != NONE), default=0) < lent.slots.usable < 6
    for _ in range(4):
        step()
    assert len(resident() & before) >= 6


def test_memory_that_somebody_else_took_is_waited_for(lent: Lent, caplog: pytest.LogCaptureFixture) -> None:
    """Fewer slots, one line about it, half of the reserve stays free; another try later, not in every step."""
    draw = random.Random(4)
    world = world_of(20)
    lent.slots.need = ActivationNeed({LONG: 10 * STRIDE})
    prefill(world, lent, LONG)
    lent.vram.empty_cache()
    lent.vram.free -= 6 * STRIDE
    for _ in range(5):
        world.decode(draw)
    fewer = lent.slots.usable
    assert 10 < fewer < 16
    assert lent.vram.free >= lent.reserve // 2
    assert all(slot < fewer for slot, _ in world.store.placement.residents())
    lines = [line for line in caplog.messages if "slots have memory" in line]
    assert lines == [f"{fewer} of 20 slots have memory: what is missing of it is in use elsewhere"]
    lent.slots.need = ActivationNeed({SHORT: STRIDE // 4, LONG: 10 * STRIDE})
    prefill(world, lent, SHORT)
    assert lent.slots.usable == fewer, "what is free is enough for it"
    lent.vram.empty_cache()
    lent.vram.free += 6 * STRIDE
    world.decode(draw)
    assert lent.slots.usable == fewer, "it is not tried in every step"
    lent.vram.now += slots_module.RETRY_S
    world.decode(draw)
    assert lent.slots.usable == 20
    assert caplog.messages[-1].startswith("20 of 20 slots have memory")


def test_a_driver_that_refuses_costs_slots_and_no_answer(lent: Lent, caplog: pytest.LogCaptureFixture) -> None:
    """It is told; passes go on with the slots that are left."""
    draw = random.Random(5)
    world = world_of(20)
    lent.slots.need = ActivationNeed({LONG: 10 * STRIDE})
    prefill(world, lent, LONG)
    lent.memory.refuse = True
    for _ in range(3):
        world.decode(draw, 8)
    assert lent.slots.usable < 10
    assert "slots that were lent do not come back: the GPU driver refuses" in caplog.text
    lent.memory.refuse, lent.vram.now = False, slots_module.RETRY_S
    world.decode(draw)
    assert lent.slots.usable == 20


def test_before_anything_is_measured_all_that_may_be_is_lent(lent: Lent) -> None:
    """A measuring pass must not run out of memory."""
    lent.most = 5 * STRIDE
    world = world_of(20)
    world.store.begin_prefill(LONG)
    assert 5 * STRIDE <= lent.memory.num_bytes - lent.memory.mapped_bytes <= 7 * STRIDE
    world.store.paused = True
    usable = lent.slots.usable
    world.store.begin_prefill(SHORT)
    assert lent.slots.usable == usable


def test_the_need_is_linear_between_measured_sizes() -> None:
    """Constant below the smallest, proportional above the largest; unknown without any."""
    need = ActivationNeed({1000: 300, 256: 100})
    assert [need.of(rows) for rows in (1, 256, 628, 1000, 2000)] == [100, 100, 200, 300, 600]
    assert ActivationNeed().of(8) is None


def test_slots_beyond_the_limit_get_no_record() -> None:
    """While they are free, and when one is asked for by name; a limit over a record is refused."""
    placement = Placement(12, 6, PlacementOptions(admit_after=1))
    placement.limit(2)
    picked = np.arange(5)
    placement.touch(picked)
    assert sorted(move.slot for move in placement.plan(picked)) == [0, 1]
    with pytest.raises(ValueError, match="slot 3 may not be used"):
        placement.put(9, 3)
    for wrong in (1, 7, -1):
        with pytest.raises(ValueError, match="slots from"):
            placement.limit(wrong)
    placement.limit(6)
    placement.put(9, 3)
