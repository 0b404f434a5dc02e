"""Teacher-forced distributions of two servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import score_panel

pytestmark = pytest.mark.e2e


def test_exact_and_fast_give_the_same_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight texts, every position: top-1 of 1, KL of 0, not a bit of any log-probability differs."""
    out = tmp_path / "panel.json"
    monkeypatch.setattr(sys, "argv", ["score_panel", "--out", str(out)])
    score_panel.main()
    document = json.loads(out.read_text())
    assert document["summary"]["prompts"] == 8
    assert document["summary"]["positions"] > 400
    assert document["summary"] | {"top1": 1.0, "kl_mean": 0.0, "kl_max": 0.0, "equal": True} == document["summary"]
    assert {row["prompt"] for row in document["rows"]} == set(range(8))
