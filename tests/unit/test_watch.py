"""What a long measurement says of itself, and its end when a step hangs; the watched process is a real one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bench import report, watch

HEAD = "import ctypes, subprocess, sys, time\nfrom bench import watch\nwatch.LINE_S = 0.4\nwatch.LOOK_S = 1.5\n"
LIMIT_S = 60


def run(body: str, *, interrupt_after: str = "") -> tuple[int, str]:
    """A process of its own: (exit status, what it said)."""
    command = [sys.executable, "-u", "-c", HEAD + textwrap.dedent(body)]
    made = subprocess.Popen(command, cwd=report.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert made.stdout is not None
    said = ""
    try:
        if interrupt_after:
            for line in made.stdout:
                said += line
                if interrupt_after in line:
                    made.send_signal(signal.SIGINT)
                    break
        rest, _ = made.communicate(timeout=LIMIT_S)
    finally:
        made.kill()
    return made.returncode, said + rest


def test_stages_and_steps_are_told() -> None:
    """A line for each stage, lines while steps run, with the state of pager and lane; a process that is done ends as it should."""
    code, said = run("""
        w = watch.Watch(time.monotonic() + 50)
        w.look(lambda: "lane UP")
        w.stage("filling")
        with w.steps("fast/C1") as stepped:
            for _ in range(12):
                time.sleep(0.1)
                stepped(0.1)
        w.look(None)
        w.close()
    """)
    assert code == 0, said
    assert re.search(r"\[ +\d+\.\d s\] filling\n", said)
    assert re.search(r"fast/C1: step [1-9]\d*, the last one 100\.0 ms; lane UP\n", said)
    assert "from outside" not in said


def test_a_step_that_hangs_without_the_gil_ends_the_process_with_its_stacks() -> None:
    """No Python runs any more: the threads are looked at from outside, then the stacks come, and the process is gone."""
    began = time.monotonic()
    code, said = run("""
        w = watch.Watch(time.monotonic() + 50, hangs_s=5)
        def stuck_in_here():
            ctypes.PyDLL(None).sleep(50)
        with w.steps("fast/C1") as stepped:
            stepped(0.1)
            stuck_in_here()
    """)
    assert code == 1, said
    assert time.monotonic() - began < 40
    assert said.index("no step for") < said.index("waits in") < said.index("Timeout") < said.index("stuck_in_here")


def test_a_pager_that_does_not_answer_is_told(tmp_path: Path) -> None:
    """The line comes all the same, and whoever would close the pager is not kept for ever."""
    code, said = run("""
        watch.ANSWER_S = 0.3
        w = watch.Watch(time.monotonic() + 50)
        w.look(lambda: time.sleep(40) or "")
        with w.steps("fast/C1") as stepped:
            time.sleep(2)
        try:
            w.look(None)
        except TimeoutError as error:
            print("told:", error)
        w.close()
    """)
    assert code == 0, said
    assert "pager and lane do not answer for" in said
    assert "told: pager and lane do not answer" in said


def test_the_deadline_ends_whatever_runs_and_its_cpu_expert() -> None:
    """Outside of steps too; the child that was named goes with it."""
    code, said = run("""
        command = [sys.executable, "-c", "import time; time.sleep(100)"]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        w = watch.Watch(time.monotonic() + 2)
        w.lane(child.pid)
        w.stage(f"child {child.pid}")
        time.sleep(50)
    """)
    assert code == 1, said
    child = int(re.findall(r"child (\d+)", said)[0])
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{child}") and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.1)


def test_an_interrupt_has_the_stacks() -> None:
    """They come before Python makes an exception of it."""
    code, said = run(
        """
        w = watch.Watch(time.monotonic() + 50)
        def waits_in_here():
            w.stage("waiting")
            time.sleep(50)
        waits_in_here()
        """,
        interrupt_after="waiting",
    )
    assert code != 0
    assert said.index("waits_in_here") < said.index("KeyboardInterrupt")


@pytest.mark.parametrize("lane", [True, False])
def test_the_line_of_counters(lane: bool) -> None:
    """Lane, jobs and what was computed again where there is a lane; the words where there is a pager."""
    state = {"state": "DOWN", "reason": "job deadline passed", "for_s": 0.52, "ups": 2, "jobs": 9, "done": 8, "aborts": 1}
    stats = {"decode_steps": 84, "recomputed_picks": 3, **({"lane": state} if lane else {})}
    want = "lane DOWN job deadline passed for 0.5 s, 2 times up, 9 jobs, 8 done, 1 aborts, 3 picks recomputed"
    line = watch.line_of(stats, (85, 84, 84) if lane else None)
    assert line == ("84 layer steps, " + want + ", the device asked for step 85, answered 84, lane's rows 84" if lane else "84 layer steps")
