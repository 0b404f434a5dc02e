"""Fixtures that every ring of tests shares, and how tests share a machine when several run at once (pytest-xdist)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

THREAD_END_S = 5.0
TURN_S = 900.0  # more than the longest test may take


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the person who runs the tests leaks into them."""
    for name in list(os.environ):
        if name.startswith("GLM53_") or name in {"HOST", "PORT", "SERVED_NAME"}:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="module")
def no_pager_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a pager's thread, which would go on looking at memory that the test gave back."""
    before, failed = threads_named("pager"), request.session.testsfailed
    yield
    deadline = time.monotonic() + THREAD_END_S
    while left := threads_named("pager") - before:
        if request.session.testsfailed != failed:
            return  # a failed test's traceback holds what it used
        assert time.monotonic() < deadline, f"{len(left)} pagers were not closed"
        time.sleep(0.01)  # the kernel shows a thread for a moment after it was joined


def threads_named(name: str) -> set[str]:
    """Ids of this process's threads that have the name."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() == name:
                found.add(task.name)
    return found


class Turns:
    """Who may run now, among the test processes of one run: many ordinary tests at once, or one that is marked `alone`.

    Whoever is next holds the gate until its turn has come: without it, tests that may run side by side would follow each other for ever
    and one that waits to be alone would not get its turn.

    Args:
        folder: common to the processes of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._gate, self._turn = (os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in ("gate.lock", "turn.lock"))

    def take(self, *, alone: bool) -> None:
        """Waits for the turn.

        Raises:
            TimeoutError: it did not come within TURN_S.
        """
        deadline = time.monotonic() + TURN_S
        _lock(self._gate, fcntl.LOCK_EX, deadline)
        try:
            _lock(self._turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, deadline)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def give_back(self) -> None:
        """Lets others run. A child process that has inherited the files holds nothing any more."""
        fcntl.flock(self._turn, fcntl.LOCK_UN)


def _lock(file: int, how: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another test did not end within {TURN_S:g} s") from None
            time.sleep(0.01)


_TURNS = pytest.StashKey[Turns]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test of several processes' run waits for its turn, outside its own time limit."""
    if not hasattr(item.config, "workerinput"):  # the variable PYTEST_XDIST_WORKER is there for a run that a test starts, too
        return (yield)
    if _TURNS not in item.config.stash:
        # A test process's folder lies in that of the whole run.
        item.config.stash[_TURNS] = Turns(item.config._tmp_path_factory.getbasetemp().parent)  # type: ignore[attr-defined]
    turns = item.config.stash[_TURNS]
    turns.take(alone=item.get_closest_marker("alone") is not None)
    try:
        return (yield)
    finally:
        turns.give_back()
