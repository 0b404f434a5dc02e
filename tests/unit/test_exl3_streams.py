"""The order of streams in staged prefills: kernels read the right bytes whichever stream is late, and need each of the waits for it."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch

from services.gpu_worker.backends.base import PassBrokenOff
from services.gpu_worker.backends.exl3 import between_steps, experts, staging
from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.patches import pointer_tables
from tests.support.late_streams import Device, Schedule, Stream, at_random, copies_early, copies_late
from tests.unit.test_exl3_experts import EXPERTS, PARTS, World, _memcmp

LAYERS = 7  # every part of the slots is used again, be there two or three
EXTREMES = {"late": copies_late, "early": copies_early}
SEEDS = 6


class LateWorld(World):
    """Kernels that read when their stream comes to them.

    Attributes:
        wrong: (layer, expert, part) that a kernel found other bytes in than were loaded.
    """

    def __init__(self, device: Device, num_slots: int, options: ExpertOptions) -> None:
        self.device, self.wrong = device, list[tuple[int, int, str]]()
        super().__init__(num_slots, options, LAYERS)
        # A record that an earlier pass left there would pass for one that arrived in time.
        self.store._slots.fill_(0xEE)

    def _compare(self, layer: int, expert: int, addresses: list[int]) -> None:
        want = self.records.pristine[layer * EXPERTS + expert].data_ptr()
        for address, (name, first, num_bytes) in zip(addresses, PARTS, strict=True):
            held = any(m.data_ptr() <= address <= m.data_ptr() + m.numel() - num_bytes for m in (self.records.host, self.store._slots))
            if not held or _memcmp(address, want + first, num_bytes):
                self.wrong.append((layer, expert, name))

    def read(self, layer: int, expert: int) -> None:
        self.device.current.give(lambda: self._compare(layer, expert, self.table[layer, :, expert].tolist()))

    def read_tensors(self, layer: int, expert: int) -> None:
        self.store.before_single_expert(layer, expert)
        mlp = self.layers[layer].mlp
        linears = {"gate": mlp.gates[expert].inner, "up": mlp.ups[expert].inner, "down": mlp.downs[expert].inner}
        # A kernel is launched with the addresses of the moment.
        addresses = [getattr(linears[projection], part).data_ptr() for projection, part in (row.split("_") for row in pointer_tables.ROWS)]
        self.device.current.give(lambda: self._compare(layer, expert, addresses))

    def decode(self, draw: random.Random, rows: int = 2) -> None:
        super().decode(draw, rows)
        # For the step's logits. Copies of experts go on.
        self.device.compute.synchronize()
        self.store.between_passes()

    def break_off(self, layer: int) -> None:
        """A prefill that ends inside a layer; nobody waits for what was launched."""
        self.store.begin_prefill(100)
        for index in range(layer + 1):
            self.store.before_experts(index, 100, None)
            for expert in range(EXPERTS):
                self.read(index, expert)
            if index < layer:
                self.store.after_experts(index)

    def cancel(self, layer: int, *, inside: bool) -> None:
        """A prefill that is not wanted any more when it comes to a layer, or to the second of its parts there."""
        wanted = True
        with self.store.breaking_off(lambda: not wanted), contextlib.suppress(PassBrokenOff):
            self.store.begin_prefill(100)
            for index in range(LAYERS):
                if index == layer and not inside:
                    wanted = False
                with self.store.part_follows():
                    self.store.before_experts(index, 100, None)
                    for expert in range(EXPERTS):
                        self.read(index, expert)
                    self.store.after_experts(index)
                wanted = index < layer
                self.store.before_experts(index, 40, None)
                for expert in range(EXPERTS):
                    self.read_tensors(index, expert)
                self.store.after_experts(index)
        assert self.store._staging.now is None


def wrong_reads(schedule: Schedule, parts: int, part: int, *, steps: int = 0) -> list[tuple[int, int, str]]:
    """What kernels of prefills, and of decode steps behind them, read wrong; the host waits for the device where the store does."""
    with pytest.MonkeyPatch.context() as patch:
        device, draw = Device(schedule), random.Random(parts)
        device.install(patch)
        for module in (between_steps, experts, staging):
            patch.setattr(module, "pinned_empty", lambda shape: torch.empty(shape, dtype=torch.int64))
        options = ExpertOptions(PlacementOptions(admit_after=1, max_admissions=3), stage_min_rows=9, stage_parts=parts)
        world = LateWorld(device, parts * part, options)
        world.prefill()
        world.prefill()
        for broken in (parts, LAYERS - 1):
            world.break_off(broken)
            world.prefill()
            world.cancel(broken, inside=False)
            world.cancel(broken, inside=True)
            world.prefill()
        for _ in range(steps):
            world.decode(draw, 8)
        world.prefill(layers=LAYERS - 1)
        for _ in range(steps):
            world.decode(draw)
        device.synchronize()
        stats = world.store.stats()
        assert stats["staged_passes"] == 13
        assert (stats["admissions"] > 0) == (steps > 0)
        return world.wrong


@pytest.mark.parametrize("part", [EXPERTS, EXPERTS // 2])
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("schedule", [*EXTREMES, *range(SEEDS)])
def test_kernels_read_the_right_bytes_whichever_stream_is_late(schedule: str | int, parts: int, part: int) -> None:
    """In staged prefills, in ones that follow one that broke off or was not wanted any more, and in decode steps behind them."""
    chosen = at_random(schedule) if isinstance(schedule, int) else EXTREMES[schedule]
    assert wrong_reads(chosen, parts, part, steps=4) == []


def leave_out(patch: pytest.MonkeyPatch, stream: str, method: str) -> None:
    """Streams of that name do not wait in that way any more."""
    stock: Any = getattr(Stream, method)
    patch.setattr(Stream, method, lambda self, other: None if self.name == stream else stock(self, other))


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    ("stream", "method", "schedule"),
    [("compute", "wait_event", "late"), ("copy", "wait_event", "early"), ("copy", "wait_stream", "early")],
    ids=["kernels wait for their records", "records wait for the kernels before", "the first records wait for the pass before"],
)
def test_each_wait_is_needed(monkeypatch: pytest.MonkeyPatch, stream: str, method: str, schedule: str, parts: int) -> None:
    """Left out it shows as wrong bytes: under the schedule that makes most of it, and under some drawn one."""
    leave_out(monkeypatch, stream, method)
    assert wrong_reads(EXTREMES[schedule], parts, EXPERTS) != []
    assert any(wrong_reads(at_random(seed), parts, EXPERTS) for seed in range(SEEDS))
