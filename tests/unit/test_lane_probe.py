"""`bench.lane_probe` on experts of a toy's size: every line of the result, and the costs that are fitted to them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import lane_probe


def test_costs_are_the_line_through_the_medians() -> None:
    """70 us a job and 180 an expert with one row, 90 and 240 with four; jobs after a pause do not count."""
    times = {(n, rows): [a + b * n, a + b * n, 9e9] for n in (1, 2, 3, 4) for rows, a, b in ((1, 70.0, 180.0), (4, 90.0, 240.0))}
    rows = lane_probe.rows_of(14, "nothing", times) + lane_probe.rows_of(14, "a pause", {(2, 1): [5000.0]})
    costs = lane_probe.fits(rows)
    assert costs == pytest.approx(
        {
            "T=14 nothing rows=1 ct_a_us": 70,
            "T=14 nothing rows=1 ct_b_us": 180,
            "T=14 nothing rows=4 ct_a_us": 90,
            "T=14 nothing rows=4 ct_b_us": 240,
        }
    )


def test_a_run_serves_every_size_with_and_without_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real cpu_expert, an arena and a reader of memory; nothing of it stays in /dev/shm."""
    before = set(Path("/dev/shm").glob("lane-probe-*"))
    out = tmp_path / "lane.json"
    for name, value in (("HIDDEN", 256), ("INTER", 128), ("PAUSE_NS", 1_000_000), ("TURNS_S", 20.0)):
        monkeypatch.setattr(lane_probe, name, value)
    monkeypatch.setattr(sys, "argv", ["lane_probe", "--threads", "1", "--jobs", "2", "--records", "8", "--out", str(out)])
    lane_probe.main()
    result = json.loads(out.read_text())
    sizes = {(row["beside"], row["experts"], row["rows"]): row["jobs"] for row in result["rows"]}
    expected = {(beside, experts, rows): 2 for beside in ("nothing", "reading") for experts in (1, 2, 3, 4) for rows in (1, 4)}
    assert sizes == expected | {("a pause", 2, 1): 12}
    assert all(0 < row["p10_us"] <= row["p50_us"] <= row["p90_us"] <= row["p99_us"] <= row["worst_us"] for row in result["rows"])
    assert all(row["read_gb_s"] > 0 for row in result["rows"] if row["beside"] == "reading")
    assert set(Path("/dev/shm").glob("lane-probe-*")) == before
