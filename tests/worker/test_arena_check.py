"""A re-attached arena is re-checked against its checksums while the worker serves, and what is damaged comes from the checkpoint again."""

from __future__ import annotations

import gc
import pathlib
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from kernels.python import segments
from kernels.python.arena import Arena
from services.common.errors import CheckpointError, Glm53Error
from services.gpu_worker.backends import cpu, cpu_arena
from services.gpu_worker.backends.arena_check import ArenaCheck
from services.gpu_worker.backends.base import BackendLostError
from services.gpu_worker.backends.cpu import CpuBackend
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.settings import GpuWorkerSettings
from tests.support.arena_damage import damage
from tests.worker.harness import RunningWorker, until


class FakeArena:
    """Records of one byte each; 0 is a whole one."""

    num_layers = 3
    experts_per_layer = 4
    has_name = True

    def __init__(self, *damaged: tuple[int, int]) -> None:
        self.damaged = set(damaged)
        self.hold: threading.Event | None = None

    def check(self, layer: int, expert: int) -> bool:
        if self.hold is not None:
            self.hold.wait(10)
        return (layer, expert) not in self.damaged

    def repair(self, layer: int, expert: int, data: NDArray[np.uint8]) -> None:
        assert data.tolist() == [layer, expert]
        self.damaged.remove((layer, expert))

    def unlink(self) -> None:
        self.has_name = False


def reload(layer: int, expert: int) -> NDArray[np.uint8]:
    return np.array([layer, expert], np.uint8)


def finished(check: ArenaCheck) -> dict[str, Any]:
    check.start()
    until(lambda: check.done or check.lost != "", "the check is over")
    check.close()
    return check.stats()


def test_damaged_records_are_reloaded() -> None:
    """Every record is looked at once; what differs from its checksum is put right."""
    arena = FakeArena((0, 1), (2, 3))
    assert finished(ArenaCheck(arena, reload, arena.repair)) == {"checked": 12, "bad": 2, "repaired": 2, "done": True}
    assert arena.damaged == set()


def test_a_record_that_cannot_be_reloaded_loses_the_arena() -> None:
    """The checkpoint does not have it any more: the reason names layer and expert, and nothing counts as repaired."""

    def gone(layer: int, expert: int) -> NDArray[np.uint8]:
        raise CheckpointError("model.safetensors is truncated")

    arena = FakeArena((1, 2))
    check = ArenaCheck(arena, gone, arena.repair)
    stats = finished(check)
    assert (stats["bad"], stats["repaired"], stats["done"]) == (1, 0, False)
    assert check.lost == "the record of layer 1, expert 2 is damaged and cannot be reloaded: model.safetensors is truncated"
    assert arena.has_name
    with pytest.raises(BackendLostError, match=r"expert 2 is damaged"):
        check.refuse_lost()
    assert not arena.has_name


def test_closing_ends_a_check_that_runs() -> None:
    """A worker that stops does not wait for the rest of a large arena."""
    arena = FakeArena()
    arena.hold = threading.Event()
    check = ArenaCheck(arena, reload, arena.repair)
    check.start()
    threading.Timer(0.2, arena.hold.set).start()
    check.close()
    assert not check.done
    assert check.checked <= 1


def leave_arena(model_dir: pathlib.Path, shm_dir: pathlib.Path) -> None:
    """What a worker that ended leaves behind."""
    settings = GpuWorkerSettings.load({}, model_dir=str(model_dir), shm_dir=str(shm_dir), expert_backend="in_process")
    backend = cpu.load(settings, Checkpoint(model_dir), lambda _fraction, _what: None)
    assert "arena_check" not in backend.stats()  # it filled the arena itself
    backend.close()
    del backend
    gc.collect()  # with the last user of the mapping goes its lock


def exported(worker: RunningWorker) -> dict[str, float]:
    """What /metrics has of bad records, by series."""
    families = text_string_to_metric_families(worker.engine.metrics.prometheus_text().decode())
    return {sample.name: sample.value for family in families for sample in family.samples if "checksum_failures" in sample.name}


def backend_of(worker: RunningWorker) -> CpuBackend:
    backend = worker.engine.backend
    assert isinstance(backend, CpuBackend)
    return backend


def test_a_restarted_worker_repairs_what_it_took_over(
    start_worker: Callable[..., RunningWorker], checkpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Bits that flipped while no worker ran are found, counted and put right; the answers are those of the undamaged arena."""
    (tmp_path / "whole").mkdir()
    expected = start_worker(shm_dir=str(tmp_path / "whole")).generate(max_tokens=12).ids
    leave_arena(checkpoint_dir, tmp_path)
    damage(tmp_path, (0, 3), (2, 5))
    heir = start_worker()
    backend = backend_of(heir)
    until(lambda: backend.stats()["arena_check"]["done"], "every record is checked")
    counts = backend.stats()["arena_check"]
    assert (counts["bad"], counts["repaired"]) == (2, 2)
    report = backend.verify()
    assert (report.records_bad, report.slots_bad) == (0, 0)
    assert heir.generate(max_tokens=12).ids == expected
    # Counted before anybody could scrape: with when the count began, it can be told from an old one.
    assert exported(heir)["glm53_checksum_failures_total"] == 2
    assert 0 <= time.time() - exported(heir)["glm53_checksum_failures_created"] < 300


def test_a_gpu_worker_checks_the_records_that_it_took_over(checkpoint_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The same check with the GPU backend's way of repairing; an arena that the worker filled itself is not checked."""
    checkpoint = Checkpoint(checkpoint_dir)
    shapes = cpu_arena.expert_shapes(checkpoint)
    settings = GpuWorkerSettings.load({}, model_dir=str(checkpoint_dir), shm_dir=str(tmp_path), expert_backend="in_process")
    repaired: list[tuple[int, int]] = []
    for reattached in (False, True):
        arena, _ = cpu.open_arena(settings, checkpoint, shapes, lambda _fraction, _what: None)

        def repair(layer: int, expert: int, data: NDArray[np.uint8], arena: Arena = arena) -> None:
            repaired.append((layer, expert))
            arena.rewrite(layer, expert, data)

        backend: Any = types.SimpleNamespace(check=None, repair=repair)
        loader.check_kept_records(backend, arena, checkpoint, shapes)
        assert (backend.check is not None) is reattached
        if reattached:
            until(lambda check=backend.check: check.done, "every record is checked")
            backend.check.close()
            assert backend.check.stats() == {
                "checked": arena.num_records,
                "bad": 2,
                "repaired": 2,
                "done": True,
            }
            assert all(arena.check(layer, expert) for layer in range(arena.num_layers) for expert in range(arena.experts_per_layer))
        arena.close()
        del arena, repair, backend
        gc.collect()  # with the last user of the mapping goes its lock
        if not reattached:
            damage(tmp_path, (0, 3), (2, 5))
    assert repaired == [(0, 3), (2, 5)]


def test_a_lost_arena_ends_the_worker_and_is_not_taken_over_again(
    start_worker: Callable[..., RunningWorker], checkpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """With a record that cannot be reloaded the worker refuses to compute, and its arena loses its name: the next one fills a new one."""
    leave_arena(checkpoint_dir, tmp_path)
    heir = start_worker()
    backend = backend_of(heir)
    until(lambda: backend.stats()["arena_check"]["done"], "every record is checked")
    assert backend._tiers is not None
    assert backend._tiers.check is not None
    backend._tiers.check.lost = "the record of layer 0, expert 0 is damaged and cannot be reloaded: gone"
    with pytest.raises(Glm53Error):
        heir.generate()
    until(lambda: isinstance(heir.engine.fatal, BackendLostError), "the engine has given up")
    assert not pathlib.Path(segments.arena_path(tmp_path, "default")).exists()
