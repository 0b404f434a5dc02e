"""Bare metal: the install script, and serving from another folder than the installation's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import server as serving
from cli.settings import ServeSettings
from services.common import setting_names
from services.common.lifecycle import ExitCode

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "install.sh"


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with some variables more."""
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=240)


def test_the_script_explains_itself() -> None:
    """--help tells what it does and ends well; an unknown option tells the same and does not."""
    helped, wrong = run(SCRIPT, "--help"), run(SCRIPT, "--rocm")
    assert (helped.returncode, wrong.returncode) == (0, 2)
    assert "--cpu | --gpu" in helped.stdout
    assert helped.stdout == wrong.stdout
    assert "--rocm" in wrong.stderr


def unit() -> dict[str, list[str]]:
    """The settings of the service that docs/install.md shows, each with its values."""
    (text,) = re.findall(r"```ini\n(.*?)```", (ROOT / "docs/install.md").read_text(), re.DOTALL)
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_service_that_is_shown_ends_for_good_where_a_restart_cannot_help() -> None:
    """Its only command is the main process, whose exit code systemd looks at: with a wrong setting that is one it does not restart."""
    service = unit()
    assert "ExecStartPre" not in service
    (command,) = service["ExecStart"]
    words = command.replace("/opt/glm53-offload/.venv/bin", str(Path(sys.executable).parent)).split()
    refused = run(*words, GLM53_ROOT=str(ROOT), GLM53_MODE="quick")
    assert str(refused.returncode) in service["RestartPreventExitStatus"][0].split()
    assert "GLM53_MODE" in refused.stdout


def test_the_service_that_is_shown_stops_in_order() -> None:
    """systemd signals the server alone, and waits longer than requests may run on; its settings exist."""
    service = unit()
    assert service["KillMode"] == ["mixed"]
    assert float(service["TimeoutStopSec"][0]) > ServeSettings.load({}).drain_timeout_s
    names = {word.partition("=")[0] for line in service["Environment"] for word in line.split()}
    assert names <= setting_names.ALL


def test_the_gpu_way_says_what_it_needs(tmp_path: Path) -> None:
    """Without nvcc the script ends before it installs anything for the GPU, and names the toolkit."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "sed", "grep", "cat"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    (programs / "make").write_text("#!/bin/sh\n")
    (programs / "make").chmod(0o755)
    done = run("/usr/bin/bash", SCRIPT, "--gpu", PATH=str(programs), CUDA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "CUDA toolkit" in done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose programs write down how they were called, with an nvcc of CUDA 13 in cuda/."""
    programs = {
        ".venv/bin/python": 'echo "python $* ninja=$(command -v ninja) nvcc=$(command -v nvcc)"',
        ".venv/bin/ninja": "",
        ".venv/bin/glm53": 'echo "glm53 $*"',
        "bin/make": 'echo "make $*"',
        "cuda/bin/nvcc": "echo Cuda compilation tools, release 13.0, V13.0.88",
    }
    for name, does in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("scripts/install.sh", "deploy/docker/requirements/gpu-worker.in"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "bin/sh").symlink_to("/usr/bin/sh")
    for name in ("dirname", "sed", "grep", "cat"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    return tmp_path


def test_the_gpu_way_builds_with_the_compilers_of_the_installation(clone: Path) -> None:
    """On a machine that has neither nvcc nor ninja on PATH: pinned versions, the extension, our kernels."""
    done = run("/usr/bin/bash", clone / "scripts/install.sh", "--gpu", PATH=str(clone / "bin"), CUDA_HOME=str(clone / "cuda"))
    assert done.returncode == 0, done.stderr
    found = f" ninja={clone}/.venv/bin/ninja nvcc={clone}/cuda/bin/nvcc"
    called = [line.removesuffix(found) for line in done.stdout.splitlines() if line.endswith(found)]
    assert [re.sub(r" --\S+", "", line) for line in called] == [
        "python -m pip install exllamav3==1.5.1 torch==2.11.0",
        "python deploy/docker/exllamav3_extension.py",
        "python tools/build_kernels.py",
    ]


@pytest.mark.parametrize(("said", "version"), [("release 12.4, V12.4.131", "12.4"), ("what?", "?")])
def test_a_toolkit_of_another_cuda_is_named_before_anything_is_installed(clone: Path, said: str, version: str) -> None:
    """torch would say so too, after gigabytes have been fetched."""
    (clone / "cuda/bin/nvcc").write_text(f"#!/bin/sh\necho {said}\n")
    done = run("/usr/bin/bash", clone / "scripts/install.sh", "--gpu", PATH=str(clone / "bin"), CUDA_HOME=str(clone / "cuda"))
    assert done.returncode == 1
    assert f"cuda/bin/nvcc is of CUDA {version};" in done.stderr
    assert "pip install" not in done.stdout


@pytest.mark.e2e
def test_an_installation_serves_from_any_folder(tmp_path: Path) -> None:
    """GLM53_ROOT is where the shipped checkpoint is found, wherever the command was given."""
    port = serving.free_port()
    env = {**os.environ, "GLM53_ROOT": str(ROOT), "GLM53_STATE_DIR": str(tmp_path / "state")}
    log = tmp_path / "serve.log"
    with log.open("wb") as out:
        command = [str(Path(sys.executable).parent / "glm53"), "serve", "--port", str(port)]
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT)
    server = serving.Server(f"http://127.0.0.1:{port}", port, f"p{port}", log, tmp_path / "state", process)
    try:
        server.wait_ready()
        assert server.get_json("/v1/models")["data"][0]["id"] == "glm-5.3-tiny"
    finally:
        assert server.stop() == 0, server.tail()


def test_a_root_that_is_none_is_refused(tmp_path: Path) -> None:
    """The setting is named, with exit code 78."""
    done = run(sys.executable, "-m", "cli.main", "serve", GLM53_ROOT=str(tmp_path / "missing"))
    assert done.returncode == ExitCode.CONFIG
    assert "GLM53_ROOT" in done.stdout + done.stderr


def test_the_doctor_looks_into_the_root(tmp_path: Path) -> None:
    """The shipped checkpoint is found from any folder; a root that is none is named."""
    port = str(serving.free_port())
    command = [str(Path(sys.executable).parent / "glm53"), "doctor", "--json"]
    env = {**os.environ, "GLM53_ROOT": str(ROOT), "PORT": port, "GLM53_WORKER_ADDRESS": f"unix:{tmp_path}/w.sock"}
    found = json.loads(subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60).stdout)
    assert [f["level"] for f in found if f["check"] == "checkpoint"].count("fail") == 0
    assert any(f["check"] == "checkpoint" for f in found)
    missing = subprocess.run(
        command, env={**env, "GLM53_ROOT": str(tmp_path / "none")}, capture_output=True, text=True, check=False, timeout=60
    )
    assert missing.returncode == ExitCode.CONFIG
    assert "GLM53_ROOT" in missing.stdout
