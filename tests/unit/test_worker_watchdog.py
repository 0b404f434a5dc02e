"""The watchdog's judgement."""

from __future__ import annotations

from services.gpu_worker.watchdog import Watchdog


def looks(readings: list[tuple[float, bool, int]], limit_s: float = 3.0) -> list[float]:
    """What the watchdog says at each (time, has work, progress)."""
    dog = Watchdog(limit_s, 0.0)
    return [dog.wedged_s(has_work=work, progress=progress, now=now) for now, work, progress in readings]


def test_no_progress_with_work_is_wedged() -> None:
    """Work without progress beyond the limit is reported, with the time."""
    answers = looks([(i * 0.5, True, 7) for i in range(10)])
    assert answers[:7] == [0.0] * 7
    assert answers[9] == 4.5


def test_progress_or_rest_resets() -> None:
    """Progress, or having nothing to do, starts the count anew."""
    assert not any(looks([(i * 0.5, True, i // 4) for i in range(40)]))
    assert not any(looks([(i * 0.5, i % 4 != 0, 7) for i in range(40)]))


def test_a_suspended_process_starts_anew() -> None:
    """A gap between two looks means that everything stood still: the engine gets its time again."""
    assert not any(looks([(0.0, True, 7), (0.5, True, 7), (60.0, True, 7), (60.5, True, 7)]))
