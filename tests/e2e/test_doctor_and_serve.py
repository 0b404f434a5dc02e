"""`glm53 doctor` refuses what `glm53 serve` refuses: a setting that it passes is one that a start takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.server import ROOT, free_port
from services.common.lifecycle import ExitCode

pytestmark = pytest.mark.e2e

# Settings that a start ends with: those that one service looks at alone, those that are checked against each other, against the
# checkpoint, against the machine, and against what is installed. {tmp} is a folder of the test's.
REFUSED: dict[str, dict[str, str]] = {
    "a wrong value": {"GLM53_MODE": "quick"},
    "a typo": {"GLM53_MODEL_DIRS": "/x"},
    "traces without their packages": {"GLM53_OTLP_ENDPOINT": "http://127.0.0.1:1/v1/traces", "PYTHONPATH": "{tmp}/hidden"},
    "hints on the CPU": {"GLM53_EC_HINTS": "3"},
    "a GPU that is not served": {"GLM53_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""},
    "a mode of another version": {"GLM53_MODE": "nvme"},
    "a context that the model has not": {"GLM53_CONTEXT_TOKENS": "1000000"},
    "a memory node that is not there": {"GLM53_CT_NUMA_NODE": "77"},
    "CPUs that are not there": {"GLM53_CT_CPUS": "9999"},
    "heat nowhere": {"GLM53_HEAT_FILE": "{tmp}/none/heat"},
    "usage in a place for no files": {"GLM53_USAGE_FILE": "/proc/usage"},
    "keys that are not there": {"GLM53_API_KEYS_FILE": "{tmp}/keys.json"},
    "a Redis that is none": {"GLM53_REDIS_URL": "http://127.0.0.1:6379"},
    "a Redis with an option that is none": {"GLM53_REDIS_URL": "redis://127.0.0.1:1/0?socket_timeout=soon"},
    "shared memory nowhere": {"GLM53_SHM_DIR": "{tmp}/none"},
    "a state folder in a place for no folders": {"GLM53_STATE_DIR": "/proc/x"},
    "a state folder that is a file": {"GLM53_STATE_DIR": "{tmp}/file"},
    "a state folder below a file": {"GLM53_STATE_DIR": "{tmp}/file/below"},
    "a state folder whose lock is a folder": {"GLM53_STATE_DIR": "{tmp}/locked"},
    "a state folder too deep": {"GLM53_STATE_DIR": "{tmp}/" + "x" * 100},
    "a socket in no folder": {"GLM53_WORKER_ADDRESS": "unix:{tmp}/none/worker.sock"},
    "a socket too deep": {"GLM53_WORKER_ADDRESS": "unix:{tmp}/" + "x" * 100},
    "a repository without its revision": {"GLM53_MODEL_REPO": "somebody/small", "GLM53_MODEL_DIR": "{tmp}/empty"},
    "a folder of another revision": {"GLM53_MODEL_DIR": "{tmp}/model", "GLM53_MODEL_REVISION": "0" * 40},
    "a listening address of somebody else": {"GLM53_WORKER_HTTP": "192.0.2.1:80"},
}
# Where the finding has another name than the first setting of the case.
NAMED = {"a GPU that is not served": "GPU"}


def prepared(tmp_path: Path, given: dict[str, str]) -> dict[str, str]:
    """The environment of both commands, with what the settings point at."""
    (tmp_path / "hidden/opentelemetry").mkdir(parents=True)
    (tmp_path / "hidden/opentelemetry/__init__.py").write_text("raise ImportError('not installed')\n")
    (tmp_path / "file").touch()
    (tmp_path / "locked/lock").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    for file in (ROOT / "models/tiny/checkpoint").iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    record = {"repo": "somebody/small", "revision": "1" * 40, "files": [], "complete": []}
    (tmp_path / "model/glm53-download.json").write_text(json.dumps(record))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GLM53_")}
    own = {"GLM53_DEVICE": "cpu", "GLM53_STATE_DIR": str(tmp_path / "state"), "PORT": str(free_port())}
    return {**clean, **own, **{name: value.replace("{tmp}", str(tmp_path)) for name, value in given.items()}}


def glm53(command: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """One of the two, in a process of its own."""
    words = [sys.executable, "-m", "cli.start", command]
    return subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120)


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_start_refuses_the_doctor_refuses(case: str, tmp_path: Path) -> None:
    """The doctor names the setting and leaves nothing behind; the start ends for good."""
    env = prepared(tmp_path, REFUSED[case])
    before = sorted(tmp_path.rglob("*"))
    found = glm53("doctor", env)
    assert sorted(tmp_path.rglob("*")) == before
    refused = glm53("serve", env)
    assert refused.returncode == (ExitCode.BOOT if "socket" in case else ExitCode.CONFIG), refused.stdout
    assert found.returncode == ExitCode.CONFIG, found.stdout
    named = NAMED.get(case) or next(name for name in REFUSED[case] if name.startswith("GLM53_"))
    failing = [line for line in found.stdout.splitlines() if line.startswith("FAIL")]
    assert any(named in line for line in failing), failing
    assert len(failing) == len(set(failing))


def test_without_any_of_them_nothing_fails(tmp_path: Path) -> None:
    """And nothing is left behind; that such a start serves is what the other tests here show."""
    env = prepared(tmp_path, {})
    before = sorted(tmp_path.rglob("*"))
    found = glm53("doctor", env)
    assert found.returncode == ExitCode.OK, found.stdout
    assert "state folder" in found.stdout
    assert sorted(tmp_path.rglob("*")) == before
