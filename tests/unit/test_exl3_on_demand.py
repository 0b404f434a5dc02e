"""The expert store with the device pager behind it: staged prefills and decode steps share the slots, and every address stays right.

The driver is immediate here, so that torch's own copies keep their order with the pager's; tests/tier/test_pager.py has the slow streams.
"""

from __future__ import annotations

import ctypes
import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from kernels.python.pager import PagerDriver, PagerPolicy
from services.gpu_worker.backends.base import BackendLostError
from services.gpu_worker.backends.exl3 import on_demand
from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.backends.exl3.placement import NONE
from tests.unit import test_exl3_experts as base
from tests.unit.test_exl3_experts import EXPERTS, LAYERS

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
def driver(monkeypatch: pytest.MonkeyPatch) -> ImmediateDriver:
    driver = ImmediateDriver()
    monkeypatch.setattr(base.FakeStream, "cuda_stream", 1, raising=False)
    monkeypatch.setattr(base.FakeStream, "synchronize", lambda _self: None, raising=False)
    monkeypatch.setattr(on_demand, "pinned_empty", lambda shape: torch.empty(shape, dtype=torch.int64))
    monkeypatch.setattr(on_demand, "Pager", lambda layout, offsets, policy: real_pager(layout, offsets, policy, driver.table))
    monkeypatch.setattr(base.FakeRecords, "base", property(lambda self: self.host.data_ptr()), raising=False)
    monkeypatch.setattr(base.FakeRecords, "device_base", property(lambda self: self.host.data_ptr()), raising=False)
    monkeypatch.setattr(base.FakeRecords, "on_device", lambda _self, pinned: pinned.data_ptr(), raising=False)
    return driver


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
    """All but the transit slots are filled."""
    world = make(16)
    slow = np.linspace(1, 0, LAYERS * EXPERTS, dtype=np.float32)
    world.store.start_with(slow, np.zeros_like(slow))
    assert set(np.flatnonzero(world.store._where.ravel() != NONE)) == set(range(14))
    assert np.array_equal(world.store.read_heat()[0], slow)


def test_a_failed_copy_loses_the_backend_at_the_step_s_end(driver: ImmediateDriver) -> None:
    """The step itself ends; its result is not used."""
    world = make(9)
    driver.refuse_copies = True
    sel = torch.tensor([[0, 1, 2, 3]])
    world.store.before_experts(0, 1, sel)
    with pytest.raises(BackendLostError, match="a copy to the GPU failed"):
        world.store.between_passes()


@pytest.mark.parametrize("num_slots", [1, 9, 20, LAYERS * EXPERTS])
def test_a_repaired_record_is_read_by_the_next_pass(driver: ImmediateDriver, num_slots: int) -> None:
    """From its slot, passing through one, or in place; no copy of the bad bytes is left in a slot."""
    for seed in range(8):
        world = make(num_slots)
        base.repair_in_the_middle(world, random.Random(seed), landing=False)
        world.store.close()
