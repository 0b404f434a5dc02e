"""What the worker counts, under its own names and under vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.gpu_worker.metrics import EngineMetrics
from services.gpu_worker.request import PromptScores
from tests.unit.test_worker_loop import EOS, Bench

# The families of the dashboards that vLLM ships, and of those made for its older and newer versions.
GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"}
COUNTERS = {
    "prompt_tokens_total", "prompt_tokens_cached_total", "prompt_tokens_by_source_total", "generation_tokens_total",
    "request_success_total", "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
}  # fmt: skip
HISTOGRAMS = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
    "request_params_max_tokens", "iteration_tokens_total",
}  # fmt: skip


class Scrape:
    """One reading of a registry, as Prometheus sees it."""

    def __init__(self, metrics: EngineMetrics) -> None:
        text = metrics.prometheus_text().decode()
        self.families = list(text_string_to_metric_families(text))

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        for family in self.families:
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def __call__(self, name: str, **labels: str) -> float:
        found = [value for n, has, value in self.samples() if n == name and all(has.get(key) == value for key, value in labels.items())]
        assert len(found) == 1, (name, labels, found)
        return found[0]


def timed(bench: Bench) -> None:
    """Runs until nothing is left; every step takes a second."""
    while bench.loop.step():
        bench.now += 1


def test_every_name_of_vllms_dashboards_exists_once_from_the_start() -> None:
    """Before the first request every family is there with its labels and its type, so that rates and sums have a beginning."""
    scrape = Scrape(EngineMetrics(model_name="m"))
    kinds = {family.name: family.type for family in scrape.families if family.name.startswith("vllm:")}
    expected = {f"vllm:{name}": "gauge" for name in GAUGES} | {f"vllm:{name}": "histogram" for name in HISTOGRAMS}
    expected |= {f"vllm:{name.removesuffix('_total')}": "counter" for name in COUNTERS}
    # What the client library adds to every counter and histogram.
    assert {name: kind for name, kind in kinds.items() if not name.endswith("_created")} == expected
    ours = [(name, sorted(labels.items())) for name, labels, _ in scrape.samples() if name.startswith("vllm:")]
    assert len(ours) == len({(name, tuple(labels)) for name, labels in ours})
    assert all(("model_name", "m") in labels and ("engine", "0") in labels for _, labels in ours)
    reasons = {labels["finished_reason"] for name, labels, _ in scrape.samples() if name == "vllm:request_success_total"}
    assert reasons == {"stop", "length", "abort"}


def test_a_request_is_counted_with_its_times() -> None:
    """Queue, prefill, decode and their sums are those of the request; a step a second."""
    bench = Bench(max_streams=1)
    bench.submit("first", prompt=range(20), max_tokens=5)
    bench.submit("second", prompt=[EOS - 3], max_tokens=50)
    timed(bench)
    scrape = Scrape(bench.loop.metrics)
    # first: three chunks at 0, 1 and 2 s, the first token with the last of them and one more in the same step, then one a second.
    assert scrape("vllm:request_prefill_time_seconds_sum") == 2
    assert scrape("vllm:request_inference_time_seconds_sum") == scrape("vllm:request_prefill_time_seconds_sum") + scrape(
        "vllm:request_decode_time_seconds_sum"
    )
    assert scrape("vllm:request_queue_time_seconds_sum") == pytest.approx(
        scrape("vllm:e2e_request_latency_seconds_sum") - scrape("vllm:request_inference_time_seconds_sum")
    )
    assert scrape("vllm:request_queue_time_seconds_sum") > 0
    assert scrape("vllm:request_decode_time_seconds_count") == 2
    # Mean gap of each request: first 3 s over 4 gaps, second 1 s over 2 (two tokens come in a prompt's last step).
    assert scrape("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(3 / 4 + 1 / 2)
    assert scrape("vllm:inter_token_latency_seconds_count") == scrape("vllm:time_per_output_token_seconds_count") == 6
    assert scrape("vllm:time_to_first_token_seconds_count") == 2


def test_the_longest_gap_between_tokens_is_that_of_the_stream_that_another_prompt_held_up() -> None:
    """Tokens at 0 and 1 s, then one at 4.5 s behind somebody's chunk, then one at 5 s; gaps of other requests are no shorter ones."""
    bench = Bench(max_streams=2)
    bench.submit("one", prompt=[1], max_tokens=50)
    bench.submit("other", prompt=[1], max_tokens=50)
    bench.loop._receive()
    one, other = (bench.loop._live[name] for name in ("one", "other"))
    metrics = EngineMetrics()
    for request, now in ((one, 0.0), (other, 0.5), (one, 1.0), (one, 4.5), (other, 3.0), (one, 5.0)):
        metrics.note_token(request, now)
    assert metrics.to_json()["longest_token_gap_s"] == 3.5
    assert Scrape(metrics)("glm53_longest_token_gap_seconds") == 3.5


def test_a_request_is_counted_with_its_sizes_and_its_end() -> None:
    """Tokens of prompts and answers, limits and reasons; sums over steps are sums over requests."""
    bench = Bench(max_streams=4)
    bench.submit("long", prompt=range(20), max_tokens=5)
    bench.submit("stops", prompt=[EOS - 3], max_tokens=50)
    bench.submit("leaves", prompt=[1], max_tokens=1000)
    for _ in range(12):
        bench.loop.step()
    bench.loop.cancel("leaves")
    bench.run()
    scrape = Scrape(bench.loop.metrics)
    assert {r: scrape("vllm:request_success_total", finished_reason=r) for r in ("stop", "length", "abort")} == {
        "stop": 1,
        "length": 1,
        "abort": 1,
    }
    generated = scrape("vllm:generation_tokens_total")
    assert scrape("vllm:request_generation_tokens_sum") == scrape("vllm:request_max_num_generation_tokens_sum") == generated > 8
    assert scrape("vllm:request_generation_tokens_bucket", le="5.0") == 2
    assert (scrape("vllm:request_prompt_tokens_sum"), scrape("vllm:prompt_tokens_total")) == (22, 22)
    assert scrape("vllm:request_params_max_tokens_sum") == 1055
    assert scrape("vllm:iteration_tokens_total_sum") == 22 + generated
    # The last step finds nothing to do.
    assert scrape("vllm:iteration_tokens_total_count") == bench.loop.steps - 1
    assert scrape("vllm:num_preemptions_total") == 0
    assert scrape("vllm:num_requests_running") == scrape("vllm:num_requests_waiting") == 0


def test_what_never_ran_has_no_run_times() -> None:
    """A request that waited too long fails: no success, no prompt, no prefill."""
    bench = Bench(max_streams=1)
    bench.submit("runs", max_tokens=40)
    bench.submit("waits", timeout_s=2.0)
    timed(bench)
    scrape = Scrape(bench.loop.metrics)
    assert scrape("glm53_requests_total", outcome="failed") == 1
    assert sum(value for name, _, value in scrape.samples() if name == "vllm:request_success_total") == 1
    assert scrape("vllm:request_prefill_time_seconds_count") == scrape("vllm:request_prompt_tokens_count") == 1


def test_hits_are_cached_of_looked_up_tokens() -> None:
    """hits / queries is the share of prompt tokens that were not computed again; scoring looks nothing up."""
    bench = Bench()
    for name in ("a", "b"):
        bench.submit(name, prompt=range(40), max_tokens=1)
        bench.run()
    bench.submit("scored", prompt=range(40), max_tokens=0, scores=PromptScores(1, 0))
    bench.run()
    scrape = Scrape(bench.loop.metrics)
    assert (scrape("vllm:prefix_cache_queries_total"), scrape("vllm:prefix_cache_hits_total")) == (80, 39)
    assert scrape("vllm:prompt_tokens_total") == 120
    assert scrape("vllm:prompt_tokens_cached_total") == scrape("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 39
    assert scrape("vllm:prompt_tokens_by_source_total", source="local_compute") == 81
    assert scrape("glm53_prefill_tokens_total") == 81


def test_views_show_what_they_are_views_of() -> None:
    """A renamed family has the original's samples to the last bucket."""
    bench = Bench()
    bench.submit("r", max_tokens=9)
    timed(bench)
    scrape = Scrape(bench.loop.metrics)

    def of(name: str) -> list[float]:
        values = [(float(labels["le"]), value) for n, labels, value in scrape.samples() if n == f"{name}_bucket"]
        assert values[-1][0] == math.inf
        return [value for _, value in values]

    assert of("vllm:inter_token_latency_seconds") == of("glm53_inter_token_seconds")
    assert of("vllm:time_to_first_token_seconds") == of("glm53_time_to_first_token_seconds")
    assert scrape("vllm:kv_cache_usage_perc") == scrape("glm53_context_usage_ratio")
