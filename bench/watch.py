"""Says what a long measurement is doing, and ends it when it hangs.

Lines come from two threads: one prints, the other asks the pager, which may not answer when it hangs itself. Neither runs while the main
thread hangs inside a call that keeps the GIL. So another process looks at this one from outside (`python -m bench.watch PAGE SECONDS`), and
faulthandler's own thread, which needs no GIL, prints every Python stack and ends the process. The limit is that of one step, not of a row.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LINE_S = 10.0
HANGS_S = 60.0  # a step that takes longer will not end; the first ones compile
ARM_S = 5.0  # between two settings of faulthandler's timer: each one starts a thread
LOOK_S = 10.0  # the look from outside comes so long before the end
STACKS_S = 20
ANSWER_S = 10.0
_PAGE = struct.Struct("<qqqd")  # process, its cpu_expert, 1 while steps are expected, monotonic seconds of the last sign of life


class Watch:
    """Told of stages and steps by the main thread.

    Args:
        deadline: monotonic seconds at which the process ends whatever it does.
        hangs_s: how long a step may take.
    """

    def __init__(self, deadline: float, hangs_s: float = HANGS_S) -> None:
        self._look: Callable[[], str] = lambda: ""
        self._looking = threading.Lock()
        self._deadline, self._hangs_s = deadline, hangs_s
        self._began, self._armed = time.monotonic(), 0.0
        self._what, self._steps, self._ms = "starting", 0, 0.0
        self._seen, self._seen_at = "", self._began
        self._stop = threading.Event()
        self._lane_pid = 0
        descriptor, path = tempfile.mkstemp(prefix="glm53-watch-")
        os.truncate(descriptor, mmap.PAGESIZE)
        self._path, self._page = Path(path), mmap.mmap(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
        self._alive(steps=False)
        command = [sys.executable, "-m", "bench.watch", str(self._path), str(hangs_s - LOOK_S)]
        self._outside = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[1])
        faulthandler.enable(all_threads=True)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        # Stacks first, then what Python makes of it.
        faulthandler.register(signal.SIGINT, all_threads=True, chain=True)
        self._arm(steps=False)
        for body in (self._print, self._ask):
            threading.Thread(target=body, daemon=True).start()

    def stage(self, what: str) -> None:
        """A line now; what comes is no step."""
        self._what, self._steps = what, 0
        self._alive(steps=False)
        self._arm(steps=False)
        self.say(what)

    @contextlib.contextmanager
    def steps(self, what: str) -> Iterator[Callable[[float], None]]:
        """Inside, what it gives is called after each decode step, with its seconds."""
        self.stage(what)
        self._alive(steps=True)
        self._arm(steps=True)
        try:
            yield self._step
        finally:
            self._alive(steps=False)
            self._arm(steps=False)

    def _step(self, seconds: float) -> None:
        self._steps, self._ms = self._steps + 1, 1000 * seconds
        self._alive(steps=True)
        if time.monotonic() - self._armed > ARM_S:
            self._arm(steps=True)

    def look(self, look: Callable[[], str] | None) -> None:
        """Says how pager and lane are: what `look` gives, called from a thread of its own. None before they are closed.

        Raises:
            TimeoutError: they do not answer.
        """
        if not self._looking.acquire(timeout=ANSWER_S):
            raise TimeoutError("pager and lane do not answer")
        try:
            self._look = look or (lambda: "")
        finally:
            self._looking.release()

    def lane(self, pid: int) -> None:
        """The cpu_expert that goes when this process does."""
        self._lane_pid = pid

    def say(self, text: str) -> None:
        """A line with the seconds since the beginning."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)

    def close(self) -> None:
        """Nothing is watched any more."""
        self._stop.set()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGINT)
        self._outside.terminate()
        self._outside.wait(timeout=10)
        self._path.unlink(missing_ok=True)

    def _alive(self, *, steps: bool) -> None:
        _PAGE.pack_into(self._page, 0, os.getpid(), self._lane_pid, int(steps), time.monotonic())

    def _arm(self, *, steps: bool) -> None:
        """Sets the timer that ends the process."""
        now = self._armed = time.monotonic()
        left = max(self._deadline - now, 1.0)
        faulthandler.dump_traceback_later(min(left, self._hangs_s) if steps else left, exit=True)

    def _print(self) -> None:
        while not self._stop.wait(LINE_S):
            age = time.monotonic() - self._seen_at
            seen = self._seen if age < LINE_S else f"pager and lane do not answer for {age:.0f} s; before: {self._seen}"
            self.say(f"{self._what}: step {self._steps}, the last one {self._ms:.1f} ms; {seen}")

    def _ask(self) -> None:
        while not self._stop.wait(LINE_S / 4):
            try:
                with self._looking:
                    self._seen = self._look()
            except Exception as error:  # noqa: BLE001 - a backend that is being closed, or failed: told
                self._seen = f"{type(error).__name__}: {error}"
            self._seen_at = time.monotonic()


def line_of(stats: dict[str, Any], words: tuple[int, int, int] | None) -> str:
    """One line of a backend's counters.

    Args:
        stats: the backend's.
        words: of the pager: the last step that the device asked for, was answered, and got the lane's rows of.
    """
    parts = [f"{stats.get('decode_steps', 0)} layer steps"]
    if lane := stats.get("lane"):
        parts.append(
            f"lane {lane['state']} {lane['reason']} for {lane['for_s']:.1f} s, {lane['ups']} times up, {lane['jobs']} jobs, "
            f"{lane['done']} done, {lane['aborts']} aborts, {stats['recomputed_picks']} picks recomputed"
        )
    if words is not None:
        parts.append("the device asked for step {}, answered {}, lane's rows {}".format(*words))
    return ", ".join(parts)


def threads_of(pid: int) -> dict[int, tuple[str, str, int, str]]:
    """Thread -> (name, state, processor ticks, what it waits for in the kernel)."""
    found: dict[int, tuple[str, str, int, str]] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            name, rest = (task / "stat").read_text().rsplit(")", 1)
            fields = rest.split()
            waits = ""
            with contextlib.suppress(OSError):
                waits = (task / "wchan").read_text()
            found[int(task.name)] = (name.split("(", 1)[1], fields[0], int(fields[11]) + int(fields[12]), waits)
    return found


def look_at(pid: int) -> None:
    """Prints every thread of a process, and its stacks where there is a debugger."""
    before = threads_of(pid)
    time.sleep(1.0)
    for thread, (name, state, ticks, waits) in threads_of(pid).items():
        used = ticks - before.get(thread, (name, state, ticks, waits))[2]
        print(f"  thread {thread} {name}: {state}, {used} ticks in a second, waits in {waits or '?'}", flush=True)
    if debugger := shutil.which("gdb"):
        command = [debugger, "-p", str(pid), "-batch", "-ex", "thread apply all bt 14"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, timeout=STACKS_S, check=False, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def parent_of(pid: int) -> int:
    """A process's parent, 0 when it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return 0


def outside(path: Path, after_s: float) -> None:
    """Watches the process of a page until it ends: looks at it once for each hang, and takes its cpu_expert along."""
    with path.open("r+b") as file:
        page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    pid, looked_at = _PAGE.unpack_from(page, 0)[0], 0.0
    while os.getppid() == pid:
        time.sleep(0.25)
        _, _, steps, alive = _PAGE.unpack_from(page, 0)
        if steps and time.monotonic() - alive > after_s and looked_at != alive:
            looked_at = alive
            print(f"no step for {time.monotonic() - alive:.0f} s; from outside:", flush=True)
            look_at(pid)
    lane = _PAGE.unpack_from(page, 0)[1]
    # It was a child of the process that is gone; another one of that number is not.
    if lane and parent_of(lane) in (1, os.getppid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(lane, signal.SIGTERM)
    path.unlink(missing_ok=True)


if __name__ == "__main__":
    outside(Path(sys.argv[1]), float(sys.argv[2]))
