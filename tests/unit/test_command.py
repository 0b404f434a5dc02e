"""Hints show the command as the person who reads them can type it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from services.common.command import find
from services.common.version import VERSION

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with a virtual environment that has our command."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("glm53", "python"):
        (programs / name).write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("argv0", "folder", "on_path", "expected"),
    [
        (".venv/bin/glm53", "", None, ".venv/bin/glm53"),
        ("{root}/.venv/bin/glm53", "", None, ".venv/bin/glm53"),
        ("{root}/.venv/bin/glm53", "..", None, "{root}/.venv/bin/glm53"),
        ("{root}/.venv/bin/glm53", "", "{root}/.venv/bin/glm53", "glm53"),
        (".venv/bin/glm53", "", "/usr/bin/glm53", ".venv/bin/glm53"),
        ("-m", "", None, "{root}/.venv/bin/glm53"),
        ("{root}/services/gateway/__main__.py", "", None, "{root}/.venv/bin/glm53"),
        ("{root}/services/gateway/__main__.py", "", "{root}/.venv/bin/glm53", "glm53"),
    ],
)
def test_the_command_is_named_as_it_can_be_typed(installed: Path, argv0: str, folder: str, on_path: str | None, expected: str) -> None:
    """Relative where it was called from its folder, short where the shell finds this very one, whole otherwise."""
    root = str(installed)
    here = os.path.normpath(os.path.join(root, folder)) if folder == "" else str(installed / "elsewhere")
    given = None if on_path is None else on_path.format(root=root)
    assert find(argv0.format(root=root), f"{root}/.venv/bin/python", here, lambda _: given) == expected.format(root=root)


def test_without_an_installed_command_the_module_is_named(tmp_path: Path) -> None:
    """As in containers."""
    assert find("/x/__main__.py", str(tmp_path / "python"), str(tmp_path), lambda _: None) == "python -m cli.main"


def test_the_real_command_shows_itself() -> None:
    """Its usage begins with what was typed, and a refusal's hint can be copied."""
    command = ROOT / ".venv" / "bin" / "glm53"
    if not command.exists():
        pytest.skip("this environment is not the repository's own .venv")
    env = {name: value for name, value in os.environ.items() if name != "PATH"} | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([".venv/bin/glm53", "--help"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("usage: .venv/bin/glm53 ")
    refused = subprocess.run(
        [".venv/bin/glm53", "doctor", "--for", "gateway"],
        cwd=ROOT,
        env=env | {"HOST": "0.0.0.0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "`.venv/bin/glm53 keys create " in refused.stdout


def test_there_is_one_version() -> None:
    """The command, the package and the images say the same one."""
    shown = subprocess.run(
        [sys.executable, "-m", "cli.main", "--version"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert shown == f"glm53-offload {VERSION}\n"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION
    images = re.findall(r"^ARG VERSION=(.+)$", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    assert set(images) == {VERSION}
