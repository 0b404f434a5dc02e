"""On a GPU: a prefill that is broken off between two layers leaves nothing that a later pass would see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.gpu_worker.backends import select
from tests.gpu.broken_passes import LENGTHS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
PROBLEM = select.gpu_problem()
SIDES, PLACES = 4, 3  # two ways of admission, few slots and all; layers, or more where the middle is not among the first


@pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
def test_a_prefill_that_is_broken_off_changes_no_bit_of_what_follows() -> None:
    """The step of another stream behind it and the whole prompt behind that, chunk alone or joined; on the shipped checkpoint."""
    command = [sys.executable, "-m", "tests.gpu.broken_passes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert len(rows) >= SIDES * PLACES * len(LENGTHS)
    assert [row["name"] for row in rows if not (row["equal"] and row["states_equal"] and row["beside_equal"])] == []
