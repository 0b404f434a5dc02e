"""Counters of the engine, as Prometheus text and as the JSON of /stats."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gpu_worker.request import Request, RequestState
from services.gpu_worker.vllm_metrics import VllmMetrics

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 640.0, 2560.0)
# Weight of a new reading in the moving average of the speed.
_SPEED_WEIGHT = 0.1
_SPEED_INTERVAL_S = 0.25


class EngineMetrics:
    """What the engine loop counts. Written by the engine's thread, readable from any.

    Args:
        clock: monotonic seconds.
        model_name: label of the ``vllm:*`` family, which exists so that dashboards made for vLLM work unchanged.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, model_name: str = "") -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        r = self.registry
        self.requests_received = Counter("glm53_requests_received", "Requests that came into the queue.", registry=r)
        self._ended = Counter("glm53_requests", "Requests that ended, by outcome.", ["outcome"], registry=r)
        self.outcomes()  # makes the series: a rate sees the first failure only where they stood at nought before
        self.prefill_tokens = Counter("glm53_prefill_tokens", "Prompt tokens computed, and answers' after a put-back.", registry=r)
        self.decode_tokens = Counter("glm53_decode_tokens", "Tokens sampled.", registry=r)
        self.decode_steps = Counter("glm53_decode_steps", "Decode passes.", registry=r)
        self.slow_readers = Counter("glm53_slow_readers", "Streams ended because nobody read them.", registry=r)
        self.cached_tokens = Counter("glm53_cached_prompt_tokens", "Prompt tokens whose state was kept from earlier.", registry=r)
        self._put_back = Counter("glm53_requests_put_back", "Times that a running request had to give its context memory up.", registry=r)
        self._recomputed = Counter("glm53_recomputed_tokens", "Of the computed tokens, those that had been computed before.", registry=r)
        self.queue_wait = Histogram("glm53_queue_wait_seconds", "Time in the queue.", buckets=_SECONDS, registry=r)
        self._first_token = Histogram(
            "glm53_time_to_first_token_seconds", "From submission to the first token.", buckets=_SECONDS, registry=r
        )
        self._between = Histogram("glm53_inter_token_seconds", "Between two tokens of a request.", buckets=_SECONDS, registry=r)
        self._longest_gap = Gauge(
            "glm53_longest_token_gap_seconds",
            "Longest time between two tokens of a request, whatever lay between: prompts of others, a slow reader, a put-back.",
            registry=r,
        )
        self._longest = 0.0
        self._whole = Histogram("glm53_request_seconds", "From submission to the end.", buckets=_SECONDS, registry=r)
        self._queued = Gauge("glm53_queue_depth", "Requests that wait.", registry=r)
        self._running = Gauge("glm53_running_requests", "Requests in prefill or decode.", registry=r)
        self._kv_used = Gauge("glm53_context_tokens_used", "Tokens of context that open streams hold.", registry=r)
        self._kv_reserved = Gauge("glm53_context_tokens_reserved", "Tokens of context that memory is reserved for.", registry=r)
        self._kept_states = Gauge("glm53_kept_states", "States of earlier prompts and answers that are kept.", registry=r)
        self._kept_bytes = Gauge("glm53_kept_state_bytes", "Memory that they take.", registry=r)
        self._kv_share = Gauge("glm53_context_usage_ratio", "Used of the reserved context tokens, 0..1.", registry=r)
        self._vllm = VllmMetrics(
            model_name,
            r,
            _SECONDS,
            {
                "vllm:time_to_first_token_seconds": (self._first_token, "From submission to the first token."),
                "vllm:inter_token_latency_seconds": (self._between, "Between two tokens of a request."),
                "vllm:time_per_output_token_seconds": (self._between, "The same under its older name."),
                "vllm:e2e_request_latency_seconds": (self._whole, "From submission to the end."),
                "vllm:request_queue_time_seconds": (self.queue_wait, "Time in the queue."),
                "vllm:num_requests_running": (self._running, "Requests in prefill or decode."),
                "vllm:num_requests_waiting": (self._queued, "Requests that wait."),
                "vllm:kv_cache_usage_perc": (self._kv_share, "Share of the reserved context memory in use, 0..1."),
                "vllm:gpu_cache_usage_perc": (self._kv_share, "The same under its older name."),
            },
        )
        self._last_token: dict[str, float] = {}
        self._step_tokens = 0
        self._speed = 0.0
        self._speed_since = clock()
        self._speed_tokens = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Moving average of tokens computed (prompt and output) per second of work."""
        return self._speed

    def set_gauges(self, queued: int, running: int, kv_used: int, kv_reserved: int) -> None:
        """State now and then; also where the speed is measured."""
        self._queued.set(queued)
        self._running.set(running)
        self._kv_used.set(kv_used)
        self._kv_reserved.set(kv_reserved)
        self._kv_share.set(kv_used / kv_reserved if kv_reserved else 0.0)
        now = self._clock()
        elapsed = now - self._speed_since
        if elapsed < _SPEED_INTERVAL_S:
            return
        tokens = counter_value(self.prefill_tokens) + counter_value(self.decode_tokens)
        # Idle time says nothing about speed: it is left out of the average.
        if running and elapsed < 10 * _SPEED_INTERVAL_S:
            rate = (tokens - self._speed_tokens) / elapsed
            self._speed = rate if self._speed == 0.0 else (1 - _SPEED_WEIGHT) * self._speed + _SPEED_WEIGHT * rate
        self._speed_since, self._speed_tokens = now, tokens

    def set_kept(self, states: int, num_bytes: int) -> None:
        """Kept states now."""
        self._kept_states.set(states)
        self._kept_bytes.set(num_bytes)

    def end_step(self) -> None:
        """A step that computed something is over."""
        if self._step_tokens:
            self._vllm.note_step(self._step_tokens)
            self._step_tokens = 0

    def note_prefill(self, request: Request, tokens: int) -> None:
        """So many tokens of the request's `feed` were computed; `num_prefilled` counts them already."""
        self.prefill_tokens.inc(tokens)
        self._step_tokens += tokens
        self._recomputed.inc(max(0, min(tokens, request.num_lost - (request.num_prefilled - tokens))))
        if request.num_prefilled == len(request.spec.prompt) and request.times.prefilled is None:
            self._vllm.note_prompt(request)

    def note_put_back(self) -> None:
        """A running request gave its memory up."""
        self._put_back.inc()
        self._vllm.note_put_back()

    def note_token(self, request: Request, now: float) -> None:
        """A token was sampled for the request."""
        self.decode_tokens.inc()
        self._vllm.note_token()
        self._step_tokens += 1
        key = request.spec.request_id
        previous = self._last_token.get(key)
        if previous is None:
            self._first_token.observe(now - request.times.submitted)
        else:
            self._between.observe(now - previous)
            if now - previous > self._longest:
                self._longest = now - previous
                self._longest_gap.set(self._longest)
        self._last_token[key] = now

    def note_end(self, request: Request) -> None:
        """The request reached a terminal state."""
        self._last_token.pop(request.spec.request_id, None)
        self._ended.labels(outcome=request.state.value).inc()
        if request.times.finished is not None:
            self._whole.observe(request.times.finished - request.times.submitted)
        self._vllm.note_end(request)

    def outcomes(self) -> dict[str, int]:
        """Ended requests by outcome."""
        states = (RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED)
        return {state.value: int(counter_value(self._ended.labels(outcome=state.value))) for state in states}

    def to_json(self) -> dict[str, Any]:
        """The engine's part of /stats."""
        return {
            "requests_received": int(counter_value(self.requests_received)),
            "requests": self.outcomes(),
            "prefill_tokens": int(counter_value(self.prefill_tokens)),
            "cached_prompt_tokens": int(counter_value(self.cached_tokens)),
            "decode_tokens": int(counter_value(self.decode_tokens)),
            "decode_steps": int(counter_value(self.decode_steps)),
            "requests_put_back": int(counter_value(self._put_back)),
            "recomputed_tokens": int(counter_value(self._recomputed)),
            "slow_readers": int(counter_value(self.slow_readers)),
            "queue_depth": int(gauge_value(self._queued)),
            "running_requests": int(gauge_value(self._running)),
            "context_tokens_used": int(gauge_value(self._kv_used)),
            "context_tokens_reserved": int(gauge_value(self._kv_reserved)),
            "kept_states": int(gauge_value(self._kept_states)),
            "kept_state_bytes": int(gauge_value(self._kept_bytes)),
            "tokens_per_s": round(self._speed, 1),
            "longest_token_gap_s": round(self._longest, 4),
        }

    def prometheus_text(self) -> bytes:
        """Everything in the registry."""
        return generate_latest(self.registry)


def counter_value(counter: Counter) -> float:
    """Current value of a counter without labels, or of one label's child."""
    return _value(counter, "_total")


def gauge_value(gauge: Gauge) -> float:
    """Current value of a gauge without labels."""
    return _value(gauge, "")


def _value(metric: Counter | Gauge, suffix: str) -> float:
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith(suffix) and not sample.name.endswith("_created"):
                return float(sample.value)
    return 0.0


class TierCollector(Collector):
    """Prometheus view of the tiers' counters.

    Args:
        stats: gives the backend's current stats.
    """

    # name in stats -> (metric, help, unit of the value in the metric's unit, is a counter)
    _FLAT: dict[str, tuple[str, str, float, bool]] = {
        "decode_picks": ("glm53_expert_decode_picks", "Routed picks of decode steps.", 1, True),
        "decode_hits": ("glm53_expert_decode_hits", "Of these, picks whose expert was in a slot.", 1, True),
        "admissions": ("glm53_expert_admissions", "Records copied into a slot.", 1, True),
        "evictions": ("glm53_expert_evictions", "Records that had to leave their slot.", 1, True),
        "bytes_copied": ("glm53_expert_bytes_copied", "Bytes copied from the arena into slots.", 1, True),
        "hint_records_started": ("glm53_expert_hints_started", "Records brought ahead of the step that may pick them.", 1, True),
        "hint_records_used": ("glm53_expert_hints_used", "Of these, picked when they had landed.", 1, True),
        "hint_records_late": ("glm53_expert_hints_late", "Of those brought ahead, picked before they had landed.", 1, True),
        "hint_bytes_copied": ("glm53_expert_hint_bytes_copied", "Bytes copied from the arena ahead of the step.", 1, True),
        "bytes_in_place": ("glm53_expert_bytes_in_place", "Bytes of records read in the arena by the device.", 1, True),
        "cpu_lane_bytes": ("glm53_cpu_lane_bytes", "Bytes of records that the CPU lane evaluated.", 1, True),
        "cpu_expert_bytes": ("glm53_cpu_expert_bytes", "Of these, by the cpu_expert process.", 1, True),
        "lane_us": ("glm53_cpu_lane_seconds", "Time that jobs spent in the CPU lane.", 1e-6, True),
        "hot_us": ("glm53_device_lane_seconds", "Time that the device's own lane took.", 1e-6, True),
        "overrun_us": ("glm53_cpu_lane_overrun_seconds", "Time waited for the CPU lane after the device was done.", 1e-6, True),
        "plan_us": ("glm53_plan_seconds", "Time spent planning.", 1e-6, True),
        "ct_a_us": ("glm53_cpu_lane_job_cost_seconds", "What a job of the CPU lane costs by itself, as the planner has it.", 1e-6, False),
        "ct_b_us": ("glm53_cpu_lane_expert_cost_seconds", "What one expert with one row costs there.", 1e-6, False),
        "ct_tzc_us": ("glm53_link_record_cost_seconds", "What one record costs over the link, as the planner has it.", 1e-6, False),
        "planner_error_pct": ("glm53_planner_error_ratio", "Median error of the foretold time of decode steps, 0..1.", 0.01, False),
        "aborts": ("glm53_cpu_lane_aborts", "Jobs given up.", 1, True),
        "recomputed_picks": ("glm53_recomputed_picks", "Picks of given-up jobs computed again.", 1, True),
        "checksum_failures": ("glm53_checksum_failures", "Records or slots found with wrong bytes, at start or by VerifyTiers.", 1, True),
        "slots": ("glm53_expert_slots", "Slots.", 1, False),
        "slots_used": ("glm53_expert_slots_used", "Slots that hold a record.", 1, False),
        "cache_pages": ("glm53_cache_pages", "Pages of the GPU's key-value cache.", 1, False),
        "cache_pages_free": ("glm53_cache_pages_free", "Of these, pages that nobody has taken or reserved.", 1, False),
        "cache_pages_kept": ("glm53_cache_pages_kept", "Of these, pages of kept states alone; they are given up when needed.", 1, False),
        "arena_bytes": ("glm53_arena_bytes", "Bytes of the arena.", 1, False),
    }

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats
        self._created = time.time()

    def collect(self) -> Iterator[Metric]:
        """One reading."""
        stats = self._stats()
        for name, (metric, text, unit, is_counter) in self._FLAT.items():
            value = stats.get(name)
            if isinstance(value, int | float):
                if is_counter:
                    counter = CounterMetricFamily(metric, text)
                    # A count may begin above nought: what the check of a re-attached arena found before the first scrape is no increase to
                    # Prometheus. When the count began tells a rule that it is new.
                    counter.add_metric([], float(value) * unit, created=self._created)
                    yield counter
                else:
                    yield GaugeMetricFamily(metric, text, float(value) * unit)
        if lane := stats.get("lane"):
            state = lane.get("state")
            yield GaugeMetricFamily("glm53_cpu_lane_enabled", "1 when the mode has a CPU lane.", float(state != "OFF"))
            yield GaugeMetricFamily("glm53_cpu_lane_up", "1 while cpu_expert serves jobs.", float(state == "UP"))
        picks = CounterMetricFamily("glm53_expert_picks", "Routed picks by lane and layer.", labels=["lane", "layer"])
        for layer, lanes in enumerate(stats.get("picks_by_layer", [])):
            for lane, count in lanes.items():
                picks.add_metric([lane, str(layer)], float(count))
        yield picks
