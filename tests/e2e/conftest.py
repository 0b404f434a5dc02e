"""A real `glm53 serve` for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from bench import server as serving


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs and state of the servers of this run."""
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="session")
def stack(work: Path) -> Iterator[serving.Server]:
    """The default stack: three processes, the shipped checkpoint, every setting at its default."""
    server = serving.start(work)
    yield server
    code = server.stop()
    leftovers = [p.name for p in Path("/dev/shm").glob(f"glm53-{server.instance}-*")]
    assert (code, leftovers) == (0, []), server.tail()


@pytest.fixture
def own_stack(work: Path, request: pytest.FixtureRequest) -> Iterator[serving.Server]:
    """A stack of the test's own, to break things in; an indirect parameter `{name: value}` sets its environment."""
    server = serving.start(work, env=getattr(request, "param", None))
    yield server
    server.stop()


@pytest.fixture
def client(stack: serving.Server) -> Iterator[openai.OpenAI]:
    """The official client on the default stack."""
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made
