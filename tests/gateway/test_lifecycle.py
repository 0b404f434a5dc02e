"""Health, loading, counters, and the end of the process."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.common.errors import ERROR_TYPES, DeadlineExceeded, EngineFailed, NotReady
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gateway import chat
from services.gateway.errors import http_of
from tests.gateway.events import Streamed, chat_body, stream
from tests.gateway.fake_worker import Fail, Finish, Forever, Say, Wait
from tests.gateway.stack import Stack, until
from tests.gateway.test_validation import check_error


def test_health_follows_the_worker_from_nothing_to_ready() -> None:
    """No worker, loading with progress, ready: 503, 503, 200; alive all the time; requests get 503 with Retry-After."""
    stack = Stack(start_worker=False)
    try:
        stack.worker.address = "127.0.0.1:0"
        body = stack.http.get("/health")
        assert body.status_code == 503
        assert body.json()["status"] == "unreachable"
        assert stack.http.get("/health/live").status_code == 200
        check_error(stack.post(), None, 503)
        check_error(stack.http.get("/v1/models"), None, 503)
    finally:
        stack.close()


def test_where_a_worker_should_be_is_for_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Neither an answer nor /health, which nobody signs in for, has an address of the inside in it."""
    caplog.set_level(logging.INFO, logger="services.gateway.worker_watch")
    stack = Stack(start_worker=False)
    try:
        answer = stack.post()
        answers = answer.text + stack.http.get("/health").text + stack.http.get("/v1/models").text
        address = stack.settings.worker_address.removeprefix("unix:")
        assert answer.json()["error"]["message"] == "The worker is not reachable."
        assert address not in answers
        assert any(message.startswith("waiting for the worker: the worker is not reachable: ") for message in caplog.messages)
        assert address in caplog.text
    finally:
        stack.close()


def test_health_shows_progress_while_loading(stack: Stack) -> None:
    """While the model loads, and has no name yet: 503 with progress and step, also for requests and for the list of models."""
    stack.worker.state = pb.SERVICE_STATE_LOADING
    stack.run(stack.services.watch.refresh())
    try:
        for path in ("/health", "/health/ready"):
            response = stack.http.get(path)
            assert response.status_code == 503
            assert response.json()["status"] == "loading"
            assert response.json()["progress"] == 0.4
            assert response.json()["step"] == "experts"
        assert stack.http.get("/health/live").status_code == 200
        check_error(stack.http.get("/v1/models"), None, 503)
        refused = stack.post()
        error = check_error(refused, None, 503)
        assert "loading (40%, experts)" in error["message"]
        assert int(refused.headers["retry-after"]) >= 1
    finally:
        stack.worker.state = pb.SERVICE_STATE_READY
    # No poll needed: the next request asks by itself.
    assert stack.post().status_code == 200
    assert stack.http.get("/health").json()["status"] == "ok"
    assert stack.http.get("/health/ready").status_code == 200


def test_health_asks_the_worker_itself(stack: Stack) -> None:
    """A worker that goes away or comes back is seen by the next health check, not a second later."""
    for state, status in ((pb.SERVICE_STATE_DRAINING, 503), (pb.SERVICE_STATE_READY, 200)):
        stack.worker.state = state
        time.sleep(0.3)
        assert stack.http.get("/health").status_code == status


def test_a_failed_worker_is_said_to_be(stack: Stack) -> None:
    """FAILED and DRAINING are not ready, and have their own words."""
    for state, word in ((pb.SERVICE_STATE_FAILED, "failed"), (pb.SERVICE_STATE_DRAINING, "draining")):
        stack.worker.state = state
        stack.run(stack.services.watch.refresh())
        assert (stack.http.get("/health").status_code, stack.http.get("/health").json()["status"]) == (503, word)
    stack.worker.state = pb.SERVICE_STATE_READY
    stack.run(stack.services.watch.refresh())


def test_stats_joins_the_engines_counters_and_ours(stack: Stack) -> None:
    """The worker's document stays at the top level; the gateway's own numbers have a key of their own."""
    before = stack.http.get("/stats").json()["gateway"]["completion_tokens_total"]
    stack.play(Say("a b"), Finish())
    stack.post()
    body = stack.http.get("/stats").json()
    assert body["expert_cache"] == [{"slots": 3}]
    assert body["engine"] == {"running": 0}
    assert body["gateway"]["completion_tokens_total"] == before + 4
    assert body["gateway"]["worker_up"] == 1


def sample(stack: Stack, name: str, **labels: str) -> float:
    response = stack.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = [
        entry.value
        for family in text_string_to_metric_families(response.text)
        for entry in family.samples
        if entry.name == name and entry.labels == labels
    ]
    return found[0] if found else 0.0


def test_metrics_are_prometheus_text_of_both(stack: Stack) -> None:
    """The scrape parses, holds the worker's samples, and counts statuses, undeclared calls and disconnects."""
    assert sample(stack, "glm53_slots") == 3
    assert sample(stack, "glm53_gateway_worker_up") == 1
    labels = {"route": "/v1/chat/completions", "status": "400"}
    before = sample(stack, "glm53_gateway_http_responses_total", **labels)
    stack.post(temperature=-1)
    assert sample(stack, "glm53_gateway_http_responses_total", **labels) == before + 1
    before = sample(stack, "glm53_gateway_undeclared_tool_calls_total")
    tools = [{"type": "function", "function": {"name": "f"}}]
    stack.play(Say("</think><tool_call>g</tool_call>"), Finish())
    stack.post(tools=tools)
    assert sample(stack, "glm53_gateway_undeclared_tool_calls_total") == before + 1
    before = sample(stack, "glm53_gateway_stream_errors_total", code="internal_error")
    stack.play(Say("a"), Fail(EngineFailed("x")))
    stream(stack)
    assert sample(stack, "glm53_gateway_stream_errors_total", code="internal_error") == before + 1


def test_the_log_tells_of_a_worker_that_a_generation_has_lost(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """With the reason, once, and that it is back: whether a generation or the next question has noticed it."""
    with caplog.at_level(logging.INFO, logger="services.gateway.worker_watch"):
        stack.play(Say("a"), Fail(NotReady("its socket is closed")))
        stream(stack)
        until(lambda: "the worker is ready" in caplog.messages, "the worker is back")
    assert caplog.messages == ["requests are refused: its socket is closed", "the worker is ready"]


def test_metrics_survive_a_lost_worker() -> None:
    """Without a worker the scrape still answers and says so."""
    stack = Stack(start_worker=False)
    try:
        assert sample(stack, "glm53_gateway_worker_up") == 0
        check_error(stack.http.get("/stats"), None, 503)
    finally:
        stack.close()


@pytest.mark.alone
def test_metrics_do_not_wait_for_a_worker_that_hangs() -> None:
    """Prometheus would give up, and take the gateway for gone: the answer comes in time, and says whose fault it is."""
    stack = Stack(connect_timeout_s=20.0)
    try:
        until(lambda: sample(stack, "glm53_gateway_worker_up") == 1, "the worker is known")
        stack.worker.frozen = True
        began = time.monotonic()
        assert "glm53_slots" not in stack.http.get("/metrics").text
        assert time.monotonic() - began < 4  # scrape_timeout of deploy/prometheus
        stack.worker.frozen = False
        assert sample(stack, "glm53_slots") == 3
    finally:
        stack.close()


@pytest.mark.alone
def test_a_worker_that_hangs_costs_one_wait() -> None:
    """Requests are turned away when the time for one question is over, however many ask at once."""
    stack = Stack(connect_timeout_s=2.0)
    try:
        until(lambda: stack.http.get("/health").json()["status"] == "ok", "the worker is known")
        stack.worker.frozen = True
        until(lambda: stack.http.get("/health").json()["status"] != "ok", "the worker is known to hang")
        with ThreadPoolExecutor(4) as pool:
            began = time.monotonic()
            statuses = [answer.result().status_code for answer in [pool.submit(stack.post) for _ in range(4)]]
        assert statuses == [503] * 4
        # One that has begun already, and the next; each after the other it would be eight seconds and more.
        assert time.monotonic() - began < 6
    finally:
        stack.close()


def test_failures_are_counted_in_series_that_were_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate says nothing of a series' first value: of the first failure of any kind the alerts would never hear."""

    async def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    stack = Stack()
    try:
        before = {line.rpartition(" ")[0] for line in stack.http.get("/metrics").text.splitlines()}
        kinds = [cls for cls in ERROR_TYPES.values() if http_of(cls("")).status >= 500]
        for error in kinds:
            stack.play(Say("a"), Fail(error("x")))
            stream(stack)
        stack.play(Fail(EngineFailed("x")))
        stack.post()
        stack.play(Fail(DeadlineExceeded("x")))
        stack.post()
        monkeypatch.setattr("services.gateway.native.read_body", broken)
        assert stack.http.post("/tokenize", json={}).status_code == 500
        counted = [
            name for name, _, value in (line.rpartition(" ") for line in stack.http.get("/metrics").text.splitlines()) if value != "0.0"
        ]
        failed = [name for name in counted if 'status="50' in name and "_created" not in name]
        ended = [name for name in counted if name.startswith("glm53_gateway_stream_errors_total{")]
        assert len(ended) == len({error.code for error in kinds})
        assert len(failed) >= 3
        assert set(failed) | set(ended) <= before
        assert not [name for name, value in stack.http.get("/stats").json()["gateway"].items() if "{" in name and not value]
    finally:
        stack.close()


def test_logs_have_the_request_id_and_never_the_prompt(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """Neither prompts nor answers nor refused values are logged; the echoed id is."""
    secret = "xyzzy plugh"
    messages = [{"role": "user", "content": secret}]
    with caplog.at_level(logging.DEBUG):
        stack.play(Say("</think>" + secret), Finish())
        headers = {"X-Request-Id": "find-me"}
        stack.http.post("/v1/chat/completions", json=chat_body(messages=messages), headers=headers)
        stack.post(messages=[{"role": secret, "content": secret}])
        stack.post(messages=messages, stop=secret * 100)
        stack.play(Fail(EngineFailed("broken")))
        stack.post(messages=messages)
    text = "\n".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records)
    assert secret not in text
    assert "find-me" in text


def test_a_bug_is_a_clean_500(stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected exception: our error shape, no traceback and no detail for the client, both in the log under the request's id."""

    async def broken(*_: Any) -> Any:
        raise RuntimeError("boom-1234")

    monkeypatch.setattr(chat, "prepare", broken)
    response = stack.http.post("/v1/chat/completions", json=chat_body(), headers={"X-Request-Id": "find-me"})
    error = check_error(response, None, 500)
    assert error["code"] == "internal_error"
    assert "boom" not in response.text
    assert response.headers["x-request-id"] == "find-me"
    assert any(record.exc_info and "boom-1234" in str(record.exc_info[1]) for record in caplog.records)
    assert stack.services.traffic.in_flight == 0


def test_a_worker_with_a_broken_template_is_not_ready() -> None:
    """A chat template that does not compile keeps the gateway from serving, and /health says why."""
    stack = Stack(chat_template="{% if %}")
    try:
        response = stack.http.get("/health")
        assert response.status_code == 503
        assert "chat_template.jinja" in response.json()["reason"]
        assert response.json()["broken"] is True
        check_error(stack.post(), None, 503)
    finally:
        stack.close()


class Process:
    """The gateway as a process of its own."""

    def __init__(self, worker: str, **env: str) -> None:
        full = {name: value for name, value in os.environ.items() if not name.startswith("GLM53_")}
        full |= {"PORT": "0", "GLM53_WORKER_ADDRESS": worker, "GLM53_LOG_FORMAT": "json", **env}
        self.process = subprocess.Popen([sys.executable, "-m", "services.gateway"], env=full, stderr=subprocess.PIPE, text=True)
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else {"msg": line})

    @property
    def messages(self) -> str:
        return "\n".join(str(line["msg"]) for line in self.lines)

    def url(self) -> str:
        until(lambda: "Uvicorn running on" in self.messages, "it listens", 30)
        line = next(str(line["msg"]) for line in self.lines if "Uvicorn running on" in str(line["msg"]))
        return line.split("running on ")[1].split(" ")[0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def process(stack: Stack) -> Iterator[Process]:
    """A gateway process on the shared stack's worker."""
    running = Process(stack.worker.address, GLM53_DRAIN_TIMEOUT_S="3")
    yield running
    running.close()


def start_stream(url: str) -> tuple[threading.Thread, list[bytes]]:
    got: list[bytes] = []
    thread = threading.Thread(
        target=lambda: got.append(httpx.post(f"{url}/v1/chat/completions", json=chat_body(stream=True), timeout=30).content)
    )
    thread.start()
    return thread, got


@pytest.mark.e2e
def test_sigterm_completes_streams_and_turns_newcomers_away(stack: Stack, process: Process) -> None:
    """The live stream ends as usual; a new request hears 503 + Retry-After, readiness 503; exit code 0."""
    url = process.url()
    until(lambda: httpx.get(f"{url}/health").status_code == 200, "ready", 20)
    stack.play(Say("</think>a"), Wait(1.5), Say(" b"), Finish())
    thread, got = start_stream(url)
    until(lambda: stack.worker.live, "the stream runs")
    process.process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{url}/health/ready").json()["status"] == "draining", "draining")
    refused = httpx.post(f"{url}/v1/chat/completions", json=chat_body())
    assert check_error(refused, None, 503)["code"] == "shutting_down"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["connection"] == "close"
    thread.join(20)
    streamed = Streamed.of(got[0])
    assert (streamed.text("content"), streamed.finish_reasons, streamed.done) == ("a b", ["stop"], True)
    assert process.process.wait(20) == 0


@pytest.mark.e2e
def test_a_stream_that_outlives_the_drain_ends_with_an_error(stack: Stack, process: Process) -> None:
    """After GLM53_DRAIN_TIMEOUT_S a straggler gets an error event and [DONE], its job is cancelled; exit code 0."""
    url = process.url()
    until(lambda: httpx.get(f"{url}/health").status_code == 200, "ready", 20)
    stack.play(Say("</think>a"), Forever())
    thread, got = start_stream(url)
    until(lambda: stack.worker.live, "the stream runs")
    process.process.send_signal(signal.SIGTERM)
    thread.join(20)
    streamed = Streamed.of(got[0])
    assert streamed.error is not None
    assert streamed.error["code"] == "shutting_down"
    assert streamed.done
    assert process.process.wait(20) == 0
    until(lambda: not stack.worker.live, "the job is gone")


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_streams_with_their_last_words(stack: Stack, number: signal.Signals) -> None:
    """Long before the drain's time is up: every open stream gets the error event and [DONE], a whole answer a 503; exit code 0."""
    running = Process(stack.worker.address, GLM53_DRAIN_TIMEOUT_S="300")
    try:
        url = running.url()
        until(lambda: httpx.get(f"{url}/health").status_code == 200, "ready", 20)
        stack.play(Say("</think>a"), Forever())
        streams = [start_stream(url) for _ in range(3)]
        whole: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: whole.append(httpx.post(f"{url}/v1/chat/completions", json=chat_body(), timeout=60)))
        waiting.start()
        until(lambda: len(stack.worker.live) == 4, "all run")
        running.process.send_signal(number)
        until(lambda: httpx.get(f"{url}/health/ready").json()["status"] == "draining", "draining")
        running.process.send_signal(number)
        assert running.process.wait(30) == 0
        waiting.join(20)
        for thread, got in streams:
            thread.join(20)
            streamed = Streamed.of(got[0])
            assert streamed.error is not None
            assert (streamed.error["code"], streamed.done) == ("shutting_down", True)
        check_error(whole[0], None, 503)
        until(lambda: not stack.worker.live, "the jobs are gone")
    finally:
        running.close()


@pytest.mark.e2e
def test_an_idle_gateway_stops_at_once(stack: Stack) -> None:
    """SIGINT with nothing to do: exit code 0 long before the drain timeout; the settings were printed with their sources."""
    idle = Process(stack.worker.address, GLM53_DRAIN_TIMEOUT_S="60")
    try:
        idle.url()
        idle.process.send_signal(signal.SIGINT)
        assert idle.process.wait(40) == 0
        assert any("GLM53_DRAIN_TIMEOUT_S" in str(line["msg"]) and "60.0 (environment)" in str(line["msg"]) for line in idle.lines)
    finally:
        idle.close()


@pytest.mark.e2e
def test_a_wrong_setting_and_a_taken_port_stop_the_start(stack: Stack) -> None:
    """A wrong setting is exit code 78 and names it; a port in use is exit code 3."""
    wrong = Process(stack.worker.address, GLM53_THINKING_OFF_POLICY="maybe")
    taken = Process(stack.worker.address, PORT=str(stack.port))
    try:
        assert wrong.process.wait(20) == 78
        until(lambda: "GLM53_THINKING_OFF_POLICY" in wrong.messages, "the setting is named")
        assert taken.process.wait(20) == 3
    finally:
        wrong.close()
        taken.close()
