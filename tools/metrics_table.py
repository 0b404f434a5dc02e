"""Writes docs/metrics.md from the services' registries: `python -m tools.metrics_table`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from services.common.memory import MemoryCollector
from services.cpu_expert.metrics import ExpertMetrics
from services.gateway.metrics import GatewayMetrics
from services.gpu_worker.metrics import EngineMetrics, TierCollector

OUT = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
HEAD = """# Metrics

What `/metrics` of each service has, in Prometheus' text format. gateway: its HTTP port; it passes the worker's on unless
`GLM53_WORKER_METRICS=0`. gpu_worker: `GLM53_WORKER_HTTP`. cpu_expert: `GLM53_EXPERT_HTTP`. A histogram has `_bucket`, `_sum` and `_count`;
counters, but for `glm53_expert_picks_total`, and histograms also have `_created`. The `vllm:*` names are vLLM's, so that dashboards made
for it work. What the rules of deploy/prometheus and the dashboards of deploy/grafana make of them is in [operations.md](operations.md).
Written by `python -m tools.metrics_table`.

| name | kind | labels | meaning | exported by |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """One family as Prometheus shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    service: str


class _EveryStat(dict[str, Any]):
    """Tier counters of a machine that has all of them: the collector then yields every family that it knows."""

    def get(self, name: str, default: Any = None) -> Any:
        del default
        return {"lane": {"state": "UP"}, "picks_by_layer": [{"hit": 0}]}.get(name, 0)


def rows() -> list[Row]:
    """Every family, by service and name."""
    gateway, engine, expert = GatewayMetrics().registry, EngineMetrics(model_name="model").registry, ExpertMetrics().registry
    sources: tuple[tuple[str, Iterable[Metric], dict[str, tuple[str, ...]]], ...] = (
        ("gateway", gateway.collect(), _declared_labels(gateway)),
        ("gpu_worker", engine.collect(), _declared_labels(engine)),
        ("gpu_worker", TierCollector(_EveryStat).collect(), {}),
        ("gpu_worker", MemoryCollector("gpu_worker", "/").collect(), {}),
        ("cpu_expert", expert.collect(), _declared_labels(expert)),
    )
    found = []
    for service, families, declared in sources:
        for family in families:
            labels = declared.get(family.name) or {label for sample in family.samples for label in sample.labels} - {"le"}
            name = family.name + ("_total" if family.type == "counter" else "")
            found.append(Row(name, family.type, tuple(sorted(labels)), family.documentation, service))
    return sorted(found, key=lambda row: (row.service, row.name))


def _declared_labels(registry: CollectorRegistry) -> dict[str, tuple[str, ...]]:
    """Labels by family: one that nothing has happened to yet has no sample that would show them."""
    collectors = list(registry._collector_to_names)
    return {collector._name: collector._labelnames for collector in collectors if getattr(collector, "_labelnames", ())}


def names() -> set[str]:
    """Every series name that a query may use; of `_created`, those of the tiers."""
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    found = {row.name + part for row in rows() for part in parts.get(row.kind, ("",))}
    return found | {sample.name for family in TierCollector(_EveryStat).collect() for sample in family.samples}


def table() -> str:
    """The whole document."""
    lines = []
    for row in rows():
        text, labels = row.text.replace("|", "\\|"), ", ".join(row.labels) or "-"
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {text} | {row.service} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUT.write_text(table())
