"""On a GPU: a decode step waits for the device once, at its logits, and makes no other call that may wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.gpu_worker.backends import select
from tests.gpu import programs
from tests.support import cuda_waits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
PROBLEM = select.gpu_problem()


@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
@pytest.mark.parametrize("flags", [[], ["--on-demand"], ["--on-demand", "--hints", "3"]], ids=["between_steps", "in_step", "hints"])
def test_a_decode_step_waits_once(tmp_path: Path, flags: list[str]) -> None:
    """Counted at the driver, in the thread of the forward pass: one synchronise, no allocation, no blocking copy, no code loaded."""
    env = {**os.environ, "LD_PRELOAD": str(cuda_waits.build(tmp_path)), "CUDA_MODULE_LOADING": "EAGER"}
    seen = programs.result_of("tests.gpu.step_waits", *flags, timeout_s=500, env=env)
    assert seen["hooked"] > 0
    assert (seen["hints"] > 0) == ("--hints" in flags)
    assert len(seen["rows"]) == 3 * 24
    wrong = [row for row in seen["rows"] if row["calls"] != ["cuStreamSynchronize"]]
    assert wrong == []
