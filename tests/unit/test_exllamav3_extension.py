"""deploy/docker/exllamav3_extension.py, with a stand-in for exllamav3 that builds its extension when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy/docker/exllamav3_extension.py"
# As exllamav3 does: it names the cards that are there where nobody has, and builds nothing when its extension can be found.
STAND_IN = """
import importlib.util, os, pathlib
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.6+PTX")
if importlib.util.find_spec("exllamav3_ext") is None:
    for name in os.environ["BUILDS"].split():
        made = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"], name)
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(os.environ["TORCH_CUDA_ARCH_LIST"])
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The packages of an environment that has the stand-in."""
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv/lib").glob("python3*/site-packages")
    (site / "exllamav3.py").write_text(STAND_IN)
    return site


def build(site: Path, builds: str = "exllamav3_ext/exllamav3_ext.so", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the script in that environment."""
    python = site.parents[2] / "bin/python"
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TORCH_CUDA_ARCH_LIST")}
    extensions = str(site.parents[3] / "extensions")
    env = {**given, "TORCH_EXTENSIONS_DIR": extensions, "BUILDS": builds, "PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run([python, SCRIPT], env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("env", "said"), [({"TORCH_CUDA_ARCH_LIST": "8.6;9.0"}, "8.6;9.0"), ({}, "8.6+PTX")], ids=["named", "found"])
def test_the_extension_is_installed_with_what_it_was_built_for(site: Path, env: dict[str, str], said: str) -> None:
    """Named architectures, or those of the cards that are there."""
    done = build(site, **env)
    assert done.returncode == 0, done.stderr
    assert (site / "exllamav3_ext.so").read_text() == said
    assert (site / "exllamav3_ext.archs").read_text() == f"{said}\n"


def test_a_second_build_is_not_spared_by_the_first(site: Path) -> None:
    """Another card: what was installed is built anew, and so it is when the folder of the first build is gone."""
    for architecture in ("8.6", "9.0"):
        done = build(site, TORCH_CUDA_ARCH_LIST=architecture, TORCH_EXTENSIONS_DIR=str(site.parents[3] / architecture))
        assert done.returncode == 0, done.stderr
        assert (site / "exllamav3_ext.so").read_text() == architecture
        assert (site / "exllamav3_ext.archs").read_text() == f"{architecture}\n"


@pytest.mark.parametrize("builds", ["", "a/exllamav3_ext.so b/exllamav3_ext.so"], ids=["none", "two"])
def test_a_build_that_left_not_one_extension_fails(site: Path, builds: str) -> None:
    """Nothing is installed then, and the message lists what was found."""
    done = build(site, builds)
    assert done.returncode != 0
    assert "expected one exllamav3_ext*.so" in done.stderr
    assert not (site / "exllamav3_ext.so").exists()


def test_the_script_needs_no_package_but_exllamav3() -> None:
    """It runs in an image that has the worker's packages alone."""
    imported = {line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith(("import ", "from "))}
    assert imported - {"__future__"} <= sys.stdlib_module_names
