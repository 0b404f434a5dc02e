"""What errors tell people to run is there, and does what it is named for."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from services.common import otel
from services.common.errors import ConfigError
from services.gpu_worker.patches import upstream
from tests.support import missing

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("services", "cli", "kernels", "tools", "scripts") for path in (ROOT / folder).rglob("*.[ps][yh]"))


def would_run(target: str) -> str:
    """What `make TARGET` would run if the pinned versions had changed."""
    command = ["make", "-n", "-W", "requirements.lock", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


def test_every_make_target_that_the_code_names_is_one() -> None:
    """In errors, findings and fixes."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for path in SOURCES for name in re.findall(r"`make ([a-z-]+)", path.read_text())}
    assert {"kernels", "setup-otel"} <= named
    assert named <= targets


def test_no_error_about_packages_leads_around_the_pinned_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for GLM53_OTLP_ENDPOINT names a target that installs the extra as the set-up does."""
    missing.hide(monkeypatch, "opentelemetry")
    with pytest.raises(ConfigError) as refused:
        otel.provider_for("http://127.0.0.1:1/v1/traces", "test")
    assert "pip install" not in refused.value.message
    (target,) = re.findall(r"`make ([a-z-]+)`", refused.value.message)
    assert re.search(r"^tools/pip_install\.sh \S*\botel\b", would_run(target), re.MULTILINE)


def test_errors_about_exllamav3_lead_to_the_script_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing or of another version: the way of docs/install.md, which brings the version that the patches are for."""
    monkeypatch.setattr(upstream.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError) as missing_one:
        upstream.check()
    monkeypatch.setattr(upstream, "_source", lambda _module: '__version__ = "1.0"')
    with pytest.raises(ConfigError) as other:
        upstream.check()
    for message in (missing_one.value.message, other.value.message):
        assert "pip install" not in message
        assert message.endswith(": run `scripts/install.sh --gpu` in this installation's folder")
    assert re.search(
        r"^ +scripts/install\.sh .*exllamav3 " + re.escape(upstream.VERSION), (ROOT / "docs/install.md").read_text(), re.MULTILINE
    )
    brought = (ROOT / "deploy/docker/requirements/gpu-worker.in").read_text().splitlines()
    assert f"{upstream.PACKAGE}=={upstream.VERSION}" in brought
    assert "requirements/gpu-worker.in" in (ROOT / "scripts/install.sh").read_text()


def test_what_was_added_stays_of_the_pinned_versions(tmp_path: Path) -> None:
    """Once installed, the extra is part of what a later set-up brings up to date; where it is not, it stays away."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    (tmp_path / ".state").mkdir()
    command = ["make", "-n", "setup"]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    (tmp_path / ".state/otel").touch()
    added = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert "worker,build\n" in plain.stdout
    assert "otel" not in plain.stdout
    assert "pip_install.sh worker,build,otel" in added.stdout


def test_packages_go_into_our_environment_pinned_and_editable(tmp_path: Path) -> None:
    """Not into the system's Python, and not as a copy of the code."""
    program = tmp_path / ".venv/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$@" > called\n')
    program.chmod(0o755)
    subprocess.run([ROOT / "tools/pip_install.sh", "worker,build,otel"], cwd=tmp_path, check=True, capture_output=True, timeout=30)
    called = (tmp_path / "called").read_text().split()
    assert called[:3] == ["-m", "pip", "install"]
    assert called[called.index("--constraint") + 1] == "requirements.lock"
    assert called[called.index("--editable") + 1] == ".[worker,build,otel]"


def test_all_that_the_extra_brings_is_pinned() -> None:
    """Each package of it, and what they need in turn, has a version in requirements.lock: else pip would take the newest."""
    lines = re.findall(r"^([A-Za-z0-9._-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    pinned, seen = {canonicalize_name(name) for name in lines}, set[str]()
    extra = re.findall(r"^otel = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    waiting = [Requirement(text) for text in re.findall(r'"([^"]+)"', extra[0])]
    assert waiting
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name not in seen:
            seen.add(name)
            needed = map(Requirement, importlib.metadata.requires(name) or [])
            waiting += [need for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})]
    assert seen <= pinned
