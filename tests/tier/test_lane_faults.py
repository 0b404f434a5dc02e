"""The scenes of tests/gpu/test_fast.py about a cpu_expert without time, over a simulated GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.tier import lane_faults
from tests.tier.fast_world import FastWorld
from tests.tier.harness import CpuExpert, Stage, cpu_expert

TIMEOUT_MS = 400


@contextlib.contextmanager
def world(made: Stage) -> Iterator[tuple[FastWorld, CpuExpert]]:
    """A pager with the timeouts of the test on a GPU, and its server."""
    with cpu_expert(made) as server:
        opened = FastWorld(made, 13, 7, 2, timeout_ms=TIMEOUT_MS)
        try:
            yield opened, server
        finally:
            opened.close()


def test_a_stopped_cpu_expert_costs_no_bit_and_is_welcomed_back(made: Stage) -> None:
    """Twice: the second time it has woken with an old job in its hands."""
    with world(made) as (w, server):
        for _ in range(2):
            lane_faults.stop_and_wake(w, server)


@pytest.mark.parametrize("stopped_s", [0.1, 0.6])
def test_a_cpu_expert_that_crawls_costs_no_bit(made: Stage, stopped_s: float) -> None:
    """Stops that are shorter and longer than a job's deadline."""
    with world(made) as (w, server):
        lane_faults.crawl(w, server, stopped_s, TIMEOUT_MS)
