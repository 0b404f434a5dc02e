"""The stack when something breaks: never a wrong token, never a hang, never a silent end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bench import server as serving
from bench.server import Server
from tests.e2e import asking

pytestmark = pytest.mark.e2e

LONG = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 150, "ignore_eos": True}


def long_body(server: Server, **more: Any) -> dict[str, Any]:
    return {**LONG, "model": asking.model_of(server.url), **more}


def tiers(server: Server) -> dict[str, Any]:
    return dict(server.get_json("/stats")["tiers"])


def lane(server: Server) -> str:
    return str(tiers(server)["lane"]["state"])


def alive(pid: int) -> bool:
    """False for a process that has ended, also while nobody has collected its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def at_event(number: int, action: Any) -> Any:
    """A callback for `asking.stream` that runs `action` once, after event `number`."""
    done: list[bool] = []

    def callback(got: asking.Stream) -> None:
        if got.events >= number and not done:
            done.append(True)
            action()

    return callback


def test_killing_cpu_expert_in_mid_stream_changes_no_token(own_stack: Server) -> None:
    """The stream goes on with exactly the tokens of an undisturbed run, and the lane comes back."""
    undisturbed = asking.stream(own_stack.url, long_body(own_stack))
    before = tiers(own_stack)
    assert before["lane"]["state"] == "UP"
    victim = own_stack.pid_of("cpu_expert")
    got = asking.stream(own_stack.url, long_body(own_stack), on_event=at_event(10, lambda: os.kill(victim, signal.SIGKILL)))
    assert (got.reasoning, got.content, got.finish_reason) == (undisturbed.reasoning, undisturbed.content, undisturbed.finish_reason)
    asking.until(lambda: own_stack.pid_of("cpu_expert") != victim and lane(own_stack) == "UP", 30, "the lane is back")
    again = asking.stream(own_stack.url, long_body(own_stack))
    assert (again.reasoning, again.content) == (undisturbed.reasoning, undisturbed.content)
    after = tiers(own_stack)
    assert after["lane"]["ups"] > before["lane"]["ups"]
    assert after["cpu_expert_bytes"] > before["cpu_expert_bytes"]


def test_stopping_cpu_expert_for_five_seconds_changes_no_token(own_stack: Server) -> None:
    """SIGSTOP in mid-stream: no hang, no wrong token, also after it wakes."""
    undisturbed = asking.stream(own_stack.url, long_body(own_stack))
    victim = own_stack.pid_of("cpu_expert")
    threading.Timer(5.0, lambda: os.kill(victim, signal.SIGCONT)).start()
    began = time.monotonic()
    got = asking.stream(own_stack.url, long_body(own_stack), on_event=at_event(10, lambda: os.kill(victim, signal.SIGSTOP)))
    assert (got.reasoning, got.content) == (undisturbed.reasoning, undisturbed.content)
    while time.monotonic() - began < 7:
        again = asking.stream(own_stack.url, long_body(own_stack))
        assert (again.reasoning, again.content) == (undisturbed.reasoning, undisturbed.content)
    asking.until(lambda: lane(own_stack) == "UP", 30, "the lane is back")


def test_killing_gpu_worker_ends_the_stream_with_an_error_and_the_arena_is_reused(own_stack: Server) -> None:
    """The open stream ends with an error event and [DONE]; the next worker re-attaches the arena; the next request works."""
    undisturbed = asking.stream(own_stack.url, long_body(own_stack))
    victim = own_stack.pid_of("gpu_worker")
    got = asking.stream(own_stack.url, long_body(own_stack), on_event=at_event(10, lambda: os.kill(victim, signal.SIGKILL)))
    assert got.error is not None
    assert got.done
    assert got.finish_reason is None
    asking.until(
        lambda: own_stack.get_json("/health").get("status") == "ok" and own_stack.pid_of("gpu_worker") != victim, 60, "ready again"
    )
    again = asking.stream(own_stack.url, long_body(own_stack))
    assert (again.reasoning, again.content) == (undisturbed.reasoning, undisturbed.content)
    assert "re-attached" in own_stack.log.read_text()
    asking.until(lambda: lane(own_stack) == "UP", 30, "the lane is back")


@pytest.mark.parametrize("own_stack", [{"GLM53_MODE": "exact"}], indirect=True)
def test_exact_never_uses_the_cpu_lane_and_answers_the_same(own_stack: Server, stack: Server) -> None:
    """On this device both modes give the same bits; `exact` gives cpu_expert nothing to do."""
    assert asking.stream(own_stack.url, long_body(own_stack)).content == asking.stream(stack.url, long_body(stack)).content
    assert tiers(own_stack)["cpu_expert_bytes"] == 0
    assert tiers(own_stack)["experts"]["hit"] > 0


def test_ctrl_c_leaves_nothing_and_a_start_after_sigkill_reclaims(work: Path) -> None:
    """SIGINT: no process, no segment. SIGKILL of the supervisor: the next start ends the orphans and serves."""
    first = serving.start(work)
    pids = [first.pid_of(name) for name in ("gpu_worker", "cpu_expert", "gateway")]
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(10)
    second = serving.start(work, port=first.port)
    body = {"model": asking.model_of(second.url), "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    assert asking.ask(second.url, body)["choices"][0]["finish_reason"] == "stop"
    assert not any(alive(pid) for pid in pids)
    pids = [second.pid_of(name) for name in ("gpu_worker", "cpu_expert", "gateway")]
    second.process.send_signal(signal.SIGINT)
    assert second.process.wait(60) == 0
    assert not any(alive(pid) for pid in pids)
    assert list(Path("/dev/shm").glob(f"glm53-{second.instance}-*")) == []


def test_sigterm_lets_a_running_stream_finish(work: Path) -> None:
    """A stream that runs when SIGTERM comes is completed; the exit code is 0."""
    server = serving.start(work)
    got = asking.stream(server.url, long_body(server), on_event=at_event(5, lambda: server.process.send_signal(signal.SIGTERM)))
    assert got.done
    assert got.error is None
    assert got.finish_reason == "length"
    assert server.process.wait(60) == 0


def test_a_broken_checkpoint_stops_serve_with_the_boot_code(work: Path, tmp_path: Path) -> None:
    """A checkpoint that cannot be served is named, with exit code 3, and nothing is respawned."""
    source = Path("models/tiny/checkpoint")
    for file in source.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    server = serving.start(work, "--model-dir", str(tmp_path), wait=False)
    assert server.process.wait(60) == 3
    assert "model.safetensors" in server.log.read_text()


def test_a_second_ctrl_c_ends_a_stream_with_its_error_and_leaves_nothing(work: Path) -> None:
    """`glm53 serve` with a long stream open: the first one drains, the second ends the stream in an orderly way, and everything stops."""
    server = serving.start(work, env={"GLM53_DRAIN_TIMEOUT_S": "300"})
    presses: list[float] = []

    def press(got: asking.Stream) -> None:
        if got.events in (5, 15) and len(presses) < got.events // 5:
            presses.append(time.monotonic())
            server.process.send_signal(signal.SIGINT)

    body = long_body(server, max_tokens=10_000)
    got = asking.stream(server.url, body, on_event=press)
    assert got.error is not None, got
    assert (got.error["code"], got.done) == ("shutting_down", True)
    assert server.process.wait(60) == 0
    assert time.monotonic() - presses[-1] < 30
    assert not list(Path("/dev/shm").glob(f"glm53-{server.instance}-*"))
