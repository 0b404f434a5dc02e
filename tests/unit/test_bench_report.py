"""What a result file says of its run is of use elsewhere: no folder of the machine that measured stands in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import report

RESULTS = sorted((report.ROOT / "docs" / "results").glob("*.json"))


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--layers", "--layers"),
        ("12", "12"),
        ("/somewhere/else/rows.json", "rows.json"),
        ("--state=/somewhere/else/rows.json", "--state=rows.json"),
        (f"{report.ROOT}/docs/results/x.json", "docs/results/x.json"),
        (f"--out={report.ROOT}/docs/results/x.json", "--out=docs/results/x.json"),
        ("docs/results/x.json", "docs/results/x.json"),
        ("GLM53_DEVICE=cuda", "GLM53_DEVICE=cuda"),
    ],
)
def test_of_a_path_outside_of_the_project_the_name_is_told(argument: str, told: str) -> None:
    """Inside of it the way from its root."""
    assert report.without_folders(argument) == told


def test_a_command_is_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Module and arguments, each as it can be used elsewhere."""
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "3", "--out", "/somewhere/x.json"])
    assert report.start("bench.thing")["command"] == "python -m bench.thing --rounds 3 --out x.json"
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert report.start("bench.thing")["command"] == "python -m bench.thing"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_name_no_folder_of_a_machine(path: Path) -> None:
    """In the command that made them."""
    words = json.loads(path.read_text())["command"].split()
    assert [word for word in words if word.startswith("/") or "=/" in word] == []
