"""What clients may do to HTTP: refused in OpenAI's words, bounded, and never at others' cost."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.access import write_keys
from tests.gateway.events import Streamed, chat_body
from tests.gateway.fake_worker import Finish, Forever, Pieces, Say, Script, Wait
from tests.gateway.hostile import CHAT, Reply, connected, post, read_all, replies, talk
from tests.gateway.stack import Stack, until

HEALTH = b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET /health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"


@pytest.fixture(scope="module")
def small_stack() -> Iterator[Stack]:
    stack = Stack(max_header_bytes=4096, max_body_bytes=100_000, header_timeout_s=1.0, body_timeout_s=1.0, keepalive_s=0.05)
    yield stack
    stack.close()


@pytest.fixture
def stack(small_stack: Stack) -> Stack:
    """Small limits and short patience."""
    small_stack.play(Say("</think>Hi"), Finish())
    for log in (small_stack.worker.requests, small_stack.worker.cancelled, small_stack.worker.ended):
        log.clear()
    return small_stack


def refusal(reply: Reply, status: int, code: str) -> dict[str, Any]:
    """Checks that a response is an error in OpenAI's shape."""
    assert reply.status == status, reply
    assert reply.headers["content-type"] == "application/json"
    error: dict[str, Any] = reply.json()["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}
    return error


BROKEN = {
    "no http": (b"\x16\x03\x01\x02\x00\x01\x00", 400, "invalid_http"),
    "no method": (b"FROB / HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    "http 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http"),
    "version 2": (b"GET /health HTTP/2.0\r\n\r\n", 501, "unsupported_http"),
    "version 0.9": (b"GET /health HTTP/0.9\r\n\r\n", 501, "unsupported_http"),
    "folded": (b"GET /health HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", 400, "invalid_http"),
    "bare newlines": (b"GET /health HTTP/1.1\nHost: a\n\n", 400, "invalid_http"),
    "space before colon": (b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n", 400, "invalid_http"),
    "a nul": (b"GET /health HTTP/1.1\r\nHost: a\x00\r\n\r\n", 400, "invalid_http"),
    "a proxy's method": (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 405, "method_not_allowed"),
    "another scheme": (b"GET ftp://a/health HTTP/1.1\r\nHost: a\r\n\r\n", 400, "invalid_http"),
    "url not ascii": ("GET /é HTTP/1.1\r\nHost: a\r\n\r\n".encode(), 400, "invalid_http"),
    "long url": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414, "url_too_long"),
    "long header": (b"GET /health HTTP/1.1\r\nHost: a\r\nx: " + b"a" * 5000 + b"\r\n\r\n", 431, "headers_too_large"),
    "many headers": (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431, "headers_too_large"),
    "two hosts": (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "invalid_http"),
    "two keys": (b"GET /stats HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400, "invalid_http"),
    "two lengths": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400, "invalid_http"),
    "length and chunks": (CHUNKED + b"Content-Length: 5\r\n\r\nhello", 400, "invalid_http"),
    "negative length": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", 400, "invalid_http"),
    "wrong chunk": (CHUNKED + b"\r\nzz\r\nhello\r\n", 400, "invalid_http"),
    "gzip chunks": (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"\r\n0\r\n\r\n", 501, "unsupported_http"),
    "endless trailer": (CHUNKED + b"\r\n0\r\nx: " + b"a" * 400_000, 400, "invalid_http"),
    "endless chunk extension": (CHUNKED + b"\r\n5;" + b"a" * 400_000, 400, "invalid_http"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_request_is_refused_in_openais_shape(stack: Stack, name: str) -> None:
    """The status says what is wrong, the body says it in words, and the connection ends in an orderly way."""
    data, status, code = BROKEN[name]
    (reply,) = talk(stack, data)
    refusal(reply, status, code)
    assert reply.headers["connection"] == "close"
    assert stack.post().status_code == 200


def test_a_refused_head_has_its_apis_shape(stack: Stack) -> None:
    """Anthropic's clients read their own shape, also before the app has seen the request."""
    (reply,) = talk(stack, post({}, "/v1/messages", "x: " + "a" * 5000 + "\r\n"))
    assert reply.status == 431
    assert reply.json()["type"] == "error"


def test_refused_heads_are_counted() -> None:
    """They never reach the app, but the metrics, in series that stood at nought before: a rate sees the first one too."""
    fresh = Stack(max_header_bytes=4096, max_body_bytes=100_000)
    try:
        before = fresh.http.get("/metrics").text
        for data, _, code in BROKEN.values():
            assert f'glm53_gateway_refusals_total{{code="{code}"}} 0.0' in before
            talk(fresh, data)
        text = fresh.http.get("/metrics").text
        for _, _, code in BROKEN.values():
            assert f'glm53_gateway_refusals_total{{code="{code}"}} 0.0' not in text
        assert 'glm53_gateway_http_responses_total{route="unknown",status="414"}' in text
    finally:
        fresh.close()


@pytest.mark.parametrize("chunked", [True, False])
def test_a_client_that_sends_too_much_reads_the_refusal(stack: Stack, chunked: bool) -> None:
    """413 with its body arrives although the client goes on sending for megabytes before it reads."""
    head = CHUNKED + b"\r\n" if chunked else post().partition(b"Content-Length")[0] + b"Content-Length: 8000000\r\n\r\n"
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n" if chunked else b" " * 65536
    (reply,) = talk(stack, head, *[piece] * 100)
    error = refusal(reply, 413, "request_too_large")
    assert "100000" in error["message"]
    assert reply.headers["connection"] == "close"


def test_a_client_that_never_stops_sending_is_cut_off(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is thrown away after a refusal is bounded too."""
    monkeypatch.setattr("services.gateway.http_protocol._LINGER_BYTES", 1 << 20)
    with connected(stack) as connection:
        connection.sendall(CHUNKED + b"\r\n")
        with pytest.raises(ConnectionError):
            connection.sendall((b"10000\r\n" + b" " * 65536 + b"\r\n") * 1000)


@pytest.mark.parametrize("path", ["/v1/nothing", "/health"])
def test_an_answer_before_the_body_ends_the_connection(stack: Stack, path: str) -> None:
    """The rest of a body that nobody wanted is never taken for the next request."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n".encode()
    (reply,) = talk(stack, head + HEALTH)
    assert reply.status in (404, 405)
    assert reply.headers["connection"] == "close"


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "gzip, identity"])
def test_compressed_bodies_are_refused_by_name(stack: Stack, coding: str) -> None:
    """415 names the coding; `identity` is none."""
    headers = f"Content-Encoding: {coding}\r\nConnection: close\r\n"
    (reply,) = talk(stack, post(headers=headers))
    assert coding in refusal(reply, 415, "unsupported_content_encoding")["message"]
    (reply,) = talk(stack, post(headers="Content-Encoding: identity\r\nConnection: close\r\n"))
    assert reply.status == 200


def test_a_head_that_comes_too_slowly_is_408(stack: Stack) -> None:
    """The first request of a connection and a later one alike; who says nothing at all is just let go."""
    for begun in (b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: a\r\nx: "):
        (reply,) = talk(stack, begun)
        refusal(reply, 408, "request_timeout")
    ok, late = talk(stack, HEALTH + b"GET /hea")
    assert ok.status == 200
    refusal(late, 408, "request_timeout")
    assert talk(stack) == []
    # Empty lines before a request are no sign of life.
    assert [reply.status for reply in talk(stack, b"\r\n")] == [408]


def test_bytes_that_drip_do_not_prolong_a_head(stack: Stack) -> None:
    """A header a second, for ever: the deadline counts from the request's first byte."""
    with connected(stack) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n")
        connection.settimeout(0.1)
        got, deadline = b"", time.monotonic() + 15
        while not got:
            assert time.monotonic() < deadline
            connection.sendall(b"x: y\r\n")
            with contextlib.suppress(TimeoutError):
                got = connection.recv(65536)
    refusal(replies(got)[0], 408, "request_timeout")


@pytest.mark.parametrize("head", [CHUNKED + b"\r\n2\r\n{", post()[:-5]], ids=["chunked", "declared"])
def test_a_body_that_comes_too_slowly_is_408(stack: Stack, head: bytes) -> None:
    """GLM53_BODY_TIMEOUT_S bounds it, and the message says so."""
    (reply,) = talk(stack, head)
    assert "GLM53_BODY_TIMEOUT_S" in refusal(reply, 408, "request_timeout")["message"]
    until(lambda: stack.services.traffic.in_flight == 0, "the request is over")


def test_pipelined_requests_are_answered_in_order(stack: Stack) -> None:
    """Also in pieces, also after a stream."""
    data = post(chat_body(stream=True)) + HEALTH + post({"model": "other", "messages": []}) + LAST
    for size in (len(data), 100):
        found = talk(stack, *[data[i : i + size] for i in range(0, len(data), size)])
        assert [reply.status for reply in found] == [200, 200, 404, 200]
        assert Streamed.of(found[0].body).done


def test_too_many_pipelined_requests_are_not_kept(stack: Stack) -> None:
    """A bounded number is answered, then the connection ends."""
    stack.play(Say("</think>Hi"), Wait(0.3), Finish())
    found = talk(stack, post(chat_body(stream=True)) + HEALTH * 5000)
    assert [reply.status for reply in found] == [200] * 17


def test_a_large_body_before_its_turn_is_not_kept(stack: Stack) -> None:
    """The request before it is answered, then the connection ends."""
    stack.play(Say("</think>Hi"), Wait(0.3), Finish())
    found = talk(stack, post() + post({"model": "x" * 90_000}))
    assert [reply.status for reply in found] == [200]


@pytest.mark.parametrize("rest", [b"", HEALTH, HEALTH * 3 + post(), b"rubbish\r\n\r\n", b"GET /hea", post({"model": "x" * 90_000})])
def test_a_client_that_leaves_while_more_waits_frees_its_job(stack: Stack, rest: bytes) -> None:
    """Whatever was sent behind a request, its job ends with its client."""
    stack.worker.script = Script((Forever(),))
    with connected(stack) as connection:
        connection.sendall(post())
        until(lambda: stack.worker.live, "the job runs")
        connection.sendall(rest)
        time.sleep(0.05)
    until(lambda: not stack.worker.live, "the job is gone")
    until(lambda: stack.services.traffic.in_flight == 0, "the request is over")


def test_rubbish_behind_a_request_does_not_break_its_answer(stack: Stack) -> None:
    """The stream is complete, and nothing of the refusal is inside it."""
    stack.play(Say("</think>a"), Wait(0.3), Say(" b"), Finish())
    (reply,) = talk(stack, post(chat_body(stream=True)), b"rubbish\r\n\r\n")
    assert Streamed.of(reply.body).text("content") == "a b"


def test_http_1_0_gets_bodies_without_chunks(stack: Stack) -> None:
    """A stream ends with its connection, a whole answer has its length, and nobody is told to continue."""
    (streamed,) = talk(stack, post(chat_body(stream=True), version="1.0", headers="Expect: 100-continue\r\n"))
    assert "transfer-encoding" not in streamed.headers
    assert Streamed.of(streamed.body).text("content") == "Hi"
    (whole,) = talk(stack, post(version="1.0"))
    assert whole.json()["choices"][0]["message"]["content"] == "Hi"


H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("cut", [0, 1, 50, 400])
@pytest.mark.parametrize("offer", [H2C, "Connection: upgrade\r\nUpgrade: websocket\r\n"], ids=["h2c", "websocket"])
def test_an_offered_upgrade_is_declined_and_the_body_read(stack: Stack, offer: str, cut: int) -> None:
    """Java's HttpClient offers HTTP/2 with its first request; it is answered in HTTP/1.1, and so is the next one."""
    data = post(headers=offer)
    cut = len(data) - cut
    found = talk(stack, data[:cut], data[cut:] + post(headers=offer) + LAST)
    assert [reply.status for reply in found] == [200, 200, 200]
    assert found[0].json()["choices"][0]["message"]["content"] == "Hi"


def test_an_upgrade_may_come_with_a_chunked_body(stack: Stack) -> None:
    """The framing of the declined request counts."""
    body = json.dumps(chat_body()).encode()
    data = CHUNKED + H2C.encode() + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) + LAST
    assert [reply.status for reply in talk(stack, data)] == [200, 200]


def test_expect_100_continue_is_obeyed(stack: Stack) -> None:
    """100 before a body that is wanted; the refusal alone for one that is not."""
    data = post(headers="Expect: 100-continue\r\nConnection: close\r\n")
    head, _, body = data.partition(b"\r\n\r\n")
    with connected(stack) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        (reply,) = replies(read_all(connection))
    assert reply.status == 200
    (reply,) = talk(stack, head.replace(b"Content-Length: ", b"Content-Length: 99999") + b"\r\n\r\n")
    refusal(reply, 413, "request_too_large")


def test_urls_may_be_absolute(stack: Stack) -> None:
    """As a proxy's clients write them, with and without a path; `*` is the server as a whole."""
    for url, status in (("http://a/health/live", 200), ("http://a:80/health/live?x=1", 200), ("http://a", 404)):
        (reply,) = talk(stack, f"GET {url} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        assert reply.status == status, url
    (reply,) = talk(stack, b"OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert (reply.status, reply.headers["allow"]) == (204, "DELETE, GET, HEAD, OPTIONS, POST")


def test_chunks_may_have_extensions_and_trailers(stack: Stack) -> None:
    """They are read over."""
    body = json.dumps(chat_body()).encode()
    chunk = b'%x;name=value;other="quoted"\r\n%s\r\n' % (len(body), body)
    found = talk(stack, CHUNKED + b"\r\n" + chunk + b"0\r\nx-trailer: y\r\nHost: b\r\n\r\n" + LAST)
    assert [reply.status for reply in found] == [200, 200]


def test_a_body_in_tiny_chunks_is_bounded(stack: Stack) -> None:
    """A few thousand bytes one by one are taken; a flood of them is refused long before it has all been looked at."""
    body = json.dumps(chat_body()).encode().ljust(9_000)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    found = talk(stack, CHUNKED + b"\r\n" + chunks + b"0\r\n\r\n" + LAST)
    assert [reply.status for reply in found] == [200, 200]
    (reply,) = talk(stack, CHUNKED + b"\r\n" + b"1\r\n \r\n" * 90_000 + b"0\r\n\r\n")
    assert "10000 pieces" in refusal(reply, 400, "invalid_http")["message"]


def test_a_client_that_ends_its_side_still_reads_what_it_looked_up(stack: Stack) -> None:
    """`GET` and a closed write side, as netcat does it, is answered."""
    for data in (HEALTH, b"GET /health HTTP/1.0\r\n\r\n", HEALTH + HEALTH):
        with connected(stack) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert {reply.status for reply in replies(read_all(connection))} == {200}


def test_a_client_that_ends_its_side_in_a_generation_has_left(stack: Stack) -> None:
    """A killed program looks the same: its job must not go on."""
    stack.worker.script = Script((Say("a"), Forever()))
    with connected(stack) as connection:
        connection.sendall(post())
        until(lambda: stack.worker.live, "the job runs")
        connection.shutdown(socket.SHUT_WR)
        until(lambda: not stack.worker.live, "the job is gone")


READ_ONLY = [
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/stats",
    "/v1/models",
    "/v1/models/tiny",
    "/openapi.json",
    "/server_info",
]


@pytest.mark.parametrize("path", READ_ONLY)
def test_head_is_get_without_a_body(stack: Stack, path: str) -> None:
    """Same status, same kind, the length that GET would have."""
    head, get = stack.http.head(path), stack.http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    assert stack.http.head("/v1/nothing").status_code == 404
    assert stack.http.head(CHAT).status_code == 405


def test_options_tells_the_methods(stack: Stack) -> None:
    """Without CORS: 204 with Allow, no header that would let a web page in; 404 where there is nothing."""
    cases = {"/health": "GET, HEAD", CHAT: "POST", "/v1/responses/x": "GET, HEAD, DELETE"}
    for path, allow in cases.items():
        headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        reply = stack.http.options(path, headers=headers)
        assert (reply.status_code, reply.headers["allow"], reply.content) == (204, allow, b"")
        assert not [name for name in reply.headers if name.startswith("access-control")]
        refused = stack.http.request("PUT", path)
        assert (refused.status_code, refused.headers["allow"]) == (405, allow)
    assert stack.http.options("/v1/nothing").status_code == 404


def test_heads_and_options_where_keys_are_asked_for(tmp_path: Path) -> None:
    """What may be asked is told without a key, also of administrators' URLs; HEAD needs the key that GET needs."""
    keys = write_keys(tmp_path / "keys.json", me={})
    stack = Stack(api_keys_file=str(tmp_path / "keys.json"))
    try:
        for path in (CHAT, "/v1/models", "/stats"):
            assert stack.http.options(path).status_code == 204
        assert stack.http.head("/health").status_code == 200
        assert stack.http.head("/v1/models").status_code == 401
        mine = {"Authorization": f"Bearer {keys['me']}"}
        assert stack.http.head("/v1/models", headers=mine).status_code == 200
        assert stack.http.head("/stats", headers=mine).status_code == 403
    finally:
        stack.close()


def test_connections_are_bounded() -> None:
    """The one that has been idle for longest makes room; where all are busy a newcomer gets 503, and room comes back."""
    stack = Stack(max_connections=16)
    try:
        stack.worker.script = Script((Forever(),))
        with contextlib.ExitStack() as open_ones:
            idle = [open_ones.enter_context(connected(stack)) for _ in range(16)]
            until(lambda: len(stack.server.server_state.connections) == 16, "all are taken")
            newest = open_ones.enter_context(connected(stack))
            assert read_all(idle[0]) == b""
            for connection in (*idle[1:], newest):
                connection.sendall(post())
            until(lambda: len(stack.worker.live) == 16, "all are busy")
            (reply,) = talk(stack)
            refusal(reply, 503, "too_many_connections")
            assert "retry-after" in reply.headers
            crowd = [open_ones.enter_context(connected(stack)) for _ in range(60)]
            until(lambda: len(stack.server.server_state.connections) <= 32, "refused ones are bounded too")
            assert {read_all(connection)[:12] for connection in crowd} == {b"HTTP/1.1 503", b""}
        until(lambda: not stack.worker.live, "all are gone")
        assert [reply.status for reply in talk(stack, LAST)] == [200]
    finally:
        stack.close()


@pytest.fixture
def impatient() -> Iterator[Stack]:
    """A gateway that gives up readers after half a second."""
    stack = Stack(slow_client_s=0.5, keepalive_s=0.05)
    yield stack
    stack.close()


FLOOD = Pieces([(0, b"x" * 65536)] * 400)


@pytest.mark.parametrize("steps", [(FLOOD, Finish()), (FLOOD, Forever())])
def test_a_reader_that_stops_loses_its_job(impatient: Stack, steps: Any, caplog: pytest.LogCaptureFixture) -> None:
    """GLM53_SLOW_CLIENT_S after its buffers are full: the job is cancelled, the connection closed; one line and one count tell."""
    stack = impatient
    stack.worker.script = Script(steps)
    with caplog.at_level(logging.WARNING), connected(stack) as connection:
        connection.sendall(post(chat_body(stream=True)))
        until(lambda: stack.worker.requests and not stack.worker.live, "the job is gone", 30)
        until(lambda: stack.services.traffic.in_flight == 0, "the request is over")
        until(lambda: not stack.server.server_state.connections, "the connection is gone")
    assert stack.worker.cancelled
    lines = [record for record in caplog.records if "its connection is closed" in record.getMessage()]
    assert len(lines) == 1
    assert getattr(lines[0], "request_id", "")
    assert "glm53_gateway_slow_readers_total 1.0" in stack.http.get("/metrics").text


def test_a_reader_that_stops_in_a_whole_answer_is_cut_off(impatient: Stack) -> None:
    """Megabytes that are complete and not taken do not stay, whether the connection was to be kept or closed."""
    stack = impatient
    for headers in ("", "Connection: close\r\n"):
        stack.play(FLOOD, Finish())
        with connected(stack, receive_buffer=4096) as connection:
            connection.sendall(post(headers=headers))
            until(lambda: stack.worker.requests and stack.services.traffic.in_flight == 0, "the answer is complete", 30)
            until(lambda: not stack.server.server_state.connections, "the connection is gone", 30)
        stack.worker.requests.clear()


def test_a_slow_reader_that_goes_on_reading_gets_everything(impatient: Stack) -> None:
    """Slower than the model, and never silent for too long: nothing is cut."""
    stack = impatient
    stack.play(Pieces([(0, b"x" * 65536)] * 100), Finish())
    got = b""
    with connected(stack, receive_buffer=65536) as connection:
        connection.sendall(post(chat_body(stream=True), headers="Connection: close\r\n"))
        while part := connection.recv(65536):
            got += part
            time.sleep(0.02)
    (reply,) = replies(got)
    assert Streamed.of(reply.body).done


def test_a_stopped_stream_holds_little(impatient: Stack) -> None:
    """Twenty megabytes are ready for a client that takes none: what the gateway holds of them, and its socket, stays small."""
    stack = impatient
    stack.worker.script = Script((FLOOD, Forever()))
    held: list[int] = []
    with connected(stack, receive_buffer=4096) as connection:
        connection.sendall(post(chat_body(stream=True)))
        until(lambda: stack.worker.live, "the job runs")

        def look() -> None:
            held.extend(peer.transport.get_write_buffer_size() for peer in stack.server.server_state.connections)

        while stack.worker.live:
            stack._loop.call_soon_threadsafe(look)
            time.sleep(0.02)
    assert 0 < max(held) < 3 * 65536 + 65536


def test_others_are_served_beside_a_crowd_of_bad_clients(stack: Stack) -> None:
    """Half heads, half bodies, rubbish and silence from a hundred connections; requests go on."""
    kinds = [b"", b"GET /hea", CHUNKED + b"\r\n2\r\n{", b"\x00" * 100, post(chat_body(stream=True))]
    with contextlib.ExitStack() as crowd:
        for number in range(100):
            connection = crowd.enter_context(connected(stack))
            connection.sendall(kinds[number % len(kinds)])
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(stack.post().status_code)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert results == [200] * 8
    until(lambda: stack.services.traffic.in_flight == 0, "all is over")
    until(lambda: len(stack.server.server_state.connections) <= 8, "connections are gone")
