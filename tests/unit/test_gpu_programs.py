"""How the tests of a GPU run their programs, with other programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.gpu.programs import result_of


def test_the_last_line_is_the_result_and_a_failure_is_told_with_its_words(tmp_path: Path) -> None:
    """Arguments and environment reach the program; one that fails, or takes too long, is no result."""
    (tmp_path / "told.py").write_text(
        "import json, os, sys, time\n"
        "print('a line of a library')\n"
        "print('why', file=sys.stderr)\n"
        "time.sleep(float(sys.argv[2]))\n"
        "print(json.dumps({'home': os.environ['HERE']}))\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    env = {"PYTHONPATH": str(tmp_path), "HERE": "there"}
    assert result_of("told", "0", "0", timeout_s=60, env=env) == {"home": "there"}
    with pytest.raises(AssertionError, match="why"):
        result_of("told", "3", "0", timeout_s=60, env=env)
    with pytest.raises(subprocess.TimeoutExpired):
        result_of("told", "0", "60", timeout_s=0.5, env=env)
