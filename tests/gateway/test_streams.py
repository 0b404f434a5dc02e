"""Streams on the wire: headers, keep-alives, errors, disconnects."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.common import errors
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from tests.gateway.events import Streamed, chat_body, stream
from tests.gateway.fake_worker import Die, Fail, Finish, Forever, Prefill, Say, Script, Wait
from tests.gateway.stack import Stack, until
from tests.gateway.test_validation import check_error

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@contextlib.contextmanager
def raw_post(stack: Stack, body: dict[str, Any], path: str = CHAT, more_headers: str = "") -> Iterator[socket.socket]:
    """A plain socket that has sent a request."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        connection.sendall(f"{head}{more_headers}\r\n".encode() + data)
        yield connection


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        part = connection.recv(65536)
        assert part, f"closed after {data!r}"
        data += part
    return data


def test_headers_come_before_the_first_token(stack: Stack) -> None:
    """As soon as the worker has taken the request, the client sees 200 and event-stream headers."""
    stack.play(Forever())
    with raw_post(stack, chat_body(stream=True)) as connection:
        head = read_until(connection, b"\r\n\r\n").lower()
    assert head.startswith(b"http/1.1 200")
    assert b"content-type: text/event-stream" in head
    assert b"cache-control: no-cache" in head
    assert b"content-length" not in head


@pytest.mark.parametrize("admit", [True, False])
def test_a_silent_stream_is_kept_alive_by_comments(stack: Stack, admit: bool) -> None:
    """While queued and while the prompt is read, comments come at the interval; clients see data only."""
    stack.play(Wait(1.5), Say("</think>Hi"), Finish(), admit=admit)
    began = time.monotonic()
    streamed = stream(stack)
    assert streamed.text("content") == "Hi"
    assert streamed.done
    waited = time.monotonic() - began - (0 if admit else 1.0)
    assert 2 <= streamed.comments <= waited / 0.05 + 1


def test_progress_of_the_worker_does_not_replace_keep_alives(stack: Stack) -> None:
    """A long prefill that reports its progress all the time is as silent for the client, and kept alive as well."""
    stack.play(Prefill(1.0), Say("</think>Hi"), Finish())
    streamed = stream(stack)
    assert streamed.text("content") == "Hi"
    assert streamed.comments >= 5


def test_the_headers_of_a_queued_stream_do_not_wait_for_admission(stack: Stack) -> None:
    """A request that waits in the worker's queue has its headers within about a second, then comments."""
    stack.play(Forever(), admit=False)
    began = time.monotonic()
    with raw_post(stack, chat_body(stream=True)) as connection:
        read_until(connection, b": keep-alive\n\n")
    assert time.monotonic() - began < 5


REFUSALS = [
    (errors.QueueFull("12 requests wait", retry_after_s=7.2), 503, {"retry-after": "8", "retry-after-ms": "7200"}),
    (errors.QueueTimeout("waited 60.0 s", retry_after_s=2.5), 503, {"retry-after": "3", "retry-after-ms": "2500"}),
    (errors.NotReady("draining"), 503, {"retry-after": "1"}),
    (errors.ContextLengthExceeded("too long", param="messages"), 400, {}),
    (errors.InvalidRequest("no such token", param="logit_bias"), 400, {}),
    (errors.UnsupportedParameter("no grammar", param="response_format"), 400, {}),
    (errors.DeadlineExceeded("too slow"), 504, {"x-should-retry": "false"}),
    (errors.EngineFailed("broken"), 500, {}),
]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(("error", "status", "headers"), REFUSALS, ids=lambda value: getattr(value, "code", None))
def test_what_the_worker_refuses_is_a_status(stack: Stack, streaming: bool, error: errors.Glm53Error, status: int, headers: Any) -> None:
    """An error before the first token is an HTTP status with the worker's words, for streams as well."""
    stack.play(Fail(error), admit=False)
    response = stack.post(stream=streaming)
    body = check_error(response, error.param, status)
    assert (body["code"], body["message"]) == (error.code, error.message)
    for name, value in headers.items():
        assert response.headers[name] == value
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_error_in_mid_stream_is_an_event(stack: Stack, path: str) -> None:
    """What was said stays said, then the error and [DONE]; no finish reason is made up."""
    stack.play(Say("a b"), Fail(errors.EngineFailed("step failed")))
    streamed = stream(stack, path)
    assert streamed.choices
    assert streamed.finish_reasons == []
    assert streamed.error == {"message": "step failed", "type": "server_error", "param": None, "code": "internal_error"}
    assert streamed.done
    check_error(stack.post(path), None, 500)


def test_a_worker_that_ends_without_a_reason_is_an_error(stack: Stack) -> None:
    """A stream that just stops is never passed off as a finished answer."""
    stack.play(Say("a"))
    streamed = stream(stack)
    assert streamed.error is not None
    assert streamed.done
    check_error(stack.post(), None, 500)


@pytest.mark.parametrize("reason", [pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_CANCELLED])
def test_a_generation_that_was_cancelled_elsewhere_is_an_error(stack: Stack, reason: int) -> None:
    """Neither a cancelled nor an unexplained end looks like a stop."""
    stack.play(Say("a"), Finish(reason))
    streamed = stream(stack)
    assert streamed.error is not None
    assert streamed.finish_reasons == []
    assert stack.post().status_code in (499, 500)


def test_a_worker_that_dies_in_mid_stream_ends_it_with_an_error_and_the_next_one_serves() -> None:
    """Three tokens, then the connection breaks: error event, [DONE]; 503 until a new worker listens; then the gateway goes on."""
    stack = Stack()
    try:
        stack.play(Say("a b"), Die())
        streamed = stream(stack)
        assert streamed.error is not None
        assert streamed.error["code"] == "service_unavailable"
        assert streamed.done
        assert streamed.finish_reasons == []
        assert stack.http.get("/health").status_code == 503
        refused = stack.post()
        check_error(refused, None, 503)
        assert int(refused.headers["retry-after"]) >= 1
        assert stack.http.get("/health/live").status_code == 200
        stack.worker.instance_id = "two"
        stack.play(Say("</think>back"), Finish())
        stack.run(stack.worker.start())
        until(lambda: stack.http.get("/health").status_code == 200, "the new worker is found")
        assert stack.message()["message"]["content"] == "back"
        assert stack.worker.tokenizer_calls[0] == ""
        assert all(stack.worker.tokenizer_calls[1:])
    finally:
        stack.close()


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("steps", [(Forever(),), (Say("a b c"), Forever())], ids=["in prefill", "in mid-answer"])
def test_a_client_that_leaves_frees_its_job(stack: Stack, path: str, streaming: bool, steps: Any) -> None:
    """Closing the socket cancels the job in the worker, streaming or not, also before the first token."""
    stack.worker.script = Script(steps)
    body = chat_body(stream=streaming, **({"messages": None, "prompt": "x"} if path == TEXT else {}))
    with raw_post(stack, body, path) as connection:
        until(lambda: stack.worker.live, "the job runs")
        if streaming:
            read_until(connection, b"keep-alive" if len(steps) == 1 else b"data:")
    until(lambda: stack.worker.cancelled, "the job is cancelled")
    assert not stack.worker.live
    until(lambda: stack.services.traffic.in_flight == 0, "the request is over")


def test_a_client_that_leaves_in_the_queue_frees_its_place(stack: Stack) -> None:
    """Also before the worker has admitted the request, while headers still wait."""
    stack.play(Forever(), admit=False)
    for streaming in (True, False):
        with raw_post(stack, chat_body(stream=streaming)):
            until(lambda: stack.worker.live, "the job waits")
        until(lambda: not stack.worker.live, "the job is gone")


def test_disconnects_at_random_points_leave_nothing_behind(stack: Stack) -> None:
    """Twenty clients that leave at random points: no job stays, and no stream gets another's text."""
    stack.worker.script_for = lambda request: Script(
        (Say("</think>"), *([Say(f"{request.sampling.max_tokens} "), Wait(0.01)] * 20), Finish())
    )
    rng = random.Random(7)
    wrong: list[str] = []

    def client(number: int, leave_after_s: float | None) -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.Client(base_url=stack.url, timeout=10) as http:
            began = time.monotonic()
            with http.stream("POST", CHAT, json=chat_body(stream=True, max_tokens=number)) as response:
                for line in response.iter_lines():
                    delta = json.loads(line[6:])["choices"][0]["delta"] if line.startswith("data: {") else {}
                    if set((delta.get("content") or "").split()) - set(str(number)) - {str(number)}:
                        wrong.append(line)
                    if leave_after_s is not None and time.monotonic() - began > leave_after_s:
                        return

    plans = [(100 + number, rng.choice([None, *[rng.uniform(0, 0.3)] * 3])) for number in range(20)]
    threads = [threading.Thread(target=client, args=plan) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    until(lambda: not stack.worker.live and stack.services.traffic.in_flight == 0, "everything is freed")
    assert len(stack.worker.ended) == 20
    stack.worker.script_for = None
    stack.play(Say("</think>ok"), Finish())
    assert stack.message()["message"]["content"] == "ok"


def test_parallel_streams_keep_apart(stack: Stack) -> None:
    """Two streams at once each get their own text."""
    stack.worker.script_for = lambda request: Script(
        (Say("</think>"), *([Say(str(request.sampling.max_tokens)), Wait(0.005)] * 10), Finish())
    )
    results: dict[int, Streamed] = {}

    def client(number: int) -> None:
        response = httpx.post(f"{stack.url}{CHAT}", json=chat_body(stream=True, max_tokens=number), timeout=20)
        results[number] = Streamed.of(response.content)

    threads = [threading.Thread(target=client, args=(number,)) for number in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {number: found.text("content") for number, found in results.items()} == {number: str(number) * 10 for number in (1, 2, 3, 4)}
    assert len({found.chunks[0]["id"] for found in results.values()}) == 4


def test_a_request_has_a_time_limit() -> None:
    """A generation that outlives GLM53_REQUEST_TIMEOUT_S ends with a timeout: a status, or an event of a stream."""
    stack = Stack(request_timeout_s=0.3)
    try:
        stack.play(Say("a"), Forever())
        check_error(stack.post(), None, 504)
        streamed = stream(stack)
        assert streamed.error is not None
        assert streamed.error["code"] == "timeout"
        assert streamed.done
        until(lambda: not stack.worker.live, "the job is gone")
    finally:
        stack.close()


def test_a_slow_body_is_not_waited_for_by_others(stack: Stack) -> None:
    """A client that has sent half a request holds up nobody."""
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert stack.post().status_code == 200
    until(lambda: stack.services.traffic.in_flight == 0, "the half request is over")
