"""Documents that are written from code are up to date, and links lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools import licences, settings_table

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / name for name in subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
]


def test_the_settings_table_is_up_to_date() -> None:
    """docs/settings.md equals what the settings classes say."""
    assert settings_table.OUT.read_text() == settings_table.table()


def test_the_licence_table_is_up_to_date() -> None:
    """docs/third-party-licences.md lists every pinned package."""
    assert licences.OUT.read_text() == licences.table()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_exist(document: Path) -> None:
    """Every relative link of every document leads to a file or folder of the repository."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_commands_of_the_readme_are_make_targets() -> None:
    """Every `make X` that the documents name is a target."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for command in re.findall(r"`make ([a-z-]+)", document.read_text()):
            assert command in targets, f"{document.name}: make {command}"


def test_the_architecture_page_stays_short() -> None:
    """docs/architecture.md is a page that one reads, not a book."""
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 120
