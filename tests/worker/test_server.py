"""The worker over real gRPC: what a gateway relies on."""

from __future__ import annotations

import contextvars
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from services.common import errors
from services.common.grpc_status import ERROR_METADATA_KEY, error_of
from services.common.pb.glm53.worker.v1 import worker_pb2 as pb
from services.common.pb.glm53.worker.v1 import worker_pb2_grpc as pb_grpc
from services.gpu_worker.backends import cpu
from tests.worker.harness import PROMPT, Answer, RunningWorker, until

LONG = list(range(40, 2440))


def test_stream_has_admission_prefill_tokens_and_one_end(worker: RunningWorker) -> None:
    """A stream brings admission, prefill progress, tokens one by one and exactly one final event with true counts."""
    answer = worker.generate(max_tokens=12)
    kinds = [event.WhichOneof("event") for event in answer.events]
    assert kinds[:2] == ["admitted", "prefill"]
    assert len(answer.ids) == 12
    assert answer.finished.reason == pb.FINISH_REASON_LENGTH
    assert answer.finished.prompt_tokens == len(PROMPT)
    assert answer.finished.completion_tokens == 12
    assert answer.finished.cached_tokens == 0
    assert answer.finished.decode_s > 0


def test_info_and_tokenizer(worker: RunningWorker) -> None:
    """Info tells what is served; the tokenizer is sent once per hash and its parts are the checkpoint's files."""
    info = worker.stub.Info(pb.InfoRequest())
    assert info.state == pb.SERVICE_STATE_READY
    assert info.load_progress == 1.0
    assert info.model_name == "glm-5.3-tiny"
    assert info.max_context == 16384
    assert info.mode == pb.MODE_FAST
    assert info.mode_reason
    assert info.kernel_variant
    assert info.arithmetic_version == 1
    assert list(info.eos_token_ids)
    full = worker.stub.GetTokenizer(pb.GetTokenizerRequest())
    assert b'"added_tokens"' in full.tokenizer_json
    assert "<|assistant|>" in full.chat_template
    again = worker.stub.GetTokenizer(pb.GetTokenizerRequest(known_sha256=full.sha256))
    assert again.sha256 == full.sha256
    assert again.tokenizer_json == b""


def test_health_service_says_serving(worker: RunningWorker) -> None:
    """grpc.health.v1 answers SERVING for the server and for the Worker service once the model is loaded."""
    stub = health_pb2_grpc.HealthStub(worker.channel)
    for name in ("", "glm53.worker.v1.Worker"):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == health_pb2.HealthCheckResponse.SERVING


def test_not_ready_before_loading(start_worker: Callable[..., RunningWorker]) -> None:
    """Before the model is loaded Info answers, and a generation is refused with NotReady and a time to come back."""
    running = start_worker(load=False)
    assert running.stub.Info(pb.InfoRequest()).state == pb.SERVICE_STATE_STARTING
    error, events = running.refused(running.request())
    assert isinstance(error, errors.NotReady)
    assert error.retry_after_s
    assert not events


def test_ragged_requests_together_answer_as_alone(worker: RunningWorker) -> None:
    """Eight requests of different lengths at the same time give the tokens and log-probabilities of each alone."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 2500, size).tolist() for size in (1, 3, 17, 64, 130, 257, 300, 611)]
    requests = [worker.request(prompt, max_tokens=24, logprobs=0) for prompt in prompts]
    alone = [worker.generate(prompt, max_tokens=24, logprobs=0) for prompt in prompts]
    batched = worker.together(requests)
    assert [answer.ids for answer in batched] == [answer.ids for answer in alone]
    for one, other in zip(batched, alone, strict=True):
        assert [t.logprob for t in one.tokens] == [t.logprob for t in other.tokens]


def test_the_next_turn_of_a_conversation_reuses_the_state(worker: RunningWorker) -> None:
    """The next turn reports the cached tokens and answers with the bits of a computation from scratch."""
    rng = np.random.default_rng(21)
    first = rng.integers(0, 2500, 300).tolist()
    answer = worker.generate(first, max_tokens=12, logprobs=0, key_id="alice")
    assert answer.finished.cached_tokens == 0
    turn = [*first, *answer.ids, *rng.integers(0, 2500, 20).tolist()]
    warm = worker.generate(turn, max_tokens=12, logprobs=0, key_id="alice")
    cold = worker.generate(turn, max_tokens=12, logprobs=0, key_id="bob")
    assert warm.finished.cached_tokens == len(first) + 11
    assert next(event.admitted for event in warm.events if event.HasField("admitted")).cached_tokens == len(first) + 11
    assert cold.finished.cached_tokens == 0
    assert [(t.id, t.logprob) for t in warm.tokens] == [(t.id, t.logprob) for t in cold.tokens]


def test_seed_fixes_the_draw_whoever_else_runs(worker: RunningWorker) -> None:
    """The same seed draws the same tokens alone and among others; another seed draws others."""
    sampled = {"temperature": 1.0, "max_tokens": 24, "top_p": 0.95}
    alone = worker.generate(seed=7, **sampled)
    requests = [worker.request(seed=seed, **sampled) for seed in (7, 8, 9, 7)]
    together = worker.together(requests)
    assert together[0].ids == together[3].ids == alone.ids
    assert together[1].ids != alone.ids


def test_cancel_in_mid_stream_frees_the_stream(worker: RunningWorker) -> None:
    """Cancel ends a running generation with reason CANCELLED and gives its stream back; a second Cancel finds nothing."""
    request = worker.request(max_tokens=8000)
    stream = worker.start(request)
    events = iter(stream)
    answer = Answer()
    while len(answer.ids) < 3:
        answer.events.append(next(events))
    assert worker.stub.Cancel(pb.CancelRequest(request_id=request.request_id)).found
    answer.events.extend(events)
    assert answer.finished.reason == pb.FINISH_REASON_CANCELLED
    assert answer.finished.completion_tokens == len(answer.ids)
    assert len(answer.ids) < 8000
    worker.wait_idle()
    assert not worker.stub.Cancel(pb.CancelRequest(request_id=request.request_id)).found


def test_lost_stream_cancels_in_mid_prefill(worker: RunningWorker) -> None:
    """A client that goes away during prefill frees the stream long before the prompt is done."""
    request = worker.request(LONG * 6, max_tokens=4)
    stream = worker.start(request)
    seen = next(event for event in stream if event.HasField("prefill"))
    assert seen.prefill.done_tokens < len(LONG) * 6
    stream.cancel()
    before = int(worker.engine.metrics.to_json()["prefill_tokens"])
    worker.wait_idle()
    computed = int(worker.engine.metrics.to_json()["prefill_tokens"]) - before
    assert computed <= 4 * worker.settings.chunk_size


def test_stop_string_over_token_borders(worker: RunningWorker) -> None:
    """A stop string that starts inside one token and ends inside another cuts the text exactly where it begins."""
    whole = worker.generate(max_tokens=24)
    text = whole.text
    pieces = [token.piece for token in whole.tokens]
    start = len(b"".join(pieces[:6])) + max(1, len(pieces[6]) // 2)
    stop = text[start : len(b"".join(pieces[:9]))]
    decoded = stop.decode("utf-8", errors="ignore").strip("\x00")
    if decoded.encode() != stop:
        # Random weights speak in half characters: take a stop string of the readable kind from elsewhere in the text.
        decoded = _readable_stop(pieces)
        stop = decoded.encode()
    answer = worker.generate(max_tokens=24, stop=[decoded])
    assert answer.finished.reason == pb.FINISH_REASON_STOP
    assert answer.finished.stop_string == decoded
    assert answer.text == text[: text.index(stop)]
    kept = worker.generate(max_tokens=24, stop=[decoded], include_stop_str_in_output=True)
    assert kept.text == text[: text.index(stop) + len(stop)]


def _readable_stop(pieces: list[bytes]) -> str:
    for first, second in itertools.pairwise(pieces[4:]):
        try:
            return (first + second).decode()
        except UnicodeDecodeError:
            continue
    raise AssertionError("no two neighbouring tokens are whole characters: choose another seed for the checkpoint")


def test_stop_token_ids_and_min_tokens(worker: RunningWorker) -> None:
    """A stop token ends the output with empty bytes, but not before min_tokens."""
    plain = worker.generate(max_tokens=16)
    stop_id = plain.ids[5]
    first = plain.ids.index(stop_id)
    answer = worker.generate(max_tokens=16, stop_token_ids=[stop_id])
    assert answer.ids == plain.ids[: first + 1]
    assert answer.tokens[-1].piece == b""
    assert answer.finished.stop_token_id == stop_id
    assert answer.finished.reason == pb.FINISH_REASON_STOP
    later = worker.generate(max_tokens=16, min_tokens=12, stop_token_ids=[stop_id])
    assert stop_id not in later.ids[:12]


def test_logprobs_are_the_models_log_softmax(worker: RunningWorker) -> None:
    """Sampled log-probabilities equal teacher-forced scores of the same tokens, and greedy's token leads its own ranking."""
    answer = worker.generate(max_tokens=10, logprobs=3)
    scored = worker.stub.Score(pb.ScoreRequest(request_id="score", token_ids=PROMPT + answer.ids, first_scored=len(PROMPT), top=3)).tokens
    assert [token.id for token in scored] == answer.ids
    for one, other in zip(answer.tokens, scored, strict=True):
        assert one.logprob == other.logprob
        assert [(t.token_id, t.logprob) for t in one.top] == [(t.token_id, t.logprob) for t in other.top]
        assert one.top[0].token_id == one.id
        assert one.top[0].logprob >= one.top[1].logprob >= one.top[2].logprob
        assert one.logprob < 0


def test_logprobs_ignore_sampling_parameters(worker: RunningWorker) -> None:
    """Temperature, penalties and bias change the choice, never the reported log-probabilities."""
    plain = worker.generate(max_tokens=1, logprobs=2)
    biased = worker.generate(max_tokens=1, logprobs=2, logit_bias={17: 100.0}, presence_penalty=1.5)
    assert biased.ids == [17]
    assert [t.logprob for t in biased.tokens[0].top] == [t.logprob for t in plain.tokens[0].top]


def test_prompt_logprobs_cover_every_prompt_token(worker: RunningWorker) -> None:
    """Prompt scores arrive over chunk borders, one per prompt token but the first."""
    prompt = LONG[:700]
    answer = worker.generate(prompt, max_tokens=1, prompt_logprobs=True, logprobs=0)
    scored = [token for event in answer.events for token in event.prefill.prompt_tokens]
    assert [token.id for token in scored] == prompt
    assert not scored[0].HasField("logprob")
    assert all(token.HasField("logprob") and token.logprob < 0 for token in scored[1:])
    direct = worker.stub.Score(pb.ScoreRequest(request_id="direct", token_ids=prompt, first_scored=1)).tokens
    assert [token.logprob for token in direct] == [token.logprob for token in scored[1:]]


def test_thinking_budget_forces_its_tokens(worker: RunningWorker) -> None:
    """After the budget without the end token the forced tokens come, then the choice is free again."""
    plain = worker.generate(max_tokens=12)
    budget = pb.ThinkingBudget(budget=4, end_token_id=2546, forced_token_ids=[2546, 100])
    answer = worker.generate(max_tokens=12, thinking_budget=budget)
    assert answer.ids[:4] == plain.ids[:4]
    assert answer.ids[4:6] == [2546, 100]
    assert len(answer.ids) == 12


BAD_FIELDS: list[tuple[str, dict[str, object]]] = [
    ("request_id", {"request_id": ""}),
    ("request_id", {"request_id": "x" * 300}),
    ("key_id", {"key_id": "k" * 300}),
    ("prompt_token_ids", {"prompt_token_ids": []}),
    ("prompt_token_ids[1]", {"prompt_token_ids": [1, 2560]}),
    ("priority", {"priority": 9}),
    ("queue_timeout_ms", {"queue_timeout_ms": 2**32 - 1}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1.1}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("logit_bias", {"logit_bias": {2560: 1.0}}),
    ("logit_bias", {"logit_bias": {1: 101.0}}),
    ("max_tokens", {"max_tokens": 0}),
    ("min_tokens", {"max_tokens": 4, "min_tokens": 5}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop[1]", {"stop": ["a", ""]}),
    ("stop[0]", {"stop": ["é" * 257]}),
    ("stop_token_ids[0]", {"stop_token_ids": [99999]}),
    ("logprobs", {"logprobs": -2}),
    ("logprobs", {"logprobs": 101}),
    ("thinking_budget.forced_token_ids", {"thinking_budget": pb.ThinkingBudget(budget=1, end_token_id=1)}),
    ("thinking_budget.end_token_id[0]", {"thinking_budget": pb.ThinkingBudget(budget=1, end_token_id=2560, forced_token_ids=[1])}),
]


@pytest.mark.parametrize(("param", "fields"), BAD_FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_field_is_refused_by_name(worker: RunningWorker, param: str, fields: dict[str, object]) -> None:
    """Every field out of range is refused with INVALID_ARGUMENT and an error that names it, before any event."""
    error, events = worker.refused(worker.request(**fields))
    assert isinstance(error, errors.InvalidRequest)
    assert error.param == param
    assert not events


def test_errors_travel_whole(worker: RunningWorker) -> None:
    """An error's status, field and message arrive as the worker raised them, by status for any client and by metadata for ours."""
    with pytest.raises(grpc.RpcError) as caught:
        list(worker.start(worker.request(top_p=7.0)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert ERROR_METADATA_KEY in dict(caught.value.trailing_metadata())
    error = error_of(caught.value)
    assert (error.param, error.message) == ("top_p", "top_p is 7, need a number above 0 to 1")


def test_context_overflow_comes_before_any_event(worker: RunningWorker) -> None:
    """Prompt and max_tokens beyond the context are refused as OUT_OF_RANGE with both numbers, before any event."""
    error, events = worker.refused(worker.request(LONG * 7, max_tokens=10))
    assert isinstance(error, errors.ContextLengthExceeded)
    assert str(len(LONG) * 7) in error.message
    assert "16384" in error.message
    assert not events
    error, events = worker.refused(worker.request(max_tokens=16384 - len(PROMPT) + 1))
    assert isinstance(error, errors.ContextLengthExceeded)
    assert not events


def test_duplicate_live_id_is_refused(worker: RunningWorker) -> None:
    """Two live requests cannot share an id; the first goes on."""
    request = worker.request(max_tokens=4000, request_id="twice")
    stream = worker.start(request)
    next(stream)
    error, _ = worker.refused(worker.request(request_id="twice"))
    assert isinstance(error, errors.InvalidRequest)
    assert error.param == "request_id"
    assert next(stream) is not None
    stream.cancel()
    worker.wait_idle()


def test_queue_full_names_a_time_to_come_back(start_worker: Callable[..., RunningWorker]) -> None:
    """When the queue is full the next request gets RESOURCE_EXHAUSTED with a wait estimate, and what waits is served later."""
    running = start_worker(max_streams=1, max_queued=4)
    streams = [running.start(running.request(max_tokens=2000, key_id="busy"))]
    next(streams[0])
    for i in range(4):
        streams.append(running.start(running.request(max_tokens=3, key_id=f"key{i}")))
        until(lambda count=i + 1: running.engine.num_queued == count, "the request waits")
    error, events = running.refused(running.request(key_id="other"))
    assert isinstance(error, errors.QueueFull)
    assert error.retry_after_s
    assert 1 <= error.retry_after_s <= 300
    assert not events
    streams[0].cancel()
    assert all(len(running.collect(stream).ids) == 3 for stream in streams[1:])
    running.wait_idle()


def test_queue_timeout_ends_a_waiting_request(start_worker: Callable[..., RunningWorker]) -> None:
    """A request that waits longer than it wanted ends with a queue timeout, hears when to come back, and never ran."""
    running = start_worker(max_streams=1)
    busy = running.start(running.request(max_tokens=8000))
    next(busy)
    error, events = running.refused(running.request(queue_timeout_ms=200))
    assert isinstance(error, errors.QueueTimeout)
    assert "queue" in error.message
    assert error.retry_after_s is not None
    assert error.retry_after_s >= 1
    assert not events
    busy.cancel()
    running.wait_idle()


def test_drain_lets_live_streams_end_and_refuses_new_ones(start_worker: Callable[..., RunningWorker]) -> None:
    """While the worker drains, a live stream completes, a new request gets NotReady and health says NOT_SERVING."""
    running = start_worker()
    stream = running.start(running.request(max_tokens=300))
    next(stream)
    answers: list[Answer] = []
    reader = threading.Thread(target=lambda: answers.append(running.collect(stream)))
    reader.start()
    drained = threading.Thread(target=lambda: running.run(running.worker.drain()))
    drained.start()
    until(lambda: running.stub.Info(pb.InfoRequest()).state == pb.SERVICE_STATE_DRAINING, "the worker drains")
    error, _ = running.refused(running.request())
    assert isinstance(error, errors.NotReady)
    health = health_pb2_grpc.HealthStub(running.channel)
    assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    drained.join(30)
    reader.join(30)
    assert len(answers[0].ids) == 300


def test_slow_reader_is_ended(start_worker: Callable[..., RunningWorker]) -> None:
    """A client that stops reading does not stop others, and its stream is ended after the slow-reader time."""
    running = start_worker(slow_reader_s=1.0, stream_buffer_events=4)
    # A connection with small windows: by default it would swallow megabytes before the worker notices that nobody reads.
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
    with grpc.insecure_channel(f"127.0.0.1:{running.worker.port}", options=options) as channel:
        _read_nothing(running, pb_grpc.WorkerStub(channel))


def _read_nothing(running: RunningWorker, stub: pb_grpc.WorkerStub) -> None:
    lazy = stub.Generate(running.request(max_tokens=16000, logprobs=40), timeout=120)
    next(lazy)
    until(lambda: running.engine.num_running == 1, "the request runs")
    assert len(running.generate(max_tokens=50).ids) == 50
    until(lambda: running.engine.num_live == 0, "the slow reader's request is gone", timeout_s=60)
    running.wait_idle()
    with pytest.raises(errors.DeadlineExceeded, match="reader"):
        running.collect(lazy)


def test_twenty_requests_cancelled_at_random_points(worker: RunningWorker) -> None:
    """However requests are cancelled, every stream comes back and nobody gets another's events."""
    rng = np.random.default_rng(11)
    streams = [worker.start(worker.request(LONG[: int(size)], max_tokens=200)) for size in rng.integers(1, 900, 20)]
    for stream, wait_s in zip(streams, rng.uniform(0, 0.15, 20), strict=True):
        time.sleep(wait_s)
        stream.cancel()
    worker.wait_idle()
    assert worker.engine.backend.memory_tokens == (0, 0)
    assert len(worker.generate().ids) == 8


def test_stats_count_what_happened(worker: RunningWorker) -> None:
    """Stats count tokens, picks of every lane and the cache's work, as JSON and as Prometheus text."""
    worker.generate(max_tokens=64)
    answer = worker.stub.Stats(pb.StatsRequest())
    stats = json.loads(answer.json)
    assert stats["engine"]["decode_tokens"] >= 64
    cache = stats["expert_cache"][0]
    assert cache["slots"] > 0
    assert cache["hits"] > 0
    assert cache["admissions"] > 0
    assert stats["tiers"]["picks"]["cpu"] > 0
    text = answer.prometheus_text.decode()
    assert 'glm53_expert_picks_total{lane="hit",layer="0"}' in text
    assert "glm53_decode_tokens_total" in text
    assert 'vllm:generation_tokens_total{engine="0",model_name="glm-5.3-tiny"}' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="glm-5.3-tiny"}' in text
    families = {family.name for family in text_string_to_metric_families(text)}
    assert {"vllm:num_requests_running", "vllm:time_to_first_token_seconds", "glm53_queue_wait_seconds"} <= families


def test_a_callers_trace_stands_in_the_log(worker: RunningWorker, caplog: pytest.LogCaptureFixture) -> None:
    """The line that a request ends with has the trace's id; one without a trace, or with nonsense for one, has none."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with caplog.at_level(logging.INFO, logger="services.gpu_worker.loop"):
        for given in (f"00-{trace}-00f067aa0ba902b7-01", "nonsense"):
            list(worker.stub.Generate(worker.request(), timeout=60, metadata=(("traceparent", given),)))
        worker.generate()
        worker.wait_idle()
    ended = [record for record in caplog.records if record.getMessage() == "request finished"]
    assert [getattr(record, "trace_id", None) for record in ended] == [trace, None, None]


def test_verify_tiers_finds_everything_whole(worker: RunningWorker) -> None:
    """VerifyTiers re-reads every record and finds none bad."""
    report = worker.stub.VerifyTiers(pb.VerifyTiersRequest())
    assert report.records_checked == 6 * 24  # MoE layers times experts of the shipped configuration
    assert report.records_bad == report.slots_bad == 0


def test_the_engine_runs_in_the_context_of_the_load(start_worker: Callable[..., RunningWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backend sets there while it loads, as Triton's allocator is set, is there when it computes."""
    allocator = contextvars.ContextVar("allocator", default="none")
    seen: list[str] = []
    load = cpu.load

    def setting(*how: Any) -> Any:
        backend = load(*how)
        allocator.set("loaded")
        prefill = backend.prefill
        monkeypatch.setattr(backend, "prefill", lambda *args, **options: seen.append(allocator.get()) or prefill(*args, **options))
        return backend

    monkeypatch.setattr(cpu, "load", setting)
    assert len(start_worker().generate().ids) == 8
    assert set(seen) == {"loaded"}
    assert allocator.get() == "none"
