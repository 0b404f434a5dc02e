"""`fast` in the expert store: exllamav3's call for a decode step runs ours, the shared expert stays stock's, prefills stay as they are.

The device is immediate, its kernels are the CPU's; tests/tier/test_fast_pager.py has slow streams and a real cpu_expert.
"""

from __future__ import annotations

import contextlib
import pathlib
import signal
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kernels.python import cuda_expert
from kernels.python.errors import TierTimeout
from kernels.python.expert import ExpertShape
from kernels.python.fast_pager import FastOptions, FastPager, Forced
from kernels.python.pager import PagerPolicy
from services.gpu_worker.backends.base import BackendLostError
from services.gpu_worker.backends.exl3 import fast
from services.gpu_worker.backends.exl3.experts import ExpertOptions, ExpertStore
from services.gpu_worker.backends.exl3.fast import FastSetup
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.metrics import TierCollector
from services.gpu_worker.patches import pointer_tables
from services.gpu_worker.patches.expert_load import MoeLayer
from tests.tier import conftest, harness
from tests.tier.fast_world import fp16_batch
from tests.tier.harness import EXPERTS, HIDDEN, LAYERS, TOP_K, Stage, bits_equal, cpu_expert, wait_until
from tests.tier.simulated_gpu import FastKernels, array
from tests.unit import test_exl3_experts as experts_base
from tests.unit import test_exl3_on_demand as pager_base

host_as_device = experts_base.host_as_device
driver = pager_base.driver
made, shm_dir = conftest.made, conftest.shm_dir


class ImmediateGpu:
    """Everything has happened when it is enqueued."""

    problems: list[str]

    def __init__(self) -> None:
        self.problems = []

    def enqueue(self, _stream: int, _kind: str, action: Any) -> int:
        action()
        return 0

    def fail(self) -> None:
        raise


class ArenaRecords:
    """The arena's records as `PinnedRecords` shows them."""

    def __init__(self, stage: Stage) -> None:
        arena = stage.arena
        self.arena, self.num_layers, self.num_experts = arena, LAYERS, EXPERTS
        self.num_records = LAYERS * EXPERTS
        self.shapes = [arena.shape(layer) for layer in range(LAYERS)]
        self.base = self.device_base = arena.record(0, 0).ctypes.data
        self.stride = arena.record(0, 1).ctypes.data - self.base
        self.num_bytes = self.num_records * self.stride
        self.host = torch.from_numpy(array(self.base, np.uint8, self.num_records, self.stride))
        self.offsets = np.array([[getattr(shape, row) for row in pointer_tables.ROWS] for shape in self.shapes], np.int64)

    def addresses(self, layer: int) -> Any:
        return self.base + (layer * EXPERTS + np.arange(EXPERTS, dtype=np.int64)) * self.stride

    def on_device(self, pinned: torch.Tensor) -> int:
        return pinned.data_ptr()


class World:
    """A store in `fast` and layers as exllamav3 built them."""

    def __init__(
        self, stage: Stage, num_slots: int, *, lane: bool, shared_inside: bool = True, hint_records: int = 0, timeout_ms: int = 60_000
    ) -> None:
        self.records = ArenaRecords(stage)
        self.table = torch.zeros(LAYERS, len(pointer_tables.ROWS), EXPERTS, dtype=torch.int64)
        self.out = torch.zeros(8, HIDDEN)
        self.shared = torch.zeros(8, HIDDEN)
        self.stock_weights: list[torch.Tensor] = []
        mlp = types.SimpleNamespace(experts_cfg=types.SimpleNamespace(out_bszn=self.out), bc_sh_exp=shared_inside)
        self.layers = [MoeLayer(layer, mlp, EXPERTS) for layer in range(LAYERS)]
        self.setup = FastSetup(stage.region if lane else None, FastOptions(job_timeout_ms=timeout_ms, heartbeat_timeout_ms=timeout_ms))
        policy = PagerPolicy(hint_records=hint_records)
        options = ExpertOptions(PlacementOptions(admit_after=1), stage_min_rows=9, pager=policy, fast=self.setup)
        self.store = ExpertStore(self.records, self.table, self.layers, num_slots, TOP_K, options)  # type: ignore[arg-type]
        self.steps = [self.store.decode_step(layer, self.stock) for layer in self.layers]
        self.oracle = harness.Oracle(stage.arena)
        self.rng = np.random.default_rng(5)

    def stock(self, y: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> None:
        """exllamav3's own call: with weights 0 the shared expert alone."""
        assert selected.shape == weights.shape
        self.stock_weights.append(weights)
        self.out[: len(y)] = self.shared[: len(y)]

    def decode(self) -> None:
        rows = int(self.rng.integers(1, 9))
        for layer, step in enumerate(self.steps):
            batch = fp16_batch(self.rng, rows, layer)
            y, weights = torch.from_numpy(batch.x).half(), torch.from_numpy(batch.weights).half()
            selected = torch.from_numpy(batch.sel)
            self.shared = torch.randn(8, HIDDEN)
            self.out.fill_(float("nan"))
            self.store.before_experts(layer, rows, selected)
            step(y, selected, weights)
            self.store.after_experts(layer)
            want = self.oracle(batch)
            if self.layers[0].mlp.bc_sh_exp:
                want = want + self.shared[:rows].numpy()
            assert bits_equal(self.out[:rows].numpy(), want)
        self.store.between_passes()


class FakeKernels:
    """A handle of the integer kernels."""

    made: list[ExpertShape]

    def __init__(self, shape: ExpertShape, max_picks: int, device: int) -> None:
        assert (max_picks, device) == (8 * TOP_K, 0)
        FakeKernels.made.append(shape)
        self.handle = len(FakeKernels.made)

    def close(self) -> None:
        self.handle = 0


@pytest.fixture(autouse=True)
def immediate(driver: pager_base.ImmediateDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device's libraries are replaced; the pager is the real one, and ends with the test."""
    FakeKernels.made = []
    pagers: weakref.WeakSet[FastPager] = weakref.WeakSet()  # any other must end before the memory that it works on

    def make_pager(*arguments: Any) -> FastPager:
        pager: FastPager = real(*arguments[:-1], driver=arguments[-1] or driver.table)
        pagers.add(pager)
        return pager

    kernels = FastKernels(ImmediateGpu(), FakeKernels.made)  # type: ignore[arg-type]
    real: Any = FastPager
    monkeypatch.setattr(fast, "CudaExperts", FakeKernels)
    monkeypatch.setattr(cuda_expert, "step_functions", lambda: kernels.functions)
    monkeypatch.setattr(fast, "FastPager", make_pager)
    monkeypatch.setattr(fast, "pinned", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(fast, "MappedRegion", lambda region, _records: types.SimpleNamespace(on_device=region.address, close=lambda: None))
    monkeypatch.setattr(
        fast,
        "FirstLaunches",
        lambda *_: types.SimpleNamespace(publish=lambda *_: None, run=lambda _: None, time=lambda *_: (3.0, 2.0)),
    )
    yield
    for pager in pagers:
        pager.close()


@pytest.mark.parametrize("shared_inside", [True, False])
def test_a_decode_step_has_the_reference_bits(made: Stage, shared_inside: bool) -> None:
    """Without a lane; the shared expert is added where stock's call has it inside, and stock is called with weights 0 for it alone."""
    world = World(made, 9, lane=False, shared_inside=shared_inside)
    for _ in range(12):
        world.decode()
    stats = world.store.stats()
    assert stats["mode"] == "fast"
    assert stats["decode_steps"] == 12 * LAYERS
    assert stats["picks"]["cpu"] == 0
    assert stats["lane"]["state"] == "OFF"
    assert world.store._fast.words() == (12 * LAYERS, 12 * LAYERS, 12 * LAYERS)  # type: ignore[union-attr]
    assert len(world.stock_weights) == (12 * LAYERS if shared_inside else 0)
    assert all(weights.count_nonzero() == 0 for weights in world.stock_weights)
    assert len(FakeKernels.made) == 2  # layers of one shape share their kernels
    world.store.close()


@pytest.mark.parametrize("shared_inside", [True, False])
def test_a_hint_follows_the_shared_expert(made: Stage, shared_inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind what runs while the host decides, before the step is finished; bits stay the reference's, and hints are counted."""
    world = World(made, 9, lane=False, shared_inside=shared_inside, hint_records=2)
    pager: Any = world.store._fast._pager  # type: ignore[union-attr]
    calls: list[Any] = []

    def noting(name: str, call: Any) -> Any:
        return lambda *arguments, **more: (calls.append((name, arguments[0])), call(*arguments, **more))[1]

    for name in ("publish", "hint", "finish"):
        monkeypatch.setattr(pager, name, noting(name, getattr(pager, name)))
    stock = world.stock
    monkeypatch.setattr(world, "stock", lambda *arguments: (calls.append("shared"), stock(*arguments))[1])
    world.steps = [world.store.decode_step(layer, world.stock) for layer in world.layers]
    ids = torch.zeros((8, EXPERTS), dtype=torch.int64)

    def early(layer: int, rows: int) -> torch.Tensor | None:
        calls.append("guess")
        ids[:rows] = torch.from_numpy(np.stack([world.rng.permutation(EXPERTS) for _ in range(rows)]))
        return ids[:rows] if layer + 1 < LAYERS else None

    world.store.hint_from(early)
    for _ in range(12):
        world.decode()
    expected: list[Any] = []
    for layer in range(LAYERS):
        expected += [("publish", layer), *(["shared"] if shared_inside else []), "guess"]
        expected += [*([("hint", layer + 1)] if layer + 1 < LAYERS else []), ("finish", layer)]
    assert calls == expected * 12
    stats = world.store.stats()
    assert stats["hint_records_named"] > 0
    assert (stats["mode"], stats["decode_steps"]) == ("fast", 12 * LAYERS)
    world.store.close()


def test_layer_by_layer_a_step_is_answered_behind_its_second_half(made: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for every layer, when all of it is enqueued; not where nobody wants it."""
    world = World(made, 9, lane=False)
    pager: Any = world.store._fast._pager  # type: ignore[union-attr]
    calls: list[str] = []
    for name in ("publish", "finish", "catch_up"):
        real = getattr(pager, name)
        monkeypatch.setattr(pager, name, lambda *a, real=real, name=name, **k: (calls.append(name), real(*a, **k))[1], raising=False)
    world.store.layer_by_layer(True)
    world.decode()
    assert calls == ["publish", "finish", "catch_up"] * LAYERS
    world.store.layer_by_layer(False)
    world.decode()
    assert calls[3 * LAYERS :] == ["publish", "finish"] * LAYERS
    world.store.close()


@pytest.mark.parametrize("call", ["publish", "finish", "catch_up"])
def test_a_step_that_the_device_does_not_take_loses_the_backend(made: Stage, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Whichever call it is: a refusal, or a device that the host would have waited for in vain. Further passes would wait as long."""
    world = World(made, 9, lane=False)
    world.store.layer_by_layer(True)

    def fail(*_: Any, **__: Any) -> None:
        raise TierTimeout("the device did not come")

    with monkeypatch.context() as patch:
        patch.setattr(world.store._fast._pager, call, fail, raising=False)  # type: ignore[union-attr]
        with pytest.raises(BackendLostError, match="the device did not come"):
            world.decode()
    world.store.close()


def test_the_cpu_lane_computes_picks_and_leaves_no_segment(made: Stage) -> None:
    """A real cpu_expert, random placements; at its end the store takes the control region with it."""
    with cpu_expert(made):
        world = World(made, 9, lane=True)
        steps = world.store._fast
        assert steps is not None
        assert wait_until(lambda: steps.lane_up, 60)
        steps.force(Forced.RANDOM, 3)
        for _ in range(15):
            world.decode()
        stats = world.store.stats()
        assert stats["picks"]["cpu"] > 0
        assert stats["cpu_expert_bytes"] > 0
        world.store.close()
    assert not pathlib.Path(made.ctl_path).exists()
    made.region = type(made.region).create(made.ctl_path, made.arena, top_k=TOP_K)  # for the fixture's end


def decode_until(world: World, done: Callable[[], bool], what: str) -> None:
    """Steps with the reference's bits until done() is true."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, what
        world.decode()


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_gpu_worker_tells_when_its_cpu_lane_is_down(made: Stage, fault: str) -> None:
    """In /stats and in /metrics, with jobs given up; a step has the same bits meanwhile, and both tell when the lane is back."""

    def exported(name: str) -> float:
        families = TierCollector(world.store.stats).collect()
        return next(sample.value for family in families for sample in family.samples if sample.name == name)

    def told() -> tuple[float, str]:
        return exported("glm53_cpu_lane_up"), world.store.stats()["lane"]["state"]

    def serves() -> None:
        decode_until(world, lambda: told() == (1.0, "UP"), "the lane is up")
        before = exported("glm53_cpu_expert_bytes_total")
        decode_until(world, lambda: exported("glm53_cpu_expert_bytes_total") > before, "jobs are served")

    with contextlib.ExitStack() as servers:
        server = servers.enter_context(cpu_expert(made))
        world = World(made, 9, lane=True, timeout_ms=400)
        world.store._fast.force(Forced.ALL_LANE)  # type: ignore[union-attr]
        serves()
        if fault == "killed":
            server.kill()
        else:
            server.signal(signal.SIGSTOP)
        decode_until(world, lambda: told() == (0.0, "DOWN"), "the lane is down")
        assert exported("glm53_cpu_lane_aborts_total") >= 1
        if fault == "killed":
            servers.enter_context(cpu_expert(made))
        else:
            server.signal(signal.SIGCONT)
        serves()
        world.store.close()
    made.region = type(made.region).create(made.ctl_path, made.arena, top_k=TOP_K)  # for the fixture's end


def test_a_prefill_between_decode_steps_finds_every_address(made: Stage) -> None:
    """Slots are lent and given back, tables are whole for stock's kernels, and the next step decodes on."""
    world = World(made, 9, lane=False)
    for _ in range(4):
        world.decode()
        world.store.begin_prefill(100)
        for layer in range(LAYERS):
            world.store.before_experts(layer, 100, None)
            for expert in range(EXPERTS):
                record = world.records.host[layer * EXPERTS + expert].numpy()
                for row, name in enumerate(pointer_tables.ROWS):
                    start = int(getattr(world.records.shapes[layer], name))
                    assert array(int(world.table[layer, row, expert]), np.uint8, 64).tobytes() == record[start : start + 64].tobytes()
            world.store.after_experts(layer)
    world.decode()
    world.store.close()


def test_arguments_that_the_kernels_do_not_read_are_refused_by_name(made: Stage) -> None:
    """Another type, another width, a view with gaps."""
    world = World(made, 4, lane=False)
    y, selected, weights = torch.zeros(2, HIDDEN).half(), torch.zeros(2, TOP_K, dtype=torch.int64), torch.zeros(2, TOP_K).half()
    for name, bad in (
        ("y", (y.float(), selected, weights)),
        ("selected", (y, selected.int(), weights)),
        ("weights", (y, selected, weights.float())),
        ("weights", (y, selected, torch.zeros(2, 2 * TOP_K).half()[:, ::2])),
    ):
        with pytest.raises(ValueError, match=f"{name} is torch"):
            world.steps[0](*bad)
    world.store.close()


def test_kernels_that_are_not_built_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without nvcc there is no library, and a start says so instead of failing."""
    monkeypatch.setattr(fast.cuda_expert, "is_built", lambda: False)
    assert "`make kernels` builds it where nvcc is" in fast.why_not([ExpertShape.create(256, 128, (3, 3, 4))], "90")


@pytest.mark.skipif(not fast.cuda_expert.is_built(), reason="libglm53_cuda.so is not built: no nvcc")
def test_why_the_kernels_cannot_run_is_said() -> None:
    """Codebook, bits, architecture: each by name; nothing when they can."""
    good = ExpertShape.create(256, 128, (3, 3, 4))
    built = fast.cuda_expert.architectures()
    assert fast.why_not([good, good], built[-1]) == ""
    assert "layer 1: k_down = 5" in fast.why_not([good, ExpertShape.create(256, 128, (3, 3, 5))], built[-1])
    assert f"compute capabilities {', '.join(built)}, this GPU has 75" in fast.why_not([good], "75")


def test_a_repaired_record_is_computed_from_by_the_next_step(made: Stage) -> None:
    """Records that were bad when they were copied into slots: after their repair every step has the bits of the whole arena."""
    world = World(made, 9, lane=False)
    whole = world.oracle
    records = [(layer, expert) for layer in range(LAYERS) for expert in range(0, EXPERTS, 2)]
    pristine = {record: made.arena.record(*record).copy() for record in records}
    for layer, expert in records:
        start = int(world.records.shapes[layer].gate_trellis)
        world.records.host[layer * EXPERTS + expert, start : start + 512] ^= 0x5A
    world.oracle = harness.Oracle(made.arena)
    for _ in range(6):
        world.decode()
    assert any(world.store._record_in(slot) % 2 == 0 for slot in range(9))
    for (layer, expert), data in pristine.items():
        world.store.repair(layer, expert, data)
        assert made.arena.check(layer, expert)
    world.oracle = whole
    for _ in range(6):
        world.decode()
    report = world.store.verify()
    assert (report.records_bad, report.slots_bad) == (0, 0)
    world.store.close()
