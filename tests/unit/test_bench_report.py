"""What a result file says of its run is of use elsewhere: no folder of the machine that measured stands in it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
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


def test_an_archive_of_the_project_knows_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`git archive` writes the commit into the file that report.commit() reads; in a checkout git is asked."""
    repo = tmp_path / "repo"
    (repo / "bench").mkdir(parents=True)
    for name in (".gitattributes", "bench/archive_commit.txt"):
        (repo / name).write_bytes((report.ROOT / name).read_bytes())
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *identity, *words], cwd=repo, check=True, capture_output=True).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD").decode().strip()
    monkeypatch.setattr(report, "ROOT", repo)
    monkeypatch.setattr(report, "ARCHIVED", repo / "bench" / "archive_commit.txt")
    assert report.commit() == head
    (tmp_path / "out" / "bench").mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
        packed = archive.extractfile("bench/archive_commit.txt")
        assert packed is not None
        (tmp_path / "out" / "bench" / "archive_commit.txt").write_bytes(packed.read())
    monkeypatch.setattr(report, "ROOT", tmp_path / "out")
    monkeypatch.setattr(report, "ARCHIVED", tmp_path / "out" / "bench" / "archive_commit.txt")
    assert report.commit() == head
