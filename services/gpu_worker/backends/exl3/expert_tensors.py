"""The tensors by which exllamav3 names an expert's bytes beside the tables: its kernels for many rows of one expert read them.

A prefill of 8,192 tokens points some hundred experts of each layer at other slots, while the device has nothing to do: what can be made
once is kept.
"""

from __future__ import annotations

import numpy as np
import torch

from services.gpu_worker.backends.exl3.placement import NONE
from services.gpu_worker.backends.exl3.records import PinnedRecords, typed_part
from services.gpu_worker.patches.expert_load import PROJECTIONS, MoeLayer, Place

PARTS = tuple((projection, part) for projection in PROJECTIONS for part in ("trellis", "suh", "svh"))


class ExpertTensors:
    """Where every expert's tensors point, and what moves them. For the forward pass's thread.

    Args:
        records: pinned.
        layers: loaded with views of `records`.
        slots: uint8 [slots, stride] on the device, at one address for good.
    """

    def __init__(self, records: PinnedRecords, layers: list[MoeLayer], slots: torch.Tensor) -> None:
        self._records, self._layers, self._slots = records, layers, slots
        self._at = np.full((records.num_layers, records.num_experts), NONE, np.int64)
        self._own: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        self._views: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        kinds = {key: number for number, key in enumerate(dict.fromkeys(map(bytes, records.shapes)))}
        self._kind_of = [kinds[bytes(shape)] for shape in records.shapes]

    def point(self, layer: int, expert: int, slot: int) -> None:
        """At the record in a slot, or on the host for NONE."""
        if slot == int(self._at[layer, expert]):
            return
        with torch.inference_mode():
            sources = self._in_slot(slot, layer) if slot != NONE else self._on_host(layer, expert)
            for tensor, source in zip(self._of(layer, expert), sources, strict=True):
                tensor.set_(source)  # in place: exllamav3's compiled objects share the tensor
        self._at[layer, expert] = slot

    def all_to_host(self) -> None:
        """Nothing points at a slot any more."""
        for layer, expert in np.argwhere(self._at != NONE):
            self.point(int(layer), int(expert), NONE)

    def close(self) -> None:
        """Points everything at the host and lets go of the slots' memory."""
        self.all_to_host()
        self._views.clear()
        self._slots = self._slots.new_empty((0, self._slots.shape[1]))

    def _in_slot(self, slot: int, layer: int) -> tuple[torch.Tensor, ...]:
        key = slot, self._kind_of[layer]
        if key not in self._views:
            record, shape = self._slots[slot], self._records.shapes[layer]
            self._views[key] = tuple(typed_part(record, shape, projection, part) for projection, part in PARTS)
        return self._views[key]

    def _on_host(self, layer: int, expert: int) -> tuple[torch.Tensor, ...]:
        return tuple(self._records.view(Place(layer, expert, projection), part) for projection, part in PARTS)

    def _of(self, layer: int, expert: int) -> tuple[torch.Tensor, ...]:
        key = layer, expert
        if key not in self._own:
            mlp = self._layers[layer].mlp
            linears = dict(zip(PROJECTIONS, (mlp.gates[expert], mlp.ups[expert], mlp.downs[expert]), strict=True))
            self._own[key] = tuple(getattr(linears[projection].inner, part) for projection, part in PARTS)
        return self._own[key]
