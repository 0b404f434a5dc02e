"""`bench.gpu_exact` without a GPU: rows over several commands, bits that differ, the figures beside them."""

from __future__ import annotations

import functools
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_exact, slice_cases
from bench.gpu_exact_script import SCRIPTS
from bench.kept_rows import Rows
from services.gpu_worker.patches import decode_blocks
from services.gpu_worker.patches.replace import Replacements

SCRIPT = SCRIPTS[1]


class Runs(list[Any]):
    """Models that were run. A model's logits are its number."""

    def run(self, _exl3: Any, model: Any, _cache: Any, _tokenizer: Any, script: Any, chunk: int, between: Any = None) -> list[torch.Tensor]:
        self.append((model, script.name, chunk))
        if between is not None:
            between(0)
        return [torch.full((1, 4), float(model))]


@pytest.fixture
def runs() -> Runs:
    return Runs()


def bench_in(tmp_path: Path, runs: Runs, *, ours: int = 1, deadline: float = float("inf")) -> gpu_exact.Bench:
    rows = Rows(
        tmp_path / "rows", tmp_path / "out.json", {"machine": {}}, functools.partial(gpu_exact.summarise, [tmp_path / "slice.json"])
    )
    sides = [gpu_exact.Side(model, None, None) for model in (1, ours)]
    loaded: Any = types.SimpleNamespace(records=types.SimpleNamespace(num_records=6), replacements=None)
    return gpu_exact.Bench(None, sides[0], sides[1], loaded, 2, [SCRIPT], [256, 2048], deadline, rows, runs.run)


def summary_of(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "out.json").read_text())["summary"])


def test_a_second_command_compares_what_is_missing(tmp_path: Path, runs: Runs) -> None:
    """Stock's logits are made again, for they are compared with; rows that are there are not."""
    first = bench_in(tmp_path, runs)
    first.measure(gpu_exact.STOCK, first.stock)
    first.measure("in place", first.ours)
    assert len(runs) == 4
    second = bench_in(tmp_path, runs)
    second.measure(gpu_exact.STOCK, second.stock)
    second.measure("in place", second.ours)
    second.measure("slots", second.ours)
    assert len(runs) == 8
    assert summary_of(tmp_path)["bit_exact"] is True
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 6


def test_our_side_decodes_as_the_worker_does(tmp_path: Path, runs: Runs) -> None:
    """The generator's decode steps take the patched blocks, its prefills and wide steps stock's; rows say how many did."""
    passes: list[Any] = []
    model = types.SimpleNamespace(forward=lambda ids, params=None: passes.append(dict(params or {})) or tuple(ids.shape))
    stock = model.forward
    bench = bench_in(tmp_path, runs)
    bench.ours.model = model
    with Replacements() as into:
        gpu_exact.decode_as_served(bench.ours, into)
        for rows, tokens, staged in ((3, 1, True), (1, 1, False), (2, 5, True), (9, 1, True), (8, 1, True)):
            assert model.forward(input_ids=torch.zeros(rows, tokens), params={"pinned_staging": staged}) == (rows, tokens)
        model.forward(torch.zeros(1, 1))
    assert model.forward is stock
    assert [one.get(decode_blocks.DECODE) for one in passes] == [3, None, None, None, 8, None]
    assert bench.ours.served_steps == 2

    def run(*_how: Any) -> list[torch.Tensor]:
        bench.ours.served_steps += 4
        return [torch.zeros(1, 4)]

    bench.run = run
    bench.measure("slots", bench.ours)
    assert {row["served_steps"] for row in bench.rows.rows.values() if row["name"] == "slots"} == {4}


def test_bits_that_differed_once_stay_in_the_file(tmp_path: Path, runs: Runs) -> None:
    """A later command with equal bits does not take the finding back."""
    first = bench_in(tmp_path, runs, ours=2)
    first.measure(gpu_exact.STOCK, first.stock)
    first.measure("in place", first.ours)
    assert summary_of(tmp_path)["bit_exact"] is False
    second = bench_in(tmp_path, runs)
    second.measure(gpu_exact.STOCK, second.stock)
    second.measure("in place", second.ours)
    second.measure("slots", second.ours)
    assert summary_of(tmp_path)["bit_exact"] is False
    assert runs


def test_what_time_does_not_allow_is_named(tmp_path: Path, runs: Runs) -> None:
    """Nothing compared is no verdict: null, with the reason."""
    late = bench_in(tmp_path, runs, deadline=0.0)
    late.measure("in place", late.ours)
    assert late.skipped == [f"in place: {SCRIPT.name}, chunk {chunk}" for chunk in (256, 2048)]
    assert runs == []
    late.rows.note(skipped=late.skipped)
    summary = summary_of(tmp_path)
    assert (summary["bit_exact"], summary["cases_skipped"]) == (None, 2)
    assert "nothing was compared" in summary["reason_for_null"]["bit_exact"]


def test_random_repoints_go_on_with_what_earlier_turns_moved(tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until so many records have moved, over commands; then there is nothing to do."""
    placed: list[list[int]] = []

    class Store:
        placement = types.SimpleNamespace(slots_used=3)

        def place(self, records: Any) -> None:
            placed.append(list(records))

        def close(self) -> None:
            pass

    monkeypatch.setattr(gpu_exact.loader, "make_store", lambda *_args: Store())
    monkeypatch.setattr(gpu_exact, "FEW", ((SCRIPT, 2048),))
    gpu_exact.shuffled(bench_in(tmp_path, runs), 3, 8)
    before = len(placed)
    assert before >= 2
    bench = bench_in(tmp_path, runs)
    moved, turns = bench.moved_before("random repoints, 3 slots")
    assert (moved >= 8, turns) == (True, before)
    gpu_exact.shuffled(bench, 3, moved + 1)
    assert len(placed) == before + 1
    gpu_exact.shuffled(bench_in(tmp_path, runs), 3, moved + 1)
    assert len(placed) == before + 1
    assert runs


def test_figures_of_the_slice_come_with_their_reasons(tmp_path: Path) -> None:
    """Every figure of the slice is there or null with a reason; those of fewer layers are not quoted as what they are not."""
    absent = gpu_exact.slice_figures(tmp_path / "none.json")
    assert set(absent["reason_for_null"]) == set(slice_cases.NEEDS)
    rows = {"ours/in_step/C1": {"ms": 15.0, "tok_s": 66.7, "hit_rate": 0.5, "missed_mib_per_step": 1.0}}
    for layers in (2, 12):
        document = {"summary": slice_cases.summarise(rows, {}), "facts": {"depths": list(range(layers))}}
        (tmp_path / "slice.json").write_text(json.dumps(document))
        got = gpu_exact.slice_figures(tmp_path / "slice.json")
        assert got["c1_tok_s"] == (66.7 if layers == 12 else None)
        assert layers == 12 or "the slice had 2 MoE layers" in got["reason_for_null"]["c1_tok_s"]
        assert all(got[name] is not None or got["reason_for_null"][name] for name in slice_cases.NEEDS)
        assert got["reason_for_null"]["c1_vs_stock151"] == "stock/C1 was not measured in this run"


def test_a_figure_that_one_run_lacks_is_another_run_s_by_name(tmp_path: Path) -> None:
    """What both have is the first one's; no ratio is made of two runs; what neither has keeps its reason."""
    first = {"ours/in_step/C1": {"ms": 15.0, "tok_s": 66.7}, "stock/C1": {"ms": 22.5}}
    second = {"ours/in_step/C1": {"ms": 14.0, "tok_s": 71.4}, "stock165/C1": {"ms": 28.0}}
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, rows in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps({"summary": slice_cases.summarise(rows, {}), "facts": {"depths": list(range(12))}}))
    got = gpu_exact.figures_of([*paths, tmp_path / "none.json"])
    assert (got["c1_tok_s"], got["c1_vs_stock151"], got["c1_vs_stock165"]) == (66.7, 1.5, 2.0)
    assert got["slice"] == "12 MoE layers, first.json"
    assert got["of_other_runs"] == {"c1_vs_stock165": "12 MoE layers, second.json"}
    assert "c1_vs_stock165" not in got["reason_for_null"]
    assert got["reason_for_null"]["c2_vs_stock151"] == "ours/in_step/C2 was not measured in this run"
    alone = gpu_exact.figures_of([tmp_path / "none.json", paths[1]])
    assert (alone["c1_tok_s"], alone["of_other_runs"]["c1_tok_s"]) == (71.4, "12 MoE layers, second.json")
