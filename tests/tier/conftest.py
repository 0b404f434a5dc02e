"""Fixtures of the shared-memory and tier tests."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.tier import harness


@pytest.fixture
def shm_dir() -> Iterator[pathlib.Path]:
    """A folder for segments, in a tmpfs where there is one. A segment that a test leaves behind fails it."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = pathlib.Path(tempfile.mkdtemp(prefix="glm53-test-", dir=parent))
    yield path
    left = sorted(p.name for p in path.iterdir())
    shutil.rmtree(path)
    assert left == [], "segments were left behind"


@pytest.fixture
def made(shm_dir: pathlib.Path) -> Iterator[harness.Stage]:
    """A filled arena and a control region."""
    with harness.stage(shm_dir) as stage:
        yield stage
