"""One supervised child process."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.common.lifecycle import BOOT_FAILURES

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
# A child that ran this long was healthy: its next crash starts the back-off anew.
STABLE_S = 60.0
# A service that was ready once and now fails at boot gets this many tries (its peer may be restarting), then we stop. One that was never
# ready gets as many, however it ends: what breaks every start is not healed by one more.
MAX_BOOT_FAILURES = 5


def _die_with(parent: int) -> None:
    # Runs in the child between fork and exec. If the supervisor is killed with SIGKILL, nobody else would stop the services.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)  # it died before we asked to be told


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: the child gets SIGTERM when this process dies, however it dies."""
    return functools.partial(_die_with, os.getpid())


def describe_exit(code: int) -> str:
    """An exit code in words: signals by name, SIGKILL with the usual cause."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"  # real-time signals have no name here
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"exited with code {code}"


@dataclass
class Service:
    """A child with its restart policy.

    Attributes:
        name: shown to people.
        command: argv.
        env: the whole environment of the child.
        was_ready: set by the supervisor once the service has been ready; tells a boot failure from a crash.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    was_ready: bool = False
    restarts: int = 0
    boot_failures: int = 0
    early_ends: int = 0
    next_start: float = 0.0
    started_at: float = 0.0
    last_exit: int | None = None
    killed: bool = False  # by us
    _backoff_s: float = BACKOFF_FIRST_S
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        """True while the process is alive."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Starts the process in a session of its own: Ctrl-C reaches the supervisor alone, which then stops the services in order."""
        self.killed = False
        self.process = subprocess.Popen(
            list(self.command),
            env=dict(self.env),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )
        self.started_at = time.monotonic()

    def reap(self) -> int | None:
        """The exit code if the process ended since the last call; schedules the next start."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        self.process = None
        self.last_exit = code
        if time.monotonic() - self.started_at >= STABLE_S:
            self._backoff_s = BACKOFF_FIRST_S
            self.boot_failures = 0
        if code in BOOT_FAILURES:
            self.boot_failures += 1
        if not self.was_ready:
            self.early_ends += 1
        self.next_start = time.monotonic() + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_MAX_S)
        return code

    @property
    def hopeless(self) -> bool:
        """True when respawning cannot help: a boot failure before the service was ever ready, or too many of whatever kind."""
        if not self.was_ready and (self.last_exit in BOOT_FAILURES or self.early_ends >= MAX_BOOT_FAILURES):
            return True
        return self.last_exit in BOOT_FAILURES and self.boot_failures >= MAX_BOOT_FAILURES

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal if the process is alive."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end of the process; True when it has ended."""
        if self.process is None:
            return True
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to the child's whole session."""
        if self.process is None:
            return
        self.killed = True
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(10)
