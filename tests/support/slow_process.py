"""A process that gets little time or none, as on a machine that has none to spare. Needs nothing but the standard library."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

LATE_S = 0.02  # of one lane job on a small model: a hundred times what it takes a cpu_expert that has a processor
LATE_POLLS = 5


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP for the length of a `with` block, SIGCONT at its end, whatever the block did."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def crawling(pid: int, stopped_s: float, running_s: float) -> Iterator[None]:
    """In turns the process stands still for `stopped_s` and runs for `running_s`, until the block ends; then it runs.

    Raises:
        ProcessLookupError: at the block's end, when the process has gone meanwhile.
    """
    over = threading.Event()
    problems: list[OSError] = []

    def take_turns() -> None:
        try:
            while not over.is_set():
                with stopped(pid):
                    over.wait(stopped_s)
                over.wait(running_s)
        except OSError as error:
            problems.append(error)

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if problems:
        raise problems[0]


def is_felt(stats: Callable[[], dict[str, Any]]) -> Callable[[], bool]:
    """A condition to poll for: the lane's jobs suffer from its server.

    One was given up since this call, or at LATE_POLLS polls in a row those that had been done took LATE_S each: a busy machine delays one
    now and then, and not all. It compares counters of `stats`, as a tier engine, a pager and the server's /stats have them.
    """
    seen = stats()
    given_up, late = seen["aborts"], 0

    def condition() -> bool:
        nonlocal seen, late
        now = stats()
        if done := now["lane"]["done"] - seen["lane"]["done"]:
            late = late + 1 if now["lane_us"] - seen["lane_us"] >= LATE_S * 1e6 * done else 0
            seen = now
        return bool(now["aborts"] > given_up or late >= LATE_POLLS)

    return condition
