"""The programs of this folder, each in a process of its own: a broken device takes that process alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TOLD_CHARS = 4000


def result_of(module: str, *arguments: str, timeout_s: float, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Runs `python -m module`; what the last line of its output says, which is an object in JSON.

    Args:
        module: such as tests.gpu.joined_passes.
        timeout_s: seconds after which it is killed.
        env: its environment; None: this process's.

    Raises:
        AssertionError: it failed; with the end of what it printed.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-_TOLD_CHARS:] + done.stderr[-_TOLD_CHARS:]
    return dict(json.loads(done.stdout.splitlines()[-1]))
