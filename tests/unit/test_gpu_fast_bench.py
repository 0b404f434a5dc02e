"""`bench.gpu_fast` without a GPU: its dry run, its figures, and its whole fidelity part over a fake exllamav3 with a real cpu_expert."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import gc
import json
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import fast_fidelity, fast_figures, gpu_fast, gpu_fast_parts, gpu_fast_rig, kept_rows, report, stock_error
from bench.fast_fidelity import Run, Setting
from bench.gpu_fast_dry import DryRig
from kernels.python.cuda_expert import StepArguments
from kernels.python.expert import ExpertPool, ExpertTask
from kernels.python.fast_pager import FastOptions
from services.gpu_worker.backends.exl3 import backend as backend_module
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.backends.exl3.experts import ExpertStore
from services.gpu_worker.patches import pointer_tables
from services.gpu_worker.patches.expert_load import MoeLayer
from services.gpu_worker.patches.replace import Replacements
from tests.tier.harness import EXPERTS, HIDDEN, LAYERS, TOP_K, Stage
from tests.tier.simulated_gpu import FastKernels, array
from tests.unit import test_exl3_fast as fast_base
from tests.unit.test_exl3_backend import FakeCache

host_as_device, driver, made, shm_dir = fast_base.host_as_device, fast_base.driver, fast_base.made, fast_base.shm_dir
immediate = fast_base.immediate
VOCAB = 48


def test_the_dry_run_writes_every_figure(tmp_path: Path) -> None:
    """The command as a GPU machine runs it, but for the GPU: rows, summary, exit code."""
    out = tmp_path / "fast.json"
    boot = kept_rows.boot_id()
    (tmp_path / "slice.json").write_text(json.dumps({"facts": {"boot_id": boot}, "rows": [{"name": "stock/C1", "tok_s": 45.0}]}))
    (tmp_path / "int.json").write_text(json.dumps({"summary": {f"int_kernel_vs_stock_m{n}": 0.5 for n in (1, 4, 8)}}))
    files = ["--state", str(tmp_path / "rows"), "--slice", str(tmp_path / "slice.json"), "--int-kernel", str(tmp_path / "int.json")]
    command = [sys.executable, "-m", "bench.gpu_fast", "--dry-run", "--out", str(out), *files]
    done = subprocess.run(command, cwd=report.ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(out.read_text())["summary"]
    missing = [key for key in fast_figures.NEEDS if summary[key] is None]
    assert missing == list(summary["reason_for_null"]) == []
    assert summary["c1_vs_stock151"] == pytest.approx(1000 / 7 / 45, abs=1e-3)
    assert summary["c1_vs_stock151_derated"] == pytest.approx(500 / 7 / 45, abs=1e-3)
    assert (summary["planner_steps"], summary["publish_to_seen_us"], summary["flag_to_add_us"]) == (2150, 1.6, 4.0)
    assert summary["ram_total_gib_full_size"] == pytest.approx(42 * 288 * 9_474_048 / 2**30 + 3, abs=0.01)
    assert summary["dry_run"] is True
    assert summary["placement_invariant"] is True
    wanted = (
        "c1_tok_s",
        "c2_tok_s",
        "c4_tok_s",
        "c4_vs_exact",
        "c1_vs_exact",
        "c1_vs_exact_derated",
        "step_over_bound",
        "planner_error_pct",
    )
    assert all(summary[name] is not None for name in (*wanted, "kl_fast_vs_exact", "kl_noise_floor", "top1_fast", "upper_bounds"))


def test_divergence_agreement_and_interval() -> None:
    """KL of equal logits is 0, of others what the formula gives; the interval holds the mean and is as wide as prompts differ."""
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal(8).astype(np.float32) for _ in range(40)]
    prompts = [i // 10 for i in range(40)]
    one = Run(rows, prompts, {})
    other = Run([row + np.float32(0.1) * rng.standard_normal(8).astype(np.float32) for row in rows], prompts, {})
    assert fast_fidelity.divergences(one, one).max() < 1e-12
    p, q = (np.exp(a.astype(float)) / np.exp(a.astype(float)).sum() for a in (rows[0], other.logits[0]))
    assert fast_fidelity.divergences(one, other)[0] == pytest.approx(float((p * np.log(p / q)).sum()))
    assert fast_fidelity.agreement(one, one) == 1.0
    assert fast_fidelity.digest(one) == fast_fidelity.digest(Run([row.copy() for row in rows], prompts, {}))
    assert fast_fidelity.digest(one) != fast_fidelity.digest(other)
    assert fast_fidelity.steps_differing(one, other) == 40
    values = np.repeat([0.0, 1.0, 0.0, 1.0], 10)
    low, high = fast_fidelity.interval(values, prompts)
    assert low == 0.0
    assert high == 1.0
    assert fast_fidelity.interval(np.full(40, 0.3), prompts) == pytest.approx((0.3, 0.3))


class Stock:
    """exllamav3's compiled layer: fp16 roundings of its own, the shared expert inside, picks of weight 0 neither read nor computed.

    It reads records where the layer's tables say.
    """

    def __init__(self, layer: int, stage: Stage, out: torch.Tensor, table: torch.Tensor) -> None:
        self._layer, self._arena, self._out, self._table, self._pool = layer, stage.arena, out, table, ExpertPool("scalar")

    def record(self, expert: int) -> Any:
        shape = self._arena.shape(self._layer)
        return array(int(self._table[self._layer, 0, expert]) - getattr(shape, pointer_tables.ROWS[0]), np.uint8, shape.record_bytes)

    def run_bszN(self, y: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> None:
        shape = self._arena.shape(self._layer)
        picks = np.zeros((selected.numel(), HIDDEN), np.float32)
        x = y.numpy()
        for pick, (expert, weight) in enumerate(zip(selected.flatten().tolist(), weights.flatten().tolist(), strict=True)):
            if weight != 0:
                row, out_row = np.array([pick // TOP_K], np.uint32), np.array([pick], np.uint32)
                self._pool.run([ExpertTask(shape, self.record(expert), x, picks, row, out_row)])
        rounded = torch.from_numpy(picks).half().float().view(*selected.shape, HIDDEN)
        self._out[: len(y)] = (weights.float()[..., None] * rounded).sum(1) + 0.125 * y.float()


class FakeModel:
    """A decoder whose only state is each stream's length."""

    def __init__(self, layers: list[MoeLayer]) -> None:
        self.layers = layers
        random = torch.Generator().manual_seed(3)
        self.embedding, self.head = torch.randn(VOCAB, HIDDEN, generator=random), torch.randn(HIDDEN, VOCAB, generator=random)
        self.gate = torch.randn(HIDDEN, EXPERTS, generator=random)

    def get_recurrent_layers(self) -> list[str]:
        return []

    def forward(self, ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        tokens = ids.flatten()
        place = params["cache_seqlens"].repeat_interleave(ids.shape[1])
        hidden = self.embedding[tokens % VOCAB] + 0.1 * torch.sin(place[:, None].float() * torch.arange(HIDDEN))
        for layer in self.layers:
            mlp, rows = layer.mlp, len(tokens)
            y = torch.nn.functional.normalize(hidden, dim=1).mul(8).half()
            chosen = (y.float() @ self.gate).topk(TOP_K)
            selected, weights = chosen.indices, chosen.values.softmax(1).half().contiguous()
            mlp.cpu_split_submit(y, rows, selected, weights)
            if rows <= 8:
                mlp.bc.run_bszN(y, selected, weights)
                hidden = hidden + mlp.experts_cfg.out_bszn[:rows]
            mlp.cpu_split_combine(None, None, None, None)
        logits = hidden @ self.head
        return logits[-params.get("last_tokens_only", len(tokens)) :].view(ids.shape[0], -1, VOCAB)


def make_layer(stage: Stage, index: int, table: torch.Tensor) -> MoeLayer:
    out = torch.zeros(8, HIDDEN)
    mlp = types.SimpleNamespace(
        experts_cfg=types.SimpleNamespace(out_bszn=out),
        bc_sh_exp=True,
        bc=Stock(index, stage, out, table),
        cpu_split_first=None,
        cpu_split_submit=None,
        cpu_split_combine=None,
    )
    return MoeLayer(index, mlp, EXPERTS)


@pytest.fixture
def rig(made: Stage, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bench's rig over a fake model."""
    real = {name: getattr(torch, name) for name in ("empty", "zeros")}
    fake = types.SimpleNamespace(
        **{name: getattr(torch, name) for name in ("tensor", "int32", "int64", "float32", "inference_mode", "AcceleratorError", "device")},
        **{name: lambda *a, pin_memory=False, name=name, **k: real[name](*a, **k) for name in ("empty", "zeros")},
        cuda=types.SimpleNamespace(
            synchronize=lambda _d: None, current_device=lambda: 0, current_stream=lambda _d: types.SimpleNamespace(synchronize=lambda: None)
        ),
    )
    monkeypatch.setattr(backend_module, "torch", fake)
    shapes = [made.arena.shape(layer) for layer in range(LAYERS)]
    kernels = FastKernels(fast_base.ImmediateGpu(), shapes)  # type: ignore[arg-type]

    class RunKernels:
        """`CudaExperts.run` on the CPU."""

        def __init__(self, shape: Any, _max_picks: int, _device: int) -> None:
            self._handle = 1 + next(i for i, known in enumerate(shapes) if bytes(known) == bytes(shape))

        def run(self, routing: Any, x: int, *, y: int, stream: int) -> None:
            names = ("records", "selected", "weights", "num_experts", "rows", "top_k", "selected_type", "weights_dtype")
            step = StepArguments(x=x, y=y, x_dtype=1, **{name: getattr(routing, name) for name in names})
            kernels._run(self._handle, ctypes.addressof(step), stream)

        def close(self) -> None:
            pass

        def __enter__(self) -> RunKernels:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(gpu_fast_rig, "CudaExperts", RunKernels)
    patient = functools.partial(FastOptions, job_timeout_ms=60_000, heartbeat_timeout_ms=60_000)  # a busy machine is no fault
    monkeypatch.setattr(gpu_fast_rig, "FastOptions", patient)
    records = fast_base.ArenaRecords(made)
    table = torch.zeros(LAYERS, len(pointer_tables.ROWS), EXPERTS, dtype=torch.int64)
    layers = [make_layer(made, layer, table) for layer in range(LAYERS)]
    loaded = loader.Loaded(FakeModel(layers), FakeCache(64 * 2048), layers, records, table, Replacements())  # type: ignore[arg-type]
    made.region.unlink()  # the rig makes its own, one for each setting
    lane = gpu_fast_rig.LaneProcess(made.instance, str(made.shm_dir), 1)
    yield gpu_fast_rig.GpuRig(loaded, TOP_K, VOCAB, made.instance, lane, time.monotonic() + 600, str(made.shm_dir))
    lane.close()
    made.restart_region()  # for the end of the stage


def test_the_fidelity_part_finds_equal_bits_and_a_noise_floor(rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every placement, also while cpu_expert is killed: one hash. exact is reproducible, noise of its own size makes the floor."""
    monkeypatch.setattr(gpu_fast, "GROUPS", (1, 3))
    monkeypatch.setattr(gpu_fast, "NOISE_SEEDS", 2)
    results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}})
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, VOCAB, 4 + 5 * i).tolist() for i in range(4)]
    gpu_fast.fidelity(rig, Setting, prompts, results, steps=6)
    rows = {row["name"]: row for row in results.rows}
    assert rows["exact again"]["differing"] == 0
    assert rows["every pick on the CPU"]["picks"]["cpu"] > 0
    assert rows["every record read in place"]["picks"]["zero_copy"] > 0
    assert rows["every expert in VRAM"]["picks"]["hit"] > 0
    assert results.summary["placement_invariant"] is True, [(row["name"], row.get("differing")) for row in results.rows]
    assert results.summary["positions"] == 6 * 4
    assert 0 < results.summary["fast_relative_rms"] < results.summary["stock_relative_rms"] < 2e-3
    assert results.summary["kl_noise_floor"] > 0
    assert results.summary["kl_fast_vs_exact"] < 100 * results.summary["kl_noise_floor"]
    assert json.loads((tmp_path / "out.json").read_text())["summary"]["noise_seeds"] == 2


def test_stock_s_error_is_not_measured_through_the_tables_of_another_step(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock reads where the tables say. In place and in slots it gives fp16's roundings; behind steps that moved slots, other experts."""
    rng = np.random.default_rng(2)
    group = [rng.integers(0, VOCAB, 4 + 5 * i).tolist() for i in range(3)]
    stale = dataclasses.replace(gpu_fast_rig.ERROR_SETTINGS["after the step"], slots=0.4, placed=0.1)  # so many that some are in transit
    monkeypatch.setitem(gpu_fast_rig.ERROR_SETTINGS, "after the step", stale)
    rows = {how: rig.stock_error(group, how=how) for how in gpu_fast_rig.ERROR_SETTINGS}
    for how in ("in place", "in slots"):
        row = rows[how]
        assert "error" not in row
        assert row["entries"] == len(row["by_entry"]) == 5 * LAYERS  # two prompts are short enough for a decode step
        assert row["stock_min"] <= row["stock"] <= row["stock_max"]
        assert 5e-5 < row["stock"] < 1e-3  # a row rounded to fp16: 2^-12 at most, 2^-12 / sqrt(3) on average
        assert 0 < row["ours"] < row["stock"]
        for name in ("own_weight", "weight_0.1", "weight_1"):
            assert row[f"stock_row_{name}"]["max"] < 1e-3
        assert {layer for layer, _, _ in row["by_entry"]} == set(range(LAYERS))
    assert rows["in slots"] == rows["in place"]
    wrong = rows["after the step"]
    assert wrong["stock_max"] > 0.5
    assert f"(layer {wrong['stock_max_layer']})" in wrong["error"]
    assert wrong["ours_max"] < 1e-3  # reads the arena, whatever the tables say


def test_a_broken_measurement_of_stock_gives_no_noise_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row is an error with the figure; no noise is added, and the next command measures it again."""
    monkeypatch.setattr(gpu_fast, "GROUPS", (1,))

    class Wrong(CountingRig):
        def stock_error(self, group: list[list[int]]) -> dict[str, Any]:
            return stock_error.summarise([{"layer": 4, "stock": self.off, "ours": 1e-4, "weight_1": [self.off]}] * 3)

    rig = Wrong(100)
    rig.off = 0.295
    results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}}, tmp_path / "rows")
    gpu_fast.fidelity(rig, Setting, [[1, 2]], results, steps=3)
    assert "off by up to 0.295 (layer 4)" in results.row(**gpu_fast.RMS)["error"]
    assert not any("noise" in name for name in rig.ran)
    assert (results.summary["stock_relative_rms"], results.summary["kl_noise_floor"]) == (None, None)
    rig.off = 0.0014
    gpu_fast.fidelity(rig, Setting, [[1, 2]], results, steps=3)
    assert results.summary["stock_relative_rms"] == 0.0014
    assert results.summary["noise_seeds"] == gpu_fast.NOISE_SEEDS


def earlier_result(folder: Path, stock: float) -> Path:
    """A result file of another boot, whose noise floor was made with so large an error of stock's."""
    results = gpu_fast.Results(folder / "earlier.json", {"machine": {}, "commit": "c0ffee"}, folder / "earlier.rows")
    gpu_fast.fidelity(CountingRig(100), Setting, [[1, 2]], results, steps=3)
    results.add(part="speed", name="fast", streams=1, link_derate=1, ms=1.0, tok_s=1000.0)
    results.add(part="idle", name="idle", worker_core_pct=4.0, cpu_expert_core_pct=1.0)
    results.add(part="fidelity", name="random", error="x")
    results.add(**gpu_fast.RMS, stock=stock, ours=1e-4)
    document = json.loads((folder / "earlier.json").read_text())
    document["facts"]["boot_id"] = "another"
    (folder / "earlier.json").write_text(json.dumps(document))
    return folder / "earlier.json"


@pytest.mark.parametrize(("stock", "seeds_again"), [(0.295, 8), (0.001, 0)])
def test_fidelity_of_an_earlier_boot_is_quoted_with_its_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stock: float, seeds_again: int
) -> None:
    """Bits alone, no times and no failed row; a noise floor whose measurement would be refused today is measured again."""
    monkeypatch.setattr(gpu_fast, "GROUPS", (1,))
    path = earlier_result(tmp_path, stock)
    results, rig = gpu_fast.Results(tmp_path / "out.json", {"machine": {}}, tmp_path / "rows"), CountingRig(100)
    results.quote(path)
    assert {(row["part"], row["boot_id"], row["commit"]) for row in results.rows} == {("fidelity", "another", "c0ffee")}
    assert not results.done(part="fidelity", name="random")
    gpu_fast.fidelity(rig, Setting, [[1, 2]], results, steps=3)
    assert rig.ran[:2] == ["exact", "random"]  # exact once: the quoted hash stands beside its own
    assert len([name for name in rig.ran if "noise" in name]) == seeds_again
    exact = results.row(part="fidelity", name="exact")
    assert (exact["bits_of_an_earlier_boot"], exact["earlier_boot_id"]) == (True, "another")
    summary = results.summary
    assert (summary["placement_invariant"], summary["placements"]) == (True, len(gpu_fast.placements(Setting)))
    assert (summary["fidelity_boot_ids"], summary["exact_as_in_the_earlier_boot"]) == (["another"], True)
    assert (summary["noise_seeds"], summary["c1_tok_s"], summary["idle_core_pct"]) == (gpu_fast.NOISE_SEEDS, None, None)
    assert summary["stock_relative_rms"] == 0.001
    gpu_fast.Results(tmp_path / "out.json", {"machine": {}}, tmp_path / "rows").quote(path)
    assert json.loads((tmp_path / "out.json").read_text())["summary"] == summary  # what is there stays


def test_the_speed_part_counts_lanes_and_bounds(rig: Any, tmp_path: Path) -> None:
    """Steady decode over the fake model: experts by lane, what was learned, and the step over both of its bounds."""
    results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}})
    args = argparse.Namespace(warm=2, steps=4)
    routing: Any = types.SimpleNamespace(step=-1)
    bound = {"resident": {1: 0.5, 2: 0.5}, "link": 1e9, "dram": 5e9, "stride": rig.loaded.records.stride}
    deadline = time.monotonic() + 300
    alone = Setting("fast without the lane", lane=False)
    for setting in (Setting("exact in step", fast=False), Setting("fast", facts={"threads": 1}), alone):
        with rig.backend(setting) as backend:
            gpu_fast_parts.measure(results, backend, routing, setting, args, deadline, bound, streams_measured=(1, 2))
    exact, fast = results.rows[0], results.rows[2]
    assert (exact["name"], fast["name"], fast["streams"], fast["threads"]) == ("exact in step", "fast", 1, 1)
    assert [row.get("cpu_lane") for row in results.rows[::2]] == [None, True, False]
    assert "step_over_bound" not in exact
    assert exact["step_over_link_bound"] == pytest.approx(exact["ms"] / exact["link_bound_ms"], rel=5e-3)
    assert fast["lanes_bound_ms"] <= fast["bound_ms"] <= fast["link_bound_ms"]
    lane = bound["stride"] / (fast["ct_b_us"] * 1e-6)
    assert fast["lanes_bound_ms"] == pytest.approx(0.5 + 1000 * fast["missed_mib_per_step"] * 2**20 / (1e9 + lane), abs=1e-3)
    assert sum(fast["experts_by_lane"].values()) > 0
    assert fast["ct_b_us"] > 0
    summary = results.summary
    assert summary["c1_tok_s"] == fast["tok_s"]
    assert summary["c1_vs_exact"] == pytest.approx(fast["tok_s"] / exact["tok_s"], rel=5e-3)
    assert summary["c4_vs_exact"] is None


class CountingRig(DryRig):
    """Runs so many settings, then says that the time is over."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.off = 0.0
        self.ran: list[str] = []

    def time_left(self) -> bool:
        return len(self.ran) < self.most

    def forced(self, setting: Setting, groups: list[list[list[int]]], continuations: Any, steps: int) -> tuple[Run, Any]:
        self.ran.append(setting.name)
        return super().forced(setting, groups, continuations, steps)


def test_the_fidelity_part_goes_on_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second command takes logits, tokens and rows of the first and runs the rest alone; a third finds nothing to do."""
    monkeypatch.setattr(gpu_fast, "GROUPS", (1, 3))
    prompts = [[1, 2], [3, 4], [5, 6], [7, 8]]
    names = [placement.name for placement in gpu_fast.placements(Setting)]
    ran = []
    for most in (4, 6, 100, 100):
        results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}}, tmp_path / "rows")
        rig = CountingRig(most)
        gpu_fast.fidelity(rig, Setting, prompts, results, steps=3)
        ran.append(rig.ran)
    assert ran[0] == ["exact", "exact", *names[:2]]
    assert ran[1] == names[2:]
    assert ran[2] == [f"exact, noise {seed}" for seed in range(gpu_fast.NOISE_SEEDS)]
    assert ran[3] == []
    whole = gpu_fast.Results(tmp_path / "whole.json", {"machine": {}}, tmp_path / "others")
    gpu_fast.fidelity(CountingRig(100), Setting, prompts, whole, steps=3)
    assert results.summary == whole.summary
    assert results.summary["placement_invariant"] is True
    assert results.summary["placements"] == len(names)


def test_a_setting_that_breaks_does_not_stand_before_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row says what broke; one more and the command ends; the next command begins with what has not failed."""
    monkeypatch.setattr(gpu_fast, "GROUPS", (1,))
    names = [placement.name for placement in gpu_fast.placements(Setting)]

    class Breaking(CountingRig):
        def forced(self, setting: Setting, groups: Any, continuations: Any, steps: int) -> tuple[Run, Any]:
            if setting.name in names[1:3]:
                self.ran.append(setting.name)
                raise RuntimeError("the lane does not come back")
            return super().forced(setting, groups, continuations, steps)

    results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}}, tmp_path / "rows")
    rig = Breaking(100)
    with pytest.raises(RuntimeError, match="the lane does not come back"):
        gpu_fast.fidelity(rig, Setting, [[1, 2]], results, steps=3)
    assert rig.ran == ["exact", "exact", *names[:3]]
    assert results.row(part="fidelity", name=names[1])["error"] == "RuntimeError: the lane does not come back"
    assert results.summary["placement_invariant"] is None  # one placement alone
    again, rig = gpu_fast.Results(tmp_path / "out.json", {"machine": {}}, tmp_path / "rows"), Breaking(100)
    with pytest.raises(RuntimeError, match="the lane does not come back"):
        gpu_fast.fidelity(rig, Setting, [[1, 2]], again, steps=3)
    assert rig.ran == [*names[3:], *names[1:3]]
    assert again.summary["placements"] == len(names) - 2


def test_a_placement_with_other_bits_is_told(tmp_path: Path) -> None:
    """By the hashes of rows, whichever command wrote them; nothing is claimed of one placement alone."""
    results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}})
    results.add(part="fidelity", name="a", placement=True, hash="1")
    assert results.summary["placement_invariant"] is None
    results.add(part="fidelity", name="b", placement=True, hash="1")
    assert results.summary["placement_invariant"] is True
    results.add(part="fidelity", name="c", placement=True, hash="2")
    assert results.summary["placement_invariant"] is False


def test_figures_of_another_boot_are_not_compared(tmp_path: Path) -> None:
    """Stock's steps of another boot, a broken stock row, a file that is no JSON: no ratio, and the reason says what it needs."""
    for text in (
        json.dumps({"facts": {"boot_id": "another"}, "rows": [{"name": "stock/C1", "tok_s": 45.0}]}),
        json.dumps({"facts": {"boot_id": kept_rows.boot_id()}, "rows": [{"name": "stock/C1", "tok_s": 45.0, "error": "too slow"}]}),
        "{",
    ):
        (tmp_path / "slice.json").write_text(text)
        results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}}, None, tmp_path / "slice.json")
        results.add(part="speed", name="fast", streams=1, link_derate=1, ms=10.0, tok_s=100.0)
        assert results.summary["c1_vs_stock151"] is None
        assert "stock/C1 of bench.gpu_exact_slice in the same boot" in results.summary["reason_for_null"]["c1_vs_stock151"]


def test_the_speed_part_measures_the_most_valuable_first_and_goes_on(rig: Any, made: Stage, tmp_path: Path, monkeypatch: Any) -> None:
    """A command with little time leaves the rest out by name; the next one measures it alone. Two threads are another process's."""
    started: list[int] = []

    def lane_process(_instance: str, _folder: str, threads: int) -> gpu_fast_rig.LaneProcess:
        started.append(threads)
        return gpu_fast_rig.LaneProcess(made.instance, str(made.shm_dir), 1)

    def trace_of(*_args: Any, **_more: Any) -> Any:
        return np.zeros((8, 8, LAYERS, TOP_K), np.uint16)

    checkpoint = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=VOCAB))
    monkeypatch.setattr(gpu_fast_parts, "prepare", lambda _results: None)
    monkeypatch.setattr(gpu_fast_parts, "load_slice", lambda _layers: (rig.loaded, checkpoint))
    monkeypatch.setattr(gpu_fast_parts, "LaneProcess", lane_process)
    monkeypatch.setattr(gpu_fast_parts, "GpuRig", lambda _loaded, _k, _v, _i, lane, deadline, _s: remade(rig, lane, deadline))
    monkeypatch.setattr(gpu_fast_parts.round_trip, "on_gpu", lambda: {"publish_to_seen_us": 2.0, "flag_to_add_us": 5.0})
    monkeypatch.setattr(gpu_fast_parts.routing_trace, "make", trace_of)
    monkeypatch.setattr(gpu_fast_parts.routing_trace, "SLOT_SHARE", 0.16)
    monkeypatch.setattr(gpu_fast_parts.slice_ours, "ForcedRouting", lambda *_args: types.SimpleNamespace(step=-1))
    monkeypatch.setattr(gpu_fast_parts.slice_rates, "link_rate", lambda *_args, derate=1: 2e9 / derate)
    monkeypatch.setattr(gpu_fast_parts.slice_rates, "read_rate", lambda *_args: 5e9)
    monkeypatch.setattr(gpu_fast_parts.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu_fast_parts.torch.cuda, "mem_get_info", lambda _device: (1 << 30, 2 << 30))
    held: list[int] = []  # stores of ours that are alive when the cap of a card of 24 GB is set

    def cap(_share: float) -> None:
        held.append(sum(type(o) is ExpertStore and o._records is rig.loaded.records for o in gc.get_objects()))

    monkeypatch.setattr(gpu_fast_parts.torch.cuda, "set_per_process_memory_fraction", cap)
    monkeypatch.setattr(fast_figures, "ENOUGH_STEPS", 6)
    rig.loaded.model.fwd_modules = [(Passing(), 0, 0), (types.SimpleNamespace(mlp=None), 0, 1), (Passing(), 0, 2)]
    monkeypatch.setattr(rig.loaded.model, "forward", through(rig.loaded.model))
    monkeypatch.setattr(gpu_fast_parts, "HIDDEN_S", 1e6)
    expected = [
        fast_figures.key_of(gpu_fast_parts.key_of(one.setting, n)) for one in gpu_fast_parts.settings_of_speed(2) for n in one.streams
    ]
    args = argparse.Namespace(layers=1, warm=2, steps=2, threads=2, only="speed", first=False)
    monkeypatch.setattr(gpu_fast_parts, "expected_s", lambda setting, *_more: 0.0 if setting.name == "fast" else 1e6)
    results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}}, tmp_path / "rows")
    gpu_fast_parts.speed_on_gpu(args, results, time.monotonic() + 300)
    measured = [key for key in results.kept.rows if key in expected]
    assert measured == ["speed/fast/C1/x1", "speed/fast/C4/x1", "speed/fast/C2/x1", "speed/fast/C1/x2", "speed/fast/C8/x1"]
    assert held == [0]
    assert set(results.left_out) == {*expected, "hidden states"} - set(measured)
    monkeypatch.setattr(gpu_fast_parts, "HIDDEN_S", 0.0)
    results.add(**gpu_fast.RMS, stock=1e-3)
    assert results.row(part="speed", name="fast", streams=1, link_derate=2)["link_bound_ms"] > 0
    monkeypatch.setattr(gpu_fast_parts, "expected_s", lambda *_args: 0.0)
    results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}}, tmp_path / "rows")
    gpu_fast_parts.speed_on_gpu(args, results, time.monotonic() + 300)
    assert results.left_out == []
    assert set(expected) <= set(results.kept.rows)
    assert [key for key in results.kept.rows if key in expected] == [*measured, *(key for key in expected if key not in measured)]
    assert started == [2, 2, 2, 2]  # both commands: the lane as asked for, and one of two threads
    summary = results.summary
    assert all(summary[name] is not None for name in ("c1_vs_exact", "c4_vs_exact", "c1_vs_exact_derated", "two_threads_vs_exact"))
    rms = {name: results.row(part="hidden", name=f"hidden states: {name}")["relative_rms"] for name in ("fast", "exact, noise")}
    assert all(len(layers) == 2 for layers in rms.values())
    assert 0 < rms["fast"][1] < rms["exact, noise"][1] < 0.1
    assert summary["hidden_relative_rms_last_layer"] == {name: layers[1] for name, layers in rms.items()}
    assert rig.loaded.model.fwd_modules[0][0].forward.__name__ == "forward"
    assert (summary["publish_to_seen_us"], summary["flag_to_add_us"]) == (2.0, 5.0)
    assert summary["planner_steps"] is not None
    hidden = gpu_fast.Results(tmp_path / "hidden.json", {"machine": {}}, tmp_path / "hidden.rows")
    hidden.add(**gpu_fast.RMS, stock=1e-3)
    gpu_fast_parts.speed_on_gpu(argparse.Namespace(**{**vars(args), "only": "hidden"}), hidden, time.monotonic() + 300)
    assert [row["name"] for row in hidden.rows[1:]] == ["hidden states: fast", "hidden states: exact, noise"]
    monkeypatch.setattr(gpu_fast_parts, "load_slice", None)
    gpu_fast_parts.speed_on_gpu(args, results, time.monotonic() + 300)  # everything is there: nothing is loaded
    first = {
        fast_figures.key_of(gpu_fast_parts.key_of(one.setting, n))
        for one in gpu_fast_parts.settings_of_speed(2, first=True)
        for n in one.streams
    }
    assert first < set(expected)
    must = (
        "c1_tok_s",
        "c2_tok_s",
        "c4_tok_s",
        "c1_vs_exact",
        "c4_vs_exact",
        "c1_vs_exact_derated",
        "two_threads_vs_exact",
        "step_over_bound",
    )
    others = fast_figures.Others()
    enough = [row for key, row in results.kept.rows.items() if key in first]
    assert all(fast_figures.summarise(enough, results.kept.facts, others)[name] is not None for name in must)


def test_an_error_takes_no_row_back(tmp_path: Path) -> None:
    """It is the first row of its setting that is missing."""
    results = gpu_fast.Results(tmp_path / "out.json", {"machine": {}})
    rows = [gpu_fast_parts.key_of(Setting("fast"), streams) for streams in (1, 4, 2)]
    with results.trying(*rows):
        results.add(**rows[0], tok_s=100.0)
        raise RuntimeError("x")
    assert results.row(**rows[0]) == {**rows[0], "tok_s": 100.0}
    assert results.row(**rows[1])["error"] == "RuntimeError: x"
    assert (results.done(**rows[0]), results.done(**rows[1])) == (True, False)


def test_the_peak_of_vram_is_that_of_a_card_of_24_gb() -> None:
    """Rows with every expert in VRAM have a figure of their own; every other row counts, whatever it is called."""
    figures = fast_figures.summarise(
        [
            {"part": "speed", "name": f"{fast_figures.RESIDENT}, fast", "streams": 4, "link_derate": 1, "vram_peak_mib": 66_412},
            {"part": "speed", "name": "fast", "streams": 1, "link_derate": 1, "vram_peak_mib": 7_168},
            {"part": "speed", "name": "exact in step", "streams": 1, "link_derate": 1, "vram_peak_mib": 8_192},
            {"part": "speed", "name": "fast", "streams": 2, "link_derate": 1},
        ],
        {"boot_id": "x"},
        fast_figures.Others(),
    )
    assert (figures["vram_peak_gib"], figures["vram_peak_gib_every_expert"]) == (8.0, 64.86)
    none = fast_figures.summarise([], {"boot_id": "x"}, fast_figures.Others())
    assert (none["vram_peak_gib"], none["vram_peak_gib_every_expert"]) == (None, None)


class Passing:
    """A block that gives on what it gets."""

    def __init__(self) -> None:
        self.mlp = object()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def through(model: Any) -> Any:
    """The model's pass, its logits going through its blocks once more."""
    stock = model.forward

    def forward(ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        logits = stock(ids, params)
        for block, _, _ in model.fwd_modules:
            if block.mlp is not None:
                logits = block.forward(logits)
        return logits

    return forward


def remade(rig: Any, lane: Any, deadline: float) -> Any:
    rig.lane, rig.deadline = lane, deadline
    return rig
