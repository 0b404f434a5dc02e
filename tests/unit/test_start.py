"""How signals end the `glm53` command before it serves: at once, without a traceback, also as a container's first process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


CODE = """
import os, sys
if FIRST: os.getpid = lambda: 1
class Input:
    def readline(self):
        print("reading", flush=True)
        return os.read(0, 100).decode()
sys.stdin, sys.argv = Input(), ["glm53", "keys", "hash"]
from cli.start import main
sys.exit(main())
"""


def forget_ignored_signals() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and that would be inherited."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def run_until_it_reads(first_process: bool) -> subprocess.Popen[bytes]:
    """`glm53 keys hash`, which waits for its standard input, and has begun to."""
    command = [sys.executable, "-c", CODE.replace("FIRST", str(first_process))]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, preexec_fn=forget_ignored_signals)
    assert process.stdout is not None
    assert process.stdout.readline() == b"reading\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("first_process", [True, False])
def test_a_signal_ends_the_command_at_once(number: signal.Signals, first_process: bool) -> None:
    """The kernel drops what a container's first process does not handle, so there it must; elsewhere the signal's own effect is kept."""
    process = run_until_it_reads(first_process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert said == b""
    assert process.returncode == (128 + number if first_process else -number)
