"""More threads than CPUs: warned of with both numbers, and served."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.threads import too_many
from services.cpu_expert import placement
from services.cpu_expert.settings import CpuExpertSettings
from services.gpu_worker.backends import select
from services.gpu_worker.settings import GpuWorkerSettings

CPUS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("threads", "warned"), [(0, False), (CPUS, False), (CPUS + 1, True), (1024, True)])
def test_the_lane_warns_of_threads_without_a_cpu(threads: int, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """At start, not in the middle of a slow answer."""
    with caplog.at_level(logging.WARNING):
        placement.check(CpuExpertSettings.load({"GLM53_CT_THREADS": str(threads)}))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == (
        [f"GLM53_CT_THREADS={threads}, but this process may use {CPUS} CPU{'' if CPUS == 1 else 's'}"] if warned else []
    )


def test_listed_cpus_are_what_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Threads share those of GLM53_CT_CPUS, however many others there are."""
    cpu = str(min(os.sched_getaffinity(0)))
    with caplog.at_level(logging.WARNING):
        placement.check(CpuExpertSettings.load({"GLM53_CT_THREADS": "2", "GLM53_CT_CPUS": cpu}))
    assert "GLM53_CT_THREADS=2, but GLM53_CT_CPUS names 1 CPU:" in caplog.text


@pytest.mark.parametrize(("threads", "warned"), [(1, False), (CPUS + 1, True)])
def test_the_workers_own_kernel_warns_too(
    threads: int, warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GLM53_BACKEND_THREADS, where the worker computes on the CPU."""
    loaded = SimpleNamespace()
    monkeypatch.setattr(select.cpu, "load", lambda *_: loaded)
    settings = GpuWorkerSettings.load({"GLM53_DEVICE": "cpu"}, backend_threads=threads)
    unread: Any = None
    with caplog.at_level(logging.WARNING):
        assert select.load(settings, unread, lambda *_: None) is loaded
    assert (f"GLM53_BACKEND_THREADS={threads}, but this process may use {CPUS} CPU" in caplog.text) is warned


def test_both_numbers_are_in_the_words() -> None:
    """And one CPU is no plural."""
    assert too_many("X", 2, {0}).startswith("X=2, but this process may use 1 CPU:")
    assert too_many("X", 2, {0, 1}) == ""
