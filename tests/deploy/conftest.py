"""One engine and one set of images for all container tests, made when the first test asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy import engine as engines
from tests.deploy import images, stack


@pytest.fixture(scope="session")
def engine() -> Iterator[engines.Engine]:
    """podman with its own storage, and its API for docker-compose."""
    with engines.engine() as made:
        yield made


@pytest.fixture(scope="session")
def built(engine: engines.Engine) -> dict[str, str]:
    """Every image that can be built here: target → name."""
    return images.build_all(engine)


@pytest.fixture(scope="module")
def running(engine: engines.Engine, built: dict[str, str]) -> Iterator[stack.Stack]:
    """The compose stack, healthy; a module's own, because its tests kill and stop things."""
    assert built
    with stack.stack(engine) as made:
        yield made
