"""On a GPU: the kernels that go through numbered rounds with the host (bench/round_trip.py)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import round_trip
from bench.round_trip import REQUEST, Gpu, Page
from services.gpu_worker.backends import select

PROBLEM = select.gpu_problem()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120), pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)]


@pytest.fixture
def words() -> Iterator[Path]:
    """In shared memory: the driver maps no page of a file system that keeps track of what is written."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="glm53-round-trip-") as folder:
        path = Path(folder) / "words"
        path.touch()
        yield path


@pytest.fixture
def page(words: Path) -> Page:
    return Page(words)


@pytest.fixture
def gpu(page: Page) -> Iterator[Gpu]:
    made = Gpu(page)
    yield made
    made.close()


def test_every_round_is_answered(gpu: Gpu, page: Page, words: Path) -> None:
    """By a thread, by the stream's wait, by another process; the last number is the last request."""
    row = round_trip.measure(gpu, page, words, rounds=150)
    assert all(row[name] > 0 for name in row)
    assert page.word(REQUEST).value == 64 + 150 + 64 + 2 * 100 + 64 + 150


def test_a_device_without_an_answer_gives_up(gpu: Gpu, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first request stands, the kernel has ended, and the round is named."""
    monkeypatch.setattr(round_trip, "LIMIT_NS", 50_000_000)
    with pytest.raises(TimeoutError, match="round 0 of 5 had no answer"):
        gpu.spin(9, 5, lambda: None)
    assert page.word(REQUEST).value == 9
