"""Wherever the experts are evaluated, the answers are the same bits."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.cpu_expert.settings import CpuExpertSettings
from tests.worker.harness import RunningWorker, until

PLACEMENTS: dict[str, dict[str, Any]] = {
    "fast, in process": {},
    "fast, few slots": {"ec_max_slots": 3, "ec_admit_after": 1},
    "fast, every expert in a slot": {"ec_max_slots": 168, "ec_admit_after": 1},
    "exact": {"mode": "exact"},
    "two threads": {"backend_threads": 2},
    "scalar kernel": {"ct_isa": "scalar"},
    "other chunks": {"chunk_size": 16},
}


def outcome(running: RunningWorker) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities of a few requests together."""
    prompts = [list(range(i, i + size)) for i, size in ((5, 3), (70, 40), (900, 12), (33, 130))]
    answers = running.together([running.request(prompt, max_tokens=20, logprobs=0) for prompt in prompts])
    return [[(token.id, token.logprob) for token in answer.tokens] for answer in answers]


@pytest.fixture(scope="module")
def expected(worker: RunningWorker) -> list[list[tuple[int, float]]]:
    """What the default worker answers."""
    return outcome(worker)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placement_does_not_change_a_bit(
    name: str, start_worker: Callable[..., RunningWorker], expected: list[list[tuple[int, float]]]
) -> None:
    """Modes, numbers of slots, threads, kernels and chunk sizes give equal tokens and equal log-probabilities."""
    assert outcome(start_worker(**PLACEMENTS[name])) == expected


@pytest.fixture
def cpu_expert(tmp_path: pathlib.Path) -> Iterator[Any]:
    """A cpu_expert process serving the instance in tmp_path."""
    env = {"PATH": os.environ["PATH"], "GLM53_SHM_DIR": str(tmp_path), "GLM53_LOG_LEVEL": "warning"}
    CpuExpertSettings.load(env)
    process = subprocess.Popen([sys.executable, "-m", "services.cpu_expert"], env=env, cwd=pathlib.Path(__file__).parents[2])
    yield process
    process.terminate()
    process.wait(20)


@pytest.mark.e2e
def test_a_cpu_expert_process_does_not_change_a_bit(
    start_worker: Callable[..., RunningWorker], cpu_expert: Any, expected: list[list[tuple[int, float]]]
) -> None:
    """With a real cpu_expert process the answers are equal and it computed picks; killing it changes only where picks are computed."""
    running = start_worker(expert_backend="shm")

    def stats() -> dict[str, Any]:
        document: dict[str, Any] = json.loads(running.stub.Stats(pb.StatsRequest()).json)
        return document

    until(lambda: stats()["cpu_tier"]["state"] == "UP", "the CPU lane is up")
    assert outcome(running) == expected
    served = stats()["cpu_tier"]
    assert served["picks"] > 0
    assert served["bytes"] > 0
    cpu_expert.kill()
    cpu_expert.wait(10)
    assert outcome(running) == expected
    until(lambda: stats()["cpu_tier"]["state"] == "DOWN", "the CPU lane is down")
