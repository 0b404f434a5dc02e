"""A container is told to stop before its service has begun: nothing is lost, and nobody waits for a grace period."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = {"gateway": "services.gateway", "gpu-worker": "services.gpu_worker", "cpu-expert": "services.cpu_expert"}
# When it is told, after the first handler is there: in the doctor's checks, in the service's imports, in its start, when it serves.
DELAYS_S = (0.0, 0.4, 0.8, 1.2, 1.8, 2.5)
ENDS_S = 60.0  # on a busy machine; a container engine would wait for 45 s and then kill


def handles_sigterm(pid: int) -> bool:
    """True when the process has a handler for SIGTERM, or keeps the signal waiting."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigCgt", "SigBlk"))]
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


@pytest.mark.e2e
@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_a_container_can_be_stopped_at_any_moment(service: str, delay_s: float, tmp_path: Path) -> None:
    """As the first process it gets only what it has a handler for, or holds: from the first line on it always has one, and ends with 0."""
    env = {
        **os.environ,
        "PORT": "0",
        "GLM53_SHM_DIR": str(tmp_path),
        "GLM53_WORKER_ADDRESS": f"unix:{tmp_path}/worker.sock",
        "GLM53_MODEL_DIR": str(ROOT / "models" / "tiny" / "checkpoint"),
        "GLM53_DEVICE": "cpu",
    }
    command = [sys.executable, "-m", "cli.doctor", "--for", service, "--", sys.executable, "-m", SERVICES[service]]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + ENDS_S
        while not handles_sigterm(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        until = time.monotonic() + delay_s
        while time.monotonic() < until:
            assert handles_sigterm(process.pid), "a moment in which the signal would be lost"
            time.sleep(0.002)
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDS_S) == 0, (tmp_path / "log").read_text()[-2000:]
    finally:
        process.kill()
        process.wait()
