"""The expert store with the device pager behind it: staged prefills and decode steps share the slots, and every address stays right.

The driver is immediate here, so that torch's own copies keep their order with the pager's; tests/tier/test_pager.py has the slow streams.
"""

from __future__ import annotations

import ctypes
import random
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kernels.python.errors import TierTimeout
from kernels.python.pager import PagerDriver, PagerPolicy
from services.gpu_worker.backends.base import BackendLostError
from services.gpu_worker.backends.exl3 import on_demand
from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.backends.exl3.placement import NONE
from tests.unit import test_exl3_experts as base
from tests.unit.test_exl3_experts import EXPERTS, LAYERS, TOP_K

host_as_device = base.host_as_device
DEADLINE_S = 10.0


class ImmediateDriver:
    """Every call has happened when it returns; a wait returns when its word is there."""

    def __init__(self) -> None:
        self.refuse_copies = False
        self.table = PagerDriver(
            PagerDriver.CONTEXT_GET(lambda _out: 0),
            PagerDriver.CONTEXT_SET(lambda _context: 0),
            PagerDriver.COPY_TO_HOST(lambda to, source, size, _stream: self._move(to, source, size)),
            PagerDriver.COPY_TO_DEVICE(lambda to, source, size, _stream: 700 if self.refuse_copies else self._move(to, source, size)),
            PagerDriver.WORD(self._write),
            PagerDriver.WORD(self._wait),
        )

    @staticmethod
    def _move(to: int, source: int, size: int) -> int:
        ctypes.memmove(to, source, size)
        return 0

    @staticmethod
    def _write(_stream: int, address: int, value: int, _flags: int) -> int:
        ctypes.c_uint32.from_address(address).value = value
        return 0

    @staticmethod
    def _wait(_stream: int, address: int, value: int, _flags: int) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while ctypes.c_uint32.from_address(address).value < value:
            if time.monotonic() > deadline:
                return 702
            time.sleep(0.0001)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImmediateDriver]:
    """Ends every pager over it: a store that its test did not close lives on in cycles, and its pager's thread with it."""
    driver = ImmediateDriver()
    made: weakref.WeakSet[Any] = weakref.WeakSet()  # any other must end before the memory that it works on

    def make_pager(layout: Any, offsets: Any, policy: Any, own: Any) -> Any:
        pager = real_pager(layout, offsets, policy, own or driver.table)  # a gather's driver is the test's own too
        made.add(pager)
        return pager

    monkeypatch.setattr(base.FakeStream, "cuda_stream", 1, raising=False)
    monkeypatch.setattr(base.FakeStream, "synchronize", lambda _self: None, raising=False)
    monkeypatch.setattr(on_demand, "pinned_empty", lambda shape: torch.empty(shape, dtype=torch.int64))
    monkeypatch.setattr(on_demand, "Pager", make_pager)
    monkeypatch.setattr(base.FakeRecords, "base", property(lambda self: self.host.data_ptr()), raising=False)
    monkeypatch.setattr(base.FakeRecords, "device_base", property(lambda self: self.host.data_ptr()), raising=False)
    monkeypatch.setattr(base.FakeRecords, "on_device", lambda _self, pinned: pinned.data_ptr(), raising=False)
    yield driver
    for pager in made:
        pager.close()


real_pager: Any = on_demand.Pager


def make(num_slots: int) -> base.World:
    return base.World(num_slots, ExpertOptions(on_demand=True, stage_min_rows=9, pager=PagerPolicy(max_copies=6)))


@pytest.mark.parametrize("num_slots", [1, 3, 9, 20, LAYERS * EXPERTS])
def test_every_pass_reads_the_right_bytes(driver: ImmediateDriver, num_slots: int) -> None:
    """Decode steps and prefills of any length in any order."""
    draw = random.Random(num_slots)
    world = make(num_slots)
    for _ in range(50):
        if draw.random() < 0.7:
            world.decode(draw, draw.randint(1, 8))
        else:
            world.prefill(draw.choice((9, 100)), draw.choice((LAYERS, LAYERS - 1)))
    stats = world.store.stats()
    assert stats["admissions"] > 0
    assert stats["decode_hits"] > 0
    report = world.store.verify()
    assert (report.records_bad, report.slots_bad) == (0, 0)
    assert report.slots_checked == stats["slots_used"]
    world.store.close()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            world.read(layer, expert)


def test_a_damaged_slot_is_counted(driver: ImmediateDriver) -> None:
    """As without a pager: what verify() finds bad is in the counters."""
    world = make(9)
    for _ in range(8):
        world.decode(random.Random(7), 8)
    held = next(slot for slot in range(9) if world.store._record_in(slot) != NONE)
    assert world.store.stats()["checksum_failures"] == 0
    world.store._slots[held, 100] ^= 1
    world.records.arena.check = lambda layer, expert: (layer, expert) != (2, 3)
    report = world.store.verify()
    assert (report.records_bad, report.slots_bad) == (1, 1)
    assert world.store.stats()["checksum_failures"] == 2
    world.store.close()


def test_placed_records_are_hits(driver: ImmediateDriver) -> None:
    """With every record placed and the host's bytes overwritten, all passes read what was loaded."""
    world = make(LAYERS * EXPERTS)
    placed = range(LAYERS * EXPERTS - min(on_demand.TRANSIT_SLOTS, LAYERS * EXPERTS // 8))
    world.store.place(placed)
    world.records.host[list(placed)] = 0xFF
    for _ in range(3):
        layer = 0
        sel = torch.tensor([[0, 1, 2, 3]])
        world.store.before_experts(layer, 1, sel)
        for expert in range(4):
            world.read(layer, expert)
        world.store.after_experts(layer)
    assert world.store.stats()["decode_hits"] == 12
    assert (world.store._where.ravel()[list(placed)] != NONE).all()


def test_a_warm_start_has_the_hottest_records_in_its_slots(driver: ImmediateDriver) -> None:
    """All but the transit slot are filled."""
    world = make(16)
    slow = np.linspace(1, 0, LAYERS * EXPERTS, dtype=np.float32)
    world.store.start_with(slow, np.zeros_like(slow))
    assert set(np.flatnonzero(world.store._where.ravel() != NONE)) == set(range(15))
    assert np.array_equal(world.store.read_heat()[0], slow)


def test_a_failed_copy_loses_the_backend_at_the_step_s_end(driver: ImmediateDriver) -> None:
    """The step itself ends; its result is not used."""
    world = make(9)
    driver.refuse_copies = True
    sel = torch.tensor([[0, 1, 2, 3]])
    world.store.before_experts(0, 1, sel)
    with pytest.raises(BackendLostError, match="a copy to the GPU failed"):
        world.store.between_passes()


def guesses(world: base.World, draw: random.Random, right: float) -> list[torch.Tensor]:
    """Lets the store hint what `World.decode` is about to pick, each id right with that probability; keeps what was handed over."""
    kept: list[torch.Tensor] = []

    def early(layer: int, rows: int) -> torch.Tensor | None:
        if layer == LAYERS - 1:
            return None
        state = draw.getstate()
        next_picks = [draw.sample(range(EXPERTS), TOP_K) for _ in range(rows)]
        draw.setstate(state)
        noise = random.Random(len(kept))
        ids = [[pick if noise.random() < right else noise.randrange(-1, EXPERTS + 1) for pick in row] for row in next_picks]
        kept.append(torch.tensor(ids, dtype=torch.int64))
        return kept[-1]

    world.store.hint_from(early)
    return kept


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_slots", [3, 9, 20])
def test_hints_leave_every_pass_the_right_bytes(driver: ImmediateDriver, num_slots: int, right: float) -> None:
    """Whatever is guessed, ids that are no expert's among it; what came ahead and was picked is counted."""
    draw = random.Random(num_slots)
    policy = PagerPolicy(max_copies=6, hint_records=2, hint_chunk=base.SHAPE.record_bytes // 3)
    world = base.World(num_slots, ExpertOptions(on_demand=True, stage_min_rows=9, pager=policy))
    kept = guesses(world, draw, right)
    launched = world.store.after_experts
    world.store.after_experts = lambda layer: (launched(layer), time.sleep(0.001))[0]  # type: ignore[method-assign,func-returns-value]
    for _ in range(40):
        if draw.random() < 0.8:
            world.decode(draw, draw.randint(1, 8))
        else:
            world.prefill(draw.choice((9, 100)), draw.choice((LAYERS, LAYERS - 1)))
    assert len(kept) > 40
    stats = world.store.stats()
    ended = stats["hint_records_used"] + stats["hint_records_late"] + stats["hint_records_dropped"]
    assert ended == stats["hint_records_started"] <= stats["hint_records_named"]
    assert (right == 0.0 or num_slots < 9) or stats["hint_records_used"] > 0
    report = world.store.verify()
    assert (report.records_bad, report.slots_bad) == (0, 0)
    world.store.close()


class CallsOnly:
    """A pager that notes what it is asked for."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._calls.append((name, *arguments))


def test_a_hint_stands_between_the_halves_of_a_step(driver: ImmediateDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """ask, the guess's kernels, the hint for the layer after, wait; without a guess no hint, and the device waits even where one fails."""
    calls: list[Any] = []
    monkeypatch.setattr(on_demand, "Pager", lambda layout, offsets, policy, driver: CallsOnly(calls))
    world = base.World(9, ExpertOptions(on_demand=True, pager=PagerPolicy(hint_records=2)))
    picks, ids = torch.tensor([[0, 1, 2, 3]] * 2), torch.zeros((2, 6), dtype=torch.int64)

    def early(layer: int, rows: int) -> torch.Tensor | None:
        calls.append(("guess", layer, rows))
        if layer == 1:
            raise RuntimeError("a kernel failed")
        return ids if layer == 0 else None

    world.store.before_experts(0, 2, picks)
    world.store.hint_from(early)
    world.store.before_experts(0, 2, picks)
    world.store.before_experts(2, 2, picks)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        world.store.before_experts(1, 2, picks)
    at = picks.data_ptr()
    assert calls == [
        ("step", 0, 2, at, 1),
        *(("ask", 0, 2, at, 1), ("guess", 0, 2), ("hint", 1, 2, ids.data_ptr(), 6, 1), ("wait", 1)),
        *(("ask", 2, 2, at, 1), ("guess", 2, 2), ("wait", 1)),
        *(("ask", 1, 2, at, 1), ("guess", 1, 2), ("wait", 1)),
    ]


def test_layer_by_layer_every_step_is_answered_before_the_next_call(driver: ImmediateDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the wait, for as long as it is wanted; a device that does not come is a lost one."""
    calls: list[Any] = []
    monkeypatch.setattr(on_demand, "Pager", lambda layout, offsets, policy, driver: CallsOnly(calls))
    world = base.World(9, ExpertOptions(on_demand=True, pager=PagerPolicy(hint_records=2)))
    picks = torch.tensor([[0, 1, 2, 3]])
    world.store.layer_by_layer(True)
    world.store.before_experts(0, 1, picks)
    world.store.hint_from(lambda _layer, _rows: None)
    world.store.before_experts(1, 1, picks)
    world.store.layer_by_layer(False)
    world.store.before_experts(2, 1, picks)
    assert [call[0] for call in calls] == ["step", "catch_up", "ask", "wait", "catch_up", "ask", "wait"]

    def late() -> None:
        raise TierTimeout("the device did not come")

    world.store.layer_by_layer(True)
    monkeypatch.setattr(world.store._on_demand._pager, "catch_up", late, raising=False)  # type: ignore[union-attr]
    with pytest.raises(BackendLostError, match="the device did not come"):
        world.store.before_experts(0, 1, picks)


@pytest.mark.parametrize("call", ["step", "ask", "wait", "hint"])
def test_a_step_that_the_device_does_not_take_loses_the_backend(
    driver: ImmediateDriver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whichever call it is: a refusal, or a device that the host would have waited for in vain. Further passes would wait as long."""
    monkeypatch.setattr(on_demand, "Pager", lambda layout, offsets, policy, driver: CallsOnly([]))
    world = base.World(9, ExpertOptions(on_demand=True, pager=PagerPolicy(hint_records=2)))
    if call != "step":
        world.store.hint_from(lambda _layer, _rows: torch.zeros(1, 4, dtype=torch.int64))

    def fail(*_: Any) -> None:
        raise TierTimeout("the device did not come")

    monkeypatch.setattr(world.store._on_demand._pager, call, fail, raising=False)  # type: ignore[union-attr]
    with pytest.raises(BackendLostError, match="the device did not come"):
        world.store.before_experts(0, 1, torch.tensor([[0, 1, 2, 3]]))


def test_a_store_that_can_use_no_hints_refuses_them(driver: ImmediateDriver) -> None:
    """Without a pager, and where its policy brings nothing ahead; no counters of hints are told then."""
    for options in (ExpertOptions(), ExpertOptions(on_demand=True)):
        world = base.World(9, options)
        with pytest.raises(ValueError, match="hint"):
            world.store.hint_from(lambda _layer, _rows: None)
        assert not [name for name in world.store.stats() if name.startswith("hint_")]


@pytest.mark.parametrize("num_slots", [1, 9, 20, LAYERS * EXPERTS])
def test_a_repaired_record_is_read_by_the_next_pass(driver: ImmediateDriver, num_slots: int) -> None:
    """From its slot, passing through one, or in place; no copy of the bad bytes is left in a slot."""
    for seed in range(8):
        world = make(num_slots)
        base.repair_in_the_middle(world, random.Random(seed), landing=False)
        world.store.close()
