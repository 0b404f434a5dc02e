"""`fast` on a GPU against a server that stops after every single action of the protocol, and wakes up late with its old job in hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels.python.fast_pager import Forced
from kernels.python.job_server import ServerStep
from tests.tier.fast_world import FastWorld
from tests.tier.harness import Stage
from tests.tier.test_stops import STOPS, SteppedServer


def decode_until(w: FastWorld, done: Callable[[], bool]) -> None:
    """Right answers until done() is true."""
    for _ in range(300):
        if done():
            return
        w.decode(2)
    raise AssertionError("it never happened")


def served(w: FastWorld) -> int:
    return int(w.pager.fast_stats()["cpu_expert_bytes"])


@pytest.mark.parametrize("step", STOPS, ids=lambda s: s.name.lower())
def test_a_server_stopped_at_any_action(made: Stage, step: ServerStep) -> None:
    """Right bits while it stands still, and when it writes its old rows into a buffer that other steps have used; the lane returns."""
    server = SteppedServer(made)
    w = FastWorld(made, int(step), 5, 2, timeout_ms=1000)
    try:
        assert w.wait_lane()
        w.pager.force(Forced.ALL_LANE)
        decode_until(w, lambda: served(w) > 0)
        server.stop_at(step)
        decode_until(w, server.frozen.is_set)
        decode_until(w, lambda: not w.pager.lane_up)
        for _ in range(4):
            w.decode()
        before = served(w)
        server.thaw()
        assert w.wait_lane()
        decode_until(w, lambda: served(w) > before)
        for _ in range(10):
            w.decode()
        stats = w.pager.fast_stats()
        assert stats["recomputed_picks"] > 0
        assert stats["aborts"] >= 1
    finally:
        server.close()
        w.close()


def test_rows_of_the_lane_are_the_ones_that_are_added(made: Stage) -> None:
    """With zeros in place of what cpu_expert computed the answer is wrong."""
    server = SteppedServer(made)
    w = FastWorld(made, 77, 0, 0)
    try:
        assert w.wait_lane()
        w.pager.force(Forced.ALL_LANE)
        w.decode()
        server.spoil = True
        with pytest.raises(AssertionError, match="layer"):
            w.decode()
        server.spoil = False
        w.decode()
    finally:
        server.close()
        w.close()
