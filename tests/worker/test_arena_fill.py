"""Filling the arena: every byte in its place from any number of threads, bounded memory, and an end of all threads whatever happens."""

from __future__ import annotations

import json
import mmap
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench import slice_checkpoint
from kernels.python.arena import Arena
from kernels.python.expert import ExpertShape
from services.common.errors import Cancelled, CheckpointError
from services.gpu_worker.backends import arena_fill, cpu, cpu_arena
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.pace import Pace, span
from services.gpu_worker.safetensors_files import TensorReader
from services.gpu_worker.settings import GpuWorkerSettings
from tests.support import random_checkpoint
from tests.support.random_checkpoint import Recipe


def no_progress(_fraction: float, _words: str) -> None:
    pass


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two MoE layers of eight experts in three files."""
    return Checkpoint(random_checkpoint.write(tmp_path_factory.mktemp("fill") / "model", Recipe(num_layers=3, num_experts=8, num_files=3)))


class FakeArena:
    """Records in plain memory, full of a pattern; optionally one that nobody gets past."""

    def __init__(self, shapes: list[ExpertShape], experts: int) -> None:
        self.records = [np.full((experts, shape.record_bytes), 0xAA, np.uint8) for shape in shapes]
        self.finished: list[tuple[int, int]] = []
        self.hold: Callable[[], None] = lambda: None

    def record(self, layer: int, expert: int) -> NDArray[np.uint8]:
        self.hold()
        return self.records[layer][expert]

    def finish(self, layer: int, first_expert: int = 0, count: int | None = None) -> None:
        assert count == 1
        self.finished.append((layer, first_expert))


def made(checkpoint: Checkpoint) -> tuple[list[ExpertShape], FakeArena]:
    shapes = cpu_arena.expert_shapes(checkpoint)
    return shapes, FakeArena(shapes, checkpoint.config.n_routed_experts)


def expected(checkpoint: Checkpoint, shape: ExpertShape, layer: int, expert: int) -> NDArray[np.uint8]:
    record = np.zeros(shape.record_bytes, np.uint8)
    for part, name in checkpoint.expert_tensors(layer, expert):
        raw = checkpoint.files.raw(name)
        record[getattr(shape, part) : getattr(shape, part) + raw.size] = raw
    return record


def fill_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fill-")]


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("keep_cached", [True, False])
def test_every_record_has_its_tensors(small: Checkpoint, threads: int, keep_cached: bool) -> None:
    """Whatever the number of threads: tensors at their offsets, zeros between, one checksum for each record, words up to the end."""
    shapes, arena = made(small)
    said: list[tuple[float, str]] = []
    arena_fill.fill(small, shapes, arena, lambda f, words: said.append((f, words)), threads=threads, keep_cached=keep_cached)
    for index, layer in enumerate(small.config.moe_layers):
        for expert in range(small.config.n_routed_experts):
            assert np.array_equal(arena.records[index][expert], expected(small, shapes[index], layer, expert)), (layer, expert)
    assert sorted(arena.finished) == [(layer, expert) for layer in range(len(shapes)) for expert in range(8)]
    assert said[0][0] == 0
    assert said[-1][0] == 1
    assert [f for f, _ in said] == sorted(f for f, _ in said)
    assert fill_threads() == []


def test_the_first_error_ends_every_thread(tmp_path: pathlib.Path) -> None:
    """A file that is cut short while it is read is named with the tensor; nobody goes on reading."""
    checkpoint = Checkpoint(random_checkpoint.write(tmp_path / "model", Recipe(num_layers=3, num_experts=8)))
    shapes, arena = made(checkpoint)
    os.truncate(tmp_path / "model" / "model.safetensors", 200_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: tensor .*experts"):
        arena_fill.fill(checkpoint, shapes, arena, no_progress, threads=4)
    assert fill_threads() == []


def test_an_error_of_the_disk_names_tensor_and_file(small: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says about a failed read is passed on."""

    def broken(*_args: Any) -> int:
        raise OSError(5, "Input/output error")

    shapes, arena = made(small)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match=r"tensor model\.language.* in .*safetensors cannot be read: Input/output error"):
        arena_fill.fill(small, shapes, arena, no_progress, threads=2)


def test_a_read_may_come_in_pieces(small: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give less than it was asked for."""
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:1000]], at))
    name = next(name for _, name in small.expert_tensors(1, 0))
    out = np.zeros(small.files.entry(name).num_bytes, np.uint8)
    with TensorReader(small.files) as reader:
        reader.into(name, out)
        with pytest.raises(ValueError, match="there is room for 3"):
            reader.into(name, out[:3])
    assert np.array_equal(out, small.files.raw(name))


def test_telling_it_to_stop_stops_the_threads(small: Checkpoint) -> None:
    """What the progress raises comes out, after every thread has ended."""
    shapes, arena = made(small)

    def stop(_fraction: float, _words: str) -> None:
        raise Cancelled("told to stop")

    with pytest.raises(Cancelled):
        arena_fill.fill(small, shapes, arena, stop, threads=2)
    assert fill_threads() == []


def test_a_storage_that_gives_nothing_is_given_up(small: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """No record for the time allowed: an error instead of a start that never ends."""
    shapes, arena = made(small)
    release = threading.Event()
    arena.hold = lambda: bool(release.wait(20)) and None  # type: ignore[assignment,return-value]
    monkeypatch.setattr(arena_fill, "END_WAIT_S", 0.1)
    try:
        with pytest.raises(CheckpointError, match=r"has stalled: nothing came for 0\.2 s"):
            arena_fill.fill(small, shapes, arena, no_progress, threads=2, stalled_s=0.2)
    finally:
        release.set()
        for thread in fill_threads():
            thread.join(10)


class SharedRecords(FakeArena):
    """Records in memory of the kind that the real arena has."""

    def __init__(self, shape: ExpertShape, experts: int) -> None:
        self.finished = []
        self.hold = lambda: None
        descriptor = os.memfd_create("records")
        os.ftruncate(descriptor, experts * shape.record_bytes)
        self._map = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        self.records = [np.frombuffer(self._map, np.uint8).reshape(experts, -1)]


def own_kib() -> int:
    """What is resident of this process besides shared memory."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile")))


def test_no_second_copy_is_held(tmp_path: pathlib.Path) -> None:
    """Experts of the real size: while 150 MB are read, the process itself grows by a small fraction of one thread's expert each."""
    experts = 16
    document = slice_checkpoint.config_document(1, experts)
    (tmp_path / "config.json").write_text(json.dumps(document))
    slice_checkpoint.write_experts(tmp_path, slice_checkpoint.DENSE_LAYERS, experts)
    checkpoint = Checkpoint(tmp_path)
    shapes = cpu_arena.expert_shapes(checkpoint)
    assert shapes[0].record_bytes == 9_474_048
    arena = SharedRecords(shapes[0], experts)
    before, peak = own_kib(), 0

    def look(_fraction: float, _words: str) -> None:
        nonlocal peak
        peak = max(peak, own_kib() - before)

    arena_fill.fill(checkpoint, shapes, arena, look, threads=2)
    assert len(arena.finished) == experts
    assert peak < 16 * 1024


def test_records_that_are_taken_over_are_not_read_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start looks at one expert of each layer and fills nothing; another checkpoint's is read in full."""
    settings = GpuWorkerSettings.load({}, shm_dir=str(tmp_path), load_threads=2)
    first = Checkpoint(random_checkpoint.write(tmp_path / "a", Recipe(num_layers=3, num_experts=8)))
    arena, _ = cpu.open_arena(settings, first, cpu_arena.expert_shapes(first), no_progress)
    arena.close()

    def never(*_args: Any, **_options: Any) -> None:
        raise AssertionError("looked at every expert")

    with monkeypatch.context() as patched:
        patched.setattr(cpu_arena, "check_experts", never)
        patched.setattr(arena_fill, "fill", never)
        arena, why = cpu.open_arena(settings, first, cpu_arena.expert_shapes(first), no_progress)
        assert why.startswith("re-attached")
        arena.close()
    second = Checkpoint(random_checkpoint.write(tmp_path / "b", Recipe(num_layers=3, num_experts=8, seed=5)))
    arena, why = cpu.open_arena(settings, second, cpu_arena.expert_shapes(second), no_progress)
    assert why.startswith("loaded")
    assert np.array_equal(arena.record(1, 7)[:100], expected(second, arena.shape(1), second.config.moe_layers[1], 7)[:100])
    assert all(arena.check(layer, expert) for layer in range(2) for expert in range(8))
    arena.unlink()
    arena.close()


def test_a_damaged_expert_is_refused_before_memory_is_taken(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without records to take over, every expert's tensors are checked first."""
    document = random_checkpoint.config_document(Recipe(num_layers=3, num_experts=8))
    tensors = random_checkpoint.make_tensors(document, Recipe(num_layers=3, num_experts=8))
    del tensors[random_checkpoint.TEXT + "layers.2.mlp.experts.7.down_proj.svh"]
    (tmp_path / "config.json").write_text(json.dumps(document))
    random_checkpoint.save(tmp_path / "model.safetensors", tensors)
    checkpoint = Checkpoint(tmp_path)
    settings = GpuWorkerSettings.load({}, shm_dir=str(tmp_path))

    def never(*_args: Any) -> Arena:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(Arena, "attach_or_create", never)
    with pytest.raises(CheckpointError, match=r"experts\.7\.down_proj\.svh is missing"):
        cpu.open_arena(settings, checkpoint, cpu_arena.expert_shapes(checkpoint), no_progress)


def test_words_of_a_long_transfer_change_seldom() -> None:
    """A few seconds apart at first, later in shares of the whole; the end is always told; what was there before counts to no rate."""
    now = 0.0
    pace = Pace(100_000_000_000, 20_000_000_000, lambda: now)
    assert pace.words(20_000_000_000) == "20.0 of 100.0 GB"
    now = 1.0
    assert pace.words(21_000_000_000) == "20.0 of 100.0 GB"
    now = 10.0
    assert pace.words(30_000_000_000) == "30.0 of 100.0 GB, 1.00 GB/s, 70 s left"
    now = 1000.0
    told = pace.words(30_500_000_000)
    assert told == "30.5 of 100.0 GB, 10.5 MB/s, 1 h 50 min left"
    now = 1049.0
    assert pace.words(31_000_000_000) == told
    now = 1049.5
    assert pace.words(100_000_000_000).startswith("100.0 of 100.0 GB")
    assert [span(5), span(600), span(12_000)] == ["5 s", "10 min", "3 h 20 min"]
