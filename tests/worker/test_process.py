"""The worker as a process: exit codes, draining, re-attaching after a crash, rest when idle."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest

from services.common import errors
from services.common.grpc_status import error_of
from services.common.lifecycle import ExitCode
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.common.pb.glm53.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.support import random_checkpoint
from tests.support.random_checkpoint import Recipe
from tests.worker.harness import PROMPT, until

pytestmark = pytest.mark.e2e
ROOT = pathlib.Path(__file__).parents[2]


class WorkerProcess:
    """`python -m services.gpu_worker`, or another module, listening on a socket in `directory`."""

    def __init__(self, directory: pathlib.Path, model_dir: pathlib.Path, module: str = "services.gpu_worker", **settings: str) -> None:
        self.log = directory / f"worker-{len(list(directory.glob('worker-*.log')))}.log"
        env = {
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "GLM53_WORKER_ADDRESS": f"unix:{directory}/w.sock",
            "GLM53_SHM_DIR": str(directory),
            "GLM53_MODEL_DIR": str(model_dir),
            "GLM53_EXPERT_BACKEND": "in_process",
            **settings,
        }
        with self.log.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, "-m", module], cwd=ROOT, env=env, stdout=out, stderr=out)
        self.channel = grpc.insecure_channel(f"unix:{directory}/w.sock")
        self.stub = pb_grpc.WorkerStub(self.channel)

    def wait_ready(self) -> None:
        """Waits for READY."""

        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(grpc.RpcError):
                return bool(self.stub.Info(pb.InfoRequest(), timeout=5).state == pb.SERVICE_STATE_READY)
            return False

        until(ready, "the worker is ready", timeout_s=60)

    def start(self, request_id: str, max_tokens: int) -> Any:
        """Opens a greedy stream."""
        sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=-1)
        return self.stub.Generate(pb.GenerateRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling), timeout=60)

    def exit_code(self) -> int:
        """Waits for the end."""
        return self.process.wait(60)

    def close(self) -> None:
        """Ends it by force if it still runs."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


@pytest.fixture
def launch(tmp_path: pathlib.Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts worker processes and ends them afterwards."""
    started: list[WorkerProcess] = []
    directory = tmp_path / "run"
    directory.mkdir()

    def start(model_dir: pathlib.Path, **settings: str) -> WorkerProcess:
        started.append(WorkerProcess(directory, model_dir, **settings))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def ids(events: Any) -> list[int]:
    return [token.id for event in events for token in event.tokens.tokens]


def test_sigterm_lets_the_live_stream_end(launch: Callable[..., WorkerProcess], checkpoint_dir: pathlib.Path) -> None:
    """SIGTERM while a stream runs: it completes, then the process exits with 0; the records stay for the next worker."""
    worker = launch(checkpoint_dir)
    worker.wait_ready()
    stream = worker.start("live", 400)
    first = ids([next(stream), next(stream), next(stream)])
    worker.process.send_signal(signal.SIGTERM)
    assert len(first + ids(stream)) == 400
    assert worker.exit_code() == ExitCode.OK
    assert "loaded in" in worker.log.read_text()
    assert (worker.log.parent / "glm53-default-arena").exists()


def test_kill_9_and_the_next_worker_takes_the_records_over(launch: Callable[..., WorkerProcess], checkpoint_dir: pathlib.Path) -> None:
    """After kill -9 in mid-stream the stream breaks with an error, and the next worker re-attaches the arena and gives the same tokens."""
    worker = launch(checkpoint_dir)
    worker.wait_ready()
    expected = ids(worker.start("before", 20))
    stream = worker.start("cut", 10_000)
    next(stream)
    worker.process.kill()
    with pytest.raises(grpc.RpcError):
        for _ in stream:
            pass
    worker.exit_code()
    again = launch(checkpoint_dir)
    again.wait_ready()
    assert ids(again.start("after", 20)) == expected
    assert re.search(r"arena = re-attached", again.log.read_text())


def test_another_checkpoint_replaces_the_records(
    launch: Callable[..., WorkerProcess], checkpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A worker for another checkpoint does not use the records that it finds."""
    first = launch(checkpoint_dir)
    first.wait_ready()
    expected = ids(first.start("a", 20))
    first.process.kill()
    first.exit_code()
    other = launch(random_checkpoint.write(tmp_path / "other", Recipe(seed=99)))
    other.wait_ready()
    assert ids(other.start("b", 20)) != expected
    assert "arena = loaded" in other.log.read_text()


def test_boot_failures_have_their_exit_codes(
    launch: Callable[..., WorkerProcess], checkpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A wrong setting exits with 78, a broken checkpoint with 3, both with a message that says what to do."""
    wrong = launch(checkpoint_dir, GLM53_MODE="nvme")
    assert wrong.exit_code() == ExitCode.CONFIG
    assert "GLM53_MODE=nvme is not in this version" in wrong.log.read_text()
    typo = launch(checkpoint_dir, GLM53_MODELDIR="x")
    assert typo.exit_code() == ExitCode.CONFIG
    assert "did you mean GLM53_MODEL_DIR" in typo.log.read_text()
    for setting, place in (("GLM53_SHM_DIR", tmp_path / "missing"), ("GLM53_HEAT_FILE", tmp_path / "missing" / "heat")):
        misplaced = launch(checkpoint_dir, **{setting: str(place)})
        assert misplaced.exit_code() == ExitCode.CONFIG
        assert f"{setting}={place}" in misplaced.log.read_text()
        assert "Traceback" not in misplaced.log.read_text()
    diary = tmp_path / "diary"
    diary.write_text("not heat")
    another = launch(checkpoint_dir, GLM53_HEAT_FILE=str(diary))
    assert another.exit_code() == ExitCode.CONFIG
    assert f"GLM53_HEAT_FILE={diary} is not written to: it has 8 bytes that are no heat file of ours" in another.log.read_text()
    assert diary.read_text() == "not heat"
    broken = random_checkpoint.write(tmp_path / "broken", Recipe(num_layers=3, num_experts=8))
    with (broken / "model.safetensors").open("r+b") as stream:
        stream.truncate(100_000)
    refused = launch(broken)
    assert refused.exit_code() == ExitCode.BOOT
    assert "truncated" in refused.log.read_text()
    assert "Traceback" not in refused.log.read_text()


def test_second_worker_of_an_instance_is_refused(launch: Callable[..., WorkerProcess], checkpoint_dir: pathlib.Path) -> None:
    """While a worker lives, another one of the same instance does not touch its records."""
    first = launch(checkpoint_dir)
    first.wait_ready()
    second = launch(checkpoint_dir, GLM53_WORKER_ADDRESS="127.0.0.1:0")
    assert second.exit_code() == ExitCode.CONFIG
    assert "another worker serves instance" in second.log.read_text()
    assert len(ids(first.start("still", 5))) == 5


def test_an_idle_worker_rests(launch: Callable[..., WorkerProcess], checkpoint_dir: pathlib.Path) -> None:
    """With nothing to do the worker uses almost no processor time."""
    worker = launch(checkpoint_dir)
    worker.wait_ready()
    assert len(ids(worker.start("warm", 5))) == 5
    process = psutil.Process(worker.process.pid)
    before = sum(process.cpu_times()[:2])
    threading.Event().wait(3.0)
    assert sum(process.cpu_times()[:2]) - before < 0.3


def test_a_wedged_engine_ends_the_process(launch: Callable[..., WorkerProcess], checkpoint_dir: pathlib.Path) -> None:
    """Work pending without progress: the watchdog ends the process with a code that means "start me again"."""
    worker = launch(checkpoint_dir, module="tests.worker.wedged_worker", GLM53_WATCHDOG_S="1")
    worker.wait_ready()
    stream = worker.start("r", 100)
    with pytest.raises(grpc.RpcError):
        for _ in stream:
            pass
    assert worker.exit_code() == 1
    assert "nothing moved for" in worker.log.read_text()


def test_a_lost_backend_ends_the_process(launch: Callable[..., WorkerProcess], checkpoint_dir: pathlib.Path) -> None:
    """When the backend is lost the stream ends with an error that says so, and the process ends with a code that means "start me again"."""
    worker = launch(checkpoint_dir, module="tests.worker.lost_worker")
    worker.wait_ready()
    with pytest.raises(grpc.RpcError) as caught:
        list(worker.start("r", 100))
    assert isinstance(error_of(caught.value), errors.NotReady)
    assert worker.exit_code() == 1
    assert "the device fell off" in worker.log.read_text()


def test_a_suspended_process_is_not_taken_for_a_wedged_one(launch: Callable[..., WorkerProcess], checkpoint_dir: pathlib.Path) -> None:
    """A process that was stopped for longer than the watchdog's time and goes on keeps serving its stream."""
    worker = launch(checkpoint_dir, GLM53_WATCHDOG_S="1")
    worker.wait_ready()
    stream = worker.start("r", 800)
    got = ids([next(stream), next(stream), next(stream)])
    process = psutil.Process(worker.process.pid)
    process.suspend()
    threading.Event().wait(2.5)
    process.resume()
    assert len(got + ids(stream)) == 800
    assert worker.process.poll() is None
