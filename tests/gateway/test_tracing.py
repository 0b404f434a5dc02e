"""Traces: one span a request with what it cost, never with what was said."""

from __future__ import annotations

import gzip
import http.server
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.common.errors import ConfigError
from services.common.logs import JsonFormatter
from services.gateway import tracing
from tests.gateway.events import stream
from tests.gateway.fake_worker import Finish, Say, Script
from tests.gateway.stack import Stack, until
from tests.support import missing, random_checkpoint
from tests.worker.harness import RunningWorker

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans over OTLP/HTTP."""

    spans: list[Any] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        Collector.spans += [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.spans = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    server.shutdown()
    thread.join(10)
    server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_every_request_is_one_span_with_its_cost_and_without_its_words(collector: str) -> None:
    """Streamed or whole: route, status, tokens, times; the caller's trace is continued; probes make none; nothing of prompt or answer."""
    stack = Stack(otlp_endpoint=collector)
    stack.worker.script = Script((Say("</think>secret answer"), Finish()))
    messages = [{"role": "user", "content": "secret question"}]
    assert stream(stack, messages=messages).text("content") == "secret answer"
    traced = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    stack.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages}, headers=traced)
    stack.post(temperature=-1)
    for path in ("/health", "/metrics"):
        stack.http.get(path)
    # Closing sends what is left.
    stack.close()
    until(lambda: len(Collector.spans) >= 3, "the spans arrived")
    assert len(Collector.spans) == 3
    found = [attributes(span) for span in Collector.spans]
    assert [span.name for span in Collector.spans] == ["POST /v1/chat/completions"] * 3
    assert [row["http.response.status_code"] for row in found] == [200, 200, 400]
    for row in found[:2]:
        assert row["gen_ai.usage.input_tokens"] > 0
        assert row["gen_ai.usage.output_tokens"] > 2
        assert row["glm53.key_id"] == "anonymous"
    assert "gen_ai.usage.input_tokens" not in found[2]
    assert (Collector.spans[1].trace_id.hex(), Collector.spans[1].parent_span_id.hex()) == (TRACE, PARENT)
    assert [event.name for event in Collector.spans[0].events] == ["first byte"]
    assert "secret" not in repr(Collector.spans)
    # The worker is told the span, not the caller: what it does happened inside of it.
    ids = [f"00-{span.trace_id.hex()}-{span.span_id.hex()}" for span in Collector.spans[:2]]
    assert [trace.rpartition("-")[0] for trace in stack.worker.traces] == ids


@pytest.mark.parametrize("streaming", [True, False])
def test_a_callers_trace_reaches_the_worker_and_the_log_without_the_extra(
    stack: Stack, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    """traceparent goes on over gRPC, with generations and scores, and its trace id stands in the log lines of the request."""
    traced = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"model": "tiny", "prompt": "Hello you", "stream": streaming}
    seen: list[str] = []
    watch = logging.Handler()
    watch.setFormatter(JsonFormatter("gateway"))
    watch.addFilter(lambda record: record.getMessage().startswith("POST"))
    watch.emit = lambda record: seen.append(watch.format(record))  # type: ignore[method-assign]
    logging.getLogger("services.gateway").addHandler(watch)
    try:
        with caplog.at_level(logging.INFO):
            assert stack.http.post("/v1/completions", json=body, headers=traced).status_code == 200
            scoring = body | {"echo": True, "logprobs": 1, "max_tokens": 0}
            assert stack.http.post("/v1/completions", json=scoring, headers=traced).status_code == 200
            assert stack.http.post("/v1/completions", json=body).status_code == 200
            until(lambda: len(seen) == 3, "the log lines")
    finally:
        logging.getLogger("services.gateway").removeHandler(watch)
    assert stack.worker.traces == [traced["traceparent"]] * 2 + [""]
    assert [json.loads(line).get("trace_id") for line in seen] == [TRACE, TRACE, None]


@pytest.mark.parametrize(
    "given",
    ["", "x", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01x"],
)
def test_what_is_no_trace_goes_nowhere(stack: Stack, given: str) -> None:
    """A header that is no traceparent is dropped; the request is answered."""
    assert stack.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"}, headers={"traceparent": given}).status_code == 200
    assert stack.worker.traces == [""]


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear error instead of a traceback."""
    missing.hide(monkeypatch, "opentelemetry")
    with pytest.raises(ConfigError, match="otel"):
        tracing.provider_for("http://127.0.0.1:1/v1/traces")


def test_a_collector_that_is_away_costs_no_request() -> None:
    """Spans are dropped, requests are answered, the end is not held up for long."""
    stack = Stack(otlp_endpoint="http://127.0.0.1:1/v1/traces")
    stack.worker.script = Script((Say("</think>x"), Finish()))
    assert stack.post().status_code == 200
    stack.close()


def test_one_trace_goes_through_gateway_and_worker(collector: str, tmp_path: Path) -> None:
    """The worker's call is within the gateway's request, and its phases within the call, all in the client's trace."""
    directory = random_checkpoint.write(tmp_path / "model")
    worker = RunningWorker(model_dir=str(directory), shm_dir=str(tmp_path), otlp_endpoint=collector)
    stack = Stack(start_worker=False, worker_address=f"127.0.0.1:{worker.worker.port}", otlp_endpoint=collector)
    until(lambda: stack.http.get("/health").status_code == 200, "ready", 30)
    body = {"model": "glm-5.3-tiny", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
    traced = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    assert stack.http.post("/v1/completions", json=body, headers=traced).status_code == 200
    stack.close()
    worker.close()
    until(lambda: len(Collector.spans) >= 5, "the spans arrived")
    spans = {span.name: span for span in Collector.spans}
    assert {span.trace_id.hex() for span in Collector.spans} == {TRACE}
    request, call = spans["POST /v1/completions"], spans["glm53.worker.v1.Worker/Generate"]
    assert request.parent_span_id.hex() == PARENT
    assert call.parent_span_id == request.span_id
    assert [spans[name].parent_span_id for name in ("queue", "prefill", "decode")] == [call.span_id] * 3
    assert attributes(call)["glm53.request_id"] == attributes(request)["glm53.request_id"]
