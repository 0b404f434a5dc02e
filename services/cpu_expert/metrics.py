"""What cpu_expert tells probes and scrapers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from services.common.memory import MemoryCollector
from services.common.ops_http import OpsAnswers, Verdict

# The loop comes round at least twice a second; a step that the worker gave up after its time-out still ends in far less than this.
STUCK_S = 30.0
_COUNTERS = {
    "jobs": "Jobs served.",
    "picks": "Rows computed, one for each token and expert.",
    "experts": "Expert records evaluated.",
    "bytes": "Bytes of expert records read.",
    "dropped": "Jobs dropped because the worker had given them up.",
    "stale": "Jobs refused because a record had been replaced.",
    "bad": "Jobs refused because they made no sense.",
}


class ExpertMetrics:
    """Written by the serving loop, read by the endpoint's threads.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(MemoryCollector("cpu_expert"))
        self._clock = clock
        self._lock = threading.Lock()
        self._counters = {name: Counter(f"glm53_cpu_expert_{name}", text, registry=self.registry) for name, text in _COUNTERS.items()}
        self._attachments = Counter("glm53_cpu_expert_attachments", "Times that a gpu_worker was attached to.", registry=self.registry)
        self._attached = Gauge("glm53_cpu_expert_attached", "1 while attached to a gpu_worker.", registry=self.registry)
        self._threads = Gauge("glm53_cpu_expert_threads", "Threads of the expert kernel.", registry=self.registry)
        self._last: dict[str, int] = {}
        self._waiting_for = "starting"
        self._beat = clock()

    def beat(self) -> None:
        """The loop came round."""
        self._beat = self._clock()

    def attached(self, threads: int) -> None:
        """Serving begins, with counters at zero."""
        with self._lock:
            self._last = {}
            self._waiting_for = ""
        self._attachments.inc()
        self._attached.set(1)
        self._threads.set(threads)

    def served(self, stats: Mapping[str, Any]) -> None:
        """Adds what was done since the last call; `stats` counts from the attachment on."""
        with self._lock:
            for name, counter in self._counters.items():
                value = int(stats.get(name, 0))
                counter.inc(max(0, value - self._last.get(name, 0)))
                self._last[name] = value

    def waiting(self, reason: str) -> None:
        """There is nobody to serve."""
        with self._lock:
            self._waiting_for = reason
        self._attached.set(0)

    def answers(self) -> OpsAnswers:
        """For the HTTP endpoint. Waiting for a gpu_worker is a healthy state: it loads for minutes and may restart."""
        return OpsAnswers(live=self.verdict, ready=self.verdict, metrics=lambda: generate_latest(self.registry))

    def verdict(self) -> Verdict:
        """Not ok when the loop has not come round for STUCK_S seconds."""
        silent_s = self._clock() - self._beat
        with self._lock:
            reason = self._waiting_for
        status = "stuck" if silent_s > STUCK_S else "waiting" if reason else "serving"
        facts = {"status": status, "reason": f"no progress for {silent_s:.0f} s" if status == "stuck" else reason}
        return Verdict(status != "stuck", {name: value for name, value in facts.items() if value})
