"""The worker's counters put together: the body of GET /stats and the Prometheus text."""

from __future__ import annotations

from typing import Any

from services.gpu_worker.backends.base import Backend, VerifyReport
from services.gpu_worker.loop import EngineLoop
from services.gpu_worker.metrics import EngineMetrics, TierCollector
from services.gpu_worker.status import ModelFacts


class StatsReport:
    """Reads engine and tiers. Callable from any thread.

    Args:
        engine: the running loop.
        backend: its backend.
        facts: what is served.
    """

    def __init__(self, engine: EngineLoop, backend: Backend, facts: ModelFacts) -> None:
        self._engine = engine
        self._backend = backend
        self._facts = facts
        self.metrics: EngineMetrics = engine.metrics
        self.metrics.registry.register(TierCollector(backend.stats))

    def read(self) -> tuple[dict[str, Any], bytes]:
        """(JSON document, Prometheus text)."""
        info, tiers = self._backend.info, self._backend.stats()
        document = {
            "model": self._facts.model_name,
            "mode": info.mode,
            "device": info.device,
            "arena": info.arena,
            "engine": self.metrics.to_json(),
            "expert_cache": [_cache(tiers)],
            "cpu_tier": _cpu_tier(tiers),
            "tiers": tiers,
        }
        return document, self.metrics.prometheus_text()

    def verify(self) -> VerifyReport:
        """Re-reads every record and slot."""
        return self._backend.verify()


def _cache(tiers: dict[str, Any]) -> dict[str, Any]:
    """One device's expert cache, under the names that existing dashboards read."""
    picks, hits = int(tiers.get("decode_picks", 0)), int(tiers.get("decode_hits", 0))
    return {
        "slots": tiers.get("slots", 0),
        "slots_used": tiers.get("slots_used", 0),
        "hits": hits,
        "misses": picks - hits,
        "hit_rate": round(hits / picks, 6) if picks else 0.0,
        "admissions": tiers.get("admissions", 0),
        "evictions": tiers.get("evictions", 0),
    }


def _cpu_tier(tiers: dict[str, Any]) -> dict[str, Any]:
    """The CPU lane."""
    lane, picks = tiers.get("lane", {}), tiers.get("picks", {})
    return {
        "state": lane.get("state", "OFF"),
        "reason": lane.get("reason", ""),
        "jobs": lane.get("jobs", 0),
        "picks": picks.get("cpu", 0),
        "bytes": tiers.get("cpu_expert_bytes", 0),
        "aborts": tiers.get("aborts", 0),
        "recomputed_picks": tiers.get("recomputed_picks", 0),
    }
