"""How test processes share a machine: ordinary tests side by side, one that is marked `alone` by itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import tests.conftest
from tests.conftest import Turns

CHILD = """
import pathlib, sys, time
from tests.conftest import Turns
turns = Turns(pathlib.Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    if line == "leave\\n":
        turns.give_back()
    else:
        turns.take(alone=line == "alone\\n")
    print("done", flush=True)
"""


class Other:
    """Another test process of the same run."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", CHILD, str(folder)]
        root = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        self.wait()

    def wait(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() in ("ready", "done")

    def ask(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()

    def do(self, what: str) -> None:
        self.ask(what)
        self.wait()


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Other:
    monkeypatch.setattr(tests.conftest, "TURN_S", 0.3)
    made = Other(tmp_path)
    yield made  # type: ignore[misc]
    made.process.kill()
    made.process.communicate(timeout=20)


def test_ordinary_tests_run_side_by_side(other: Other, tmp_path: Path) -> None:
    """Neither waits for the other, as often as they like."""
    mine = Turns(tmp_path)
    for _ in range(3):
        mine.take(alone=False)
        other.do("beside")
        mine.give_back()
        other.do("leave")


@pytest.mark.parametrize(("theirs", "alone"), [("alone", False), ("alone", True), ("beside", True)])
def test_a_test_that_is_alone_has_nothing_beside_it(other: Other, tmp_path: Path, theirs: str, alone: bool) -> None:
    """Whoever came first; the turn is free afterwards, for both."""
    mine = Turns(tmp_path)
    other.do(theirs)
    with pytest.raises(TimeoutError):
        mine.take(alone=alone)
    other.do("leave")
    mine.take(alone=alone)
    mine.give_back()
    other.do("alone")


def test_one_that_waits_to_be_alone_is_not_passed_by(other: Other, tmp_path: Path) -> None:
    """Tests that come after it wait, although they could run beside those that run: otherwise its turn might never come."""
    mine = Turns(tmp_path)
    mine.take(alone=False)
    other.ask("alone")
    late = Turns(tmp_path)
    for _ in range(2000):  # until the other process waits
        try:
            late.take(alone=False)
        except TimeoutError:
            break
        late.give_back()
        time.sleep(0.01)
    else:
        pytest.fail("a later test passed by")
    mine.give_back()
    other.wait()
