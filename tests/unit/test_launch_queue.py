"""`bench.launch_queue` against drivers that block in several ways."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import launch_queue


class Driver:
    """Takes `room` launches while the device waits; who waits does so with the lock that copies need, or without."""

    def __init__(self, room: int, *, keeps_lock: bool, loads_wait: bool = True) -> None:
        self._room, self._keeps_lock, self._loads_wait = room, keeps_lock, loads_wait
        self._lock, self._open, self._queued = threading.Lock(), threading.Event(), 0
        self.copies = 0
        self._open.set()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with self._lock:
            yield

    def _wait(self) -> None:
        if self._keeps_lock:
            with self._inside():
                assert self._open.wait(20)
        else:
            assert self._open.wait(20)

    def hold(self) -> None:
        self._open.clear()
        self._queued = 0

    def launches(self) -> None:
        if self._queued >= self._room and not self._open.is_set():
            self._wait()
        self._queued += 1

    def graphs(self) -> None:
        self.launches()

    def words(self) -> None:
        self._queued += 1  # there is room for all of them

    def synchronise(self) -> None:
        self._wait()

    def first_use(self) -> None:
        if self._loads_wait:
            self._wait()

    def pageable(self) -> None:
        self._wait()

    def copy(self) -> None:
        with self._inside():
            self.copies += 1

    def release(self) -> None:
        self._open.set()


def test_a_full_queue_that_keeps_the_lock_stops_the_pager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many launches, then nobody's copy: and all of it ends when the word is raised."""
    monkeypatch.setattr(launch_queue, "RELEASE_S", 0.3)
    device = Driver(1000, keeps_lock=True)
    row = launch_queue.measure(device, "launches", blocked_s=0.2, release_s=0.3)
    assert (row["blocks"], row["calls"], row["copy_is_enqueued"]) == (True, 1000, False)
    assert row["copy_ms"] >= 290
    assert device.copies == 1
    monkeypatch.setattr(launch_queue.measure, "__defaults__", (0.2, 0.3))
    launch_queue.main(["--out", str(tmp_path / "out.json")], lambda: Driver(1000, keeps_lock=True, loads_wait=False))
    summary = json.loads((tmp_path / "out.json").read_text())["summary"]
    assert summary == {
        "launches_that_wait": 1000,
        "graphs_that_wait": 1000,
        "launches_stops_the_pager": True,
        "graphs_stops_the_pager": True,
        "words_stops_the_pager": False,
        "synchronise_stops_the_pager": True,
        "first_use_stops_the_pager": False,
        "pageable_stops_the_pager": True,
    }


@pytest.mark.parametrize("way", ["launches", "graphs", "synchronise", "first_use", "pageable"])
def test_a_driver_that_lets_others_go_on(way: str) -> None:
    """The thread blocks, the copy does not."""
    device = Driver(10, keeps_lock=False)
    row = launch_queue.measure(device, way, blocked_s=0.2, release_s=5.0)
    assert (row["blocks"], row["copy_is_enqueued"]) == (True, True)
    assert row["calls"] == (10 if way in launch_queue.FILLS else 0)


def test_a_queue_with_room_for_all_blocks_nobody() -> None:
    """Every launch returns before the word is raised."""
    row = launch_queue.measure(Driver(10_000, keeps_lock=True), "launches", blocked_s=0.2, release_s=5.0)
    assert (row["blocks"], row["calls"], row["copy_is_enqueued"]) == (False, launch_queue.MOST_LAUNCHES, True)


def test_what_fails_is_raised() -> None:
    """In the thread that measures."""
    device = Driver(10, keeps_lock=False)

    def refused() -> None:
        raise OSError("the GPU driver refuses a call: 700")

    device.launches = refused  # type: ignore[method-assign]
    with pytest.raises(OSError, match="700"):
        launch_queue.measure(device, "launches", blocked_s=0.2, release_s=1.0)
