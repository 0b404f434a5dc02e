"""On a GPU: records that went bad while no worker ran are repaired while the next one computes, in host memory and in slots."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.gpu_worker.backends import select
from tests.gpu import programs
from tests.support.arena_damage import damage

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
PROBLEM = select.gpu_problem()
needs_gpu = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="glm53-arena-check-") as folder:
        yield Path(folder)


def run(shm_dir: Path, admission: str) -> dict[str, Any]:
    return programs.result_of("tests.gpu.arena_repair", "--shm-dir", str(shm_dir), "--admission", admission, timeout_s=280)


@needs_gpu
@pytest.mark.parametrize("admission", ["between_steps", "in_step"])
def test_records_that_went_bad_are_repaired_while_serving(shm_dir: Path, admission: str) -> None:
    """As many as were damaged; afterwards no record and no slot is bad, and the logits are those of the first worker."""
    first = run(shm_dir, admission)
    assert first["check"] is None
    bad = [(layer, expert) for layer in (0, 2) for expert in (0, 3, 5)]
    damage(shm_dir, *bad)
    second = run(shm_dir, admission)
    assert second["arena"].startswith("re-attached")
    assert (second["check"]["bad"], second["check"]["repaired"], second["check"]["done"]) == (len(bad), len(bad), True)
    assert (second["verify"]["records_bad"], second["verify"]["slots_bad"]) == (0, 0)
    assert second["verify"]["slots_checked"] > 0
    assert (first["checksum_failures"], second["checksum_failures"]) == (0, len(bad))
    assert second["logits"] == first["logits"]
