"""Which panels a GPU worker fills: what its store counts, through the collector, held against the dashboards and the operations page.

The panels' queries run against a CPU worker's stack, which counts more: that a panel answers there says nothing about a GPU.
"""

from __future__ import annotations

import json
import random
import re

from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.metrics import TierCollector
from tests.deploy.monitoring import ROOT, own_names
from tests.unit.test_exl3_experts import World, host_as_device  # noqa: F401 - the fixture that stands in for the device
from tools import metrics_table


def counted() -> set[str]:
    """Series of the tiers that a worker in `exact` on a GPU exports once it has decoded and prefilled."""
    world = World(9, ExpertOptions(PlacementOptions(admit_after=1), stage_min_rows=9))
    world.decode(random.Random(1))
    world.prefill()
    return {sample.name for family in TierCollector(world.store.stats).collect() for sample in family.samples}


def empty_panels() -> list[str]:
    """Titles of the panels of Tiers of which no query reads a series that such a worker, or another service, has."""
    tiers = {row.name for row in metrics_table.rows() if row.service == "gpu_worker"} & {
        family.name + suffix for family in TierCollector(metrics_table._EveryStat).collect() for suffix in ("", "_total")
    }
    missing = tiers - counted()
    panels = json.loads((ROOT / "deploy/grafana/dashboards/tiers.json").read_text())["panels"]
    return [panel["title"] for panel in panels if all(own_names(target["expr"]) & missing for target in panel["targets"])]


def test_the_operations_page_names_the_panels_that_a_gpu_leaves_empty() -> None:
    """A reader of an empty panel learns that it is no fault; a panel that fills one day leaves the list."""
    text = (ROOT / "docs/operations.md").read_text()
    (named,) = re.findall(r"no data on a GPU in `exact`: ([^.]+)\.", text)
    assert sorted(re.sub(r"\s+", " ", named).split(", ")) == sorted(empty_panels())
