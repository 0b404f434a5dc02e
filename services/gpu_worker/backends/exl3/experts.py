"""Moves routed experts between host and VRAM, and keeps every address of theirs right. `before_experts` is where a pass meets it.

Decode (rows <= 8) has two ways. `on_demand`: the device waits at each layer until the pager has copied what is missing into slots (ADMIT),
or decided to read it in place (ZERO_COPY); see on_demand.py. `fast` is that with kernels of our own and the CPU lane; see fast.py. Without
both nothing waits: a record in a slot is read there (HIT), any other in pinned host memory, and what the slots hold changes between two
steps; see between_steps.py.

Prefill: what is missing is staged a layer ahead (staging.py); the last slots are lent for it. A pass of two parts (joined.py) computes a
layer twice before it goes on to the next one.

Every write of an address is enqueued on the compute stream between the kernels that must see the old one and those that must see the new
one. A slot is overwritten only behind an event that the compute stream records after the last kernel that may read it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.python.pager import HintCounters, PagerPolicy
from services.gpu_worker.backends.base import BackendLostError, PassBrokenOff, VerifyReport
from services.gpu_worker.backends.exl3 import copy_way
from services.gpu_worker.backends.exl3.between_steps import BetweenSteps
from services.gpu_worker.backends.exl3.expert_tensors import ExpertTensors
from services.gpu_worker.backends.exl3.fast import FastSetup, FastSteps
from services.gpu_worker.backends.exl3.on_demand import OnDemand
from services.gpu_worker.backends.exl3.placement import NONE, Placement, PlacementOptions
from services.gpu_worker.backends.exl3.records import PinnedRecords, pinned_empty
from services.gpu_worker.backends.exl3.slots import ElasticSlots
from services.gpu_worker.backends.exl3.staging import Staging
from services.gpu_worker.patches.dispatch import DecodeStep, EarlyPicks
from services.gpu_worker.patches.expert_load import MoeLayer

DECODE_ROWS = 8  # exllamav3's decode kernels take so many rows
FETCH_S = 10.0  # to read one slot


@dataclass(frozen=True)
class ExpertOptions:
    """What the store does on its own."""

    placement: PlacementOptions = field(default_factory=PlacementOptions)
    admit: bool = True  # change the cache between decode steps
    stage_min_rows: int = 64  # shorter prefills read what is missing in place
    stage_parts: int = 2  # layers whose missing experts have slots at a time in a staged prefill
    on_demand: bool = False  # copy misses within the step
    pager: PagerPolicy = field(default_factory=PagerPolicy)
    copy: copy_way.Asked = "engine"  # how misses are copied within the step; auto: the faster one, measured when the store is made
    fast: FastSetup | None = None  # decode on the integer kernels, with the CPU lane; needs no `on_demand`


class ExpertStore:
    """Slots in VRAM for one model. The forward pass's thread calls everything but `stats`, `verify` and `repair`.

    Args:
        records: pinned.
        table: int64 [layers, 9, experts] on the device: the tables that exllamav3's kernels read.
        layers: loaded with views of `records`.
        num_slots: records that VRAM is taken for now.
        top_k: picks of a token.
        options: policy.
        elastic: the slots, where their end is lent to long prefills; None: memory of their own, for good.
    """

    def __init__(
        self,
        records: PinnedRecords,
        table: torch.Tensor,
        layers: list[MoeLayer],
        num_slots: int,
        top_k: int,
        options: ExpertOptions | None = None,
        elastic: ElasticSlots | None = None,
    ) -> None:
        self.options = options or ExpertOptions()
        self.progress = 0
        self.paused = False  # warm-up: picks mean nothing
        self.placement = Placement(records.num_records, num_slots, self.options.placement)
        self._records, self._table, self._layers = records, table, layers
        self._lock = threading.Lock()
        self._elastic = elastic
        if elastic is None:
            self._slots = torch.empty((num_slots, records.stride), dtype=torch.uint8, device=table.device)
        else:
            self._slots = elastic.tensor
        self._host_addresses = np.stack([records.addresses(layer) for layer in range(records.num_layers)])
        # Of no method of the store's: staging would hold the store, and with it the slots until the garbage collector comes.
        self._base = functools.partial(base_addresses, self._host_addresses, self._slots.data_ptr(), records.stride)
        # Where the tables point: a slot, or NONE for the host. The tensors follow only when they are read.
        self._where = np.full((records.num_layers, records.num_experts), NONE, np.int64)
        self._tensors = ExpertTensors(records, layers, self._slots)
        self._copy_stream = copy_way.make_stream(table.device, self.options.copy)
        self._fast: FastSteps | None = None
        self._on_demand: OnDemand | None = None
        memory = (records, table, self._slots, DECODE_ROWS, top_k, self._copy_stream, self.options.pager, self.options.copy)
        if self.options.fast is not None:
            self._on_demand = self._fast = FastSteps(self.options.fast, *memory)
        elif self.options.on_demand and num_slots:
            self._on_demand = OnDemand(*memory)
        self._between = BetweenSteps(
            records,
            table,
            self._slots,
            self.placement,
            self._where,
            self._base,
            DECODE_ROWS,
            top_k,
            self._copy_stream,
            admit=self.options.admit,
        )
        if elastic is not None:
            elastic.attach(self._lend, self._limit, self._lock, self._on_demand.num_transit if self._on_demand is not None else 0)
        self._staging = Staging(records, table, self._slots, self._copy_stream, self._base)
        self._staging_open = False
        self._part_follows = False
        self._unwanted: Callable[[], bool] | None = None
        self._table.copy_(torch.from_numpy(self._host_addresses[:, None, :] + records.offsets[:, :, None]))
        self._prefill_steps = 0
        self._checksum_failures = 0  # records and slots that verify() found bad

    # ---- the patch's side ----------------------------------------------------------------------------------------------------------

    def before_experts(self, layer: int, rows: int, selected: Any) -> None:
        """The layer's router is enqueued, its kernels are not.

        Raises:
            PassBrokenOff: a prefill pass is not wanted any more; see `breaking_off`.
        """
        self.progress += 1
        if self.paused:
            return
        if rows <= DECODE_ROWS:
            self._end_staging()
            if self._elastic is not None and layer == 0:
                self._elastic.before_decode()
            self._note_picks(layer, rows, selected)
            return
        if self._unwanted is not None and self._unwanted():
            # Now, and not when the next pass begins: until then the tables of a layer whose tail was to come lead to staged records.
            self._end_staging()
            raise PassBrokenOff(f"nobody wants the prefill pass any more: it ended before the experts of layer {layer}")
        self._prefill_steps += 1
        if layer == 0 and not self._staging_open:
            self.begin_prefill(rows)
        # While a part of the pass follows, it is not layer 0 of another pass that comes next.
        self._staging_open = self._part_follows
        self._staging.enter(layer)

    def after_experts(self, layer: int) -> None:
        """The layer's kernels are enqueued."""
        if not self._part_follows:
            self._staging.leave(layer)

    def before_single_expert(self, layer: int, expert: int) -> None:
        """The next kernel reads the expert's tensors: they are pointed at where its tables point."""
        slot = self._staging.slot_of(layer, expert)
        if slot == NONE:
            slot = int(self._where[layer, expert])
        self._tensors.point(layer, expert, slot)

    def decode_step(self, layer: MoeLayer, stock: DecodeStep) -> DecodeStep:
        """What runs a decode step of the layer: exllamav3's own kernels, or in `fast` ours."""
        return stock if self._fast is None else self._fast.decode_step(layer, stock)

    def layer_by_layer(self, wanted: bool) -> None:
        """From the next decode step on: whether every layer is answered before anything behind it is enqueued (`OnDemand`)."""
        if self._on_demand is not None:
            self._on_demand.layer_by_layer = wanted

    def hint_from(self, early: EarlyPicks) -> None:
        """Decode steps bring ahead what `early` guesses of the next layer's picks.

        Raises:
            ValueError: misses are not copied within the step, or the pager's policy has no hints.
        """
        if self._on_demand is None:
            raise ValueError("hints need decode steps that bring what is missing")
        self._on_demand.hint_from(early)

    def _note_picks(self, layer: int, rows: int, selected: Any) -> None:
        if self._fast is not None:
            return  # the step publishes its picks itself
        if self._on_demand is not None:
            self._on_demand.step(layer, rows, selected)
            return
        if layer == 0:
            self.between_passes()
        self._between.note(layer, rows, selected)

    def between_passes(self) -> None:
        """Looks at what the last decode step picked and at copies that are done; starts new ones. Never waits for the device.

        Raises:
            BackendLostError: a copy failed.
        """
        if self._on_demand is not None:
            self._on_demand.counters()
            return
        with self._lock:
            self._between.look()

    # ---- prefill: staging a layer ahead ---------------------------------------------------------------------------------------------

    def begin_prefill(self, rows: int) -> None:
        """A prefill pass is about to run, of so many rows in all its parts; its first layer is staged from now on."""
        self._end_staging()
        self._staging_open = True
        if self._on_demand is not None:
            # Decode steps must be over before slots are lent and transit slots leave the tables. They are, but where a short prompt ran as
            # one.
            torch.cuda.current_stream(self._table.device).synchronize()
            self._on_demand.flush()
            self._where[:] = self._on_demand.where()
        if self._elastic is not None and not self.paused:
            self._elastic.before_prefill(rows)
        parts = self.options.stage_parts
        part = self._part_to_lend(parts)
        if self.paused or rows < self.options.stage_min_rows or part == 0:
            return
        first = self.placement.usable - parts * part
        self._lend(first)
        self._staging.begin(self._where, part, first, parts)

    def _part_to_lend(self, parts: int) -> int:
        """Slots of each part: as many as the layer that misses most can fill, what loses its slot to the parts counted too."""
        usable, part = self.placement.usable, 0
        while True:
            missing = (self._where == NONE) | (self._where >= usable - parts * part)
            wanted = min(usable // parts, int(np.count_nonzero(missing, axis=1).max()))
            if wanted <= part:
                return part
            part = wanted

    @contextlib.contextmanager
    def part_follows(self) -> Iterator[None]:
        """Inside, a layer stays staged when its kernels are launched: the next part of the same pass reads it too, and then leaves it."""
        self._part_follows = True
        try:
            yield
        except BaseException:
            # The pass is over: the next layer 0 is another one's.
            self._staging_open = False
            raise
        finally:
            self._part_follows = False

    @contextlib.contextmanager
    def breaking_off(self, unwanted: Callable[[], bool]) -> Iterator[None]:
        """Inside, a prefill pass ends before the experts of the next layer once `unwanted` says True: tables whole, nothing more staged.

        Copies that are on their way land in lent slots, ahead of any later copy.
        """
        self._unwanted = unwanted
        try:
            yield
        finally:
            self._unwanted = None

    def _end_staging(self) -> None:
        self._staging.end()
        self._staging_open = False

    def _lend(self, first: int) -> None:
        """Empties the slots from `first` on."""
        if self._on_demand is None:
            with self._lock:
                self._between.vacate(range(first, self.placement.num_slots))
            return
        self._on_demand.vacate(first, self.placement.num_slots - first)
        self._on_demand.flush()
        self._where[:] = self._on_demand.where()

    def _limit(self, usable: int) -> None:
        """Says how many slots have memory; those behind them are empty."""
        self.placement.limit(usable)
        if self._on_demand is not None:
            self._on_demand.limit(usable)

    # ---- tests, measurements, other threads -----------------------------------------------------------------------------------------

    def repair(self, layer: int, expert: int, data: NDArray[np.uint8]) -> None:
        """Replaces a record in host memory and empties the slot that holds a copy of it. Waits for the device.

        From any thread, but no pass may be under way.
        """
        self._end_staging()
        # A copy that still runs reads what is about to be replaced.
        torch.cuda.synchronize(self._table.device)
        self._records.arena.rewrite(layer, expert, data)
        if self._on_demand is not None:
            slot = int(self._on_demand.where()[layer, expert])
            if slot != NONE:
                self._on_demand.vacate(slot, 1)
            self._on_demand.flush()
            self._where[:] = self._on_demand.where()
        else:
            with self._lock:
                self._between.drop(layer * self._records.num_experts + expert)
        torch.cuda.synchronize(self._table.device)

    def place(self, records: Iterable[int]) -> None:
        """Makes exactly these records resident, in the first slots. Waits for the device: for tests and measurements."""
        wanted = list(records)
        self._end_staging()
        torch.cuda.synchronize(self._table.device)
        if self._elastic is not None and wanted:
            self._elastic.before_decode()
        if self._on_demand is not None:
            self._place_on_demand(self._on_demand, wanted)
            return
        with self._lock:
            self._between.place(wanted)
        torch.cuda.synchronize(self._table.device)

    def read_heat(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """How hot every record is: (slow, fast) counts."""
        with self._lock:
            return (self._on_demand or self.placement).read_heat()

    def start_with(self, slow: NDArray[np.float32], fast: NDArray[np.float32]) -> None:
        """Goes on with the heat of an earlier run, its hottest records in the slots. Waits for the device."""
        with self._lock:
            (self._on_demand or self.placement).write_heat(slow, fast)
        order = np.argsort(-(slow + self.options.placement.fast_weight * fast), kind="stable")
        self.place(int(record) for record in order[: self.placement.num_slots])

    def _place_on_demand(self, pager: OnDemand, wanted: list[int]) -> None:
        pager.vacate(0, self.placement.num_slots)
        for slot, record in enumerate(wanted[: self.placement.usable - pager.num_transit], pager.num_transit):
            self._slots[slot].copy_(self._records.host[record])
            pager.put(record, slot)
        pager.flush()
        torch.cuda.synchronize(self._table.device)
        self._where[:] = pager.where()

    def close(self) -> None:
        """Points everything back at the host and lets go of the slots, whoever still has the store. Waits for the device."""
        self.place(())
        if self._on_demand is not None:
            self._on_demand.close()
        with self._lock:
            self._tensors.close()
            self._between.close()
            self._slots = self._slots.new_empty((0, self._records.stride))  # a view would keep all of them
        self._staging.close()
        if self._elastic is not None:
            self._elastic.close()

    def _record_in(self, slot: int) -> int:
        if self._on_demand is None:
            return self.placement.record_in(slot)
        held = np.flatnonzero(self._on_demand.where().ravel() == slot)
        return int(held[0]) if len(held) else NONE

    def stats(self) -> dict[str, Any]:
        """Counters, JSON-ready."""
        if self._on_demand is not None:
            return self._on_demand_stats(self._on_demand)
        with self._lock:
            return {
                **self._between.stats(),
                "checksum_failures": self._checksum_failures,
                "prefill_steps": self._prefill_steps,
                **self._staging.stats(),
                "slots": self.placement.num_slots,
                "slots_used": self.placement.slots_used,
                "admissions": self.placement.admissions,
                "evictions": self.placement.evictions,
                "arena_bytes": self._records.num_bytes,
                **(self._elastic.stats() if self._elastic is not None else {}),
            }

    def _on_demand_stats(self, pager: OnDemand) -> dict[str, Any]:
        counters = pager.counters()
        return {
            "prefill_steps": self._prefill_steps,
            **self._staging.stats(),
            "decode_steps": counters.steps,
            "decode_picks": counters.picks,
            "decode_hits": counters.hits,
            "decode_records_missed": counters.missed,
            "records_in_transit": counters.transit,
            "records_in_place": counters.in_place,
            "bytes_copied": counters.bytes_copied,
            "slots": self.placement.num_slots,
            "slots_used": int(np.count_nonzero(pager.where() != NONE)),
            "admissions": counters.admitted,
            "arena_bytes": self._records.num_bytes,
            "checksum_failures": self._checksum_failures,
            **pager.copy_way.stats(),
            **hint_stats(pager.hint_counters()),
            **(self._fast.stats() if self._fast is not None else {}),
            **(self._elastic.stats() if self._elastic is not None else {}),
        }

    def verify(self) -> VerifyReport:
        """Compares every record with its checksum and every slot with its record."""
        arena, bad = self._records.arena, 0
        for layer in range(self._records.num_layers):
            for expert in range(self._records.num_experts):
                bad += not arena.check(layer, expert)
        checked = bad_slots = 0
        held = pinned_empty((-(-self._records.stride // 8),)).view(torch.uint8)[: self._records.stride]
        for slot in range(self.placement.num_slots):
            # One slot at a time, so that no step waits for more than one copy.
            with self._lock:
                record = self._record_in(slot)
                if record == NONE:
                    continue
                self._fetch(slot, held)
                if self._record_in(slot) != record:
                    continue  # the pager, which this lock does not hold, has used it again
            checked += 1
            size = self._records.shapes[record // self._records.num_experts].record_bytes
            bad_slots += not torch.equal(held[:size], self._records.host[record][:size])
        with self._lock:  # calls of VerifyTiers may overlap
            self._checksum_failures += bad + bad_slots
        return VerifyReport(self._records.num_records, bad, checked, bad_slots)

    def _fetch(self, slot: int, into: torch.Tensor) -> None:
        """Copies a slot to pinned memory, from any thread and while steps run.

        Behind what the copy stream was given, which may still write the slot. The wait is not the driver's: the device may be waiting for
        the pager, and who waits for it inside the driver may hold what the pager's calls need.

        Raises:
            BackendLostError: the copy does not end.
        """
        done, deadline = torch.cuda.Event(), time.monotonic() + FETCH_S
        with torch.cuda.stream(self._copy_stream):
            into.copy_(self._slots[slot], non_blocking=True)
            done.record()
        while not done.query():
            if time.monotonic() > deadline:
                raise BackendLostError(f"slot {slot} cannot be read within {FETCH_S:g} s: the device is lost")
            time.sleep(0.0002)


def base_addresses(
    host: NDArray[np.int64], slots_at: int, stride: int, layers: NDArray[np.int64], experts: NDArray[np.int64], slots: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Device addresses of records in slots, or on the host where a slot is NONE.

    Args:
        host: [layers, experts], addresses there.
        slots_at: address of the first slot.
    """
    return np.where(slots == NONE, host[layers, experts], slots_at + slots * stride)


def hint_stats(counters: HintCounters | None) -> dict[str, Any]:
    """Of records that were brought ahead, JSON-ready."""
    if counters is None:
        return {}
    return {
        "hint_records_named": counters.hinted,
        "hint_records_started": counters.started,
        "hint_records_used": counters.used,
        "hint_records_late": counters.late,
        "hint_records_dropped": counters.dropped,
        "hint_bytes_copied": counters.bytes_copied,
    }
