"""What the set-up does about missing Debian packages, as an ordinary user and as root, with stand-ins for dpkg, apt and id."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "debian_packages.sh"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def machine(tmp_path: Path) -> Run:
    """Runs a command on a Debian where some packages are missing; what apt-get was asked for lands in `apt.log`."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()

    def run(*command: str, user: int, missing: tuple[str, ...], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        words = " ".join(missing)
        programs = {
            "id": f"echo {user}",
            "dpkg-query": f'for name in {words}; do [ "${{@: -1}}" = "$name" ] && exit 1; done; echo installed',
            "apt-get": f'echo "$@" >>{tmp_path}/apt.log',
        }
        for name, body in programs.items():
            path = stubs / name
            path.write_text(f"#!/bin/bash\n{body}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        env = {**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}"}
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)

    return run


def asked_of_apt(tmp_path: Path) -> str:
    log = tmp_path / "apt.log"
    return log.read_text() if log.exists() else ""


def test_an_ordinary_user_gets_the_one_line_to_run(machine: Run, tmp_path: Path) -> None:
    """The line names exactly the missing packages; nothing is installed, and the set-up stops."""
    done = machine(str(SCRIPT), user=1000, missing=("g++", "python3-venv"))
    assert done.returncode == 1
    lines = [line.strip() for line in done.stderr.splitlines() if "apt-get" in line]
    assert len(lines) == 1
    prefix = 'sudo sh -c "apt-get update && apt-get install -y --no-install-recommends '
    assert lines[0].startswith(prefix)
    assert sorted(lines[0].removeprefix(prefix).removesuffix('"').split()) == ["g++", "python3-venv"]
    assert asked_of_apt(tmp_path) == ""


def test_an_ordinary_user_with_every_package_needs_no_root(machine: Run, tmp_path: Path) -> None:
    """With nothing missing the step is silent and asks nobody."""
    done = machine(str(SCRIPT), user=1000, missing=())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert asked_of_apt(tmp_path) == ""


def test_root_installs_what_is_missing(machine: Run, tmp_path: Path) -> None:
    """As root the packages come through apt, and only the missing ones."""
    done = machine(str(SCRIPT), user=0, missing=("python3-dev",))
    assert done.returncode == 0, done.stderr
    update, install = asked_of_apt(tmp_path).splitlines()
    assert update.split()[0] == "update"
    assert install.split()[-1] == "python3-dev"
    assert "g++" not in install


def test_make_serve_stops_at_the_line(machine: Run, tmp_path: Path) -> None:
    """`make serve` as an ordinary user prints the line and makes nothing: no virtual environment, no half-done state."""
    clone = tmp_path / "clone"
    (clone / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", clone)
    for script in (ROOT / "tools").glob("*.sh"):
        shutil.copy(script, clone / "tools")
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, clone)
    done = machine("make", "serve", user=1000, missing=("g++",), cwd=clone)
    assert done.returncode != 0
    assert done.stderr.count("apt-get install") == 1
    assert "--no-install-recommends g++" in done.stderr
    assert not (clone / ".venv").exists()
    assert not (clone / ".state" / "debian").exists()
