"""What the worker's log says of the CPU lane."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from services.gpu_worker import lane_log
from services.gpu_worker.backends.base import BackendLostError
from services.gpu_worker.lane_log import LaneLog, LaneWatch


def lines(caplog: pytest.LogCaptureFixture, readings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(level, text) of what is logged for readings that are a second apart."""
    lane = LaneLog()
    with caplog.at_level(logging.INFO, logger=lane_log.__name__):
        for second, reading in enumerate(readings):
            lane.look(reading, float(second))
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def reading(state: str, for_s: float = 0.0, ups: int = 1, aborts: int = 0, reason: str = "") -> dict[str, Any]:
    return {"state": state, "reason": reason, "for_s": for_s, "ups": ups, "aborts": aborts}


def test_down_is_a_warning_with_its_reason_and_up_tells_how_long_it_took(caplog: pytest.LogCaptureFixture) -> None:
    """One line when the lane goes down, none while it stays so, one when it is back, with the time from state to state."""
    down = [reading("DOWN", 0.4, reason="job deadline passed"), reading("DOWN", 1.4, reason="job deadline passed")]
    said = lines(caplog, [reading("UP", 9.0), *down, reading("UP", 0.5, ups=2)])
    assert [level for level, _ in said] == ["INFO", "WARNING", "INFO"]
    assert "CPU lane down: job deadline passed" in said[1][1]
    assert said[2][1] == "CPU lane up after 1.9 s"


def test_waiting_for_the_first_cpu_expert_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that has just started has lost nothing, and says for whom it waits."""
    said = lines(caplog, [reading("DOWN", ups=0, reason="no cpu_expert has attached"), reading("UP", 0.5)])
    assert [level for level, _ in said] == ["INFO", "INFO"]
    assert "no cpu_expert has attached" in said[0][1]


def test_a_lane_that_fell_between_two_readings_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It is up in both, but has come up once more in between."""
    said = lines(caplog, [reading("UP", 5.0), reading("UP", 6.0), reading("UP", 0.1, ups=2, aborts=1)])
    assert [level for level, _ in said] == ["INFO", "WARNING"]
    assert "1 jobs given up" in said[1][1]


@pytest.mark.parametrize("lane", [{}, {"state": "OFF", "reason": "mode exact has no CPU lane"}])
def test_a_mode_without_the_lane_says_nothing(caplog: pytest.LogCaptureFixture, lane: dict[str, Any]) -> None:
    """No lane, no lines."""
    assert lines(caplog, [lane, lane]) == []


async def test_a_backend_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on, and no second reading is begun behind the one that hangs."""
    monkeypatch.setattr(lane_log, "LOOK_S", 0.0)
    calls, go_on = [], threading.Event()

    def stats() -> dict[str, Any]:
        calls.append(1)
        assert go_on.wait(30)
        return {}

    watch = LaneWatch(stats)
    for _ in range(5):
        watch.tick()
        await asyncio.sleep(0.01)
    assert len(calls) == 1
    go_on.set()
    await watch.end()
    watch.tick()
    await watch.end()
    assert len(calls) == 2


async def test_a_backend_that_is_lost_is_asked_again_and_leaves_no_error_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody fetches would be told by asyncio once a second; the engine tells it, once."""
    monkeypatch.setattr(lane_log, "LOOK_S", 0.0)
    calls: list[int] = []

    def stats() -> dict[str, Any]:
        calls.append(1)
        if len(calls) < 3:
            raise BackendLostError("a copy to the GPU failed")
        return {"lane": {"state": "UP"}}

    watch = LaneWatch(stats)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            watch.tick()
            reading = watch._reading
            assert reading is not None
            await watch.end()
            assert reading.exception() is None
    assert caplog.messages == ["CPU lane up"]
