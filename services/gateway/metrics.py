"""The gateway's own counters. What the engine does is counted by the worker, whose text is passed on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from services.common.errors import ERROR_TYPES, Cancelled, Glm53Error
from services.common.memory import MemoryCollector
from services.gateway import errors
from services.gateway.answers import Answer
from services.gateway.choices import Choices
from services.gateway.schemas import UNKNOWN_FIELDS

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN_BUCKETS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
# What is refused before it becomes a request, or by a key's limit.
_REFUSALS = (
    errors.AuthenticationFailed,
    errors.PermissionDenied,
    errors.ModelNotAllowed,
    errors.RateLimited,
    errors.HeadersTooLarge,
    errors.UrlTooLong,
    errors.InvalidHttp,
    errors.UnsupportedHttp,
    errors.MethodNotAllowed,
    errors.RequestTimeout,
    errors.TooManyConnections,
)
# With what a stream ends by no fault of its client.
_STREAM_ERRORS: tuple[type[Glm53Error], ...] = (
    errors.ShuttingDown,
    *(cls for cls in ERROR_TYPES.values() if errors.http_of(cls("")).status >= 500),
)
# Answers that are a fault of ours: no refusal (503), and nothing that a client did (501).
_FAILURES = ("500", "504")


class GatewayMetrics:
    """Counters of one gateway process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(MemoryCollector("gateway", prefix="glm53_gateway"))
        self._started = time.monotonic()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"glm53_gateway_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS) -> Histogram:
            return Histogram(f"glm53_gateway_{name}", text, registry=self.registry, buckets=buckets)

        self.responses = counter("http_responses", "Answered requests by route and status.", "route", "status")
        self.disconnects = counter("client_disconnects", "Generations whose client went away.")
        self.slow_readers = counter("slow_readers", "Clients cut off because they took nothing of their answer.")
        self.stream_errors = counter("stream_errors", "Streams that ended with an error event.", "code")
        self.rejected_calls = counter("undeclared_tool_calls", "Calls of undeclared tools passed on as text.")
        self.unclosed_reasoning = counter("unclosed_reasoning", "Answers that ended inside their reasoning.")
        self.registry.register(UNKNOWN_FIELDS)
        self.usage_lost = counter("usage_lines_lost", "Lines of usage that could not be written and found no more room.")
        self.refusals = counter("refusals", "Requests refused at the door or by a key's limit.", "code")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished generations.")
        self.completion_tokens = counter("completion_tokens", "Generated tokens of finished generations.")
        self.in_flight = Gauge("glm53_gateway_requests_in_flight", "POST requests that are being answered.", registry=self.registry)
        self.worker_up = Gauge("glm53_gateway_worker_up", "1 while the worker takes requests.", registry=self.registry)
        self.shared_up = Gauge("glm53_gateway_shared_state_up", "1 while Redis answers, or none is configured.", registry=self.registry)
        self.shared_up.set(1)
        self.first_token_s = histogram("time_to_first_token_seconds", "From the request to its first token.")
        self.queue_s = histogram("queue_seconds", "Time that finished generations waited in the worker's queue.")
        self.prompt_size = histogram("request_prompt_tokens", "Prompt tokens of one finished generation.", _TOKEN_BUCKETS)
        self.completion_size = histogram("request_completion_tokens", "Generated tokens of one finished generation.", _TOKEN_BUCKETS)
        self.duration_s = histogram("generation_seconds", "From the request to the end of its generation.")
        # A rate sees the first error only where its series stood at nought before.
        for stream_error in _STREAM_ERRORS:
            self.stream_errors.labels(stream_error.code)
        for refusal in _REFUSALS:
            self.refusals.labels(refusal.code)
        self.serves(["unknown"])

    def serves(self, routes: Iterable[str]) -> None:
        """Names the routes that there are, so that their first failure is seen too."""
        for route in routes:
            for status in _FAILURES:
                self.responses.labels(route, status)

    def generation_ended(self, choices: Choices, answer: Answer, error: Glm53Error | None, *, streamed: bool) -> None:
        """Counts the generations of one request, however they ended."""
        if choices.first_token_s is not None:
            self.first_token_s.observe(choices.first_token_s)
        self.duration_s.observe(choices.age_s)
        for finished in choices.finished:
            self.prompt_tokens.inc(finished.prompt_tokens)
            self.completion_tokens.inc(finished.completion_tokens)
            self.queue_s.observe(finished.queue_s)
            self.prompt_size.observe(finished.prompt_tokens)
            self.completion_size.observe(finished.completion_tokens)
        if isinstance(error, Cancelled):
            self.disconnects.inc()
        elif error is not None and streamed:
            self.stream_errors.labels(error.code).inc()
        self.rejected_calls.inc(answer.num_rejected_calls)
        self.unclosed_reasoning.inc(answer.unclosed_reasoning)

    def refused(self, error: Glm53Error, status: int) -> None:
        """Something was refused before it became a request."""
        self.refusals.labels(error.code).inc()
        self.responses.labels("unknown", str(status)).inc()

    def reader_stopped(self) -> None:
        """A client was cut off because it took nothing."""
        self.slow_readers.inc()

    def text(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)

    def snapshot(self) -> dict[str, Any]:
        """The same numbers for /stats."""
        values: dict[str, Any] = {"uptime_s": round(time.monotonic() - self._started, 3)}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_created")) or (sample.labels and not sample.value):
                    continue
                name = sample.name.removeprefix("glm53_gateway_")
                labels = "".join(f"{{{'/'.join(sample.labels.values())}}}" if sample.labels else "")
                values[name + labels] = sample.value
        return values
