"""States, exit codes and signals that all services share."""

from __future__ import annotations

import enum
import queue
import signal
import types


class ServiceState(enum.IntEnum):
    """STARTING → LOADING → READY → DRAINING → STOPPED, or FAILED. Values equal proto ServiceState where both have one."""

    STARTING = 1
    LOADING = 2
    READY = 3
    DRAINING = 4
    FAILED = 5
    STOPPED = 6


ALLOWED: dict[ServiceState, frozenset[ServiceState]] = {
    ServiceState.STARTING: frozenset({ServiceState.LOADING, ServiceState.READY, ServiceState.FAILED, ServiceState.DRAINING}),
    ServiceState.LOADING: frozenset({ServiceState.READY, ServiceState.FAILED, ServiceState.DRAINING}),
    ServiceState.READY: frozenset({ServiceState.DRAINING, ServiceState.FAILED}),
    ServiceState.DRAINING: frozenset({ServiceState.STOPPED, ServiceState.FAILED}),
    ServiceState.FAILED: frozenset({ServiceState.STOPPED, ServiceState.DRAINING}),
    ServiceState.STOPPED: frozenset(),
}


class ExitCode(enum.IntEnum):
    """What a supervisor learns from a service's exit."""

    OK = 0
    BOOT = 3  # could not start: do not respawn in a loop
    PEER = 4  # the peer in shared memory went away or does not fit
    CONFIG = 78  # EX_CONFIG: a setting is wrong, respawning cannot help


BOOT_FAILURES = frozenset({ExitCode.BOOT, ExitCode.CONFIG})


_STOP = frozenset({signal.SIGTERM, signal.SIGINT})


def hold_stop_signals() -> None:
    """Lets a request to stop wait for `heed_stop_signals`, through an exec too.

    The first process of a container gets no signal that it has no handler for: what came before would be lost, and the engine would wait
    for its whole grace period and then kill.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)


def heed_stop_signals() -> None:
    """The handlers are there: what has waited is delivered."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP)


class Signals:
    """SIGTERM, SIGINT and SIGHUP (the terminal was closed) as a queue: handlers only append, the main loop acts.

    A handler that logs or takes locks can deadlock with the code that it interrupted.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._append)
        # nohup makes a process ignore SIGHUP; that stays.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._append)
        heed_stop_signals()

    def _append(self, number: int, _frame: types.FrameType | None) -> None:
        self._queue.put(signal.Signals(number))

    def wait(self, timeout_s: float) -> signal.Signals | None:
        """The next signal, or None when none came within `timeout_s` seconds."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
