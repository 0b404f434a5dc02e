"""Hints for a slice whose routing comes from a trace: random weights guess nothing, so what a guess would have held is made from the trace.

An early router on the trained model names 0.55 of the picks that are in no slot, and 0.43 of what it names and is in no slot is picked.
Here each pick of the next layer is among the eight ids with the probability `recall`; the others are false ones, drawn without repetition
from the layer's popularity to the power FLATTER among experts that the token does not pick: as popular as picks are, they would be in slots
too often. All in random order: a real guess has the likeliest first, of which more are picked, so what a few records bring is rather better
than here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench import routing_trace

IDS = 8  # of a row
MEASURED, HALF, PERFECT = 0.55, 0.275, 1.0
# Fitted so that 0.43 of a stream's hinted records that are in no slot are picked, with a heat policy on the slice's share of slots.
FLATTER = 0.4
Hints = NDArray[np.int64]


def make(trace: NDArray[np.uint16], recall: float, seed: int, depths: tuple[int, ...], trace_seed: int = 0) -> Hints:
    """Ids for every token and layer: int64 [tokens, layers, streams, IDS], distinct in a row.

    Args:
        trace: picks, [tokens, streams, layers, 8].
        recall: probability that a pick is among them.
        depths: of the trace's layers, whose popularity `trace_seed` gives.
    """
    rng = np.random.default_rng((seed, round(1000 * recall)))
    picks = np.ascontiguousarray(trace.transpose(0, 2, 1, 3).astype(np.int64))  # [tokens, layers, streams, 8]
    result = np.empty((*picks.shape[:3], IDS), np.int64)
    for layer, depth in enumerate(depths):
        weights = FLATTER * np.log(routing_trace.popularity(trace_seed, depth))
        mine = picks[:, layer]
        keys = weights + rng.gumbel(size=(*mine.shape[:2], routing_trace.EXPERTS))
        np.put_along_axis(keys, mine, -np.inf, 2)
        false = np.argsort(-keys, axis=2)[..., :IDS]
        kept = rng.random(mine.shape) < recall
        drawn = np.take_along_axis(false, np.maximum(np.cumsum(~kept, axis=2) - 1, 0), 2)  # the first ones, as many as picks are left out
        ids = np.where(kept, mine, drawn)
        result[:, layer] = rng.permuted(ids, axis=2)
    return result


class Simulated:
    """Gives ids of the trace where the early router has guessed: its kernels run all the same, and cost what they cost.

    Args:
        early: the engine's own guess (services/gpu_worker/patches/early_router.py).
        step: number of the decode step under way, negative where the routing is not forced.
        hints: `make`'s, on the device.
        streams: that are decoded.
    """

    def __init__(self, early: Callable[[int, int], Any], step: Callable[[], int], hints: torch.Tensor, streams: int) -> None:
        self._early, self._step = early, step
        # Made before: slicing takes microseconds of every layer.
        self._rows = [[layer[:streams] for layer in token] for token in hints]

    def __call__(self, layer: int, rows: int) -> Any:
        """int64 [rows, IDS] for layer + 1; None where the engine guesses nothing."""
        guessed, step = self._early(layer, rows), self._step()
        if guessed is None or step < 0:
            return guessed
        return self._rows[step % len(self._rows)][layer + 1]


class Quality:
    """How good hints are where it counts: on records that are in no slot when a step begins."""

    def __init__(self, trace: NDArray[np.uint16], hints: Hints, streams: int) -> None:
        self._picks, self._hints, self._streams = trace, hints, streams
        self._missed = self._named = self._both = 0

    def look(self, step: int, where: NDArray[np.int64]) -> None:
        """Counts a step; where: the slot of every record, -1 for none, [layers, experts]."""
        for layer in range(1, len(where)):
            picked = np.unique(self._picks[step, : self._streams, layer].astype(np.int64))
            named = np.unique(self._hints[step, layer, : self._streams])
            picked, named = picked[where[layer, picked] < 0], named[where[layer, named] < 0]
            self._missed += len(picked)
            self._named += len(named)
            self._both += len(np.intersect1d(picked, named))

    def row(self) -> dict[str, Any]:
        """Share of missing picks that are named, share of missing named records that are picked; None where there was none."""
        return {
            "hint_recall_on_misses": round(self._both / self._missed, 3) if self._missed else None,
            "hint_precision_on_misses": round(self._both / self._named, 3) if self._named else None,
        }
