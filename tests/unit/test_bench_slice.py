"""The full-shape slice's bench as far as no GPU is needed: cases, rows over broken runs, figures, and both engines over stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from bench import (
    gpu_exact,
    gpu_exact_slice,
    kept_rows,
    report,
    routing_trace,
    slice_cases,
    slice_checkpoint,
    slice_machine,
    slice_ours,
    slice_start,
    slice_stock,
    slice_traces,
    stock_latest,
)
from bench.kept_rows import Rows
from bench.slice_cases import Case
from bench.slice_dry import DryEngine
from kernels.python.expert import ExpertShape

ROOT = Path(__file__).resolve().parents[2]
MODES = {mode.name: mode for mode in slice_cases.MODES}


def dry(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    gpu_exact_slice.main(
        [*words, "--dry-run", "--layers", "2", "--warm", "6", "--steps", "6", "--state", str(tmp_path / "rows.json"), "--out", str(out)]
    )
    return dict(json.loads(out.read_text()))


def dry_latest(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    sizes = ("--layers", "2", "--warm", "6", "--steps", "6")
    stock_latest.main([*words, "--dry-run", *sizes, "--state", str(tmp_path / "rows.json"), "--out", str(out)])
    return dict(json.loads(out.read_text()))


def test_a_dry_run_measures_every_case_and_makes_every_figure(tmp_path: Path) -> None:
    """All commands one after the other, as on a GPU: a row for each case, no figure missing; stock 1.6.5's with a program of its own."""
    for command in gpu_exact_slice.COMMANDS:
        document = dry(tmp_path, command)
    assert document["summary"]["reason_for_null"] == {"c1_vs_stock165": "stock165/C1 was not measured in this run"}
    document = dry_latest(tmp_path)
    assert [row["name"] for row in document["rows"][-3:]] == ["stock165/C1", "stock165/C4", "stock165/C2"]
    names = {row["name"] for row in document["rows"]}
    every = [case for side in ("ours", "stock", "stock_resident") for case in slice_cases.cases(side, 12)]
    admissions = [case for case in every if case.mode not in (slice_cases.BEST, slice_cases.OTHER)]
    assert names > {case.name for case in admissions}
    assert names >= {f"ours/{mode}/{what}" for mode in slice_cases.ADMISSIONS for what in ("C1", "C2", "C4", "prefill8k")}
    assert {"ours/in_step/C8", "ours/in_step/alternate", "ours/between_steps/C4", "ours/resident/C2@32k", "stock/C1@32k"} <= names
    assert not any(case.mode in (slice_cases.BEST, slice_cases.OTHER) and case.name in names for case in every)
    summary = document["summary"]
    assert [key for key, value in summary.items() if value is None] == []
    assert (summary["reason_for_null"], summary["errors"]) == ({}, [])
    assert summary["c1_vs_stock165"] == pytest.approx(1.5 * summary["c1_vs_stock151"], abs=0.002)  # 33 ms and 22
    assert summary["step_over_bound_half_link"] == pytest.approx(1.1, abs=0.01)
    assert summary["prefill32k_of_limit"] == pytest.approx(summary["prefill8k_of_limit"], abs=0.01)
    assert {"modules", "enqueue_ms", "busy_ms"} <= set(next(row for row in document["rows"] if row["name"] == "ours/resident/modules"))
    assert summary["step_over_bound"] == pytest.approx(1.1, abs=0.01)
    assert document["facts"]["boot_id"] == kept_rows.boot_id()
    assert set(gpu_exact.OTHER_FIGURES) <= set(summary)
    quoted = gpu_exact.slice_figures(tmp_path / "out.json")
    assert quoted["step_over_bound"] == summary["step_over_bound"]
    assert quoted["slice"] == "2 MoE layers, out.json"
    assert quoted["c1_tok_s"] is None


def test_all_runs_the_commands_as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other with the same options and what is left of the time; the first that fails ends it."""
    ran: list[list[str]] = []

    def run(argv: list[str], **_how: Any) -> Any:
        ran.append(argv)
        return types.SimpleNamespace(returncode=3 if argv[3] == "stock" else 0)

    monkeypatch.setattr(gpu_exact_slice.subprocess, "run", run)
    with pytest.raises(SystemExit, match="stock ended with 3"):
        gpu_exact_slice.main(["all", "--layers", "6", "--seconds", "500"])
    assert [argv[1:6] for argv in ran] == [["-m", "bench.gpu_exact_slice", name, "--layers", "6"] for name in ("prepare", "ours", "stock")]
    assert all(gpu_exact_slice.parser().parse_args(argv[3:]).seconds <= 500 for argv in ran)


def test_a_second_run_measures_only_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of this boot are kept, broken ones are measured again, another boot's are dropped."""
    dry(tmp_path, "ours")
    state = tmp_path / "rows.json"
    kept = json.loads(state.read_text())
    kept["rows"]["ours/resident/C4"] = {"error": "RuntimeError: x"}
    kept["rows"]["ours/resident/C2"]["mark"] = 1
    state.write_text(json.dumps(kept))
    capsys.readouterr()
    again = {row["name"]: row for row in dry(tmp_path, "ours")["rows"]}
    said = [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert said == ["ours/resident/C4"]
    assert again["ours/resident/C2"]["mark"] == 1
    dry(tmp_path, "ours")
    assert "everything is measured" in capsys.readouterr().out
    kept["facts"]["boot_id"] = "another"
    state.write_text(json.dumps(kept))
    assert "mark" not in {row["name"]: row for row in dry(tmp_path, "ours")["rows"]}["ours/resident/C2"]


def rows_in(tmp_path: Path) -> Rows:
    return Rows(tmp_path / "rows.json", tmp_path / "out.json", report.start("test"), slice_cases.summarise)


def trace_of(layers: int) -> np.ndarray:
    return routing_trace.make(0, 8, streams=8, depths=slice_ours.depths_of(layers))


def test_a_broken_mode_leaves_its_rows_and_the_others_go_on(tmp_path: Path) -> None:
    """One mode fails: its cases say so; two failures in a row end the run, with everything written."""
    rows, engine = rows_in(tmp_path), DryEngine("ours", 1, trace_of(1), 4, broken="in_place")
    todo = slice_cases.cases("ours", 8)
    assert slice_cases.run(todo, MODES, engine, rows, time.monotonic() + 1e6) == []
    assert rows.rows["ours/in_place/C1"] == {"error": "RuntimeError: the device is gone"}
    assert rows.done("ours/resident/C8")
    assert engine.entered[:4] == ["in_step", "resident", "in_step", "in_step"]  # the last one with the slots of a prefill
    assert set(engine.entered) == set(MODES)
    bad = DryEngine("ours", 1, trace_of(1), 4, broken="resident")
    other = Rows(tmp_path / "r2", tmp_path / "o2", report.start("test"), slice_cases.summarise)
    with pytest.raises(SystemExit, match="2 cases in a row failed, the last one with RuntimeError: the device is gone"):
        slice_cases.run(todo, MODES, bad, other, time.monotonic() + 1e6)
    assert list(json.loads((tmp_path / "r2").read_text())["rows"]) == ["ours/in_step/C1", "ours/resident/C1", "ours/resident/C2"]


def test_what_has_failed_comes_last_and_what_is_optional_needs_no_load(tmp_path: Path) -> None:
    """A mode that breaks the device does not stand before the others for ever; stock is not loaded for its long context alone."""
    rows = rows_in(tmp_path)
    rows.put("ours/between_steps/C1", {"ms": 20.0})
    rows.put("ours/in_step/C1", {"error": "CUDA error"})
    rows.put("ours/resident/C1", {"error": "CUDA error"})
    left = [slice_cases.resolved(case, rows.rows).name for case in slice_cases.missing(slice_cases.cases("ours", 300), rows)]
    assert left[0] == "ours/between_steps/C4"
    behind = left.index("ours/in_step/C1")
    assert all(name.startswith("ours/between_steps/") or name == "ours/in_place/C1" for name in left[:behind])
    assert {"ours/in_step_half_link/C1", "ours/gather/C1", "ours/in_step/C4", "ours/resident/C1"} <= set(left[behind:])
    todo = slice_cases.cases("stock", 300)
    for name in ("stock/C1", "stock/C4", "stock/C2"):
        assert len(slice_cases.missing(todo, rows)) > 1
        rows.put(name, {"ms": 20.0})
    assert slice_cases.missing(todo, rows) == []


def test_a_prefill_has_slots_in_the_proportions_of_the_whole_model(tmp_path: Path) -> None:
    """Both halves whole, of the rest the slice's part; decode keeps its share of the records, and a mode with all of them stays."""
    assert slice_cases.prefill_slots(42) == 1376
    assert slice_cases.prefill_slots(12) == 550 + 236  # 826 * 12 / 42
    assert slice_cases.prefill_slots(12, 3) == 825 + 157  # 551 * 12 / 42
    assert slice_cases.prefill_slots(12) * 9_474_048 < 8e9  # far from the card's 24 GB
    modes = {name: slice_cases.placed(MODES[name], Case("ours", name, "prefill8k", 1.0)) for name in MODES}
    assert {name: mode.slots for name, mode in modes.items() if mode} == {
        "between_steps": "prefill", "in_step": "prefill", "in_step_three_parts": "prefill", "in_step_half_link": "prefill",
        "gather": "prefill", "in_place": "one", "resident": "all",
    }  # fmt: skip
    assert slice_cases.placed(MODES["in_step"], Case("ours", "in_step", "scan", 1.0)) == MODES["in_step"]
    rows, engine = rows_in(tmp_path), DryEngine("ours", 12, trace_of(12), 4)
    slice_cases.run(slice_cases.cases("ours", 8, first=True), MODES, engine, rows, time.monotonic() + 1e6)
    assert rows.rows["ours/in_step/prefill8k"]["slots"] == 786
    assert slice_ours.staged({"bytes_staged": 100}, {"bytes_staged": 1900, "slots": 786, "slots_used": 10}, 310, 2, 3) == {
        "slots": 786, "staged_per_pass": 300, "staged_share": 1.0,
    }  # fmt: skip
    assert slice_ours.staged({"bytes_staged": 0}, {"bytes_staged": 0, "slots": 9, "slots_used": 9}, 9, 2, 1) == {"slots": 9}


def test_what_every_session_must_have_comes_first(tmp_path: Path) -> None:
    """`--first` measures that alone, and nothing of it again later."""
    document = dry(tmp_path, "ours", "--first")
    assert [row["name"] for row in document["rows"]] == [
        "ours/in_step/C1", "ours/resident/C1", "ours/resident/C2", "ours/resident/C4", "ours/in_step/C4", "ours/in_step/C2",
        "ours/in_step/prefill8k", "ours/resident/prefill8k", "ours/resident/modules", "ours/in_step_three_parts/prefill8k",
        "ours/in_step_half_link/C1", "ours/between_steps/C1", "ours/between_steps/C4",
    ]  # fmt: skip
    assert [row["name"] for row in dry(tmp_path, "stock", "--first")["rows"][13:]] == ["stock/C1", "stock/C4", "stock/C2"]
    document = dry(tmp_path, "stock_resident", "--first")
    assert document["rows"][-1]["name"] == "stock_resident/C1"
    document = dry(tmp_path, "start")
    assert document["rows"][-1]["name"] == slice_start.SECOND
    missing = {key for key, value in document["summary"].items() if value is None and key in slice_cases.NEEDS}
    assert missing == {"c1_vs_stock165"}
    names = [row["name"] for row in dry(tmp_path, "ours")["rows"]]
    assert len(names) == len(set(names)) > 30
    assert [(case.what, case.streams) for case in slice_cases.cases("ours", 8) if case.kind == "modules"] == [
        ("modules", 1),
        ("modules_C4", 4),
    ]


def test_some_cases_alone(tmp_path: Path) -> None:
    """In the order of all, the best admission's by that name; an unknown one is refused with those that there are."""
    names = [row["name"] for row in dry(tmp_path, "ours", "--only", "BEST/drift", "resident/C1", "in_step/C1")["rows"]]
    assert names == ["ours/in_step/C1", "ours/resident/C1", "ours/in_step/drift"]
    with pytest.raises(SystemExit, match=r"no case in_step/C3; there are in_step/C1, resident/C1"):
        slice_cases.only(slice_cases.cases("ours", 8, first=True), ["in_step/C3"])
    assert [case.name for case in slice_cases.only(slice_cases.cases("stock", 8), ["C4"])] == ["stock/C4"]


def test_gathered_misses_are_measured_alone_and_not_in_every_session(tmp_path: Path) -> None:
    """One stream and four, as in_step with the misses gathered, and what the machine gathers beside what it copies."""
    document = dry(tmp_path, "ours", "--only", "gather/C1", "gather/C4")
    assert [row["name"] for row in document["rows"]] == ["ours/gather/C1", "ours/gather/C4"]
    assert (document["facts"]["link_gb_s"], document["facts"]["gather_gb_s"]) == (51.5, 50.0)
    assert not any(case.mode == "gather" for case in slice_cases.cases("ours", 8, first=True))
    assert {**MODES["gather"].options, "copy": "engine"} == {**MODES["in_step"].options, "copy": "engine"}
    assert slice_cases.estimate("ours", 300) > sum(case.seconds for case in slice_cases.cases("ours", 300) if case.mode == "gather") > 10


def test_a_gather_s_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of five of as many records as a launch takes, behind one that loads the kernel; none where there is no kernel."""
    asked: list[Any] = []
    clock = iter([0.0, *(value for took in (0.4, 0.2, 0.4, 0.4, 0.4) for value in (10.0, 10.0 + took))])
    store: Any = types.SimpleNamespace(_slots=torch.zeros((3, 50), dtype=torch.uint8), placement=types.SimpleNamespace(num_slots=3))
    loaded: Any = types.SimpleNamespace(records=types.SimpleNamespace(stride=50, device_base=7000))
    rates = slice_ours.slice_rates
    monkeypatch.setattr(rates.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(rates.torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=9))
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(rates.cuda_expert, "gather", lambda copies, size, *, stream: asked.append((copies, size, stream)))
    monkeypatch.setattr(rates.copy_way, "why_not", lambda: "")
    assert rates.gather_rate(store, loaded) == pytest.approx(3 * 50 / 0.2)
    at = store._slots.data_ptr()
    assert asked == [([(at, 7000), (at + 50, 7050), (at + 100, 7100)], 50, 9)] * 6
    monkeypatch.setattr(rates.copy_way, "why_not", lambda: "no nvcc")
    assert rates.gather_rate(store, loaded) is None


def test_no_case_begins_that_would_end_too_late(tmp_path: Path) -> None:
    """What time does not allow is named."""
    engine = DryEngine("stock", 12, trace_of(12), 4)
    skipped = slice_cases.run(slice_cases.cases("stock", 300), {}, engine, rows_in(tmp_path), time.monotonic() + 10)
    assert skipped == ["stock/C4", "stock/C2"]


def test_a_case_without_a_measured_step_is_measured_again(tmp_path: Path) -> None:
    """It is no result, and no failure of the device either."""
    rows, engine = rows_in(tmp_path), DryEngine("stock", 12, trace_of(12), 0)
    slice_cases.run(slice_cases.cases("stock", 300), {}, engine, rows, time.monotonic() + 1e6)
    assert rows.rows["stock/C1"] == {"error": "the time was over before the first measured step"}
    assert not rows.done("stock/C1")
    assert len(rows.rows) == 4


def test_a_stock_run_that_is_too_slow_stops() -> None:
    """By more than 15 %: the ratio to it would flatter us."""
    case = Case("stock", "", "C1", 1)
    slice_cases.refuse_slow_stock(case, {"ms": 26.7})
    with pytest.raises(SystemExit, match=r"27\.0 ms a step at C1, 23\.3 are known"):
        slice_cases.refuse_slow_stock(case, {"ms": 27.0})
    slice_cases.refuse_slow_stock(Case("stock_resident", "", "C1", 1), {"ms": 99})
    slice_cases.refuse_slow_stock(Case("stock", "", "C1@32k", 1), {"ms": 99})


def test_no_figure_is_made_of_a_stock_run_that_was_refused(tmp_path: Path) -> None:
    """Its row says why and is measured again by the next command."""
    rows = rows_in(tmp_path)
    rows.put("ours/in_step/C1", {"ms": 15.0, "tok_s": 66.7})
    engine = DryEngine("stock", 15, trace_of(12), 4)
    todo = slice_cases.cases("stock", 300)
    with pytest.raises(SystemExit, match="cannot be compared"):
        slice_cases.run(todo, {}, engine, rows, time.monotonic() + 1e6, slice_cases.refuse_slow_stock)
    assert not rows.done("stock/C1")
    summary = rows.summary()
    assert summary["c1_vs_stock151"] is None
    assert "stock/C1 failed: stock's CPU split takes 27.5 ms" in summary["reason_for_null"]["c1_vs_stock151"]


def test_the_figures_are_made_of_the_right_rows() -> None:
    """By hand: bound, ratios, the faster admission, the prefill's limit, the largest memory."""
    memory = {"ram_extra_gib": 2.0, "vram_peak_mib": 1024}
    more = {"ram_extra_gib": 3.0, "vram_peak_mib": 2048}
    rows: dict[str, Any] = {
        "ours/resident/C1": {"ms": 5.0},
        "ours/resident/prefill8k": {"s": 0.5},
        "ours/between_steps/C1": {"ms": 20.0, "tok_s": 50.0, "hit_rate": 0.47, "missed_mib_per_step": 500.0, **memory},
        "ours/in_step/C1": {"ms": 15.0, "tok_s": 66.7, "hit_rate": 0.5, "missed_mib_per_step": 477.0, **more},
        "ours/in_step/C4": {"ms": 40.0, "tok_s": 100.0, "missed_mib_per_step": 1500.0},
        "ours/in_step/prefill8k": {"s": 1.25},
        "ours/between_steps/prefill8k": {"s": 2.0},
        "ours/resident/prefill32k": {"s": 9.0, "chunks": 4},
        "ours/in_step/prefill32k": {"s": 10.0},
        "ours/in_step_half_link/C1": {"ms": 27.0, "tok_s": 37.0, "missed_mib_per_step": 477.0},
        "ours/in_step/drift": {"hit_rate": 0.46},
        "ours/in_step/C1@32k": {"ms": 16.0, "tok_s": 62.5},
        "stock/C1@32k": {"ms": 24.0},
        "stock/C1": {"ms": 24.0},
        "stock_resident/C1": {"ms": 6.0},
        "stock/C2": {"error": "x"},
        "stock165/C1": {"ms": 30.0},
    }  # fmt: skip
    facts = {"link_gb_s": 50.0, "records": 1000, "slots": 0, "record_bytes": 50_000_000, "link_half_gb_s": 25.0}
    facts["hit_rates"] = {"steady": {"clock": 0.395, "belady": 0.69, "heat": 0.49}, "drift": {"clock": 0.4, "heat": 0.45}}
    summary = slice_cases.summarise(rows, facts)
    assert summary["admission"] == "in_step"
    assert summary["c1_tok_s"] == 66.7
    assert (summary["c1_vs_stock151"], summary["c1_vs_stock165"], summary["c4_vs_stock165"]) == (1.6, 2.0, None)
    assert summary["step_over_bound"] == pytest.approx(15 / (5 + 477 * 2**20 / 50e9 * 1000), abs=1e-3)
    assert summary["c4_over_c1"] == pytest.approx(1.499, abs=1e-3)
    assert summary["all_resident_time_ratio"] == pytest.approx(0.833, abs=1e-3)
    assert summary["hit_minus_clock_points"] == 10.5
    assert (summary["hit_minus_clock_points_drift"], summary["hit_rate_scan"]) == (6.0, None)
    assert summary["least_points_over_clock_by_counts"] == 5.0
    assert summary["belady_hit_rate"] == 0.69
    assert summary["prefill8k_of_limit"] == 0.8  # the link: 50 GB at 50 GB/s
    assert summary["prefill32k_of_limit"] == 0.9  # the experts: four times 50 GB take less
    assert summary["step_over_bound_half_link"] == pytest.approx(27 / (5 + 477 * 2**20 / 25e9 * 1000), abs=1e-3)
    assert (summary["c1_tok_s_32k"], summary["c1_vs_stock151_32k"]) == (62.5, 1.5)
    assert summary["reason_for_null"] == {
        "c2_vs_stock151": "ours/in_step/C2 was not measured in this run",
        "c4_vs_stock151": "stock/C4 was not measured in this run",
        "second_start_s": "start/second was not measured in this run",
    }
    assert (summary["ram_extra_gib"], summary["vram_peak_gib"]) == (3.0, 2.0)
    assert (summary["c2_vs_stock151"], summary["c4_vs_stock151"], summary["errors"]) == (None, None, ["stock/C2"])


def test_estimates_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """What a command should take, so that one can be fitted into a rented machine's time; each fits into ten minutes."""
    gpu_exact_slice.main(["estimate"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == list(gpu_exact_slice.COMMANDS)
    assert all(0 < float(line[1]) < 600 for line in lines)


FAKE_NVML = """
#include <string.h>
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
static int calls;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { *device = (void*)(unsigned long)(index + 1); return index > 7 ? 2 : 0; }
int nvmlDeviceGetMemoryInfo_v2(void* device, Memory* memory) {
  if (memory->version != (sizeof(Memory) | 2 << 24)) return 25;
  memory->total = 100; memory->reserved = 9; memory->free = ++calls == 2 ? 21 : 51; memory->used = 49;
  return device == (void*)1 ? 0 : 3;
}
"""


def test_vram_is_read_as_the_driver_counts_it(tmp_path: Path) -> None:
    """Through a library of NVML's interface; the peak between two looks counts once; errors say which call."""
    source, library = tmp_path / "nvml.c", tmp_path / "libnvml.so"
    source.write_text(FAKE_NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    nvml = slice_machine.Nvml(0, str(library))
    assert [nvml.used(), nvml.used(), nvml.used()] == [40, 70, 40]  # without what the driver keeps
    assert nvml.reserved() == 9
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByIndex_v2 gives 2"):
        slice_machine.Nvml(8, str(library))
    with pytest.raises(OSError, match="none"):
        slice_machine.Nvml(0, str(tmp_path / "none.so"))
    readings = iter([5, 90, 10])
    with slice_machine.PeakSampler(lambda: next(readings, 7), period_s=0.005) as sampler:
        time.sleep(0.2)
        peak, samples = sampler.take()
        assert (peak, samples > 3) == (90, True)
        assert sampler.take()[0] == 7

    def broken() -> int:
        raise OSError("nvmlDeviceGetMemoryInfo gives 999")

    with slice_machine.PeakSampler(broken, period_s=0.005) as sampler:
        time.sleep(0.03)
        assert sampler._thread.is_alive()
        assert slice_machine.vram_of(sampler) == {}


def test_memory_beside_the_arena(tmp_path: Path) -> None:
    """Anonymous and file pages of all processes, and segments beyond the arena; shared memory mapped twice counts once."""
    for pid, (anon, file) in {1: (1024 * 1024, 2048), 2: (512 * 1024, 0)}.items():
        (tmp_path / str(pid)).mkdir()
        text = f"0-1 ---p [rollup]\nRss: 9 kB\nPss_Anon: {anon} kB\nPss_File: {file} kB\nPss_Shmem: 777777 kB\n"
        (tmp_path / str(pid) / "smaps_rollup").write_text(text)
    assert slice_machine.own_bytes([1, 2], tmp_path) == (1536 * 1024 + 2048) * 1024
    own = slice_machine.own_bytes()
    assert own is not None
    assert own > 10 << 20
    (tmp_path / "3").mkdir()
    assert slice_machine.own_bytes([1, 3], tmp_path) is None
    (tmp_path / "3" / "status").write_text("Name:\tx\nVmRSS:\t 99 kB\nRssAnon:\t    1024 kB\nRssFile:\t  1024 kB\nRssShmem:\t 5 kB\n")
    assert slice_machine.own_bytes([3], tmp_path) == 2 << 20
    (tmp_path / "3" / "smaps_rollup").write_text("Pss_Anon: 1024 kB\nPss_File: 512 kB\n")
    assert slice_machine.own_bytes([3], tmp_path) == 3 << 19
    assert slice_machine.own_bytes([3], tmp_path, shares=False) == 2 << 20  # no look at each page
    segment = tmp_path / "segment"
    segment.write_bytes(os.urandom(1 << 20))
    before = slice_machine.ram_extra_gib(0, [])
    assert slice_machine.ram_extra_gib(-(1 << 30), [segment]) == pytest.approx(before + 1, abs=0.05)


def test_stocks_experts_are_renumbered_by_popularity() -> None:
    """The most picked expert of each layer becomes 0; who shares a token stays the same."""
    trace = np.array([[[[5, 7], [1, 2]]], [[[5, 9], [2, 3]]], [[[7, 5], [2, 1]]]])  # 3 tokens, 1 stream, 2 layers, 2 picks
    got = slice_stock.by_popularity(trace)
    assert got[:, 0, 0].tolist() == [[0, 1], [0, 2], [1, 0]]
    assert got[:, 0, 1].tolist() == [[1, 0], [0, 2], [0, 1]]


class FakeStore:
    def __init__(self, loaded: Any, count: int, events: list[Any]) -> None:
        self._events, self._records = events, loaded.records
        self.placement = types.SimpleNamespace(num_slots=count)
        self._slots = torch.zeros((count, 8), dtype=torch.uint8)

    def place(self, records: Any) -> None:
        self._events.append(("place", len(list(records))))

    def start_with(self, slow: np.ndarray, fast: np.ndarray) -> None:
        assert not slow.any()
        assert not fast.any()
        self._events.append("cold")

    def close(self) -> None:
        self._events.append("store closed")


class FakeBackend:
    drifting: ClassVar[bool] = False  # each prefill has other bits

    def __init__(self, _model: Any, _cache: Any, store: FakeStore, records: Any, _replacements: Any, info: Any) -> None:
        self.experts, self.info, self.open, self.rows = types.SimpleNamespace(_records=records), info, 0, 0
        self._model = _model
        self.prefills = 0

    def open_stream(self) -> Any:
        self.open += 1
        return types.SimpleNamespace(pages=[], length=0)

    def close_stream(self, _stream: object) -> None:
        self.open -= 1

    def extend(self, stream: Any, tokens: int) -> bool:
        stream.pages.extend(range(-(-tokens // 256) - len(stream.pages)))
        return tokens <= self.info.max_context

    def prefill(self, _stream: object, ids: list[int], *, all_logits: bool) -> np.ndarray:
        assert not all_logits
        assert ids
        self.prefills += 1
        return np.full(4, self.prefills if self.drifting else 0, np.float32)

    def decode(self, streams: list[Any], tokens: list[int]) -> np.ndarray:
        assert len(streams) == len(tokens) == self.open
        assert all(len(stream.pages) == -(-stream.length // 256) for stream in streams)
        self.rows += len(tokens)
        for module, _, _ in self._model.fwd_modules:
            module.forward(1)
        return np.zeros(4, np.float32)

    def stats(self) -> dict[str, int]:
        return {
            "decode_picks": 16 * self.rows,
            "decode_hits": 8 * self.rows,
            "decode_records_missed": 8 * self.rows,
            "bytes_copied": 100 * self.rows,
            "records_in_place": self.rows,
            "slots": 6,
            "slots_used": 2,
            "bytes_staged": 3 * self.prefills * self.experts._records.stride,
        }


class FakeEvent:
    """A device's clock: it goes on by 2 ms at each event."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now += 2.0
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


class Leaf:
    def forward(self, x: int) -> int:
        return x + 1


class Block:
    """A module with two below it."""

    def __init__(self) -> None:
        self.attn, self.mlp = Leaf(), Leaf()

    def forward(self, x: int) -> int:
        return self.mlp.forward(self.attn.forward(x))


def test_our_engine_over_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but exllamav3 and the device is real: files, arena, fill. Modes come in order, the cap is set and lifted."""
    experts = 8
    monkeypatch.setattr(routing_trace, "EXPERTS", experts)
    monkeypatch.setattr(slice_checkpoint, "HIDDEN", 256)
    monkeypatch.setattr(slice_checkpoint, "INTER", 128)
    slice_checkpoint.write_experts_only(tmp_path / "m", 1, experts)
    monkeypatch.setattr(slice_ours, "SHM", str(tmp_path))
    events: list[Any] = []
    keys = torch.zeros(64)

    def load_model(checkpoint: Any, arena: Any, shapes: list[ExpertShape], **sizes: int) -> Any:
        assert arena.check(0, 7)
        assert sizes == {"cache_tokens": 8 * 1024, "max_streams": 8, "chunk": 256}
        host = torch.zeros((experts, 8), dtype=torch.uint8)
        records = types.SimpleNamespace(
            num_records=experts,
            num_layers=1,
            pin_seconds=1.5,
            stride=shapes[0].record_bytes,
            arena=arena,
            host=host,
            close=lambda: events.append("unpinned"),
        )
        layers = [types.SimpleNamespace(index=0, mlp=types.SimpleNamespace(routing_fn=lambda rows, c, y, p: (y, p)))]
        return types.SimpleNamespace(
            records=records, layers=layers, table=torch.zeros(1),
            cache=types.SimpleNamespace(get_all_tensors=lambda: [keys, torch.zeros(3, dtype=torch.int64)]),
            model=types.SimpleNamespace(unload=lambda: events.append("unloaded"), fwd_modules=[(Block(), 0, 0), (Leaf(), 0, 1)]),
            replacements=types.SimpleNamespace(undo=lambda: events.append("undone")),
        )  # fmt: skip

    monkeypatch.setattr(slice_ours.loader, "load_model", load_model)
    monkeypatch.setattr(slice_ours.loader, "make_store", lambda loaded, count, *_more: FakeStore(loaded, count, events))
    monkeypatch.setattr(slice_ours, "Exl3Backend", FakeBackend)
    for name, value in {
        "mem_get_info": lambda _d: (50 << 30, 96 << 30),
        "memory_allocated": lambda: 1 << 30,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "set_per_process_memory_fraction": lambda share: events.append(("cap", round(share, 3))),
        "Event": FakeEvent,
        "_sleep": lambda cycles: events.append(("sleep", cycles)),
    }.items():
        monkeypatch.setattr(slice_ours.torch.cuda, name, value)
    monkeypatch.setattr(slice_ours, "Nvml", lambda: types.SimpleNamespace(used=lambda: 3 << 30, reserved=lambda: 600 << 20))
    monkeypatch.setattr(routing_trace, "SLOT_SHARE", 1.0)
    args = gpu_exact_slice.parser().parse_args(
        ["ours", "--folder", str(tmp_path / "m"), "--layers", "1", "--warm", "2", "--steps", "3", "--prefill", "64", "--context", "600"]
    )
    monkeypatch.setattr(slice_ours, "CHUNK", 256)
    monkeypatch.setattr(slice_ours.slice_rates, "copy_rate", lambda: 4e12)
    monkeypatch.setattr(slice_ours.slice_rates, "gather_rate", lambda _store, _loaded: 49e9)
    rows = rows_in(tmp_path)
    engine = slice_ours.OurEngine(args, np.zeros((5, 8, 1, 8), np.uint16), time.monotonic() + 1e6)
    assert slice_cases.run(slice_cases.cases("ours", 5), MODES, engine, rows, time.monotonic() + 1e6) == []
    monkeypatch.setattr(FakeBackend, "drifting", True)
    best = slice_cases.best_of(rows.rows)
    other = {"in_step": "between_steps", "between_steps": "in_step"}[str(best)]
    drifted = engine.measure(Case("ours", str(best), "alternate", 1))
    assert (drifted["rounds"], drifted["different"], drifted["equal"]) == (50, 49, False)
    engine.close()
    assert [row for row in rows.rows.values() if "error" in row] == []
    assert rows.rows[f"ours/{best}/alternate"]["equal"] is True
    assert f"ours/{other}/alternate" not in rows.rows
    assert f"ours/{other}/prefill8k" in rows.rows
    c2 = rows.rows["ours/between_steps/C2"]
    assert (c2["steps"], c2["hit_rate"], c2["vram_peak_mib"]) == (3, 0.5, 3072)
    assert c2["missed_mib_per_step"] == round(16 * engine.facts()["record_bytes"] / 2**20, 1)
    eight = rows.rows[f"ours/{best}/prefill8k"]
    assert (eight["tokens"], eight["slots"], eight["staged_per_pass"], eight["staged_share"]) == (64, 6, 3, 0.5)
    assert (rows.rows[f"ours/{best}/prefill32k"]["tokens"], rows.rows[f"ours/{best}/prefill32k"]["chunks"]) == (600, 3)
    assert (rows.rows[f"ours/{best}/C4@32k"]["context"], rows.rows[f"ours/{best}/C4@32k"]["steps"]) == (600, 1)
    assert rows.rows["ours/in_step_half_link/C1"]["read_in_place_per_step"] == 1.0
    assert rows.rows[f"ours/{best}/drift"]["steps"] == rows.rows[f"ours/{best}/scan"]["steps"] == 3
    assert keys.std() > 0.5
    modules = {row["module"]: row for row in rows.rows["ours/resident/modules"]["modules"]}
    assert {name: row["calls"] for name, row in modules.items()} == {"Block": 1, "Leaf": 3}
    # Six marks lie around the block's call: 10 ms from its first to its last, 4 of them in the two modules below; the last leaf has 2.
    assert (modules["Block"]["busy_us"], modules["Leaf"]["busy_us"]) == (6000.0, 6000.0)
    assert all(cycles > 0 for name, cycles in (e for e in events if e[0] == "sleep"))
    assert engine.facts()["arena"] == "filled"
    assert "link_gb_s" in engine.facts()
    assert engine.facts()["gather_gb_s"] == 49.0
    assert rows.rows["ours/gather/C1"]["steps"] == rows.rows["ours/gather/C4"]["steps"] == 3
    assert [event[1] for event in events if event[0] == "cap"][:4] == [0.246, 1.0, 0.246, 0.246]
    assert events[-4:] == ["store closed", "undone", "unloaded", "unpinned"]
    assert slice_ours.fill_arena(slice_ours.Checkpoint(tmp_path / "m"), tmp_path / "glm53-slice-arena")[2] == {"arena": "taken over"}


class FakeGenerator:
    """Each job streams one token an iteration, after one iteration of prefill."""

    prompts: ClassVar[list[int]] = []

    def __init__(self, model: Any, _cache: Any, _tokenizer: Any, **_sizes: int) -> None:
        self.jobs: list[list[int]] = []
        self._model = model

    def enqueue(self, job: Any) -> None:
        self.jobs.append([job["max_new_tokens"]])
        self.prompts.append(job["input_ids"].shape[1])

    def clear_queue(self) -> None:
        self.jobs.clear()

    def num_remaining_jobs(self) -> int:
        return len(self.jobs)

    def iterate(self) -> list[dict[str, Any]]:
        for module, _, _ in self._model.fwd_modules:
            module.mlp.routing_fn(len(self.jobs), None, None, None)
        out = [{"stage": "streaming", "token_ids": torch.zeros((1, 1))} for _ in self.jobs]
        for job in self.jobs:
            job[0] -= 1
        self.jobs = [job for job in self.jobs if job[0]]
        return out


def test_stocks_engine_over_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The split's settings, the forced picks of every step and layer, the tokens that are counted."""
    seen: list[Any] = []

    class Block:
        def __init__(self) -> None:
            self.routing_fn = self.stock

        def stock(self, rows: int, _config: Any, _y: Any, _params: Any) -> Any:
            picks, weights = torch.zeros((rows, 8), dtype=torch.int64), torch.zeros((rows, 8))
            seen.append(picks)
            return picks, weights

    infer = types.SimpleNamespace()
    model = types.SimpleNamespace(
        fwd_modules=[(types.SimpleNamespace(mlp=Block()), 0, i) for i in range(2)],
        load=lambda **how: seen.append(how),
        unload=lambda: None,
    )
    sampler = types.ModuleType("exllamav3.generator.sampler")
    sampler.ArgmaxSampler = object  # type: ignore[attr-defined]
    block = types.ModuleType("exllamav3.modules.block_sparse_mlp")
    block.BlockSparseMLP = Block  # type: ignore[attr-defined]
    package = types.ModuleType("exllamav3")
    for name, value in {
        "Config": types.SimpleNamespace(from_directory=lambda _path: types.SimpleNamespace(infer_params=infer)),
        "Model": types.SimpleNamespace(from_config=lambda _config: model),
        "Cache": lambda _model, max_num_tokens, max_batch_size: seen.append((max_num_tokens, max_batch_size)),
        "Tokenizer": types.SimpleNamespace(from_config=lambda _config: None),
        "Generator": FakeGenerator,
        "Job": dict,
    }.items():
        setattr(package, name, value)
    for module in (package, sampler, block, types.ModuleType("exllamav3.generator"), types.ModuleType("exllamav3.modules")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    real = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self if str(device).startswith("cuda") else real(self, device))
    for name in ("synchronize", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    trace = routing_trace.make(0, 30, streams=8, depths=(0, 41))
    args = gpu_exact_slice.parser().parse_args(["stock", "--folder", str(tmp_path), "--steps", "10", "--warm", "4", "--prefill", "64"])
    assert args.context == 32_768
    engine = slice_stock.StockEngine("stock", args, trace)
    assert infer.moe_cpu_split == 255
    assert infer.moe_cpu_threads == max(1, (os.cpu_count() or 2) - 1)
    assert seen[0] == (36_864, 8)
    assert seen[1] == {"use_per_device": [130], "max_chunk_size": 2048, "progressbar": False}
    seen.clear()
    row = engine.measure(Case("stock", "", "C4", 1))
    assert row["steps"] == 10
    assert row["tok_s"] > 0
    want = torch.from_numpy(slice_stock.by_popularity(trace))
    assert torch.equal(seen[2], want[2, :4, 0])
    assert torch.equal(seen[3], want[2, :4, 1])
    assert engine.measure(Case("stock", "", "prefill8k", 1))["tokens"] == 64
    behind = engine.measure(Case("stock", "", "C1@32k", 1))
    assert (behind["context"], behind["steps"]) == (32_768, 3)
    assert FakeGenerator.prompts[-1] == 32_768
    monkeypatch.setattr(slice_stock, "CASE_S", 0.0)
    with pytest.raises(TimeoutError, match="broken off"):
        engine.measure(Case("stock", "", "C2", 1))
    assert engine._generator.jobs == []
    assert engine.facts()["stock_experts_in_vram_per_layer"] == 33
    assert 0.2 < engine.facts()["stock_hit_share"] < 1
    assert not hasattr(infer, "moe_cpu_pinned_arena")
    latest = slice_stock.StockEngine(slice_cases.STOCK_165, args, trace)
    assert (infer.moe_cpu_split, infer.moe_cpu_pinned_arena) == (255, True)
    assert (latest._warm, engine._warm) == (4, 4)
    assert latest.facts()["stock165_hit_share"] == engine.facts()["stock_hit_share"]


def test_another_version_is_not_measured_as_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both versions are named, and where the right one goes; nothing is written over what is there."""
    package, version = types.ModuleType("exllamav3"), types.ModuleType("exllamav3.version")
    package.version, version.__version__ = version, "1.5.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "exllamav3", package)
    monkeypatch.setitem(sys.modules, "exllamav3.version", version)
    with pytest.raises(SystemExit, match=r"exllamav3 1\.5\.1 is on PYTHONPATH, this bench measures 1\.6\.5: pip install --target"):
        stock_latest.main(["--state", str(tmp_path / "rows.json"), "--out", str(tmp_path / "out.json")])
    assert list(tmp_path.iterdir()) == []
    version.__version__ = stock_latest.VERSION  # type: ignore[attr-defined]
    assert stock_latest.check_version() == "1.6.5"


@pytest.mark.parametrize("readable", [True, False])
def test_a_topology_that_is_not_there_is_not_read(readable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is there, exllamav3 pins as it always does."""
    ext = types.ModuleType("exllamav3_ext")
    ext.exl3_moe_cpu_core_order = lambda: ([0, 1], 2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "exllamav3_ext", ext)
    monkeypatch.setattr(stock_latest.os.path, "isdir", lambda _path: readable)
    for name in (*stock_latest.UNPINNED, "STOCK_LATEST_UNPINNED"):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    stock_latest.leave_topology_alone()
    assert ext.exl3_moe_cpu_core_order() == (([0, 1], 2) if readable else ([], 0))
    wanted = dict.fromkeys(stock_latest.UNPINNED) if readable else stock_latest.UNPINNED
    assert {name: os.environ.get(name) for name in stock_latest.UNPINNED} == wanted
    monkeypatch.setenv("STOCK_LATEST_UNPINNED", "1")
    stock_latest.leave_topology_alone()
    assert ext.exl3_moe_cpu_core_order() == ([], 0)


def test_a_scan_costs_the_policies_that_admit_it_and_its_own_picks_count_for_nobody() -> None:
    """Eight experts for ever, eight slots: after the scan CLOCK and LRU fetch all of them once more, in one of ten counted steps."""
    trace = np.tile(np.arange(8, dtype=np.uint16), (20, 1, 1))
    assert slice_traces.middle(10, 20) == 15
    assert slice_traces.rates(trace, 8, 10) == {"heat": 1.0, "clock": 1.0, "lru": 1.0, "belady": 1.0}
    assert slice_traces.rates(trace, 8, 10, scan=True) == {"heat": 1.0, "clock": 0.9, "lru": 0.9, "belady": 1.0}


def test_a_drift_is_another_popularity_half_way() -> None:
    """The first half is the seed's own, the second another's; all of it uint16, as the simulator takes it."""
    drifting = slice_traces.drifting(3, 41, (0, 41))
    assert (drifting.shape, drifting.dtype) == ((41, 1, 2, 8), np.uint16)
    assert (drifting[:20] == routing_trace.make(3, 20, depths=(0, 41))).all()
    assert (drifting[20:] == routing_trace.make(1003, 21, depths=(0, 41))).all()
    assert set(slice_traces.all_rates(0, 12, 6, (0, 41))) == {"steady", "seed 1", "seed 2", "seed 3", "seed 4", "drift", "scan"}


def test_clean_takes_everything_of_the_benches_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slice, its rows, arenas and control regions that a killed bench left; not those of a server."""
    monkeypatch.setattr(gpu_exact_slice, "SHM", str(tmp_path))
    ours = [f"glm53-{name}-{kind}" for name in ("slice", "gpu-fast", "gpu-exact") for kind in ("arena", "ctl")]
    for name in (*ours, "glm53-main-arena"):
        (tmp_path / name).write_text("")
    (tmp_path / "slice").mkdir()
    (tmp_path / "rows").write_text("{}")
    for _ in range(2):
        gpu_exact_slice.main(["clean", "--folder", str(tmp_path / "slice"), "--state", str(tmp_path / "rows")])
        assert [path.name for path in tmp_path.iterdir()] == ["glm53-main-arena"]
    assert str(gpu_exact.ARENA) == "/dev/shm/glm53-gpu-exact-arena"


def test_an_arena_without_files_is_filled_by_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record is whole, differs from its neighbour, and has scales that are no noise; a second call takes it over."""
    monkeypatch.setattr(routing_trace, "EXPERTS", 5)
    monkeypatch.setattr(slice_ours, "HIDDEN", 256)
    monkeypatch.setattr(slice_ours, "INTER", 128)
    shapes = [ExpertShape.create(256, 128, 3) for _ in range(3)]
    arena = slice_ours.open_arena(tmp_path / "arena", shapes, threads=4)
    assert not arena.reattached
    assert all(arena.check(layer, expert) for layer in range(3) for expert in range(5))
    first, last = arena.record(0, 0), arena.record(2, 4)
    assert (first != last).mean() > 0.5
    for record in (first, last):
        for offset, values in slice_ours.record_scales(shapes[0]):
            assert (record[offset : offset + len(values)] == values).all()
    down = np.abs(last[shapes[0].down_svh : shapes[0].down_svh + 512].view(np.float16).astype(float))
    assert down == pytest.approx(np.full(256, 0.7 * 128**-0.5), rel=1e-3)
    del first, last, record, down
    arena.close()
    again = slice_ours.open_arena(tmp_path / "arena", shapes)
    assert again.reattached
    again.unlink()


def started(arena: str = "re-attached: x", *, tuned: bool = False, s: float = 20.0, compiled: int = 0) -> tuple[dict[str, Any], None]:
    return {"arena": arena, "tuned": tuned, "s": s, "compiled": compiled}, None


@pytest.mark.parametrize(
    ("starts", "rows"),
    [
        ([started()], {slice_start.SECOND: 20.0}),  # the arena of this boot, and choices that are shipped
        ([started("loaded: x", tuned=True, s=90.0), started(s=21.0)], {slice_start.FIRST: 90.0, slice_start.SECOND: 21.0}),
        ([started(tuned=True, s=80.0), started(tuned=True, s=70.0)], {slice_start.FIRST: 80.0, slice_start.SECOND: 70.0}),
        ([started(compiled=7, s=27.0), started(s=19.0)], {slice_start.FIRST: 27.0, slice_start.SECOND: 19.0}),
    ],
)
def test_a_second_start_is_one_that_finds_what_the_first_has_left(
    tmp_path: Path, starts: list[tuple[dict[str, Any], None]], rows: dict[str, float]
) -> None:
    """One start is enough where everything is there; what is tuned at every start counts to the second one as well."""
    kept, left = rows_in(tmp_path), list(starts)
    pins = tmp_path / "pins"
    deadline = time.monotonic() + 500
    assert slice_start.measure(kept, tmp_path, pins, 24_564, deadline, start=lambda *_how: left.pop(0)) == []
    assert left == []
    assert {name: row["s"] for name, row in kept.rows.items()} == rows
    assert kept.summary()["second_start_s"] == rows[slice_start.SECOND]
    assert slice_start.measure(kept, tmp_path, pins, 24_564, deadline, start=None) == []  # nothing is measured again


def test_a_second_start_goes_on_with_turns_where_there_is_time(tmp_path: Path) -> None:
    """Not the one that tunes; a process that broke off behind its start costs the start nothing."""
    kept, pins, asked = rows_in(tmp_path), tmp_path / "pins", []

    def start(*how: Any) -> Any:
        asked.append(how[4])
        pins.write_text("{}")
        row = started(tuned=True, s=80.0)[0] if len(asked) == 1 else started()[0]
        return row, None if len(asked) == 1 else {"rounds": 50, "equal": True, "vram_peak_mib": 23_552}

    assert slice_start.measure(kept, tmp_path, pins, 24_564, time.monotonic() + 500, start=start) == []
    assert asked == [0.0, slice_start.TURNS_S]
    summary = kept.summary()
    assert (summary["alternations"], summary["alternations_equal"], summary["vram_peak_gib_alternating"]) == (50, True, 23.0)
    kept, asked = rows_in(tmp_path / "short"), [0.0]
    assert slice_start.measure(kept, tmp_path, pins, 24_564, time.monotonic() + 45, start=start) == []
    assert asked[1:] == [0.0]
    kept = rows_in(tmp_path / "broken")
    assert slice_start.measure(kept, tmp_path, pins, 1, time.monotonic() + 500, start=lambda *_: (started()[0], {"error": "x"})) == []
    assert kept.done(slice_start.SECOND)
    assert kept.summary()["alternations"] is None


def test_turns_behind_a_first_start_leave_time_for_the_second(tmp_path: Path) -> None:
    """Choices of kernels were there, compiled kernels were not: that is known when the start is over, and its turns have been planned."""
    kept, pins, now, asked = rows_in(tmp_path), tmp_path / "pins", [1000.0], []
    pins.write_text("{}")

    def start(*how: Any) -> Any:
        asked.append(how[4])
        now[0] += slice_start.SECOND_S + how[4]
        return started(compiled=30 if len(asked) == 1 else 0)[0], {"rounds": 50, "equal": True} if how[4] else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_start.time, "monotonic", lambda: now[0])
        assert slice_start.measure(kept, tmp_path, pins, 1, 1000.0 + 2 * slice_start.SECOND_S + 100, start=start) == []
    assert asked == [100.0, 0.0]
    assert all(kept.done(name) for name in (slice_start.FIRST, slice_start.SECOND, slice_start.TURNS))


def test_peaks_of_vram_are_told_by_what_was_under_way() -> None:
    """Turns begin with a prompt; where the driver did not answer there is no figure."""

    def mib(value: int) -> dict[str, int]:
        return {"vram_peak_mib": value, "vram_samples": 2}

    row = slice_start.peaks(mib(10), [mib(14), mib(11), {}, mib(12), mib(13)])
    assert row == {
        "vram_peak_mib": 14, "vram_samples": 8, "vram_peak_mib_ready": 10, "vram_peak_mib_prefill": 14, "vram_peak_mib_decode": 12,
    }  # fmt: skip
    assert slice_start.peaks(mib(10), []) == slice_start.peaks({}, [mib(14), mib(11)]) == {}


def test_turns_have_the_first_one_s_bits() -> None:
    """The same prompt in whole chunks and the same steps; a round that differs is counted, and none begins that would end too late."""
    seen: list[Any] = []

    class Turning:
        def open_stream(self) -> str:
            return "stream"

        def close_stream(self, _stream: str) -> None:
            seen.append("closed")

        def prefill(self, _stream: str, ids: list[int], *, all_logits: bool) -> np.ndarray:
            seen.append(len(ids))
            return np.array([len(seen) if seen.count("closed") == 2 else 0.0])

        def decode(self, _streams: list[str], ids: list[int]) -> np.ndarray:
            return np.array(ids)

    steps: list[int] = []
    backend: Any = Turning()
    row = slice_ours.alternate(backend, slice_ours.CHUNK + 100, time.monotonic() + 600, steps.append)
    assert {key: row[key] for key in ("rounds", "equal", "different", "prompt_tokens")} == {
        "rounds": slice_ours.ROUNDS, "equal": False, "different": 1, "prompt_tokens": slice_ours.CHUNK + 100,
    }  # fmt: skip
    assert seen[:3] == [slice_ours.CHUNK, 100, "closed"]
    assert steps[: slice_ours.ROUND_STEPS + 1] == [*range(slice_ours.ROUND_STEPS), -1]
    assert slice_ours.alternate(backend, 10, time.monotonic() - 1, steps.append)["rounds"] == 0


def test_turns_are_kept_where_the_driver_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What took minutes is not lost for want of a figure; where the driver answers, its own share is told."""

    class Driver:
        reserved_bytes: int | None = None

        def read(self) -> int:
            if self.reserved_bytes is None:
                raise OSError("nvmlDeviceGetMemoryInfo_v2 gives 25")
            return self.reserved_bytes

        used = reserved = read

    backend = types.SimpleNamespace(
        info=types.SimpleNamespace(max_context=slice_ours.ROUND_STEPS + 10),
        stats=lambda: {"slots": 7},
        open_stream=lambda: "stream",
        close_stream=lambda _stream: None,
        prefill=lambda _stream, _ids, all_logits: np.zeros(1),
        decode=lambda _streams, _ids: np.zeros(1),
    )
    monkeypatch.setattr(slice_machine, "Nvml", Driver)
    row = slice_start.turns(backend, 600)
    assert (row["rounds"], row["equal"], row["slots"]) == (slice_ours.ROUNDS, True, 7)
    assert not any(name.startswith("vram") for name in row)
    monkeypatch.setattr(Driver, "reserved_bytes", 615 << 20)
    row = slice_start.turns(backend, 600)
    assert (row["vram_reserved_mib"], row["vram_peak_mib"]) == (615, 615)


def test_a_start_that_cannot_be_measured_says_why(tmp_path: Path) -> None:
    """No time, a failure, or an arena that was filled again: no figure is made of any of them."""
    kept, pins = rows_in(tmp_path), tmp_path / "pins"
    assert slice_start.measure(kept, tmp_path, pins, 1, time.monotonic() + 60, start=None) == [slice_start.SECOND]
    pins.write_text("{}")
    assert slice_start.measure(kept, tmp_path, pins, 1, time.monotonic() + 20, start=None) == [slice_start.SECOND]

    def late(*_how: Any) -> Any:
        raise subprocess.TimeoutExpired("start", 1.0)

    assert slice_start.measure(kept, tmp_path, pins, 1, time.monotonic() + 60, start=late) == [slice_start.SECOND]

    def broken(*_how: Any) -> Any:
        raise RuntimeError("the start ended with 78, not ready: ")

    assert slice_start.measure(kept, tmp_path, pins, 1, time.monotonic() + 60, start=broken) == []
    assert kept.rows[slice_start.FIRST] == {"error": "the start ended with 78, not ready: "}
    filled = [started("loaded: x", s=60.0), started("loaded: x", s=60.0)]
    slice_start.measure(kept, tmp_path, pins, 1, time.monotonic() + 60, start=lambda *_how: filled.pop(0))
    assert kept.rows[slice_start.SECOND]["error"] == "the arena was loaded: x"
    summary = kept.summary()
    assert summary["second_start_s"] is None
    assert summary["reason_for_null"]["second_start_s"] == "start/second failed: the arena was loaded: x"


def test_a_start_is_timed_from_the_process_s_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own clock ends it; one that is not ready is told with its last words."""
    python = tmp_path / "python"
    say = """import json, time
time.sleep(0.3)
print('warming up')
print('ready: ' + json.dumps({'arena': 'x', 'ready_at': time.monotonic()}))
time.sleep(0.5)"""
    real = sys.executable
    python.write_text(f"#!{real}\n{say}\n")
    python.chmod(0o755)
    monkeypatch.setattr(slice_start.sys, "executable", str(python))
    row, behind = slice_start.run(tmp_path, tmp_path / "pins", 24_564, 60.0)
    assert behind is None
    assert slice_start.run(tmp_path, tmp_path / "pins", 24_564, 60.0, 5.0)[1] == {"error": "it ended with 0"}
    assert row["arena"] == "x"
    assert "ready_at" not in row
    assert 0.3 <= row["s"] < 20
    python.write_text(f"#!{real}\nprint('no GPU'); raise SystemExit(78)\n")
    with pytest.raises(RuntimeError, match="ended with 78, not ready: no GPU"):
        slice_start.run(tmp_path, tmp_path / "pins", 24_564, 60.0)


def test_a_start_is_the_worker_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through its loader and with its settings; free VRAM is that of a card of 24 GB, and what it tunes is told."""
    from services.gpu_worker.backends.exl3 import lending, loader

    pins, asked = tmp_path / "pins.json", []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    # Put back afterwards.
    monkeypatch.setattr(loader, "free_bytes", loader.free_bytes)
    monkeypatch.setattr(lending, "spare_bytes", lending.spare_bytes)
    for name, value in {"get_device_name": lambda _d: "NVIDIA H200", "mem_get_info": lambda _d: (130 << 30, 140 << 30)}.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def load(settings: Any, checkpoint: Any, note: Any, reason: str) -> Any:
        note(0.0, "x")
        asked.append((settings.instance, settings.triton_pin, settings.warm_up, checkpoint, reason, loader.free_bytes()))
        pins.write_text("chosen")
        (tmp_path / "triton" / "a_kernel").mkdir(parents=True, exist_ok=True)
        (tmp_path / "triton" / "a_kernel" / "a.cubin").touch()
        return types.SimpleNamespace(
            stats=lambda: {"slots": 9, "start_s": {"total": 2.5}}, info=types.SimpleNamespace(arena="re-attached: x", mode="fast")
        )

    monkeypatch.setattr(loader, "load", load)
    monkeypatch.setattr("services.gpu_worker.checkpoint.Checkpoint", lambda folder: folder)
    first, second = (slice_start.ready(tmp_path, pins, 24_564)[0] for _ in range(2))
    assert asked[0] == ("slice", str(pins), True, tmp_path, "asked for", (24_564 << 20) - (10 << 30))
    assert (first["tuned"], second["tuned"], second["slots"], second["pins"]) == (True, False, 9, "the setting's file")
    assert (first["compiled"], second["compiled"]) == (1, 0)
    assert second["stages_s"] == {"total": 2.5}
    for name, value in {"memory_reserved": 5 << 30, "memory_allocated": 3 << 30}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _d, value=value: value)
    assert lending.spare_bytes(0) == (24_564 << 20) - (10 << 30) + (2 << 30)  # of the card, not of the device
    assert slice_start.is_second(second)
    assert not slice_start.is_second(first)
