"""vLLM's metric family under its exact names, so that dashboards made for vLLM work unchanged.

What the engine already counts per token is not counted twice: those families are views, renamed and labelled when somebody scrapes.
Left out is what this engine has nothing for: LoRA adapters, drafts, paged memory, several choices in one request (the gateway makes
them requests of their own).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.gpu_worker.request import FinishReason, Request

# vLLM's label for one of several engines behind one API; a worker is one engine.
_ENGINE = "0"
_LABELS = ["model_name", "engine"]
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.GRAMMAR_END: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)

# A family and the help text of the view of it.
Views = Mapping[str, tuple[Histogram | Gauge, str]]


class VllmMetrics:
    """What is counted for vLLM's family alone. Written by the engine's thread.

    Args:
        model_name: value of the label that all of them carry.
        registry: where they are registered.
        seconds: buckets of durations.
        views: name → what it shows.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry, seconds: tuple[float, ...], views: Views) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=registry).labels(model_name, _ENGINE)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, _LABELS, registry=registry).labels(model_name, _ENGINE)

        registry.register(_Renamed(views, {"model_name": model_name, "engine": _ENGINE}))
        self._prompt = counter("prompt_tokens", "Prompt tokens of prompts that were read.")
        self._prompt_cached = counter("prompt_tokens_cached", "Of these, tokens whose state was kept from earlier.")
        by_source = Counter("vllm:prompt_tokens_by_source", "The same by source.", [*_LABELS, "source"], registry=registry)
        self._computed = by_source.labels(model_name, _ENGINE, "local_compute")
        self._from_cache = by_source.labels(model_name, _ENGINE, "local_cache_hit")
        self._queries = counter("prefix_cache_queries", "Prompt tokens that were looked up among kept states.")
        self._hits = counter("prefix_cache_hits", "Of these, tokens that were found.")
        self._generated = counter("generation_tokens", "Tokens sampled.")
        self._preemptions = counter("num_preemptions", "Times that a running request was put back into the queue.")
        success = Counter("vllm:request_success", "Finished requests.", [*_LABELS, "finished_reason"], registry=registry)
        self._success = {reason: success.labels(model_name, _ENGINE, reason) for reason in sorted(set(_REASONS.values()))}
        self._prefill = histogram("request_prefill_time_seconds", "From admission to the end of the prompt.", seconds)
        self._decode = histogram("request_decode_time_seconds", "From the end of the prompt to the end.", seconds)
        self._inference = histogram("request_inference_time_seconds", "From admission to the end.", seconds)
        self._per_token = histogram("request_time_per_output_token_seconds", "Mean time of a request's tokens after its first.", seconds)
        self._prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._answer_size = histogram("request_generation_tokens", "Tokens sampled for a request.", _TOKENS)
        self._largest = histogram("request_max_num_generation_tokens", "Tokens of a request's longest choice.", _TOKENS)
        self._limit = histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self._step = histogram("iteration_tokens_total", "Tokens that one engine step computed.", _STEP_TOKENS)

    def note_step(self, tokens: int) -> None:
        """A step of the engine computed so many tokens, prompt and output together."""
        self._step.observe(tokens)

    def note_token(self) -> None:
        """A token was sampled."""
        self._generated.inc()

    def note_put_back(self) -> None:
        """A running request lost its memory."""
        self._preemptions.inc()

    def note_prompt(self, request: Request) -> None:
        """The request's prompt was read to its end."""
        size, cached = len(request.spec.prompt), request.num_cached
        self._prompt.inc(size)
        self._prompt_cached.inc(cached)
        self._computed.inc(size - cached)
        self._from_cache.inc(cached)
        if request.spec.prompt_scores is None:
            self._queries.inc(size)
            self._hits.inc(cached)

    def note_end(self, request: Request) -> None:
        """A request ended, whether it ran or not."""
        if request.finish_reason is not None:
            self._success[_REASONS[request.finish_reason]].inc()
        times = request.times
        if times.admitted is None or times.finished is None:
            return
        self._prompt_size.observe(len(request.spec.prompt))
        self._limit.observe(request.spec.sampling.max_tokens)
        self._inference.observe(times.finished - times.admitted)
        if times.prefilled is None:
            return
        decode_s = times.finished - times.prefilled
        self._prefill.observe(times.prefilled - times.admitted)
        self._decode.observe(decode_s)
        self._answer_size.observe(request.num_generated)
        self._largest.observe(request.num_generated)
        if request.num_generated > 1:
            self._per_token.observe(decode_s / (request.num_generated - 1))


class _Renamed(Collector):
    """Shows families again under other names and with more labels."""

    def __init__(self, views: Views, labels: dict[str, str]) -> None:
        self._views = views
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """One reading."""
        for name, (source, text) in self._views.items():
            for family in source.collect():
                view = Metric(name, text, family.type)
                for sample in family.samples:
                    view.add_sample(name + sample.name.removeprefix(family.name), {**sample.labels, **self._labels}, sample.value)
                yield view
