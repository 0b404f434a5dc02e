"""The Prometheus texts of several workers as one, every sample labelled with its worker."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Merged(Collector):
    def __init__(self, families: dict[str, Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """All families."""
        return list(self._families.values())


def merged(texts: Mapping[str, bytes]) -> bytes:
    """One text in which each family is there once.

    Args:
        texts: worker's address → its text. One text alone is left as it is. `engine`, which vLLM's dashboards sum over, counts workers.
    """
    if len(texts) == 1:
        return next(iter(texts.values()))
    families: dict[str, Metric] = {}
    for number, (address, text) in enumerate(sorted(texts.items())):
        for family in text_string_to_metric_families(text.decode()):
            kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, **({"engine": str(number)} if "engine" in sample.labels else {"worker": address})}
                kept.add_sample(sample.name, labels, sample.value)
    registry = CollectorRegistry()
    registry.register(_Merged(families))
    return generate_latest(registry)
