"""A worker whose process is frozen, and one that is only busy: real workers in processes of their own, over both kinds of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway.worker_client import GrpcWorkerClient, Pings
from tests.gateway.events import Streamed
from tests.gateway.stack import HELLO, Stack, until
from tests.support import random_checkpoint
from tests.support.slow_process import stopped
from tests.worker.greedy_worker import HELD_S
from tests.worker.harness import PROMPT

pytestmark = pytest.mark.e2e
ROOT = pathlib.Path(__file__).parents[2]
PINGS = Pings(interval_s=0.5, timeout_s=3.0)
BODY: dict[str, Any] = {"model": "glm-5.3-tiny", "messages": HELLO, "temperature": 0, "ignore_eos": True, "stream": True}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Pair:
    """A gateway in this process on a worker in another one."""

    def __init__(self, directory: pathlib.Path, model_dir: pathlib.Path, kind: str, module: str) -> None:
        self.address = f"unix:{directory}/w.sock" if kind == "unix" else f"127.0.0.1:{free_port()}"
        self._log = directory / "worker.log"
        env = {
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "GLM53_WORKER_ADDRESS": self.address,
            "GLM53_SHM_DIR": str(directory),
            "GLM53_MODEL_DIR": str(model_dir),
            "GLM53_EXPERT_BACKEND": "in_process",
        }
        with self._log.open("wb") as out:
            self.worker = subprocess.Popen([sys.executable, "-m", module], cwd=ROOT, env=env, stdout=out, stderr=out)
        self.stack = Stack(start_worker=False, worker_address=self.address, pings=PINGS)

    def wait_ready(self) -> None:
        """Waits until the gateway takes requests."""
        until(lambda: self.stack.http.get("/health").status_code == 200, f"ready: {self._log.read_text()}", 60)

    def stream(self, max_tokens: int, on_begin: Callable[[], None] = lambda: None) -> Streamed:
        """A whole stream; `on_begin` is called when its first bytes are here."""
        data = b""
        with httpx.stream("POST", f"{self.stack.url}/v1/chat/completions", json={**BODY, "max_tokens": max_tokens}, timeout=60) as answer:
            for part in answer.iter_raw():
                if not data:
                    on_begin()
                data += part
        return Streamed.of(data)

    def close(self) -> None:
        """Ends both."""
        self.stack.close()
        self.worker.kill()
        self.worker.wait(10)


async def tokens_of(address: str) -> list[int]:
    """A stream of 20 tokens on a connection of its own: with other settings than the gateway's, gRPC does not share that one."""
    client = GrpcWorkerClient(address, 5.0, replace(PINGS, interval_s=0.4))
    sampling = pb.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=-1)
    request = pb.GenerateRequest(request_id="direct", prompt_token_ids=PROMPT, sampling=sampling)
    try:
        return [token.id async for event in client.generate(request, 60) for token in event.tokens.tokens]
    finally:
        await client.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An untrained checkpoint."""
    return random_checkpoint.write(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def launch(tmp_path: pathlib.Path, model_dir: pathlib.Path) -> Iterator[Callable[..., Pair]]:
    """Starts pairs and ends them afterwards."""
    with contextlib.ExitStack() as ends:

        def start(kind: str, module: str = "services.gpu_worker") -> Pair:
            pair = Pair(tmp_path, model_dir, kind, module)
            ends.callback(pair.close)
            pair.wait_ready()
            return pair

        yield start


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_frozen_worker_ends_its_streams_as_a_dead_one_does(launch: Callable[..., Pair], kind: str) -> None:
    """SIGSTOP in mid-stream: the same error event as after SIGKILL, within the time of a ping and its answer. After SIGCONT it serves."""
    pair = launch(kind)
    pid = pair.worker.pid
    with contextlib.ExitStack() as stop:
        began: list[float] = []

        def freeze() -> None:
            stop.enter_context(stopped(pid))
            began.append(time.monotonic())

        frozen = pair.stream(15_000, freeze)
        took_s = time.monotonic() - began[0]
        assert pair.stack.http.get("/health").json()["status"] == "unreachable"
    assert took_s < PINGS.interval_s + PINGS.timeout_s + 2.0
    pair.wait_ready()
    until(lambda: pair.stack.http.get("/stats").json()["engine"]["running_requests"] == 0, "its job has left the worker")
    whole = pair.stream(5)
    assert (whole.finish_reasons, whole.error, whole.done) == (["length"], None, True)
    dead = pair.stream(15_000, lambda: os.kill(pid, signal.SIGKILL))
    assert frozen.error is not None
    assert frozen.error == dead.error
    assert frozen.done
    assert frozen.finish_reasons == []


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_busy_worker_is_not_taken_for_a_frozen_one(launch: Callable[..., Pair], kind: str) -> None:
    """A worker in which no Python runs for much longer than a ping may take: /health says so, its stream goes on and is whole.

    So does one on a connection that carries nothing else meanwhile, as in a long prefill: so many pings are not too many for the worker.
    """
    assert 2 * (PINGS.interval_s + PINGS.timeout_s) < HELD_S
    pair = launch(kind, "tests.worker.greedy_worker")
    streams: list[Streamed] = []
    tokens: list[int] = []
    began = time.monotonic()
    threads = [
        threading.Thread(target=lambda: streams.append(pair.stream(20))),
        threading.Thread(target=lambda: tokens.extend(asyncio.run(tokens_of(pair.address)))),
    ]
    for thread in threads:
        thread.start()
    until(lambda: pair.stack.http.get("/health").json()["status"] == "unreachable", "no Python runs")
    for thread in threads:
        thread.join(40)
    assert time.monotonic() - began > HELD_S
    (got,) = streams
    assert (got.finish_reasons, got.error, got.done) == (["length"], None, True)
    assert len(tokens) == 20
    assert pair.worker.poll() is None
