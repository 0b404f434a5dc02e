"""Spans of the worker over real gRPC: a call, and within it what the request went through."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from services.common.errors import ConfigError, InvalidRequest, QueueFull
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.gpu_worker.backends import cpu
from services.gpu_worker.settings import GpuWorkerSettings
from services.gpu_worker.worker import Worker
from tests.support import missing
from tests.worker.harness import PROMPT, RunningWorker, until

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
CALLER = (("traceparent", f"00-{TRACE:032x}-{PARENT:016x}-01"),)
LONG = list(range(40, 2440))


class Traced:
    """A worker and the spans that it made."""

    def __init__(self, start: Callable[..., RunningWorker], **settings: Any) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.worker = start(traces=provider, **settings)

    def calls(self, count: int = 1) -> list[list[ReadableSpan]]:
        """Of each call: its own span, then those within it, in the order in which they began."""
        until(lambda: len([span for span in self._exporter.get_finished_spans() if span.kind is SpanKind.SERVER]) >= count, "the spans")
        spans = self._exporter.get_finished_spans()
        servers = sorted((span for span in spans if span.kind is SpanKind.SERVER), key=lambda span: span.start_time or 0)
        assert len(servers) == count
        return [
            [server, *sorted((s for s in spans if s.parent is not None and s.parent.span_id == server.context.span_id), key=_start)]
            for server in servers
        ]


def _start(span: ReadableSpan) -> int:
    assert span.start_time is not None
    return span.start_time


@pytest.fixture
def traced(start_worker: Callable[..., RunningWorker]) -> Traced:
    return Traced(start_worker, max_streams=1, max_queued=1)


def test_a_generation_is_a_call_with_its_phases_in_the_callers_trace(traced: Traced) -> None:
    """Queue, prefill and decoding follow each other without gaps inside the call, whose parent is the caller's span."""
    before = time.time_ns()
    answer = traced.worker.collect(traced.worker.stub.Generate(traced.worker.request(max_tokens=12), timeout=60, metadata=CALLER))
    call, *phases = traced.calls()[0]
    assert call.name == "glm53.worker.v1.Worker/Generate"
    assert call.parent is not None
    assert (call.context.trace_id, call.parent.span_id) == (TRACE, PARENT)
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert {span.context.trace_id for span in phases} == {TRACE}
    queue, prefill, decode = phases
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    # The event loop and the engine's thread each look at the clock; the comparison with the wall clock has its own grain.
    assert before - 10**7 <= _start(call) <= _start(queue) + 1000
    assert decode.end_time is not None
    assert call.end_time is not None
    assert decode.end_time <= call.end_time + 1000
    assert call.end_time <= time.time_ns() + 10**7
    finished = answer.finished
    for span, seconds in ((queue, finished.queue_s), (prefill, finished.prefill_s), (decode, finished.decode_s)):
        assert ((span.end_time or 0) - _start(span)) / 1e9 == pytest.approx(seconds, abs=1e-3)
    found = dict(call.attributes or {})
    assert found["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert found["gen_ai.usage.output_tokens"] == 12
    assert (found["glm53.state"], found["glm53.finish_reason"], found["rpc.method"]) == ("finished", "length", "Generate")
    assert call.status.status_code is StatusCode.UNSET


def test_a_score_has_no_decoding(traced: Traced) -> None:
    """It reads a prompt and is done."""
    traced.worker.stub.Score(pb.ScoreRequest(request_id="score", token_ids=PROMPT, first_scored=1), metadata=CALLER)
    call, *phases = traced.calls()[0]
    assert call.name == "glm53.worker.v1.Worker/Score"
    assert call.context.trace_id == TRACE
    assert [span.name for span in phases] == ["queue", "prefill"]


def test_a_call_without_a_trace_begins_one(traced: Traced) -> None:
    """Each its own."""
    traced.worker.generate()
    traced.worker.generate()
    first, second = traced.calls(2)
    assert first[0].parent is second[0].parent is None
    assert first[0].context.trace_id != second[0].context.trace_id
    assert [len(first), len(second)] == [4, 4]


def test_a_trace_that_is_not_sampled_costs_no_span(traced: Traced) -> None:
    """The caller's flag decides."""
    list(traced.worker.stub.Generate(traced.worker.request(), timeout=60, metadata=((CALLER[0][0], CALLER[0][1][:-1] + "0"),)))
    traced.worker.generate()
    assert traced.calls()[0][0].context.trace_id != TRACE


def test_refused_and_cancelled_calls_tell_how_far_they_came(traced: Traced) -> None:
    """One in decoding, one in the queue, one that found the queue full; the last names its error, and none says what was asked."""
    worker = traced.worker
    running = worker.start(worker.request(max_tokens=4000))
    assert next(event for event in running if event.HasField("tokens"))
    waiting = worker.start(worker.request(LONG))
    until(lambda: worker.engine.num_queued == 1, "one waits")
    error, _ = worker.refused(worker.request())
    assert isinstance(error, QueueFull)
    waiting.cancel()
    until(lambda: worker.engine.num_queued == 0, "it left the queue")
    running.cancel()
    worker.wait_idle()
    first, second, third = traced.calls(3)
    assert [span.name for span in first[1:]] == ["queue", "prefill", "decode"]
    assert [span.name for span in second[1:]] == ["queue"]
    assert third[0].status.status_code is StatusCode.ERROR
    assert dict(third[0].attributes or {})["error.type"] == error.code
    assert "decode" not in [span.name for span in third[1:]]
    assert first[0].status.status_code is second[0].status.status_code is StatusCode.UNSET


def test_a_request_that_fails_in_mid_answer_is_an_error(traced: Traced) -> None:
    """Limits that leave no token end the call with the error's name."""
    request = traced.worker.request(allowed_token_ids=[7], bad_words=[pb.TokenSequence(token_ids=[7, 7])])
    error, _ = traced.worker.refused(request)
    assert isinstance(error, InvalidRequest)
    call, *phases = traced.calls()[0]
    assert dict(call.attributes or {})["error.type"] == error.code
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]


def test_nothing_of_prompt_or_answer_is_in_a_span(traced: Traced) -> None:
    """Attributes are counts, names and ids of requests."""
    traced.worker.generate(max_tokens=3, request_id="mine")
    values = [value for span in traced.calls()[0] for value in (span.attributes or {}).values()]
    assert all(
        isinstance(value, int) or value in ("grpc", "glm53.worker.v1.Worker", "Generate", "mine", "finished", "length") for value in values
    )


async def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Exit code 78 and a sentence instead of a traceback."""
    missing.hide(monkeypatch, "opentelemetry")
    settings = GpuWorkerSettings.load({}, worker_address="127.0.0.1:0", otlp_endpoint="http://127.0.0.1:1/v1/traces")
    with pytest.raises(ConfigError, match="otel"):
        await Worker(settings, cpu.load).listen()
    assert await Worker(settings, cpu.load).run() == 78
    assert "otel" in caplog.text
