"""The stack when something breaks: never a wrong token, never a hang, never a silent end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench import server as serving
from bench.server import Server
from tests.e2e import asking
from tests.support.slow_process import crawling, is_felt, stopped

pytestmark = pytest.mark.e2e

LONG = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 150, "ignore_eos": True}
UP, DOWN = ("UP", 1.0), ("DOWN", 0.0)
SLOW = ("heartbeat lost", "job deadline passed")


def long_body(server: Server, **more: Any) -> dict[str, Any]:
    return {**LONG, "model": asking.model_of(server.url), **more}


def tiers(server: Server) -> dict[str, Any]:
    return dict(server.get_json("/stats")["tiers"])


def lane(server: Server) -> tuple[str, float | None]:
    """The CPU lane's state in /stats, and `glm53_cpu_lane_up` in /metrics: None where the worker did not answer the scrape."""
    state = str(tiers(server)["lane"]["state"])
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=20).text)
    return state, next((family.samples[0].value for family in families if family.name == "glm53_cpu_lane_up"), None)


def wait_up(server: Server) -> None:
    """Readiness does not wait for cpu_expert."""
    asking.until(lambda: lane(server) == UP, 60, "the lane is up")


def wait_served(server: Server, body: dict[str, Any], undisturbed: asking.Stream) -> None:
    """Streams, with the tokens of an undisturbed one, until cpu_expert has served jobs after this call."""
    before = tiers(server)

    def serves() -> bool:
        assert same(asking.stream(server.url, body), undisturbed)
        after = tiers(server)
        return bool(after["cpu_expert_bytes"] > before["cpu_expert_bytes"] and after["lane"]["done"] > before["lane"]["done"])

    asking.until(serves, 60, "cpu_expert serves jobs")


def same(got: asking.Stream, undisturbed: asking.Stream) -> bool:
    """The same tokens and the same end."""
    ends = [(s.reasoning, s.content, s.finish_reason, s.error, s.done) for s in (got, undisturbed)]
    return ends[0] == ends[1]


class Streaming:
    """The same stream again and again in a thread, so that a fault meets one at work; each must be the undisturbed one."""

    def __init__(self, server: Server, body: dict[str, Any], undisturbed: asking.Stream) -> None:
        self.streams = 0
        self._over = threading.Event()
        self._problems: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(server, body, undisturbed))
        self._thread.start()

    def _run(self, server: Server, body: dict[str, Any], undisturbed: asking.Stream) -> None:
        try:
            while not self._over.is_set():
                got = asking.stream(server.url, body)
                assert same(got, undisturbed), got
                self.streams += 1
        except BaseException as error:  # noqa: BLE001 - carried to the test's thread
            self._problems.append(error)

    def more(self, streams: int) -> None:
        """Waits until so many more are through."""
        target = self.streams + streams
        asking.until(lambda: self.streams >= target or self._problems, 120, "streams go on")

    def join(self) -> None:
        """Raises what went wrong."""
        self._over.set()
        self._thread.join(timeout=120)
        assert not self._thread.is_alive(), "a stream hangs"
        if self._problems:
            raise self._problems[0]


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
    wait_up(own_stack)
    body = long_body(own_stack)
    undisturbed = asking.stream(own_stack.url, body)
    before = tiers(own_stack)
    victim = own_stack.pid_of("cpu_expert")
    got = asking.stream(own_stack.url, body, on_event=at_event(10, lambda: os.kill(victim, signal.SIGKILL)))
    assert same(got, undisturbed)
    asking.until(lambda: own_stack.pid_of("cpu_expert") != victim and lane(own_stack) == UP, 60, "the lane is back")
    wait_served(own_stack, body, undisturbed)
    after = tiers(own_stack)
    assert after["lane"]["ups"] > before["lane"]["ups"]
    assert after["aborts"] > before["aborts"]


def test_stopping_cpu_expert_for_five_seconds_changes_no_token(own_stack: Server) -> None:
    """SIGSTOP in mid-stream: no hang, no wrong token, also after it wakes; meanwhile /stats and /metrics tell that the lane is down."""
    wait_up(own_stack)
    body = long_body(own_stack)
    undisturbed = asking.stream(own_stack.url, body)
    before = tiers(own_stack)
    with contextlib.ExitStack() as stop:
        fault = stopped(own_stack.pid_of("cpu_expert"))
        got = asking.stream(own_stack.url, body, on_event=at_event(10, lambda: stop.enter_context(fault)))
        began = time.monotonic()
        assert same(got, undisturbed)
        asking.until(lambda: lane(own_stack) == DOWN, 60, "the lane is down")
        while time.monotonic() - began < 5:
            assert same(asking.stream(own_stack.url, body), undisturbed)
        asking.until(lambda: lane(own_stack) == DOWN, 60, "the lane is still down")
        down = tiers(own_stack)
        assert down["lane"]["reason"] in SLOW
        assert down["aborts"] > before["aborts"]
    wait_up(own_stack)
    wait_served(own_stack, body, undisturbed)
    asking.until(lambda: re.search(r"CPU lane down: .*CPU lane up after", own_stack.log.read_text(), re.DOTALL), 60, "the log tells both")


@pytest.mark.parametrize("stopped_s", [0.1, 1.0])
def test_a_cpu_expert_that_crawls_changes_no_token(own_stack: Server, stopped_s: float) -> None:
    """It gets a hundredth of the time: jobs come late, or miss their deadline of 500 ms. The lane's state is told, and it comes back."""
    wait_up(own_stack)
    body = long_body(own_stack)
    undisturbed = asking.stream(own_stack.url, body)
    before = tiers(own_stack)
    victim = own_stack.pid_of("cpu_expert")
    streaming = Streaming(own_stack, body, undisturbed)
    try:
        streaming.more(1)
        with crawling(victim, stopped_s * 0.99, stopped_s * 0.01):
            asking.until(is_felt(lambda: tiers(own_stack)), 60, "a job is late or given up")
            if stopped_s > 0.5:
                asking.until(lambda: lane(own_stack) == DOWN, 60, "the lane is down")
                asking.until(lambda: tiers(own_stack)["aborts"] >= before["aborts"] + 2, 60, "it is tried again in vain")
            streaming.more(2)
    finally:
        streaming.join()
    wait_up(own_stack)
    wait_served(own_stack, body, undisturbed)
    assert own_stack.pid_of("cpu_expert") == victim


def test_killing_gpu_worker_ends_the_stream_with_an_error_and_the_arena_is_reused(own_stack: Server) -> None:
    """The open stream ends with an error event and [DONE]; the next worker re-attaches the arena; the next request works."""
    undisturbed = asking.stream(own_stack.url, long_body(own_stack))
    victim = own_stack.pid_of("gpu_worker")
    # So long that it still runs when a busy machine lets this process see its tenth event.
    endless = long_body(own_stack, max_tokens=6000)
    got = asking.stream(own_stack.url, endless, on_event=at_event(10, lambda: os.kill(victim, signal.SIGKILL)))
    assert got.error is not None
    assert got.done
    assert got.finish_reason is None
    asking.until(
        lambda: own_stack.get_json("/health").get("status") == "ok" and own_stack.pid_of("gpu_worker") != victim, 60, "ready again"
    )
    again = asking.stream(own_stack.url, long_body(own_stack))
    assert (again.reasoning, again.content) == (undisturbed.reasoning, undisturbed.content)
    assert "re-attached" in own_stack.log.read_text()
    asking.until(lambda: lane(own_stack) == UP, 60, "the lane is back")


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
