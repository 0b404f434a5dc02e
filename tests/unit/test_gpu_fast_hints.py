"""Hints of `bench.gpu_fast` without a GPU: what is made of a trace, its quality, and all rows over a fake exllamav3 with the real pager."""

from __future__ import annotations

import argparse
import time
import types
from typing import Any

import numpy as np
import pytest
import torch

from bench import fast_figures, gpu_fast, gpu_fast_hints, gpu_fast_rig, routing_trace, slice_hints
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.backends.exl3.experts import ExpertStore
from tests.tier.harness import EXPERTS, LAYERS, TOP_K, Stage
from tests.unit import test_gpu_fast_bench as base

host_as_device, driver, made, shm_dir, immediate, rig = base.host_as_device, base.driver, base.made, base.shm_dir, base.immediate, base.rig
DEPTHS = (0, 15, 41)


@pytest.mark.parametrize("recall", [slice_hints.HALF, slice_hints.MEASURED, slice_hints.PERFECT])
def test_a_hint_holds_the_share_of_picks_that_was_asked_for(recall: float) -> None:
    """Eight different experts; beside the kept picks none that the token picks, popular ones more often than others; the same each time."""
    trace = routing_trace.make(0, 150, streams=2, depths=DEPTHS)
    hints = slice_hints.make(trace, recall, 1, DEPTHS)
    assert (hints.dtype, hints.shape) == (np.int64, (150, len(DEPTHS), 2, slice_hints.IDS))
    assert all(len(set(row)) == slice_hints.IDS for row in hints.reshape(-1, slice_hints.IDS).tolist())
    picks = trace.transpose(0, 2, 1, 3).astype(np.int64)
    right = (hints[..., None] == picks[..., None, :]).any(-1)
    assert right.mean() == pytest.approx(recall, abs=0.02)
    assert np.array_equal(hints, slice_hints.make(trace, recall, 1, DEPTHS))
    if recall < 1:
        # Any place may hold a pick, and false ids are rather popular.
        assert right.reshape(-1, slice_hints.IDS).mean(0) == pytest.approx(recall, abs=0.06)
        popular = routing_trace.popularity(0, DEPTHS[2])[hints[:, 2][~right[:, 2]]].mean()
        assert popular > 1.3 / routing_trace.EXPERTS


def test_quality_counts_what_is_in_no_slot_alone() -> None:
    """Layer 0 has no hint; a record that several streams name counts once."""
    trace = np.zeros((1, 2, 2, 8), np.uint16)
    trace[0, 0, 1], trace[0, 1, 1] = np.arange(8), np.arange(4, 12)
    hints = np.zeros((1, 2, 2, 8), np.int64)
    hints[0, 1, 0], hints[0, 1, 1] = np.arange(20, 28), np.array([8, 9, 20, 21, 40, 41, 42, 43])
    where = np.full((2, 50), -1)
    where[1, [0, 1, 8, 20, 40]] = 3
    quality = slice_hints.Quality(trace, hints, 2)
    assert quality.row() == {"hint_recall_on_misses": None, "hint_precision_on_misses": None}
    quality.look(0, where)
    # Picked and in no slot: 2..7, 9, 10, 11. Named and in no slot: 9, 21..27, 41, 42, 43. In both: 9.
    assert quality.row() == {"hint_recall_on_misses": round(1 / 9, 3), "hint_precision_on_misses": round(1 / 11, 3)}
    alone = slice_hints.Quality(trace, hints, 1)
    alone.look(0, where)
    assert alone.row() == {"hint_recall_on_misses": 0.0, "hint_precision_on_misses": 0.0}


def test_the_engine_guesses_and_the_trace_answers() -> None:
    """The guess runs for every layer; its ids are replaced in forced steps alone, and where it gives none there is none."""
    asked: list[tuple[int, int]] = []
    own, now = torch.full((2, 16), 7), types.SimpleNamespace(step=-1)

    def early(layer: int, rows: int) -> torch.Tensor | None:
        asked.append((layer, rows))
        return own if layer < 2 else None

    hints = torch.arange(5 * 3 * 4 * 8).view(5, 3, 4, 8)
    simulated = slice_hints.Simulated(early, lambda: now.step, hints, 2)
    assert simulated(0, 2) is own
    now.step = 6
    got = simulated(1, 2)
    assert torch.equal(got, hints[1, 2, :2])
    assert got.is_contiguous()
    assert simulated(2, 2) is None
    assert asked == [(0, 2), (1, 2), (2, 2)]


def test_every_row_is_measured_beside_those_without_hints(rig: Any, made: Stage, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command with little time leaves rows out by name, the next one measures them alone; quality, counters and ratios are told."""
    checkpoint = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=base.VOCAB))
    draw, rng, routing = np.random.default_rng(0), np.random.default_rng(1), types.SimpleNamespace(step=-1)
    ids = torch.zeros((8, EXPERTS), dtype=torch.int64)

    def distinct(*shape: int) -> Any:
        return draw.permuted(np.broadcast_to(np.arange(EXPERTS), (*shape, EXPERTS)), axis=-1)

    def guess_early(_into: Any, _loaded: Any, store: ExpertStore) -> None:
        store.hint_from(lambda layer, rows: ids[:rows] if layer + 1 < LAYERS else None)

    def waiting(store: Any, layer: int) -> None:
        time.sleep(0.001)  # an attention's time, in which the copies run

    monkeypatch.setattr(loader, "guess_early", guess_early)
    monkeypatch.setattr(ExpertStore, "after_experts", waiting)
    monkeypatch.setattr(gpu_fast_hints, "prepare", lambda _results: None)
    monkeypatch.setattr(gpu_fast_hints, "load_slice", lambda _layers: (rig.loaded, checkpoint))
    monkeypatch.setattr(gpu_fast_hints, "LaneProcess", lambda *_: gpu_fast_rig.LaneProcess(made.instance, str(made.shm_dir), 1))
    monkeypatch.setattr(gpu_fast_hints, "GpuRig", lambda _loaded, _k, _v, _i, lane, deadline, _s: base.remade(rig, lane, deadline))
    monkeypatch.setattr(gpu_fast_hints.routing_trace, "make", lambda *_a, **_k: distinct(8, 8, LAYERS)[..., :TOP_K].astype(np.uint16))
    monkeypatch.setattr(gpu_fast_hints.routing_trace, "SLOT_SHARE", 0.75)
    monkeypatch.setattr(gpu_fast_hints.slice_hints, "make", lambda *_: rng.permuted(distinct(8, LAYERS, 8), axis=-1)[..., :TOP_K].copy())
    monkeypatch.setattr(gpu_fast_hints.slice_ours, "ForcedRouting", lambda *_: routing)
    monkeypatch.setattr(gpu_fast_hints, "expected_s", lambda streams, _steps: 0.0 if streams == 1 else 1e6)
    args = argparse.Namespace(layers=1, warm=8, steps=4, threads=1)
    names = [fast_figures.key_of(gpu_fast_hints.key_of(one.setting, n)) for one in gpu_fast_hints.settings_of_hints(1) for n in one.streams]
    results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}}, tmp_path / "rows")
    gpu_fast_hints.hints_on_gpu(args, results, time.monotonic() + 300)
    assert list(results.kept.rows) == [name for name in names if "/C1" in name]
    assert results.left_out == [name for name in names if "/C4" in name]
    monkeypatch.setattr(gpu_fast_hints, "expected_s", lambda *_: 0.0)
    results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}}, tmp_path / "rows")
    gpu_fast_hints.hints_on_gpu(args, results, time.monotonic() + 300)
    assert set(results.kept.rows) == set(names)
    assert not [row for row in results.rows if "error" in row]
    for row in results.rows:
        hinted = "no hints" not in row["name"]
        assert ("hint_picked_share" in row, "experts_by_lane" in row) == (hinted, row["name"].startswith("fast"))
        if hinted:
            assert row["hint_records"] == (2 if "two records" in row["name"] else 3)
            assert 0 <= row["hint_recall_on_misses"] <= 1
            assert 0 <= row["hint_precision_on_misses"] <= 1
            assert row["hint_named_per_step"] >= row["hint_started_per_step"]
            assert row["hint_started_per_step"] > 0
            assert 0 <= row["hint_landed_share"] <= row["hint_picked_share"] <= 1
    wanted = [name for name in fast_figures.NEEDS if name.startswith("hint_")]
    assert len(wanted) == 7
    assert all(results.summary[name] is not None for name in wanted)
    with_hints, without = (  # measured twice: the ratio is that of the times of both
        sum(1 / results.kept.rows[f"hints/{name}{again}/C1"]["tok_s"] for again in ("", fast_figures.AGAIN))
        for name in (fast_figures.HINTS, fast_figures.NO_HINTS)
    )
    assert results.summary["hint_c1_vs_fast"] == pytest.approx(without / with_hints, abs=1e-3)
    monkeypatch.setattr(gpu_fast_hints, "load_slice", None)
    gpu_fast_hints.hints_on_gpu(args, results, time.monotonic() + 300)  # everything is there: nothing is loaded


def test_a_broken_row_of_hints_is_no_figure() -> None:
    """A broken row makes no ratio, and the reason says what it takes."""
    base_row = {"part": fast_figures.HINT_PART, "streams": 1, "tok_s": 100.0}
    rows = [{**base_row, "name": fast_figures.NO_HINTS}, {**base_row, "name": fast_figures.HINTS, "error": "x"}]
    figures = fast_figures.summarise(rows, {"boot_id": "x"}, fast_figures.Others())
    assert figures["hint_c1_vs_fast"] is None
    assert figures["reason_for_null"]["hint_c1_vs_fast"] == "not measured: hints: fast at C1 with hints and without"
