"""Decode with the device pager: every miss is copied into a slot while the device waits for it (kernels/cuda/device_pager.h).

The forward pass's thread only enqueues; which record goes where is decided by the pager's own thread, without the GIL.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.python.errors import KernelError
from kernels.python.pager import HINT_WIDTH, WORDS_BYTES, HintCounters, Pager, PagerCounters, PagerDriver, PagerLayout, PagerPolicy
from services.gpu_worker.backends.base import BackendLostError
from services.gpu_worker.backends.exl3 import copy_way
from services.gpu_worker.backends.exl3.records import PinnedRecords, pinned_empty
from services.gpu_worker.patches.dispatch import EarlyPicks

# A step of 8 streams can miss 64 records of a layer. Of those that are not worth a slot one passes through a slot of its own, where the
# link is timed too, and so many through the coldest records' slots. Slots set aside for all of them would hold nothing at one stream; more
# that pass would drive out what several streams want.
TRANSIT_SLOTS, PASSING = 1, 10
_REQUEST, _REPLY, _LANE_REPLY = 0, 32, 48  # of the pager's words, kernels/cuda/device_pager.h


class OnDemand:
    """The pager with the memory that it works on.

    Args:
        records: pinned.
        table: int64 [layers, 9, experts] on the device.
        slots: uint8 [slots, stride] on the device.
        max_rows: rows of a decode step.
        top_k: picks of a row.
        copy_stream: where records are copied.
        policy: of the cache.
        copy: how records come into slots; `auto` measures it here.

    Attributes:
        copy_way: what that came to.
        layer_by_layer: every layer of a decode step is answered before anything behind it is enqueued. For passes in which the forward
            pass may wait for the device inside the driver, as it does where a kernel is used for the first time: the pager's calls can
            need what such a wait holds.

    Raises:
        ConfigError: a gather was asked for and cannot run here.
    """

    def __init__(
        self,
        records: PinnedRecords,
        table: torch.Tensor,
        slots: torch.Tensor,
        max_rows: int,
        top_k: int,
        copy_stream: Any,
        policy: PagerPolicy | None = None,
        copy: copy_way.Asked = "engine",
    ) -> None:
        # With a slot for every record nothing passes through.
        some = slots.shape[0] // 8 if slots.shape[0] < records.num_records else 0
        self.num_transit = min(TRANSIT_SLOTS, some)
        self._shape = (records.num_layers, records.num_experts)
        self._table = table
        self._keep = [slots, copy_stream, records]
        self._mirror = pinned_empty(tuple(table.shape))
        self._picks = pinned_empty((records.num_layers, max_rows * top_k))
        self._words = pinned_empty((WORDS_BYTES // 8,)).zero_()
        self._hints: torch.Tensor | None = None
        if policy is not None and policy.hint_records:
            self._hints = pinned_empty((records.num_layers, max_rows * HINT_WIDTH))
        self._early: EarlyPicks | None = None
        self.layer_by_layer = False
        layout = PagerLayout(
            num_layers=records.num_layers,
            experts_per_layer=records.num_experts,
            num_slots=slots.shape[0],
            num_transit=self.num_transit,
            max_rows=max_rows,
            top_k=top_k,
            record_stride=records.stride,
            host_address=records.base,
            host_device=records.device_base,
            slots_device=slots.data_ptr(),
            table_device=table.data_ptr(),
            mirror_address=self._mirror.data_ptr(),
            picks_address=self._picks.data_ptr(),
            words_address=self._words.data_ptr(),
            words_device=records.on_device(self._words),
            copy_stream=copy_stream.cuda_stream,
            hints_address=self._hints.data_ptr() if self._hints is not None else 0,
            num_passing=min(PASSING, some - self.num_transit),
        )
        self.copy_way = copy_way.choose(copy, layout, records.offsets, self._stream)
        self._pager = self._start(layout, records, policy, self.copy_way.driver)

    def _start(self, layout: PagerLayout, records: PinnedRecords, policy: PagerPolicy | None, driver: PagerDriver | None) -> Pager:
        return Pager(layout, records.offsets, policy, driver)

    def step(self, layer: int, rows: int, selected: torch.Tensor) -> None:
        """Enqueues request and wait of a layer step behind its router, and between them the hint for the next layer.

        Raises:
            BackendLostError: the driver refuses a call, or the device does not come to a step.
        """
        stream = self._stream()
        try:
            if self._early is None:
                self._pager.step(layer, rows, selected.data_ptr(), stream)
            else:
                self._pager.ask(layer, rows, selected.data_ptr(), stream)
                try:
                    self.hint(layer, rows, stream)
                finally:
                    self._pager.wait(stream)
            self._settle()
        except KernelError as error:
            raise BackendLostError(str(error)) from error

    def _settle(self) -> None:
        """Layer by layer: the device does not wait for the pager any more when the next call comes.

        Raises:
            KernelError: the device does not come to the step.
        """
        if self.layer_by_layer:
            self._pager.catch_up()

    def hint_from(self, early: EarlyPicks) -> None:
        """Every step brings ahead what `early` guesses of the next layer.

        Raises:
            ValueError: the policy has no hints.
        """
        if self._hints is None:
            raise ValueError("hint_records is 0: the pager takes no hints")
        self._early = early

    def hint(self, layer: int, rows: int, stream: int) -> None:
        """Enqueues the guess of what layer + 1 picks, between the halves of this layer's step; nothing where there is no guess."""
        if self._early is None or (ids := self._early(layer, rows)) is None:
            return
        self._pager.hint(layer + 1, rows, ids.data_ptr(), ids.shape[1], stream)

    def hint_counters(self) -> HintCounters | None:
        """What became of hints; None without any."""
        return self._pager.hint_counters() if self._hints is not None else None

    def vacate(self, first: int, count: int) -> None:
        """Empties slots; `flush` sends the tables. No decode step may be under way."""
        self._pager.vacate(first, count)

    def limit(self, usable: int) -> None:
        """Slots from there on, which are empty, get no record until a higher limit is set. No decode step may be under way."""
        self._pager.limit(usable)

    def put(self, record: int, slot: int) -> None:
        """A record's bytes are in an empty slot that is no transit slot."""
        self._pager.put(record, slot)

    def flush(self) -> None:
        """Enqueues every table that changed, and takes transit slots out of all of them."""
        self._pager.flush(self._stream())

    def where(self) -> NDArray[np.int64]:
        """The slot of every record, -1 for none: int64 [layers, experts]."""
        return self._pager.where().astype(np.int64).reshape(self._shape)

    def read_heat(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(popularity, fast): the two parts of every record's heat, fast without its weight."""
        return self._pager.heat()

    def write_heat(self, slow: NDArray[np.float32], fast: NDArray[np.float32]) -> None:
        """Goes on with the heat of an earlier run."""
        self._pager.set_heat(slow, fast)

    def counters(self) -> PagerCounters:
        """What it did.

        Raises:
            BackendLostError: a driver call failed.
        """
        try:
            return self._pager.counters()
        except KernelError as error:
            raise BackendLostError(str(error)) from error

    def words(self) -> tuple[int, int, int]:
        """The step that the device asked for last, the last one answered, and the last one that got the CPU lane's rows. Asks nobody."""
        words = self._words.numpy().view(np.uint32)
        return int(words[_REQUEST]), int(words[_REPLY]), int(words[_LANE_REPLY])

    def close(self) -> None:
        """Ends the pager's thread and lets go of the slots. The device must be idle."""
        self._pager.close()
        self._keep.clear()

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._table.device).cuda_stream)
