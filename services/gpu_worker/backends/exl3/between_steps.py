"""Decode without the pager: nothing waits, and what the cache holds changes between two steps.

What a step picked is copied to the host behind each router. When it is here the placement decides what to admit; the copies run on a stream
of their own beside the next step, and a record counts as resident when a later look finds its copy done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.backends.exl3.placement import NONE, Move, Placement
from services.gpu_worker.backends.exl3.records import PinnedRecords, pinned_empty

Ints = NDArray[np.int64]


@dataclass
class Landing:
    """Copies under way; done when the event is."""

    done: Any
    moves: list[Move]


class BetweenSteps:
    """Admissions between decode steps. Never waits for the device. Who calls holds the lock of `placement`, but for `note`.

    Args:
        records: pinned.
        table: int64 [layers, 9, experts] on the device.
        slots: uint8 [slots, stride] on the device.
        placement: which record is in which slot.
        where: int64 [layers, experts], where the tables point: a slot, or NONE for the host. Written here.
        base: addresses of records, from (layers, experts, slots).
        max_rows: rows of a decode step.
        top_k: picks of a row.
        copy_stream: where records are copied.
        admit: change the cache at all.
    """

    def __init__(
        self,
        records: PinnedRecords,
        table: torch.Tensor,
        slots: torch.Tensor,
        placement: Placement,
        where: Ints,
        base: Callable[[Ints, Ints, Ints], Ints],
        max_rows: int,
        top_k: int,
        copy_stream: Any,
        *,
        admit: bool,
    ) -> None:
        self._records, self._table, self._slots = records, table, slots
        self._placement, self._where, self._base = placement, where, base
        self._copy_stream, self._admit = copy_stream, admit
        self._landings: list[Landing] = []
        self._picks = pinned_empty((records.num_layers, max_rows, top_k))
        self._pick_rows = np.zeros(records.num_layers, np.int64)
        self._picks_ready = torch.cuda.Event()
        self._counters = dict.fromkeys(["decode_steps", "decode_picks", "decode_hits", "decode_records_missed", "bytes_copied"], 0)

    def note(self, layer: int, rows: int, selected: torch.Tensor) -> None:
        """Enqueues the copy of a layer's picks, int64 [rows, top_k] on the device, to the host."""
        self._picks[layer, :rows].copy_(selected, non_blocking=True)
        self._pick_rows[layer] = rows
        if layer == self._records.num_layers - 1:
            self._picks_ready.record()

    def look(self) -> None:
        """Looks at what the last decode step picked and at copies that are done; starts new ones."""
        picked = self._take_picks()
        changed = self._settle()
        moves = self._placement.plan(picked) if picked is not None and self._admit else []
        changed += [move.evicted for move in moves if move.evicted != NONE]
        self._point(changed)
        if moves:
            self._start_copies(moves)

    def vacate(self, slots: Iterable[int]) -> None:
        """Empties slots."""
        self._point(self._placement.vacate(slots, remember=self._admit))

    def drop(self, record: int) -> None:
        """Empties the slot of a record, if it has one. Copies must be done: the one that is under way for it too."""
        changed = self._settle()
        slot = self._placement.slot(record)
        if slot != NONE:
            changed += self._placement.vacate([slot], remember=self._admit)
        self._point(changed)

    def place(self, wanted: list[int]) -> None:
        """Makes exactly these records resident, in the first slots. The device must be idle."""
        self._landings.clear()
        self._pick_rows[:] = 0
        lost = self._placement.vacate(range(self._placement.num_slots), remember=False)
        for slot, record in enumerate(wanted[: self._placement.usable]):
            self._slots[slot].copy_(self._records.host[record])
            self._placement.put(record, slot)
        self._point([*lost, *wanted])

    def stats(self) -> dict[str, int]:
        """Counters, JSON-ready."""
        return dict(self._counters)

    def close(self) -> None:
        """Lets go of the slots' memory."""
        self._slots = self._slots.new_empty((0, self._records.stride))  # a view would keep all of them

    def _take_picks(self) -> Ints | None:
        """Distinct records of the last decode step, or None when there was none or its picks are not here yet."""
        if not self._pick_rows.all() or not self._picks_ready.query():
            return None
        picks = self._picks.numpy()
        every = np.concatenate(
            [picks[layer, :rows].ravel() + layer * self._records.num_experts for layer, rows in enumerate(self._pick_rows)]
        )
        self._counters["decode_steps"] += len(self._pick_rows)
        self._counters["decode_picks"] += len(every)
        self._counters["decode_hits"] += int(np.count_nonzero(self._where.ravel()[every] != NONE))
        self._pick_rows[:] = 0
        records = np.unique(every)
        self._counters["decode_records_missed"] += int(np.count_nonzero(self._where.ravel()[records] == NONE))
        self._placement.touch(records)
        return records

    def _settle(self) -> list[int]:
        """Records whose copies are done."""
        landed: list[int] = []
        while self._landings and self._landings[0].done.query():
            landing = self._landings.pop(0)
            landed += [move.record for move in landing.moves if self._placement.landed(move.slot, move.record)]
        return landed

    def _point(self, records: Iterable[int]) -> None:
        """Writes the tables of records whose placement changed, behind everything that the compute stream was given so far."""
        ids = np.array(sorted(set(records)), np.int64)
        if len(ids) == 0:
            return
        layers, experts = ids // self._records.num_experts, ids % self._records.num_experts
        slots = np.array([self._placement.slot(int(record)) for record in ids], np.int64)
        self._where[layers, experts] = slots
        values = self._base(layers, experts, slots)[:, None] + self._records.offsets[layers]
        rows = np.arange(values.shape[1], dtype=np.int64)
        flat = (layers[:, None] * values.shape[1] + rows) * self._records.num_experts + experts[:, None]
        message = torch.from_numpy(np.stack([flat.ravel(), values.ravel()])).to(self._table.device, non_blocking=True)
        with torch.inference_mode():
            self._table.view(-1).index_copy_(0, message[0], message[1])

    def _start_copies(self, moves: list[Move]) -> None:
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._table.device))
        with torch.cuda.stream(self._copy_stream):
            for move in moves:
                self._slots[move.slot].copy_(self._records.host[move.record], non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._landings.append(Landing(done, moves))
        self._counters["bytes_copied"] += len(moves) * self._records.stride
