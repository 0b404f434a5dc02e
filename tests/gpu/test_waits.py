"""On a GPU: a decode step waits for the device once, at its logits, and makes no other call that may wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.gpu_worker.backends import select
from tests.support import cuda_waits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
PROBLEM = select.gpu_problem()


@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
@pytest.mark.parametrize("flags", [[], ["--on-demand"], ["--on-demand", "--hints", "3"]], ids=["between_steps", "in_step", "hints"])
def test_a_decode_step_waits_once(tmp_path: Path, flags: list[str]) -> None:
    """Counted at the driver, in the thread of the forward pass: one synchronise, no allocation, no blocking copy, no code loaded."""
    env = {**os.environ, "LD_PRELOAD": str(cuda_waits.build(tmp_path)), "CUDA_MODULE_LOADING": "EAGER"}
    command = [sys.executable, "-m", "tests.gpu.step_waits", *flags]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["hooked"] > 0
    assert (seen["hints"] > 0) == ("--hints" in flags)
    assert len(seen["rows"]) == 3 * 24
    wrong = [row for row in seen["rows"] if row["calls"] != ["cuStreamSynchronize"]]
    assert wrong == []
