"""The gpu-worker image, which CI cannot build: the check that whoever builds it runs, and that its pins can be had.

The check is run for real against the image of a worker without a GPU: it must name all that this one lacks, and nothing else.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.deploy import images
from tests.deploy.engine import ROOT, Engine, run
from tools import check_gpu_image

SAID = "FAIL  GPU: no NVIDIA GPU is visible\n      fix: hand the device in (compose: devices: nvidia.com/gpu=0)\n"
SOUND: dict[str, Any] = {
    "uid": 10001,
    "python": "3.12",
    "packages": check_gpu_image.pins(),
    "tools": ["gcc"],
    "writable": [],
    "uncompiled": [],
    "architectures": ["86", "90"],
    "torch": [check_gpu_image.pins()["torch"] + "+cu130", "13.0"],
    "extension": "exllamav3_ext.so",
    "extension_for": ["8.6", "9.0"],
    "exllamav3": check_gpu_image.pins()["exllamav3"],
    "launcher": "compiled",
    "listed": sorted(check_gpu_image.pins()),
}
UNSOUND = {
    "uid": 0,
    "packages": {**check_gpu_image.pins(), "torch": "2.10.0"},
    "tools": ["gcc", "nvcc"],
    "writable": ["/app/a.py"],
    "uncompiled": ["/app/a.py"],
    "architectures": ["86"],
    "torch": ["2.10.0", "12.8"],
    "extension": "ImportError: no such symbol",
    "extension_for": ["8.6"],
    "exllamav3": "ModuleNotFoundError: no marisa_trie",
    "launcher": "Python.h: No such file",
    "listed": [],
}


def test_a_sound_image_has_no_fault() -> None:
    """What the check accepts."""
    assert check_gpu_image.faults(SOUND, 78, SAID, ["8.6", "9.0"]) == []


@pytest.mark.parametrize("name", UNSOUND)
def test_each_fact_is_judged(name: str) -> None:
    """One thing wrong is one fault that shows what was found."""
    facts = copy.deepcopy(SOUND)
    facts[name] = UNSOUND[name]
    (fault,) = check_gpu_image.faults(facts, 78, SAID, ["8.6", "9.0"])
    assert "torch 2.10.0" in fault if name == "packages" else str(UNSOUND[name]) in fault


def test_an_image_must_refuse_to_serve_without_its_gpu() -> None:
    """Exit code and words of the preflight are judged too."""
    assert len(check_gpu_image.faults(SOUND, 0, "serving on the CPU", ["8.6", "9.0"])) == 2


@pytest.mark.containers
def test_its_packages_can_be_had() -> None:
    """The index has every pinned package of the image as a wheel for its system and Python; nothing but metadata is fetched."""
    said = run([str(ROOT / "tools/image_requirements.sh"), "check", "gpu-worker"], os.environ, timeout_s=240)
    assert said.splitlines()[-1] == "gpu-worker: every package is to be had for CPython 3.12"


@pytest.mark.containers
@pytest.mark.timeout(3600)
def test_the_check_names_what_the_image_without_a_gpu_lacks(engine: Engine, built: dict[str, str]) -> None:
    """Of an image that is no GPU worker's: no torch, exllamav3, GPU kernels and compiler; what both share is as it should be."""
    command = [sys.executable, "-m", "tools.check_gpu_image", images.image("gpu-worker-cpu"), "--engine", "podman"]
    done = subprocess.run(command, cwd=ROOT, env=engine.env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    lacks = (
        "packages differ",
        "programs: []",
        "our GPU kernels",
        "torch and its CUDA",
        "exllamav3's extension:",
        "exllamav3's extension is",
        "import exllamav3",
    )
    starts = (*lacks, "what Triton does", "the bill of materials lists")
    assert len(said) == len(starts), said
    for start in starts:
        assert any(line.startswith(f"FAIL  {start}") for line in said), start
