"""One gateway for many tests; each test brings its own script."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from tests.gateway.fake_worker import Script
from tests.gateway.stack import Stack

# Properties are about values: how long an example takes says something about the machine's other work only.
settings.register_profile("values", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("values")


@pytest.fixture(scope="session")
def shared_stack() -> Iterator[Stack]:
    """A gateway with default settings, but keep-alives every 50 ms."""
    stack = Stack(keepalive_s=0.05)
    yield stack
    stack.close()


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """The shared gateway with its worker as new."""
    worker = shared_stack.worker
    worker.script = Script()
    worker.script_for = None
    worker.supports_grammar = False
    worker.state = pb.SERVICE_STATE_READY
    for log in (worker.requests, worker.scored, worker.traces, worker.ended, worker.cancelled):
        log.clear()
    return shared_stack
