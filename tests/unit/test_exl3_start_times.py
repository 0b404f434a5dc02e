"""How long each stage of a start takes."""

from __future__ import annotations

from services.gpu_worker.backends.exl3.start_times import StartTimes


def test_a_stage_lasts_until_the_next_one() -> None:
    """Time before the first and after the last belongs to none; a name that comes again adds up."""
    now = [10.0]
    times = StartTimes(lambda: now[0])
    for name, seconds in (("arena", 2.0), ("model", 3.5), ("arena", 0.25)):
        times.begin(name)
        now[0] += seconds
    times.end()
    now[0] += 100.0
    times.end()
    assert times.seconds == {"arena": 2.25, "model": 3.5}
    assert times.stats() == {"arena": 2.25, "model": 3.5, "total": 5.75}
