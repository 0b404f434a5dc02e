"""On a GPU with exllamav3: experts in host memory change no bit, and the whole stack answers. bench/gpu_exact.py runs many more cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.gpu_worker.backends import select
from services.gpu_worker.patches import upstream

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
PROBLEM = select.gpu_problem()
needs_gpu = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


@needs_gpu
def test_the_installed_exllamav3_is_the_known_one() -> None:
    """Version and every fingerprint."""
    upstream.check()


@needs_gpu
def test_no_placement_changes_a_bit(tmp_path: Path) -> None:
    """Stock against stock, then against every placement: all logits of every step. A process of its own: it keeps VRAM and settings."""
    out = tmp_path / "exact.json"
    command = [sys.executable, "-m", "bench.gpu_exact", "--quick", "--moves", "500", "--out", str(out), "--state", str(tmp_path / "rows")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(out.read_text())
    assert result["summary"]["bit_exact"] is True
    assert result["summary"]["cases_skipped"] == 0
    assert all(row["steps"] > 0 for row in result["rows"] if "steps" in row)


@needs_gpu
@pytest.mark.parametrize("admission", ["between_steps", "in_step"])
def test_a_kept_state_changes_no_bit(tmp_path: Path, admission: str) -> None:
    """Continued and whole streams have equal logits; a prompt asked again has the same answer; requests that outgrow the cache all end."""
    out = tmp_path / "kept.json"
    command = [sys.executable, "-m", "bench.gpu_kept", "--admission", admission, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(out.read_text())
    assert result["summary"]["bit_exact"] is True
    assert sum(row.get("cached", 0) for row in result["rows"]) > 0


@needs_gpu
def test_the_whole_stack_answers_on_the_gpu() -> None:
    """Gateway, worker and slots: plain, streamed and seeded answers, log-probabilities."""
    done = subprocess.run([sys.executable, "-m", "bench.gpu_serve"], cwd=ROOT, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert json.loads(done.stdout)["device"] == "cuda"
