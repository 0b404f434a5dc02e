"""The tier engine gives one answer, whatever is placed where and whoever computes it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import stat
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels.python.expert import variants
from kernels.python.tier import TierEngine
from tests.tier.harness import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    TOP_K,
    Oracle,
    Stage,
    bits_equal,
    cpu_expert,
    forward,
    random_batch,
    stage,
    wait_until,
)

RECORDS = LAYERS * EXPERTS


@pytest.fixture(scope="module")
def module_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One arena for all tests that do not change it, with one real cpu_expert."""
    with stage(tmp_path_factory.mktemp("shm")) as made, cpu_expert(made):
        yield made


@pytest.fixture(scope="module")
def oracle(module_stage: Stage) -> Oracle:
    """The answer without tiers."""
    return Oracle(module_stage.arena)


@contextlib.contextmanager
def running(made: Stage, backend: str, **options: object) -> Iterator[TierEngine]:
    """An engine whose CPU lane is up (in mode exact there is none)."""
    if backend == "shm":
        made.restart_region()
    with made.engine(backend=backend, **options) as engine:
        assert options.get("mode") == "exact" or engine.wait_lane(10)
        yield engine


BACKENDS = ("in_process", "shm")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_slots", "threads", "seed"), [(0, 1, 1), (1, 2, 2), (5, 1, 3), (RECORDS // 2, 3, 4), (RECORDS, 2, 5)])
def test_random_placements_give_the_same_bits(
    module_stage: Stage, oracle: Oracle, backend: str, num_slots: int, threads: int, seed: int
) -> None:
    """Random lanes, admissions and evictions, any number of slots and threads: the bits of the run without tiers."""
    rng = np.random.default_rng(seed)
    with running(module_stage, backend, num_slots=num_slots, threads=threads, planner="fuzz", seed=seed, min_cpu_experts=0) as engine:
        for _ in range(60):
            batch = random_batch(rng, prefill=bool(rng.integers(4) == 0))
            assert bits_equal(forward(engine, batch), oracle(batch))
        stats = engine.stats()
        assert stats["picks"]["cpu"] > 0
        assert stats["recomputed_picks"] == 0
        if num_slots:
            assert min(stats["admissions"], stats["evictions"], stats["decode_hits"]) > 0
        assert engine.verify() == {"records": RECORDS, "slots": stats["slots_used"], "bad_records": [], "bad_slots": []}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", variants())
def test_the_default_planner_uses_every_lane(module_stage: Stage, oracle: Oracle, backend: str, variant: str) -> None:
    """With a quarter of the records in slots: hits, admissions, evictions, records read in place and the CPU lane all happen."""
    rng = np.random.default_rng(7)
    with running(module_stage, backend, num_slots=RECORDS // 4, variant=variant) as engine:
        for _ in range(120):
            batch = random_batch(rng)
            assert bits_equal(forward(engine, batch), oracle(batch))
        stats = engine.stats()
    assert all(stats["picks"][lane] > 0 for lane in ("hit", "admit", "zero_copy", "cpu"))
    assert stats["picks"]["store"] == 0
    assert min(stats["admissions"], stats["evictions"], stats["bytes_copied"], stats["bytes_in_place"], stats["cpu_lane_bytes"]) > 0
    assert (stats["cpu_expert_bytes"] > 0) == (backend == "shm")
    assert sum(stats["picks"].values()) == stats["decode_picks"] == sum(sum(layer.values()) for layer in stats["picks_by_layer"])
    assert stats["lane"]["state"] == "UP"
    assert stats["kernel"] == variant


def test_exact_never_uses_the_cpu_lane(module_stage: Stage, oracle: Oracle) -> None:
    """Mode exact gives the same bits without the CPU lane, with hits, admissions and evictions."""
    rng = np.random.default_rng(8)
    with running(module_stage, "shm", mode="exact", num_slots=4) as engine:
        for _ in range(80):
            batch = random_batch(rng)
            assert bits_equal(forward(engine, batch), oracle(batch))
        stats = engine.stats()
    assert stats["picks"]["cpu"] == stats["cpu_lane_bytes"] == 0
    assert min(stats["decode_hits"], stats["admissions"], stats["evictions"]) > 0
    assert stats["lane"]["state"] == "OFF"


@pytest.mark.parametrize("rows", [9, 33, 200])
def test_prefill_keeps_the_cache_and_the_cpu_lane_out(module_stage: Stage, oracle: Oracle, rows: int) -> None:
    """More than 8 rows are prefill: the right bits, no CPU lane, and neither admissions nor evictions."""
    rng = np.random.default_rng(9)
    with running(module_stage, "in_process", num_slots=4) as engine:
        for _ in range(30):
            forward(engine, random_batch(rng, rows=2, layer=1))
        before = engine.stats()
        batch = random_batch(rng, rows=rows, layer=1)
        assert bits_equal(forward(engine, batch), oracle(batch))
        after = engine.stats()
    assert after["prefill_picks"] - before["prefill_picks"] == rows * TOP_K
    assert after["picks"]["cpu"] == before["picks"]["cpu"]
    assert (after["admissions"], after["evictions"]) == (before["admissions"], before["evictions"])
    assert after["picks"]["hit"] > before["picks"]["hit"]


def test_a_long_prefill_goes_in_blocks(module_stage: Stage, oracle: Oracle) -> None:
    """A prefill whose pick rows do not fit the engine's memory bound is cut by rows and still gives the same bits."""
    rng = np.random.default_rng(10)
    checked = [slice(first, first + 10) for first in (0, 32_763, 39_990)]  # the second lies across the cut
    batch = random_batch(rng, rows=40_000, layer=0)
    masked = np.ones(40_000, bool)
    for rows in checked:
        masked[rows] = False
    batch.sel[masked] = EXPERTS
    with running(module_stage, "in_process", num_slots=4) as engine:
        answer = forward(engine, batch)
        assert engine.stats()["prefill_steps"] == 2
    for rows in checked:
        part = type(batch)(0, *(a[rows].copy() for a in (batch.x, batch.sel, batch.weights)))
        assert bits_equal(answer[rows], oracle(part))
    assert not answer[masked].any()


def test_rows_of_a_batch_do_not_depend_on_each_other(module_stage: Stage) -> None:
    """A row's result has the same bits alone and in any batch."""
    rng = np.random.default_rng(11)
    with running(module_stage, "in_process", num_slots=6) as engine:
        batch = random_batch(rng, rows=8, layer=2)
        together = forward(engine, batch)
        for row in range(8):
            alone = type(batch)(2, *(a[row : row + 1].copy() for a in (batch.x, batch.sel, batch.weights)))
            assert bits_equal(forward(engine, alone), together[row : row + 1])


def test_masked_picks_contribute_nothing(module_stage: Stage, oracle: Oracle) -> None:
    """A pick with the sentinel index is left out; a row with only such picks is zero."""
    rng = np.random.default_rng(12)
    batch = random_batch(rng, rows=3, layer=0)
    batch.sel[0, 1:] = EXPERTS
    batch.sel[1] = EXPERTS
    with running(module_stage, "in_process", num_slots=3) as engine:
        answer = forward(engine, batch)
        assert engine.stats()["masked_picks"] == TOP_K + TOP_K - 1
    single = type(batch)(0, batch.x[:1].copy(), batch.sel[:1, :1].copy(), batch.weights[:1, :1].copy())
    assert bits_equal(answer[:1], oracle(single))
    assert not answer[1].any()


def test_one_expert_may_be_picked_twice_in_a_row(module_stage: Stage, oracle: Oracle) -> None:
    """A router that names an expert twice gets both picks."""
    rng = np.random.default_rng(13)
    batch = random_batch(rng, rows=2, layer=0)
    batch.sel[:] = 5
    with running(module_stage, "shm", num_slots=3, planner="fuzz", seed=3) as engine:
        assert bits_equal(forward(engine, batch), oracle(batch))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": LAYERS}, r"layer is 3"),
        ({"expert": EXPERTS + 1}, r"sel\[1\]\[2\] is 9: experts are 0..7"),
        ({"expert": -1}, r"sel\[1\]\[2\] is -1"),
        ({"x": np.zeros((2, HIDDEN), np.float64)}, r"x: expected C-contiguous float32 \[2, 128\], got float64"),
        ({"x": np.zeros((HIDDEN, 2), np.float32).T}, r"x: expected"),
        ({"weights": np.zeros((2, TOP_K + 1), np.float32)}, r"weights: expected"),
        ({"out": np.zeros((3, HIDDEN), np.float32)}, r"out: expected"),
        ({"sel": np.zeros((2, TOP_K), np.int32)}, r"sel: expected"),
    ],
)
def test_bad_arguments_are_named(module_stage: Stage, oracle: Oracle, change: dict[str, object], message: str) -> None:
    """A wrong argument is refused by name, and the engine goes on."""
    rng = np.random.default_rng(14)
    batch = random_batch(rng, rows=2, layer=0)
    arguments: dict[str, object] = {
        "layer": 0,
        "x": batch.x,
        "sel": batch.sel.copy(),
        "weights": batch.weights,
        "out": np.empty_like(batch.x),
    }
    if "expert" in change:
        arguments["sel"][1, 2] = change["expert"]  # type: ignore[index]
    else:
        arguments.update(change)
    with running(module_stage, "in_process", num_slots=3) as engine:
        with pytest.raises(ValueError, match=message):
            engine.forward(prefill=False, **arguments)  # type: ignore[arg-type]
        assert bits_equal(forward(engine, batch), oracle(batch))


def test_an_unknown_option_is_refused(module_stage: Stage) -> None:
    """A value out of range or an unknown choice is refused by name."""
    with pytest.raises(ValueError, match="threads is 0"):
        module_stage.engine(threads=0)
    with pytest.raises(ValueError, match=r"mode is nvme: one of exact, fast"):
        module_stage.engine(mode="nvme")
    with pytest.raises(ValueError, match="variant is sse9"):
        module_stage.engine(variant="sse9")


def test_no_region_is_refused_for_the_shm_backend(module_stage: Stage) -> None:
    """Backend shm without a control region says what to do."""
    with pytest.raises(ValueError, match="backend shm needs a control region"):
        TierEngine(module_stage.arena, None)


def writable_record(made: Stage, layer: int, expert: int) -> npt.NDArray[np.uint8]:
    """The bytes of a sealed record, past the read-only view: what a stray write would reach."""
    record = made.arena.record(layer, expert)
    return np.ctypeslib.as_array((ctypes.c_uint8 * record.size).from_address(record.ctypes.data))


def test_an_emptied_arena_makes_the_answers_wrong(shm_dir: pathlib.Path) -> None:
    """The lanes read the arena: zeroing a record changes the answer of every lane that reads it, and verify() names it."""
    with stage(shm_dir) as made:
        oracle = Oracle(made.arena)
        rng = np.random.default_rng(15)
        batch = random_batch(rng, rows=4, layer=1)
        batch.sel[:] = [0, 1, 2, 3]
        with made.engine(backend="in_process", num_slots=0) as engine:
            assert bits_equal(forward(engine, batch), oracle(batch))
            assert engine.stats()["picks"]["cpu"] > 0
            for expert in range(4):
                writable_record(made, 1, expert)[:] = 0
                assert not bits_equal(forward(engine, batch), oracle(batch))
            assert not forward(engine, batch).any()
            report = engine.verify()
            assert report["bad_records"] == [EXPERTS + expert for expert in range(4)]
            assert engine.stats()["checksum_failures"] == 4


def test_a_hit_is_computed_from_the_slot(shm_dir: pathlib.Path) -> None:
    """A slot is a private copy: once resident, damage to the arena does not reach the answer, and verify() names record and slot."""
    with stage(shm_dir) as made:
        oracle = Oracle(made.arena)
        batch = random_batch(np.random.default_rng(16), rows=1, layer=0)
        with made.engine(mode="exact", num_slots=LAYERS * EXPERTS) as engine:
            for _ in range(3):
                assert bits_equal(forward(engine, batch), oracle(batch))
            assert engine.stats()["slots_used"] == TOP_K
            damaged = int(batch.sel[0, 0])
            writable_record(made, 0, damaged)[3] ^= 0x10
            hits = engine.stats()["picks"]["hit"]
            assert bits_equal(forward(engine, batch), oracle(batch))
            assert engine.stats()["picks"]["hit"] == hits + TOP_K
            report = engine.verify()
            assert report["bad_records"] == [damaged]
            assert len(report["bad_slots"]) == 1


def test_a_repaired_record_is_right_in_every_lane(shm_dir: pathlib.Path) -> None:
    """Damage that was copied into a slot is gone with the record's repair: the slot is emptied, answers and verify() are right again."""
    with stage(shm_dir) as made:
        oracle = Oracle(made.arena)
        batch = random_batch(np.random.default_rng(18), rows=2, layer=0)
        damaged = int(batch.sel[0, 0])
        true = made.arena.record(0, damaged).copy()
        writable_record(made, 0, damaged)[:] ^= 0xFF
        with made.engine(backend="in_process", num_slots=LAYERS * EXPERTS) as engine:
            for _ in range(4):
                assert not bits_equal(forward(engine, batch), oracle(batch))
            used, generation = engine.stats()["slots_used"], made.arena.generation_of(0, damaged)
            with pytest.raises(ValueError, match="data: expected uint8"):
                engine.repair(0, damaged, true[:-1])
            with pytest.raises(ValueError, match="no such record"):
                engine.repair(0, EXPERTS, true)
            engine.repair(0, damaged, true)
            assert engine.stats()["slots_used"] == used - 1
            assert made.arena.generation_of(0, damaged) == generation + 2
            for _ in range(4):
                assert bits_equal(forward(engine, batch), oracle(batch))
            report = engine.verify()
            assert (report["bad_records"], report["bad_slots"]) == ([], [])


def test_admission_follows_the_touches(shm_dir: pathlib.Path) -> None:
    """An expert is admitted at its k-th touch, hit from the next step on, and evicted by a hotter one."""
    with stage(shm_dir) as made:
        rng = np.random.default_rng(17)
        batch = random_batch(rng, rows=1, layer=0)
        batch.sel[:] = [0, 1, 2, 3]
        with made.engine(mode="exact", num_slots=4, admit_after=3) as engine:
            for step, (admitted, hits) in enumerate([(0, 0), (0, 0), (4, 0), (4, 4), (4, 8)]):
                forward(engine, batch)
                stats = engine.stats()
                assert (stats["admissions"], stats["decode_hits"]) == (admitted, hits), step
            batch.sel[:] = [4, 5, 6, 7]
            for _ in range(60):
                forward(engine, batch)
            stats = engine.stats()
            assert (stats["admissions"], stats["evictions"]) == (8, 4)
            assert stats["decode_hits"] > 8


def test_heat_survives_a_restart(shm_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Heat is saved at close and loaded at start: the k-th touch counts over a restart. A damaged file is ignored."""
    heat_file = tmp_path / "heat"
    with stage(shm_dir) as made:
        batch = random_batch(np.random.default_rng(18), rows=1, layer=0)
        with made.engine(mode="exact", num_slots=4, admit_after=2, heat_file=str(heat_file)) as engine:
            forward(engine, batch)
            assert engine.stats()["admissions"] == 0
        assert heat_file.stat().st_size > 0
        heat_file.unlink()
        with made.engine(mode="exact", heat_file=str(heat_file), heat_period_s=1) as engine:
            forward(engine, batch)
            assert wait_until(heat_file.exists), "heat is saved while running, too"
            assert wait_until(lambda: engine.stats()["heat_saves"] > 0)
        with made.engine(mode="exact", num_slots=4, admit_after=2, heat_file=str(heat_file)) as engine:
            forward(engine, batch)
            assert engine.stats()["admissions"] == TOP_K
        damaged = bytearray(heat_file.read_bytes())
        damaged[-1] ^= 1
        heat_file.write_bytes(damaged)
        with made.engine(mode="exact", num_slots=4, admit_after=2, heat_file=str(heat_file)) as engine:
            forward(engine, batch)
            assert engine.stats()["admissions"] == 0
            assert "its checksum is wrong" in engine.stats()["heat_note"]


def test_heat_is_never_saved_over_another_file(module_stage: Stage, tmp_path: pathlib.Path) -> None:
    """Whatever lies there, and under the temporary name, stays byte for byte; the statistics tell."""
    place, beside = tmp_path / "heat", tmp_path / "heat.tmp"
    beside.write_bytes(b"diary")
    for other in (b"diary", b"G53heat", b"G53HEAT1" + bytes(4096), bytes(200_000) + b"end"):
        place.write_bytes(other)
        with module_stage.engine(mode="exact", heat_file=str(place), heat_period_s=1) as engine:
            assert "it is no heat file, and will not be written over" in engine.stats()["heat_note"]
            assert wait_until(lambda: engine.stats()["heat_errors"] > 0)
            assert engine.stats()["heat_saves"] == 0
        assert place.read_bytes() == other
        assert beside.read_bytes() == b"diary"
        assert sorted(os.listdir(tmp_path)) == ["heat", "heat.tmp"]
    place.unlink()
    for link in (tmp_path / "none", pathlib.Path(os.devnull)):
        place.symlink_to(link)
        with module_stage.engine(mode="exact", heat_file=str(place)):
            pass
        assert place.readlink() == link
        assert sorted(os.listdir(tmp_path)) == ["heat", "heat.tmp"]
        place.unlink()


@pytest.mark.parametrize("before", [b"", b"G53heat1", b"glm53 gpu heat 2 and so on", bytes(200_000)])
def test_heat_takes_the_place_of_earlier_heat(module_stage: Stage, tmp_path: pathlib.Path, before: bytes) -> None:
    """Of an empty file, of damaged heat and of what a worker on a GPU saved: a link stays one, the mode stays, leftovers stop nothing."""
    (tmp_path / "disk").mkdir()
    real, link = tmp_path / "disk" / "heat", tmp_path / "heat"
    real.write_bytes(before)
    real.chmod(0o640)
    link.symlink_to(real)
    leftover = real.with_name(f"heat.tmp.{os.getpid()}.0")
    leftover.symlink_to(tmp_path / "elsewhere")
    with module_stage.engine(mode="exact", heat_file=str(link)):
        pass
    assert link.is_symlink()
    assert real.read_bytes().startswith(b"G53heat1")
    assert real.stat().st_size > 48
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert not (tmp_path / "elsewhere").exists()
    assert sorted(os.listdir(real.parent)) == ["heat", leftover.name]


@pytest.mark.parametrize("name", ['quote"and\\slash', "new\tline"])
def test_a_heat_file_that_cannot_be_read_is_ignored_in_words(module_stage: Stage, tmp_path: pathlib.Path, name: str) -> None:
    """What lies at the heat file's place does not keep the engine from starting; the statistics say why it starts cold."""
    place = tmp_path / name
    place.mkdir()
    with module_stage.engine(mode="exact", heat_file=str(place)) as engine:
        note = engine.stats()["heat_note"]
    assert str(place) in note
    assert "Is a directory" in note


class HeldLibrary:
    """The kernels' library, with `glm53_tier_verify` held at its door."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def glm53_tier_verify(self, pointer: int) -> bytes:
        """Waits until the test lets it go on."""
        self.entered.set()
        assert self.go_on.wait(30)
        result: bytes = self._library.glm53_tier_verify(pointer)
        return result


def test_an_engine_that_is_closed_during_a_call_ends_after_it(module_stage: Stage) -> None:
    """The worker shuts down while another thread re-reads the records: their memory goes when the call is through, not before."""
    engine = module_stage.engine(mode="exact")
    library = HeldLibrary(engine._library)
    engine._library = library  # type: ignore[assignment]
    assert engine._handle is not None
    close, ended = engine._handle._close, threading.Event()
    engine._handle._close = lambda pointer: (close(pointer), ended.set())
    reports: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: reports.append(engine.verify()))
    thread.start()
    assert library.entered.wait(30)
    engine.close()
    assert not ended.is_set()
    library.go_on.set()
    thread.join(30)
    assert ended.wait(30)
    assert reports[0]["records"] > 0
    assert reports[0]["bad_records"] == []
    with pytest.raises(ValueError, match="closed"):
        engine.stats()


def test_a_caller_that_flushes_denormals_gets_the_same_bits(module_stage: Stage, oracle: Oracle) -> None:
    """The float state of the calling thread does not reach the answer."""
    torch = pytest.importorskip("torch")
    batch = random_batch(np.random.default_rng(19), rows=2, layer=0)
    batch.weights[:] = 1e-40
    expected = oracle(batch)
    assert (expected != 0).any()
    assert np.abs(expected).max() < np.finfo(np.float32).tiny
    with running(module_stage, "shm", num_slots=3) as engine:
        assert torch.set_flush_denormal(True)
        try:
            answer = forward(engine, batch)
        finally:
            torch.set_flush_denormal(False)
    assert bits_equal(answer, expected)


def test_engine_and_server_as_threads_of_one_process() -> None:
    """The native program that sanitizers run (kernels/tests/tier_threads.cpp) finds no wrong answer."""
    program = pathlib.Path(__file__).parents[2] / "build" / "kernels" / "tier_threads"
    if not program.is_file():
        pytest.skip("the native test programs are not built")
    result = subprocess.run([str(program), "40"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.rstrip().endswith("0 wrong answers")
