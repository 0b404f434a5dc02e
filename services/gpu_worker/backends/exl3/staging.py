"""Brings what a prefill pass misses into lent slots a layer ahead, and switches the tables there and back.

Parts of slots, one per layer in turn: layer l computes from one while layer l + 1 lands in another. With two of them the copy engine
stands still where a layer computes for longer than its records take, and the next, quicker layer waits for its own; a third one lets the
copies run on meanwhile. Which slots, and which records are missing, the store says (experts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.backends.exl3.placement import NONE, runs
from services.gpu_worker.backends.exl3.records import PinnedRecords, pinned_empty

RUN = 8  # records of one copy: what other copies of the pass may stand behind
_STAGED, _RESTING = 0, 1

Ints = NDArray[np.int64]
# (layers, experts, slots or NONE for the host): device addresses of records, int64 like each of them
Addresses = Callable[[Ints, Ints, Ints], Ints]


@dataclass
class StagedPass:
    """One staged prefill pass."""

    first: tuple[int, ...]  # first slot of each part
    experts: list[Ints]  # per layer: experts that are staged, ascending
    staged: list[Any]  # per layer: event, recorded when its copies are done
    computed: list[Any]  # per layer: event, recorded when its kernels are done
    next_layer: int = 0  # the next layer to stage
    inside: int = NONE  # the layer whose tables point at staged records


class Staging:
    """For the forward pass's thread.

    Args:
        records: pinned.
        table: int64 [layers, 9, experts] on the device: the tables that exllamav3's kernels read.
        slots: uint8 [slots, stride] on the device, at one address for good.
        copy_stream: where records are copied.
        addresses: where records are.

    Attributes:
        now: the pass that is staged, None between passes.
    """

    def __init__(
        self, records: PinnedRecords, table: torch.Tensor, slots: torch.Tensor, copy_stream: torch.cuda.Stream, addresses: Addresses
    ) -> None:
        self._records, self._table, self._slots, self._copy_stream, self._addresses = records, table, slots, copy_stream, addresses
        self.now: StagedPass | None = None
        # [0] staged, [1] resting tables of every layer; the device has its own before the first record of a pass is on its way.
        self._tables = pinned_empty((2, *table.shape))
        self._on_device = torch.empty((2, *table.shape), dtype=table.dtype, device=table.device)
        self._tables_read = torch.cuda.Event()
        self._passes = self._bytes = 0

    def begin(self, where: Ints, part: int, first: int, parts: int = 2) -> None:
        """A pass is about to run; its first layer is staged from now on.

        The first one alone: what the pass itself copies from the host at its beginning stands behind all records on their way in the
        copy engine, and every kernel behind that.

        Args:
            where: [layers, experts], the slot of each record or NONE for the host; none of the parts' slots.
            part: slots of each part.
            first: the first one of all.
            parts: how many, 2 or more.
        """
        # The tables in pinned memory belong to the pass before until the device has them.
        self._tables_read.synchronize()
        staging = self.now = self._plan(where, part, tuple(first + i * part for i in range(parts)))
        self._on_device.copy_(self._tables, non_blocking=True)
        self._tables_read.record()
        self._passes += 1
        # Who read these slots before is done with them then; no later layer has to wait for that again.
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._table.device))
        self._stage_next(staging)

    def enter(self, layer: int) -> None:
        """The layer's kernels come next."""
        staging = self.now
        if staging is None:
            return
        # The first layer's experts come behind what the pass copied: from here on there is a layer for each part.
        while staging.next_layer <= layer or (layer == 0 and staging.next_layer < min(len(staging.first), len(staging.experts))):
            self._stage_next(staging)
        torch.cuda.current_stream(self._table.device).wait_event(staging.staged[layer])
        self._take_tables(layer, _STAGED)
        staging.inside = layer

    def leave(self, layer: int) -> None:
        """The layer's last kernels are enqueued; nothing where the pass is not inside it."""
        staging = self.now
        if staging is None or staging.inside != layer:
            return
        self._take_tables(layer, _RESTING)
        staging.inside = NONE
        staging.computed[layer].record()
        self._stage_next(staging)

    def end(self) -> None:
        """The pass is over. One that broke off inside a layer left that layer's tables at slots which are about to be used again."""
        if self.now is not None and self.now.inside != NONE:
            # Its further layers' records are for nobody: what comes next would wait for them in the copy engine.
            self.now.next_layer = len(self.now.experts)
            self.leave(self.now.inside)
        self.now = None

    def slot_of(self, layer: int, expert: int) -> int:
        """The staging slot that the layer's tables point at now, or NONE."""
        staging = self.now
        if staging is None or staging.inside != layer:
            return NONE
        place = int(np.searchsorted(staging.experts[layer], expert))
        if place == len(staging.experts[layer]) or staging.experts[layer][place] != expert:
            return NONE
        return staging.first[layer % len(staging.first)] + place

    def stats(self) -> dict[str, int]:
        """Counters, JSON-ready."""
        return {"staged_passes": self._passes, "bytes_staged": self._bytes}

    def close(self) -> None:
        """Lets go of the slots' memory."""
        self._slots = self._slots.new_empty((0, self._slots.shape[1]))  # a view would keep all of them

    def _plan(self, where: Ints, part: int, first: tuple[int, ...]) -> StagedPass:
        num_layers, num_experts = where.shape
        experts = [np.flatnonzero(where[layer] == NONE)[:part] for layer in range(num_layers)]
        tables = self._tables.numpy()
        all_experts = np.arange(num_experts)
        for layer, chosen in enumerate(experts):
            slots = where[layer].copy()
            layers = np.full(num_experts, layer)
            offsets = self._records.offsets[layer][:, None]
            tables[_RESTING, layer] = self._addresses(layers, all_experts, slots) + offsets
            slots[chosen] = first[layer % len(first)] + np.arange(len(chosen))
            tables[_STAGED, layer] = self._addresses(layers, all_experts, slots) + offsets
        events = [torch.cuda.Event() for _ in range(2 * num_layers)]
        return StagedPass(first, experts, events[:num_layers], events[num_layers:])

    def _stage_next(self, staging: StagedPass) -> None:
        """Starts the copies of the next layer, behind the kernels that read its part of the slots last."""
        layer, parts = staging.next_layer, len(staging.first)
        if layer >= len(staging.experts):
            return
        staging.next_layer += 1
        if layer >= parts:
            self._copy_stream.wait_event(staging.computed[layer - parts])
        slot, record = staging.first[layer % parts], layer * self._records.num_experts
        with torch.cuda.stream(self._copy_stream):
            for expert, count in runs((int(e) for e in staging.experts[layer]), RUN):
                source = self._records.host[record + expert : record + expert + count]
                self._slots[slot : slot + count].copy_(source, non_blocking=True)
                slot += count
            staging.staged[layer].record()
        self._bytes += len(staging.experts[layer]) * self._records.stride

    def _take_tables(self, layer: int, which: int) -> None:
        """A kernel does it: a copy from the host would stand behind the next layer's records, and the compute stream with it."""
        with torch.inference_mode():
            torch.add(self._on_device[which, layer], 0, out=self._table[layer])
