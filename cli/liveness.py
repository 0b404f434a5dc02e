"""Which services have stopped answering although their processes live."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping

from cli.probe import SERVING, SILENT
from cli.process import die_with_parent

log = logging.getLogger("glm53")

RESTART_PROBE_AFTER_S = 5.0
# The longest silence of a probe that is well: of each service it says a line per period, however the service answers. On a machine that is
# busy a line may come late, and the first one waits for an import of gRPC.
QUIET_PERIODS = 3
QUIET_S = 10.0
FIRST_WORD_S = 20.0
LAST_FIRST_WORD_S = 640.0


class Liveness:
    """Counts unanswered questions, asked by a child process (cli.probe).

    A service counts only once this process of it has said that it serves: what loads may be silent. Anything it says starts the count anew.
    The child is watched too: one that ended is started again, one that says nothing of a service for a few periods is killed first.

    Args:
        addresses: service name -> http:// URL or gRPC address.
        period_s: between two questions, and the longest wait for an answer.
        checks: unanswered questions in a row after which a service is wedged.
        env: environment of the child.
    """

    def __init__(self, addresses: Mapping[str, str], period_s: float, checks: int, env: Mapping[str, str]) -> None:
        targets = [f"{name}={address}" for name, address in addresses.items()]
        self._command = [sys.executable, "-m", "cli.probe", str(period_s), *targets]
        self._env = dict(env)
        self._checks = checks
        self._missed = dict.fromkeys(addresses, 0)
        self._served: dict[str, int] = {}  # pid of the process that has served
        self._quiet_s = max(QUIET_PERIODS * period_s, QUIET_S)
        self._heard = dict.fromkeys(addresses, 0.0)  # when the probe last said something of it
        self._first_word_s = FIRST_WORD_S
        self._buffer = b""
        self._child: subprocess.Popen[bytes] | None = None
        self._next_start = 0.0

    def wedged(self, pids: Mapping[str, int]) -> list[tuple[str, int]]:
        """(service, unanswered questions) of each that is wedged; its count starts anew. Never waits.

        pids: of the services that run.
        """
        for line in self._lines():
            name, _, state = line.partition(" ")
            if name in self._missed:
                self._heard[name], self._first_word_s = time.monotonic(), FIRST_WORD_S
                if name in pids:
                    self._note(name, state, pids[name])
        self._end_quiet_probe()
        found = [(name, missed) for name, missed in self._missed.items() if missed >= self._checks]
        for name, _ in found:
            self._missed[name] = 0
        return found

    def _note(self, name: str, state: str, pid: int) -> None:
        if state == SERVING:
            self._served[name] = pid
        armed = self._served.get(name) == pid
        self._missed[name] = self._missed[name] + 1 if state == SILENT and armed else 0

    def _end_quiet_probe(self) -> None:
        """Kills a child that lives but says nothing, frozen or with a thread that ended; it is started again as any that ended."""
        now = time.monotonic()
        quiet = [name for name, heard in self._heard.items() if now - heard >= self._quiet_s]
        if not quiet or self._child is None or self._child.poll() is not None:
            return
        log.error("the liveness probe said nothing of %s for %g s: killing it", " and ".join(quiet), self._quiet_s)
        self._child.kill()
        # It may take its time to end, in which nothing new is to be heard of it.
        self._heard = dict.fromkeys(self._heard, now)

    def _lines(self) -> list[str]:
        if self._child is None or self._child.poll() is not None:
            self._start()
        assert self._child is not None
        assert self._child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            if not selector.select(0):
                return []
        *whole, self._buffer = (self._buffer + os.read(self._child.stdout.fileno(), 65536)).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def _start(self) -> None:
        """A probe that ended is started again, not in a tight loop."""
        if time.monotonic() < self._next_start:
            return
        self.close()
        self._next_start = time.monotonic() + RESTART_PROBE_AFTER_S
        self._child = subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        self._heard = dict.fromkeys(self._heard, time.monotonic() + self._first_word_s)
        # Where a machine is too slow for that, the next probe has longer: it must come to speak some day.
        self._first_word_s = min(2 * self._first_word_s, LAST_FIRST_WORD_S)

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._child.kill()
            # One that the system does not let end (a disk that hangs) is nobody's reason not to stop or to go on.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(10)
            assert self._child.stdout is not None
            self._child.stdout.close()
            self._child, self._buffer = None, b""
