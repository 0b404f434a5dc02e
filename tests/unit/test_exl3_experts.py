"""The GPU's expert store over fake streams: the "device" is host memory, the "kernels" read bytes through the tables' addresses.

Here it is that every address is right. What streams do to the order of things is in test_exl3_streams.py, and on a GPU (tests/gpu,
bench/gpu_exact.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kernels.python.expert import ExpertShape
from services.gpu_worker.backends.base import BackendLostError, PassBrokenOff
from services.gpu_worker.backends.exl3 import between_steps, experts, staging
from services.gpu_worker.backends.exl3.experts import ExpertOptions, ExpertStore
from services.gpu_worker.backends.exl3.placement import NONE, PlacementOptions
from services.gpu_worker.backends.exl3.records import typed_part
from services.gpu_worker.patches import pointer_tables
from services.gpu_worker.patches.expert_load import MoeLayer, Place

LAYERS, EXPERTS, TOP_K = 3, 10, 4
SHAPE = ExpertShape.create(128, 128, 2)


def parts() -> list[tuple[str, int, int]]:
    """(row of the tables, its first byte in a record, its bytes)."""
    record = torch.empty(SHAPE.record_bytes, dtype=torch.uint8)
    found = [(name, typed_part(record, SHAPE, *name.split("_"))) for name in pointer_tables.ROWS]
    return [(name, part.data_ptr() - record.data_ptr(), part.nbytes) for name, part in found]


PARTS = parts()
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes, _memcmp.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int


class FakeEvent:
    """Done when the test says so."""

    done = True

    def record(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return FakeEvent.done

    def synchronize(self) -> None:
        pass


class FakeStream:
    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _other: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def host_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.done = True
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: setattr(FakeEvent, "done", True))
    for module in (between_steps, experts, staging):
        monkeypatch.setattr(module, "pinned_empty", lambda shape: torch.empty(shape, dtype=torch.int64))


class FakeRecords:
    """Random records in ordinary memory."""

    def __init__(self, num_layers: int = LAYERS) -> None:
        self.num_layers, self.num_experts = num_layers, EXPERTS
        self.num_records = num_layers * EXPERTS
        self.shapes = [SHAPE] * num_layers
        self.stride = SHAPE.record_bytes
        self.host = torch.randint(0, 255, (self.num_records, self.stride), dtype=torch.uint8)
        self.pristine = self.host.clone()
        self.num_bytes = self.host.numel()
        self.offsets = np.array([[getattr(shape, row) for row in pointer_tables.ROWS] for shape in self.shapes], np.int64)
        self.arena = types.SimpleNamespace(check=lambda layer, expert: True, rewrite=self._rewrite)

    def _rewrite(self, layer: int, expert: int, data: np.ndarray) -> None:
        assert FakeEvent.done, "a copy that still runs reads the record"
        self.host[layer * EXPERTS + expert] = torch.from_numpy(data)

    def damage(self, record: int) -> None:
        """Other bytes than were loaded."""
        self.host[record] ^= 0x5A

    def addresses(self, layer: int) -> np.ndarray:
        return self.host.data_ptr() + (layer * EXPERTS + np.arange(EXPERTS, dtype=np.int64)) * self.stride

    def view(self, place: Place, part: str) -> torch.Tensor:
        return typed_part(self.host[place.layer * EXPERTS + place.expert], self.shapes[place.layer], place.projection, part)


class World:
    """A store, and kernels that check what they read."""

    def __init__(self, num_slots: int, options: ExpertOptions, num_layers: int = LAYERS) -> None:
        self.records = FakeRecords(num_layers)
        self.table = torch.zeros(num_layers, len(pointer_tables.ROWS), EXPERTS, dtype=torch.int64)
        self.layers = []
        for layer in range(num_layers):
            linears = {p: [types.SimpleNamespace(inner=self._inner(layer, e, p)) for e in range(EXPERTS)] for p in ("gate", "up", "down")}
            mlp = types.SimpleNamespace(gates=linears["gate"], ups=linears["up"], downs=linears["down"])
            self.layers.append(MoeLayer(layer, mlp, EXPERTS))
        self.store = ExpertStore(self.records, self.table, self.layers, num_slots, TOP_K, options)  # type: ignore[arg-type]

    def _inner(self, layer: int, expert: int, projection: str) -> Any:
        return types.SimpleNamespace(
            **{part: self.records.view(Place(layer, expert, projection), part) for part in ("trellis", "suh", "svh")}
        )

    def read(self, layer: int, expert: int) -> None:
        """What a kernel reads through the tables is the record as it was loaded."""
        want = self.records.pristine[layer * EXPERTS + expert].data_ptr()
        for address, (name, first, num_bytes) in zip(self.table[layer, :, expert].tolist(), PARTS, strict=True):
            assert _memcmp(address, want + first, num_bytes) == 0, (layer, expert, name)

    def read_tensors(self, layer: int, expert: int) -> None:
        """The same for the paths that read tensors."""
        self.store.before_single_expert(layer, expert)
        want = self.records.pristine[layer * EXPERTS + expert]
        mlp = self.layers[layer].mlp
        for projection, linears in (("gate", mlp.gates), ("up", mlp.ups), ("down", mlp.downs)):
            for part in ("trellis", "suh", "svh"):
                assert torch.equal(
                    getattr(linears[expert].inner, part).view(torch.uint8), typed_part(want, SHAPE, projection, part).view(torch.uint8)
                )

    def decode(self, draw: random.Random, rows: int = 2) -> None:
        for layer in range(self.records.num_layers):
            sel = torch.tensor([draw.sample(range(EXPERTS), TOP_K) for _ in range(rows)])
            self.store.before_experts(layer, rows, sel)
            for expert in sel.unique().tolist():
                self.read(layer, expert)
            self.store.after_experts(layer)
        self.store.between_passes()

    def prefill(self, rows: int = 100, layers: int | None = None) -> None:
        self.store.begin_prefill(rows)
        for layer in range(self.records.num_layers if layers is None else layers):
            self.store.before_experts(layer, rows, None)
            for expert in range(EXPERTS):
                self.read(layer, expert)
                self.read_tensors(layer, expert)
            self.store.after_experts(layer)


SLOTS = (0, 1, 2, 7, 15, LAYERS * EXPERTS)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("num_slots", SLOTS)
def test_every_pass_reads_the_right_bytes(num_slots: int, parts: int) -> None:
    """Decode and prefill passes in any order, copies that are done at any time: tables and tensors always lead to the record."""
    draw = random.Random(num_slots)
    world = World(num_slots, ExpertOptions(PlacementOptions(admit_after=1, max_admissions=3), stage_min_rows=9, stage_parts=parts))
    for _ in range(60):
        FakeEvent.done = draw.random() < 0.6
        if draw.random() < 0.75:
            world.decode(draw, draw.randint(1, 8))
        else:
            # exllamav3's prefill may leave out the last layer.
            world.prefill(draw.choice((9, 100)), draw.choice((LAYERS, LAYERS - 1)))
    stats = world.store.stats()
    assert stats["decode_picks"] > 0
    assert (stats["admissions"] > 0) == (num_slots > 0)
    assert (stats["staged_passes"] > 0) == (num_slots >= parts)


def test_resident_records_are_never_read_on_the_host() -> None:
    """With every record resident and the host's bytes overwritten, decode, prefill and the tensor paths still read what was loaded."""
    world = World(LAYERS * EXPERTS, ExpertOptions())
    world.store.place(range(LAYERS * EXPERTS))
    world.records.host.fill_(0xFF)
    world.decode(random.Random(1))
    world.prefill()
    assert world.store.stats()["decode_hits"] == world.store.stats()["decode_picks"]


def scales_of(world: World) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Of every layer the tables of scales that its reconstruct path reads, which that path has made for itself when it is first asked."""
    found = []
    for layer in world.layers:
        mlp, rows = layer.mlp, dict(zip(pointer_tables.ROWS, world.table[layer.index], strict=True))
        for projection in ("gate", "up", "down"):
            tables = {f"ptrs_{part}": rows[f"{projection}_{part}"] for part in ("trellis", "suh", "svh")}
            setattr(mlp, f"multi_{projection}", types.SimpleNamespace(**tables))
        own = {p[0]: (rows[f"{p}_suh"].clone(), rows[f"{p}_svh"].clone()) for p in ("gate", "up", "down")}
        state = types.SimpleNamespace(folded=True, scale_ptrs=own)
        mlp.bc, mlp.support_quant_paths, mlp._batch_recon_layer = object(), True, lambda _probe, state=state: state
        found.append(own)
    return found


def test_reconstructed_experts_have_their_scales_from_where_their_records_are() -> None:
    """Resident, staged or on the host: the reconstruct path's tables of scales lead where the other kernels' lead, in every layer."""
    world = World(2 * EXPERTS, ExpertOptions(stage_min_rows=9))
    scales = scales_of(world)
    pointer_tables.share_reconstruct_scales(world.layers, lambda _mlp: None)
    scale_parts = [part for part in PARTS if not part[0].endswith("trellis")]
    low, high = world.store._slots.data_ptr(), world.store._slots.data_ptr() + world.store._slots.numel()

    def table_of(layer: int, name: str) -> torch.Tensor:
        return scales[layer][name[0]][name.endswith("svh")]

    def in_slots(layer: int) -> list[bool]:
        return [low <= int(address) < high for name, _, _ in scale_parts for address in table_of(layer, name)]

    def read(layer: int) -> None:
        for expert in range(EXPERTS):
            want = world.records.pristine[layer * EXPERTS + expert].data_ptr()
            for name, first, num_bytes in scale_parts:
                assert _memcmp(int(table_of(layer, name)[expert]), want + first, num_bytes) == 0, (layer, expert, name)

    world.store.place(range(2 * EXPERTS))
    world.records.host[: 2 * EXPERTS] ^= 0xFF
    assert [all(in_slots(layer)) for layer in range(LAYERS)] == [True, True, False]
    for layer in range(LAYERS):
        read(layer)
    world.records.host[: 2 * EXPERTS] ^= 0xFF
    world.store.begin_prefill(100)
    for layer in range(LAYERS):
        world.store.before_experts(layer, 100, None)
        assert all(in_slots(layer))
        read(layer)
        world.store.after_experts(layer)
        assert not any(in_slots(layer))
        read(layer)


def test_staged_layers_are_read_from_slots() -> None:
    """While a staged layer computes, what fits into its half is not read on the host."""
    world = World(2 * EXPERTS, ExpertOptions(stage_min_rows=9))
    world.store.begin_prefill(100)
    world.store.before_experts(0, 100, None)
    first, last = int(world.table[0].min()), int(world.table[0].max())
    slots = world.store._slots
    assert slots.data_ptr() <= first
    assert last < slots.data_ptr() + slots.numel()
    world.store.after_experts(0)
    host = world.records.host
    assert all(host.data_ptr() <= int(address) < host.data_ptr() + host.numel() for address in world.table[0].flatten())


def test_the_compute_stream_of_a_staged_pass_stands_behind_no_copy_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once records are on their way nothing else is copied from the host: it would queue behind them in the copy engine."""
    world = World(2 * EXPERTS, ExpertOptions(PlacementOptions(admit_after=1), stage_min_rows=9))
    on_copy_stream: list[bool] = []
    copies: list[tuple[bool, int]] = []
    stock = torch.Tensor.copy_

    @contextlib.contextmanager
    def stream(_stream: object) -> Iterator[None]:
        on_copy_stream.append(True)
        yield
        on_copy_stream.pop()

    def copy(self: torch.Tensor, source: torch.Tensor, **options: Any) -> torch.Tensor:
        copies.append((bool(on_copy_stream), len(source)))
        return stock(self, source, **options)

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    world.prefill()
    first = next(i for i, (aside, _) in enumerate(copies) if aside)
    assert first == 1, "the tables go ahead of the records"
    assert all(aside for aside, _ in copies[first:])
    assert max(count for aside, count in copies if aside) == staging.RUN


@pytest.mark.parametrize("parts", [2, 3])
def test_copies_run_as_many_layers_ahead_as_there_are_parts(parts: int) -> None:
    """Each layer's records land where those of `parts` layers before were, behind its kernels; none before that, none later."""
    world = World(parts * EXPERTS, ExpertOptions(stage_min_rows=9, stage_parts=parts))
    world.store.begin_prefill(100)
    staging = world.store._staging.now
    assert staging is not None
    assert staging.first == tuple(part * EXPERTS for part in range(parts))
    for layer in range(LAYERS):
        # The first one alone until the pass's own copies are through.
        assert staging.next_layer == (min(LAYERS, layer + parts) if layer else 1)
        world.store.before_experts(layer, 100, None)
        at = world.store._slots.data_ptr() + layer % parts * EXPERTS * world.records.stride
        assert [int(address) - at for address in world.table[layer, 0]] == [
            expert * world.records.stride + int(world.records.offsets[layer][0]) for expert in range(EXPERTS)
        ]
        world.store.after_experts(layer)


def test_halves_hold_what_lost_its_slot_to_them_too() -> None:
    """With room for two whole layers nothing is read on the host, however many records were resident when the pass began."""
    world = World(2 * EXPERTS, ExpertOptions(stage_min_rows=9))
    share = 2 * EXPERTS // LAYERS
    world.store.place(layer * EXPERTS + expert for layer in range(LAYERS) for expert in range(share))
    world.store.begin_prefill(100)
    slots = world.store._slots
    for layer in range(LAYERS):
        world.store.before_experts(layer, 100, None)
        assert slots.data_ptr() <= int(world.table[layer].min())
        assert int(world.table[layer].max()) < slots.data_ptr() + slots.numel()
        world.store.after_experts(layer)


@pytest.mark.parametrize("then", ["decode", "prefill"])
def test_a_pass_that_breaks_off_inside_a_layer_leaves_no_stale_address(then: str) -> None:
    """Whatever comes next, the broken layer's experts are read where they are."""
    draw = random.Random(3)
    world = World(12, ExpertOptions(PlacementOptions(admit_after=1), stage_min_rows=9))
    world.store.begin_prefill(100)
    world.store.before_experts(0, 100, None)
    world.store.after_experts(0)
    world.store.before_experts(1, 100, None)  # and its kernels fail
    if then == "prefill":
        world.prefill(9)
    for _ in range(4):
        world.decode(draw, 8)
    world.prefill()


@pytest.mark.parametrize("broken", range(LAYERS))
@pytest.mark.parametrize("inside", [False, True])
def test_a_prefill_that_is_not_wanted_any_more_ends_before_a_layer(broken: int, inside: bool) -> None:
    """Before its kernels, or those of a second part of the pass: tables lead to where records stay, and nothing more is staged."""
    world = World(2 * EXPERTS, ExpertOptions(PlacementOptions(admit_after=1), stage_min_rows=9))
    draw, wanted = random.Random(broken), [True]
    for _ in range(4):
        world.decode(draw, 8)
    steps = world.store.stats()["prefill_steps"]
    world.store.begin_prefill(100)
    with world.store.breaking_off(lambda: not wanted[0]):
        for layer in range(broken):
            world.store.before_experts(layer, 100, None)
            world.store.after_experts(layer)
        if inside:
            with world.store.part_follows():
                world.store.before_experts(broken, 100, None)
                world.store.after_experts(broken)
        staged, wanted[0] = world.store.stats()["bytes_staged"], False
        with pytest.raises(PassBrokenOff, match=f"before the experts of layer {broken}"):
            world.store.before_experts(broken, 40, None)
    assert world.store._staging.now is None
    assert world.store.stats()["prefill_steps"] - steps == broken + inside
    assert world.store.stats()["bytes_staged"] == staged
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            world.read(layer, expert)
            world.read_tensors(layer, expert)
    passes = world.store.stats()["staged_passes"]
    for layer in range(LAYERS):
        # Nobody announced it: it is a pass of its own all the same.
        world.store.before_experts(layer, 100, None)
        for expert in range(EXPERTS):
            world.read(layer, expert)
        world.store.after_experts(layer)
    assert world.store.stats()["staged_passes"] == passes + 1
    for _ in range(4):
        world.decode(draw, 8)
    world.prefill()


def test_only_prefills_ask_whether_they_are_wanted() -> None:
    """Rows that decode's kernels take do not, nor does anything outside of `breaking_off`."""
    world = World(2 * EXPERTS, ExpertOptions(stage_min_rows=9))
    with world.store.breaking_off(lambda: True):
        world.decode(random.Random(1), 8)
    world.prefill()


def break_off(world: World) -> int:
    """A staged pass whose kernels of layer 0 fail; returns the bytes that were staged for it until then."""
    world.store.begin_prefill(100)
    world.store.before_experts(0, 100, None)
    return int(world.store.stats()["bytes_staged"])


def test_nothing_more_is_staged_for_a_pass_that_broke_off() -> None:
    """The next decode step's records would stand behind a layer's that nobody reads."""
    world = World(LAYERS * EXPERTS // 2, ExpertOptions(stage_min_rows=9))
    staged = break_off(world)
    world.store.before_experts(0, 1, torch.tensor([[0, 1, 2, 3]]))
    assert world.store.stats()["bytes_staged"] == staged
    assert staged > 0


def test_records_that_are_placed_behind_a_pass_that_broke_off_leave_no_stale_address() -> None:
    """Every expert of the broken layer is read where it is, also when the slots of its staged copies hold other records."""
    world = World(LAYERS * EXPERTS // 2, ExpertOptions(stage_min_rows=9))
    break_off(world)
    world.store.place(range((LAYERS - 1) * EXPERTS, LAYERS * EXPERTS))
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            world.read(layer, expert)


def test_a_prefill_gives_the_decode_set_back() -> None:
    """Records that lent their slots to a staged prefill are resident again after a few decode steps, without being picked."""
    world = World(8, ExpertOptions(PlacementOptions(admit_after=1), stage_min_rows=9))
    for _ in range(3):
        for layer in range(LAYERS):
            world.store.before_experts(layer, 1, torch.tensor([[0, 1, 2, 3]]) if layer < 2 else torch.tensor([[9, 9, 9, 9]]))
        world.store.between_passes()
    before = {record for _, record in world.store.placement.residents()}
    assert len(before) == 8
    world.prefill()
    for _ in range(3):
        for layer in range(LAYERS):
            world.store.before_experts(layer, 1, torch.tensor([[9, 9, 9, 9]]))
        world.store.between_passes()
    after = {record for _, record in world.store.placement.residents()}
    assert len(after & before) >= 5


def test_a_warm_start_has_the_hottest_records_in_its_slots() -> None:
    """Those that an earlier run used most."""
    world = World(3, ExpertOptions())
    slow = np.zeros(LAYERS * EXPERTS, np.float32)
    slow[[4, 17, 22, 8]] = (0.5, 0.9, 0.8, 0.1)
    world.store.start_with(slow, np.zeros_like(slow))
    assert {record for _, record in world.store.placement.residents()} == {4, 17, 22}
    assert np.array_equal(world.store.read_heat()[0], slow)


def test_closing_points_everything_at_the_host() -> None:
    """So that the slots' memory can be given to somebody else."""
    world = World(12, ExpertOptions())
    world.store.place([0, 5, 29])
    world.read_tensors(2, 9)
    world.store.close()
    world.store._slots.fill_(0xEE)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            world.read(layer, expert)
    assert world.layers[2].mlp.ups[9].inner.trellis.data_ptr() == world.records.view(Place(2, 9, "up"), "trellis").data_ptr()


def test_a_damaged_slot_is_counted() -> None:
    """verify() compares each slot with its record, and each record with its checksum; what it finds adds up."""
    world = World(4, ExpertOptions())
    world.store.place([3, 4])
    assert world.store.stats()["checksum_failures"] == 0
    world.store._slots[1, 100] ^= 1
    report = world.store.verify()
    assert (report.records_checked, report.records_bad, report.slots_checked, report.slots_bad) == (LAYERS * EXPERTS, 0, 2, 1)
    assert world.store.stats()["checksum_failures"] == 1
    world.records.arena.check = lambda layer, expert: (layer, expert) not in {(0, 7), (1, 2)}
    assert world.store.verify().records_bad == 2
    assert world.store.stats()["checksum_failures"] == 4


def test_a_slot_that_cannot_be_read_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """verify() while the device hangs: the thread that asked gets an error."""
    monkeypatch.setattr(experts, "FETCH_S", 0.05)
    world = World(4, ExpertOptions())
    world.store.place([3])
    FakeEvent.done = False
    with pytest.raises(BackendLostError, match="slot 0 cannot be read"):
        world.store.verify()


def test_a_warm_up_leaves_the_cache_alone() -> None:
    """Its picks are random: they heat nothing and stage nothing."""
    world = World(15, ExpertOptions(PlacementOptions(admit_after=1), stage_min_rows=9))
    world.store.paused = True
    world.decode(random.Random(2))
    world.prefill()
    stats = world.store.stats()
    assert (stats["decode_picks"], stats["staged_passes"], stats["slots_used"]) == (0, 0, 0)
    assert world.store.placement.slot(0) == NONE


def repair_in_the_middle(world: World, draw: random.Random, *, landing: bool) -> None:
    """A record goes bad and is read and copied so, then repaired; every pass afterwards reads what was loaded.

    Args:
        landing: the last step's copies are still under way.
    """
    layer, expert = draw.randrange(LAYERS), draw.randrange(EXPERTS)
    record = layer * EXPERTS + expert
    pristine = world.records.pristine.clone()
    world.records.damage(record)
    # Until the repair the bad bytes are the record's, as a re-attached arena's are.
    world.records.pristine[record] = world.records.host[record]
    for _ in range(draw.randint(1, 4)):
        world.decode(draw, rows=8)
    if draw.random() < 0.5:
        world.prefill(layers=draw.randint(1, LAYERS))
    world.records.pristine = pristine
    FakeEvent.done = not landing
    world.store.repair(layer, expert, pristine[record].numpy())
    world.read(layer, expert)
    world.read_tensors(layer, expert)
    for step in range(6):
        world.decode(draw, rows=8)
        if step % 2:
            world.prefill()
    assert torch.equal(world.records.host, pristine)
    report = world.store.verify()
    assert (report.records_bad, report.slots_bad) == (0, 0)


@pytest.mark.parametrize("landing", [False, True])
@pytest.mark.parametrize("num_slots", [0, 1, 6, LAYERS * EXPERTS])
def test_a_repaired_record_is_read_by_the_next_pass(num_slots: int, landing: bool) -> None:
    """From its slot or in place, after decode steps and prefills; no copy of the bad bytes is left in a slot."""
    for seed in range(8):
        options = ExpertOptions(PlacementOptions(admit_after=1), stage_min_rows=9)
        repair_in_the_middle(World(num_slots, options), random.Random(seed), landing=landing)


def test_a_repair_ends_a_prefill_that_broke_off() -> None:
    """A pass that failed inside a staged layer left that layer's tables at staged copies."""
    world = World(6, ExpertOptions(stage_min_rows=9))
    world.records.damage(1)
    world.store.begin_prefill(100)
    world.store.before_experts(0, 100, None)
    assert world.store._staging.slot_of(0, 1) != NONE
    world.store.repair(0, 1, world.records.pristine[1].numpy())
    for expert in range(EXPERTS):
        world.read(0, expert)
        world.read_tensors(0, expert)


@pytest.mark.parametrize("held", [True, False])
def test_a_closed_store_lets_go_of_its_slots_without_the_garbage_collector(held: bool) -> None:
    """The next store's slots may not fit beside them: neither who holds the store nor a cycle may keep them. Without `held`, no close."""
    world = World(LAYERS * EXPERTS, ExpertOptions(stage_min_rows=9))
    world.store.place(range(LAYERS * EXPERTS))
    slots = StorageWeakRef(world.store._slots.untyped_storage())
    gc.disable()
    try:
        if held:
            world.read_tensors(0, 1)
            world.store.close()
        else:
            del world.store
        assert slots.expired()
    finally:
        gc.enable()
