"""A random checkpoint for all tests of the worker, and workers over it on real gRPC."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import random_checkpoint
from tests.worker.harness import RunningWorker


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An untrained checkpoint of the shipped model's dimensions."""
    return random_checkpoint.write(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def worker(checkpoint_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorker]:
    """A loaded worker with default settings, shared by a module's tests."""
    running = RunningWorker(model_dir=str(checkpoint_dir), shm_dir=str(tmp_path_factory.mktemp("shm")))
    yield running
    running.close()


@pytest.fixture
def start_worker(checkpoint_dir: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Callable[..., RunningWorker]]:
    """Starts workers with settings of the test's own and closes them afterwards."""
    started: list[RunningWorker] = []

    def start(**settings: Any) -> RunningWorker:
        started.append(RunningWorker(**{"model_dir": str(checkpoint_dir), "shm_dir": str(tmp_path), **settings}))
        return started[-1]

    yield start
    for running in started:
        running.close()
