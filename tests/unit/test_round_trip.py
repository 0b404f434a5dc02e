"""`bench.round_trip` without a GPU: the host's real polling, in this process and in another, and a stand-in for the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench import fast_figures, round_trip
from bench.round_trip import REPLY, REQUEST, Page, Times
from kernels.python import cuda_expert

needs_library = pytest.mark.skipif(not cuda_expert.is_built(), reason="libglm53_cuda.so is not built: no nvcc, or nobody asked for it")


class StandIn:
    """A thread goes through the rounds; the rounds of each way take as long as its name is given here."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.took = {"spin": 1.5, "wait": 3.0}
        self.seen: list[tuple[str, int, int]] = []

    def spin(self, first: int, rounds: int, answer: Callable[[], None]) -> Times:
        return self._go("spin", first, rounds, answer)

    def wait(self, first: int, rounds: int, answer: Callable[[], None]) -> Times:
        return self._go("wait", first, rounds, answer)

    def _go(self, way: str, first: int, rounds: int, answer: Callable[[], None]) -> Times:
        self.seen.append((way, first, rounds))
        thread = threading.Thread(target=self._rounds, args=(first, rounds))
        thread.start()
        answer()
        thread.join(20)
        assert not thread.is_alive()
        times = np.full(rounds, self.took[way])
        times[-1 - rounds // 50 :] = 9.0  # two in a hundred
        return times

    def _rounds(self, first: int, rounds: int) -> None:
        for number in range(first, first + rounds):
            self.page.word(REQUEST).value = number
            deadline = time.monotonic() + 10
            while self.page.word(REPLY).value != number and time.monotonic() < deadline:
                time.sleep(0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "words"
    file.touch()
    return file


@needs_library
def test_every_round_is_answered_by_a_thread_and_by_another_process(path: Path) -> None:
    """No number twice, so that an old answer answers nothing; p50 and p99 of each way; the bounds are those of the ways they belong to."""
    page = Page(path)
    device = StandIn(page)
    row = round_trip.measure(device, page, path, rounds=150)
    assert row == {
        "rounds": 150,
        "spin_p50_us": 1.5, "spin_p99_us": 9.0,
        "wait_p50_us": 3.0, "wait_p99_us": 9.0,
        "process_p50_us": 1.5, "process_p99_us": 9.0,
        "publish_to_seen_us": 1.5, "flag_to_add_us": 3.0,
    }  # fmt: skip
    numbers = [number for _, first, rounds in device.seen for number in range(first, first + rounds)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [(way, rounds) for way, _, rounds in device.seen] == [
        ("spin", 64), ("spin", 150), ("wait", 64), ("wait", 100), ("wait", 100), ("spin", 64), ("spin", 150),
    ]  # fmt: skip


@needs_library
def test_a_device_that_does_not_ask_is_told(path: Path) -> None:
    """The host gives up after the limit, and names the round."""
    page = Page(path)
    page.word(REQUEST).value = 7
    with pytest.raises(ValueError, match="no request 1 of 3"):
        page.words().answer(7, 3, limit_ns=20_000_000)
    assert page.word(REPLY).value == 7


@needs_library
def test_a_process_that_fails_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not come up: nobody waits for it."""
    page = Page(path)
    monkeypatch.setattr(round_trip.sys, "executable", "/bin/false")
    with pytest.raises(TimeoutError, match="does not come up"), round_trip.OtherProcess(page, path, 1, 1):
        pass


def test_rounds_are_counted_in_cycles_and_told_in_microseconds() -> None:
    """By the timer over all of them; a round without an answer is no measurement."""
    assert round_trip.in_microseconds(np.array([3000, 1000]), 2000).tolist() == [1.5, 0.5]
    with pytest.raises(TimeoutError, match="round 1 of 2 had no answer within 2 s"):
        round_trip.in_microseconds(np.array([3000, 0]), 0)


def test_both_directions_are_told_as_upper_bounds() -> None:
    """Of a row, as the summary quotes it; none without a measurement, with the reason."""
    row = {
        "part": "speed",
        "name": fast_figures.ROUND_TRIP,
        "spin_p50_us": 1.6,
        "wait_p50_us": 4.0,
        "publish_to_seen_us": 1.6,
        "flag_to_add_us": 4.0,
    }
    figures = fast_figures.summarise([row], {"boot_id": "a"}, fast_figures.Others())
    assert (figures["publish_to_seen_us"], figures["flag_to_add_us"]) == (1.6, 4.0)
    assert figures["round_trip_us"] == {"spin_p50_us": 1.6, "wait_p50_us": 4.0}
    assert "at most" in figures["upper_bounds"]
    none = fast_figures.summarise([], {"boot_id": "a"}, fast_figures.Others())
    assert (none["publish_to_seen_us"], none["round_trip_us"], none["upper_bounds"]) == (None, None, None)
    assert "round trips" in none["reason_for_null"]["flag_to_add_us"]
