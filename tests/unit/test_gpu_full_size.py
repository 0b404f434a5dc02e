"""`bench.gpu_full_size` without a GPU: its script, its figures, and the real engine over a fake exllamav3 with a real cpu_expert."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import full_size_engine, gpu_check, gpu_fast_rig, gpu_full_size, kept_rows, report, routing_trace, slice_cases, slice_checkpoint
from bench import slice_machine as machine
from services.gpu_worker.backends.exl3.slots import ActivationNeed
from services.gpu_worker.checkpoint import Checkpoint
from tests.support.lent_slots import Vram, elastic_slots
from tests.tier.harness import LAYERS, TOP_K, Stage
from tests.unit import test_gpu_fast_bench as base

rig, made, shm_dir = base.rig, base.made, base.shm_dir
host_as_device, driver, immediate = base.host_as_device, base.driver, base.immediate
SCRIPT = report.ROOT / "bench" / "gpu_full_size.sh"
NAMES = [
    "full/fast/C1", "full/fast/C4", "full/exact/C1", "full/exact/C4", "full/fast/C2", "full/prefill/prefill8k", "full/fast_resident/C1",
    "full/fast_resident/C2", "full/fast_resident/C4", "full/exact_resident/C1",
]  # fmt: skip


def script(tmp_path: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, "PYTHON": sys.executable, "GPU_SESSION_STATE": str(tmp_path / "state"), "GPU_SESSION_STEPS": "4", **env}
    return subprocess.run(["bash", str(SCRIPT), *words], env=whole, capture_output=True, text=True, timeout=120, check=False)


def test_a_dry_run_of_the_script_has_every_row_and_every_figure(tmp_path: Path) -> None:
    """42 layers, one command; a second one measures nothing again; `clean` leaves the result alone."""
    done = script(tmp_path, str(tmp_path / "out"), "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out" / "gpu_full_size.json").read_text())
    assert [row["name"] for row in document["rows"]] == NAMES
    summary = document["summary"]
    assert [key for key, value in summary.items() if value is None] == []
    assert (summary["reason_for_null"], summary["errors"], summary["dry_run"]) == ({}, [], True)
    assert (document["facts"]["layers"], summary["slots"]) == (42, 1376)
    assert document["facts"]["memory_gib_at_end"] > document["facts"]["page_tables_gib_at_end"] >= 0
    assert summary["ram_total_gib_measured"] == pytest.approx(42 * 288 * 9_474_048 / 2**30 + 4, abs=0.01)
    assert (summary["vram_peak_gib"], summary["fits_24_gb"], summary["vram_peak_gib_every_expert"]) == (21.48, True, 117.19)
    assert "fast_c1_tok_s" in done.stdout
    assert "everything is measured" not in (tmp_path / "out" / "full_size.log").read_text()
    assert script(tmp_path, str(tmp_path / "out"), "--dry-run").returncode == 0
    assert "everything is measured" in (tmp_path / "out" / "full_size.log").read_text()


@pytest.mark.parametrize(
    ("words", "env", "code", "message"),
    [
        ([], {}, 2, "bash bench/gpu_full_size.sh OUT"),
        (["out", "--dry"], {}, 2, "bash bench/gpu_full_size.sh OUT"),
        (["out", "--dry-run"], {"GPU_FULL_SIZE_RAM_GIB": "much"}, 2, "whole numbers, not 'much'"),
        (["out", "--dry-run"], {"GPU_SESSION_SECONDS": "3"}, 2, "check: left out, 3 s are left"),
    ],
)
def test_the_script_refuses_what_it_does_not_know(tmp_path: Path, words: list[str], env: dict[str, str], code: int, message: str) -> None:
    """Before anything runs, with what there is."""
    done = script(tmp_path, *[str(tmp_path / word) if word == "out" else word for word in words], **env)
    assert done.returncode == code
    assert message in done.stdout + done.stderr


def test_the_script_says_what_the_machine_lacks(tmp_path: Path) -> None:
    """A machine without a GPU, or with too little memory by its setting, ends with the check's words and nothing measured."""
    done = script(tmp_path, str(tmp_path / "out"), GPU_FULL_SIZE_RAM_GIB="100", GPU_FULL_SIZE_SHM_GIB="0")
    assert done.returncode == 2
    assert "GPU: " in done.stdout
    assert "check: failed with 2" in done.stdout
    assert not (tmp_path / "out" / "gpu_full_size.json").exists()
    gib = gpu_check.GIB
    assert gpu_check.memory(42, 256 * gib, 132 * gib, 0, experts_in_files=False) is None
    short = gpu_check.memory(42, 120 * gib, 132 * gib, 0, experts_in_files=False)
    assert str(short).startswith("42 MoE layers need 125 GiB of RAM, there are 120:")
    assert "need 125 GiB of /dev/shm, 64 are free" in str(gpu_check.memory(42, 256 * gib, 64 * gib, 0, experts_in_files=False))


def test_the_figures_are_made_of_the_right_rows() -> None:
    """By hand: bounds with and without the lane, memory of a 24 GB card's rows alone, reasons for what is not there."""
    rows: dict[str, Any] = {
        "full/fast/C1": {"ms": 40.0, "tok_s": 25.0, "hit_rate": 0.48, "missed_mib_per_step": 1000.0, "ct_b_us": 200.0,
                         "planner_error_pct": 1.5, "vram_peak_mib": 22_528, "ram_extra_gib": 3.0},
        "full/exact/C1": {"ms": 60.0, "tok_s": 16.7, "missed_mib_per_step": 1000.0, "vram_peak_mib": 23_552, "ram_extra_gib": 2.0},
        "full/exact/C4": {"error": "OutOfMemoryError: x"},
        "full/fast_resident/C1": {"ms": 16.0, "tok_s": 62.0, "vram_peak_mib": 120_000, "ram_extra_gib": 9.0},
        "full/exact_resident/C1": {"ms": 19.0, "tok_s": 52.0},
    }  # fmt: skip
    facts = {"link_gb_s": 50.0, "dram_gb_s": 100.0, "record_bytes": 10_000_000, "arena_bytes": 107 * 2**30, "arena_s": 20.0}
    summary = gpu_full_size.summarise(rows, facts)
    missing_ms = 1000 * 2**20 / 1e6
    assert summary["exact_c1_bound_ms"] == pytest.approx(19 + missing_ms / 50, abs=1e-3)
    assert summary["fast_c1_bound_ms"] == pytest.approx(16 + missing_ms / 100, abs=1e-3)  # the lane's 50 GB/s beside the link's
    assert summary["fast_c1_step_over_bound"] == pytest.approx(40 / (16 + missing_ms / 100), abs=1e-3)
    assert summary["fast_c1_step_over_lanes_bound"] == summary["fast_c1_step_over_bound"]  # host memory is as fast as both
    assert summary["c1_fast_vs_exact"] == 1.5
    assert (summary["ram_extra_gib"], summary["ram_total_gib_measured"]) == (3.0, 110.0)
    assert (summary["vram_peak_gib"], summary["fits_24_gb"], summary["vram_peak_gib_every_expert"]) == (23.0, True, 117.19)
    assert summary["errors"] == ["exact/C4"]
    assert summary["reason_for_null"]["exact_c4_tok_s"] == "exact/C4 failed: OutOfMemoryError: x"
    assert summary["reason_for_null"]["fast_c2_step_over_bound"] == "fast/C2 was not measured in this run"
    rows["full/exact/C1"]["vram_peak_mib"] = 24_600
    assert gpu_full_size.summarise(rows, facts)["fits_24_gb"] is False
    empty = gpu_full_size.summarise({}, {})
    assert set(gpu_full_size.NEEDS) <= set(empty["reason_for_null"])


def test_the_trace_is_that_of_one_process() -> None:
    """Layer by layer, over the model's depths."""
    want = routing_trace.make(3, 6, streams=gpu_full_size.STREAMS, depths=(0, 1, 2))
    assert (gpu_full_size.trace_of(3, 6, 3) == want).all()


def test_rows_fit_into_their_time() -> None:
    """All rows of both modes, warm-up included, take less than half of ten minutes: the load has the other half."""
    assert sum(case.seconds for case in gpu_full_size.cases(200)) < 300


def test_memory_that_comes_when_it_is_used_is_used_first() -> None:
    """Pieces wait for memory, though not for ever; what is there already is left alone."""
    there = [1 << 20]

    def read() -> int:
        there[0] += 1 << 20
        return there[0]

    told = machine.grow(16 << 20, read=read, piece_bytes=2 << 20, least=8 << 20, wait_s=60.0)
    assert told["waited_s"] >= 0.3
    assert machine.grow(1 << 20, read=read)["touched_gib"] == machine.grow(1 << 20, read=read)["waited_s"] == 0
    began = time.monotonic()
    told = machine.grow(8 << 20, read=lambda: 0, piece_bytes=4 << 20, wait_s=0.2)  # none comes: it goes on all the same
    assert 0.2 <= told["waited_s"] < 0.5
    assert time.monotonic() - began < 30
    assert machine.available() > 1 << 20


def test_a_large_vocabulary_repeats_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the config says is in the files, at the size that it says; a second call writes nothing."""
    monkeypatch.setattr(slice_checkpoint, "HIDDEN", 256)
    monkeypatch.setattr(slice_checkpoint, "INTER", 128)
    monkeypatch.setattr(slice_checkpoint, "DISTINCT_ROWS", 2000)
    assert slice_checkpoint.write(tmp_path, 1, experts=False, vocab=5120, processes=2)
    assert not slice_checkpoint.write(tmp_path, 1, experts=False, vocab=5120, processes=2)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config.vocab_size == 5120
    assert checkpoint.files.entry("lm_head.trellis").shape == (16, 320, 96)
    entry = checkpoint.files.entry(slice_checkpoint.TEXT + "embed_tokens.weight")
    raw = entry.file.read_bytes()[entry.start : entry.start + entry.num_bytes]
    rows = np.frombuffer(raw, np.uint16).reshape(5120, 256)
    assert (rows[:1120] == rows[4000:]).all()
    assert (rows[:2000] == rows[2000:4000]).all()
    assert (rows[0] != rows[1]).any()


class Told:
    """A watch that notes what it is told, and how it finds pager and lane behind each run of steps."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.done: dict[str, int] = {}
        self.seen: dict[str, str] = {}
        self.lanes: set[int] = set()
        self._look: Any = None

    def stage(self, what: str) -> None:
        self.stages.append(what)

    @contextlib.contextmanager
    def steps(self, what: str) -> Iterator[Any]:
        seconds: list[float] = []
        yield seconds.append
        self.done[what] = len(seconds)
        self.seen[what] = self._look() if self._look is not None else ""

    def look(self, look: Any) -> None:
        self._look = look

    def lane(self, pid: int) -> None:
        self.lanes.add(pid)


def test_the_engine_measures_every_row(rig: Any, made: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both modes, every expert in slots, and a prefill for which slots are lent: caps, hooks and lane are as a card of 24 GB has them."""
    events: list[Any] = []
    vram = Vram(free=1 << 40)
    stride = rig.loaded.records.stride
    loaded = rig.loaded

    def load_model(checkpoint: Any, arena: Any, shapes: list[Any], **sizes: int) -> Any:
        assert arena is made.arena
        assert len(shapes) == LAYERS
        events.append(sizes)
        return loaded

    def lend(count: int, _stride: int, _device: int, *, most: int, reserve: int) -> Any:
        slots, memory = elastic_slots(vram, count, stride, most=most, reserve=reserve)
        events.append(memory)
        return slots

    def measure_need(_model: Any, _cache: Any, chunk: int, context: int, begin: Any) -> ActivationNeed:
        events.append(("measured", chunk, context))
        begin(64)
        return ActivationNeed({chunk: 1 << 41})  # more than the card has: slots must go

    config = types.SimpleNamespace(swiglu_limit=7.0, vocab_size=base.VOCAB)
    engine_loader = full_size_engine.loader
    monkeypatch.setattr(full_size_engine, "Checkpoint", lambda _folder: types.SimpleNamespace(config=config))
    monkeypatch.setattr(full_size_engine.slice_ours, "open_arena", lambda _path, _shapes: made.arena)
    monkeypatch.setattr(full_size_engine.slice_ours, "fill_cache", lambda _cache: None)
    monkeypatch.setattr(full_size_engine.slice_ours, "CHUNK", 256)
    monkeypatch.setattr(engine_loader, "load_model", load_model)
    monkeypatch.setattr(loaded.records, "pin_seconds", 1.5, raising=False)
    monkeypatch.setattr(full_size_engine.lending, "make", lend)
    monkeypatch.setattr(full_size_engine.lending, "measure", measure_need)
    monkeypatch.setattr(full_size_engine, "card_spare", lambda _card, _device: vram.spare())
    monkeypatch.setattr(full_size_engine, "LaneProcess", lambda *_a: gpu_fast_rig.LaneProcess(made.instance, str(made.shm_dir), 1))
    monkeypatch.setattr(full_size_engine, "GpuRig", lambda _l, _k, _v, _i, lane, deadline, _s: base.remade(rig, lane, deadline))
    monkeypatch.setattr(full_size_engine.slice_ours, "ForcedRouting", lambda *_a: types.SimpleNamespace(step=-1))
    monkeypatch.setattr(full_size_engine.slice_rates, "link_rate", lambda *_a: 2e9)
    monkeypatch.setattr(full_size_engine.slice_rates, "read_rate", lambda *_a: 5e9)
    for name, value in {
        "mem_get_info": lambda _d: (50 << 30, 96 << 30),
        "memory_allocated": lambda *_: 1 << 30,
        "get_device_name": lambda _d: "NVIDIA H200",
        "synchronize": lambda *_a: None,
        "empty_cache": vram.empty_cache,
        "set_per_process_memory_fraction": lambda share: events.append(("cap", round(share, 3))),
    }.items():
        monkeypatch.setattr(full_size_engine.torch.cuda, name, value)
    monkeypatch.setattr(loaded.model, "unload", lambda: events.append("unloaded"), raising=False)
    monkeypatch.setattr(loaded.records, "close", lambda: events.append("unpinned"), raising=False)
    monkeypatch.setattr(made.arena, "close", lambda: events.append("closed"))
    args = gpu_full_size.parser().parse_args(["run", "--layers", str(LAYERS), "--warm", "2", "--steps", "3", "--prefill", "300"])
    rows = kept_rows.Rows(tmp_path / "rows", tmp_path / "out.json", report.start("test"), gpu_full_size.summarise)
    told = Told()
    trace = np.zeros((5, 4, LAYERS, TOP_K), np.uint16)
    engine = full_size_engine.FullSizeEngine(args, trace, time.monotonic() + 600, told)  # type: ignore[arg-type]
    assert told.done["first steps, in which nothing waits"] == 3 * 4  # one, two and four streams
    modes = {mode.name: mode for mode in gpu_full_size.MODES}
    assert slice_cases.run(gpu_full_size.cases(5), modes, engine, rows, time.monotonic() + 1e6) == []
    rows.note(**engine.facts())
    assert list(rows.rows) == NAMES
    assert [row for row in rows.rows.values() if "error" in row] == []
    summary = rows.summary()
    assert summary["errors"] == []
    assert set(summary["reason_for_null"]) <= {"vram_peak_gib"}  # there is no driver that tells it
    prefill = rows.rows["full/prefill/prefill8k"]
    assert prefill["slots_lent"] > 0
    assert ("measured", 256, 32_768) in events
    assert events[1] == {"cache_tokens": 131_072, "max_streams": 8, "chunk": 256}
    assert [event[1] for event in events if isinstance(event, tuple) and event[0] == "cap"] == [*[0.246] * 5, 1.0, 1.0]
    assert sum(rows.rows["full/fast/C1"]["experts_by_lane"].values()) > 0
    assert rows.rows["full/fast_resident/C1"]["hit_rate"] == 1.0
    assert [rows.rows[f"full/{mode}/C1"]["cpu_lane"] for mode in ("fast", "fast_resident")] == [True, False]
    assert told.done["full/fast/C1"] == told.done["full/exact/C4"] == 5
    assert "lane UP" in told.seen["full/fast/C1"]
    assert "the device asked for step" in told.seen["full/exact/C1"]
    assert any(stage.startswith("fast: slots placed, the lane is up after") for stage in told.stages)
    assert "link 2.0 GB/s, host memory 5.0 GB/s" in told.stages
    assert len(told.lanes - {0}) >= 1
    engine.close()
    assert events[-3:] == ["unloaded", "unpinned", "closed"]
