"""How far a decode step's experts are from fp64 with the weights that a GPU decodes: exllamav3's kernels and ours, on inputs of real steps.

What is compared is the routed sum with the step's own routing weights: exllamav3's call computes the shared expert too, so the call with
every weight 0 is taken from it. `level` relates the difference to the picks' rows, sqrt(|difference|^2 / sum of |weight x row|^2): noise of
that relative RMS in every expert's row makes a sum that is as far off, which is what the noise floor adds.

exllamav3 reads experts through tables that hold for the step which is under way: with misses copied within the step, the table of a layer
names slots that later layers have taken since. So the measurement keeps every record at one address: on the host, or all of them in slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.fast_figures import LARGEST
from bench.kernel_accuracy import Exact, fp16_table, relative_rms

SINGLE_WEIGHTS = (0.0, 0.1, 1.0)  # 0: the pick's own
Wide = NDArray[np.float64]


@dataclass
class Step:
    """Inputs of one layer's decode step: fp16 [rows, hidden], int64 [rows, top_k], fp16 [rows, top_k]."""

    layer: Any
    x: torch.Tensor
    selected: torch.Tensor
    weights: torch.Tensor


def keep_steps(layer: Any, seen: list[Step]) -> Callable[..., None]:
    """Makes a layer's decode step keep its inputs; returns the step as it was."""
    stock: Callable[..., None] = layer.mlp.bc.run_bszN

    def run(x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> None:
        seen.append(Step(layer, x.clone(), selected.clone(), weights.clone()))
        stock(x, selected, weights)

    layer.mlp.bc.run_bszN = run
    return stock


def thinned(steps: list[Step], most: int) -> list[Step]:
    """So many of them, the last ones of each layer, as many of one layer as of another."""
    layers: dict[int, list[Step]] = {}
    for step in steps:
        layers.setdefault(step.layer.index, []).append(step)
    share = max(1, most // max(1, len(layers)))
    return [step for _, of_layer in sorted(layers.items()) for step in of_layer[-share:]]


class Meter:
    """Errors of steps.

    Args:
        records: pinned, with their arena.
        rows_of_ours: our rows of every pick of a step, unweighted: float64 [rows, top_k, hidden].
    """

    def __init__(self, records: Any, rows_of_ours: Callable[[Step], Wide]) -> None:
        self._records, self._rows_of_ours = records, rows_of_ours
        self._experts: dict[tuple[int, int], Exact] = {}
        self._table = fp16_table()

    def entry(self, step: Step, stock: Callable[..., None]) -> dict[str, Any]:
        """One step of one layer: levels of both, and the first token's two heaviest picks alone through stock, with several weights."""
        weights = step.weights.cpu().numpy().astype(np.float64)
        exact, ours = self._exact(step), self._rows_of_ours(step)
        without = self._stock(step, stock, torch.zeros_like(step.weights))
        found = self._stock(step, stock, step.weights) - without
        total = (weights[..., None] * exact).sum(1)
        power = float(((weights[..., None] * exact) ** 2).sum())
        entry: dict[str, Any] = {
            "layer": step.layer.index,
            "rows": len(weights),
            "stock": _short(np.sqrt(((found - total) ** 2).sum() / power)),
            "ours": _short(np.sqrt((((weights[..., None] * ours).sum(1) - total) ** 2).sum() / power)),
        }
        heaviest = [int(pick) for pick in np.argsort(-weights[0])[:2] if weights[0, pick] > 0]
        for weight in SINGLE_WEIGHTS:
            name = f"weight_{weight:g}" if weight else "own_weight"
            entry[name] = [self._single(step, stock, pick, weight, without, exact) for pick in heaviest]
        return entry

    def _single(self, step: Step, stock: Callable[..., None], pick: int, weight: float, without: Wide, exact: Wide) -> float:
        alone = torch.zeros_like(step.weights)
        alone[0, pick] = weight or step.weights[0, pick]
        row = (self._stock(step, stock, alone) - without)[0] / float(alone[0, pick])
        return _short(relative_rms(row, exact[0, pick]))

    def _exact(self, step: Step) -> Wide:
        x, selected = step.x.cpu().numpy(), step.selected.cpu().numpy()
        return np.stack([[self._expert(step.layer.index, int(e))(x[r : r + 1])[0] for e in picks] for r, picks in enumerate(selected)])

    def _expert(self, layer: int, expert: int) -> Exact:
        key = (layer, expert)
        if key not in self._experts:
            self._experts[key] = Exact(self._records.shapes[layer], self._records.arena.record(layer, expert), self._table)
        return self._experts[key]

    @staticmethod
    def _stock(step: Step, stock: Callable[..., None], weights: torch.Tensor) -> Wide:
        stock(step.x, step.selected, weights)
        out = step.layer.mlp.experts_cfg.out_bszn[: len(step.x)]
        return np.asarray(out.double().cpu().numpy(), np.float64)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def summarise(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the result: medians, extremes and every entry; an `error` when stock's value cannot be one."""
    row: dict[str, Any] = {"entries": len(entries)}
    for name in ("stock", "ours"):
        values = [entry[name] for entry in entries]
        row |= {name: _short(float(np.median(values))), f"{name}_min": min(values), f"{name}_max": max(values)}
    worst = max(entries, key=lambda entry: float(entry["stock"]))
    row["stock_max_layer"] = worst["layer"]
    for name in (key for key in entries[0] if "weight" in key):
        values = [value for entry in entries for value in entry[name]]
        row[f"stock_row_{name}"] = {"min": min(values), "median": _short(float(np.median(values))), "max": max(values)}
    row["by_entry"] = [[entry["layer"], entry["stock"], entry["ours"]] for entry in entries]
    if worst["stock"] > LARGEST:
        row["error"] = (
            f"stock's experts are off by up to {worst['stock']} (layer {worst['layer']}): more than fp16 makes of it, so it was measured "
            "wrongly and gives no noise floor"
        )
    return row
