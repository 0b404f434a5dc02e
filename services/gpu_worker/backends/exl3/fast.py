"""Decode steps of `fast`: the integer expert kernels on the GPU, and cpu_expert for the misses that it finishes sooner than the link.

Every pick has the same bits wherever it is computed, so an answer does not depend on what is cached or on how fast cpu_expert is. Who
computes what is decided by the pager's own thread (kernels/cuda/device_pager_fast.cpp); the forward pass's thread only enqueues:

    publish -> the shared expert, on exllamav3's kernels -> hint for the next layer -> wait, routed experts, wait, sum

The shared expert runs while the host decides and copies. exllamav3 has it in the same call as the routed experts: that call with every
weight 0 computes it alone, since a pick of weight 0 is neither read nor computed there.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kernels.python import cuda_expert
from kernels.python.cuda_expert import CudaExperts
from kernels.python.errors import KernelError
from kernels.python.expert import ExpertShape
from kernels.python.fast_pager import FastLayout, FastOptions, FastPager, Forced
from kernels.python.pager import PagerDriver, PagerLayout, PagerPolicy
from kernels.python.region import Region
from services.gpu_worker.backends.base import BackendLostError
from services.gpu_worker.backends.exl3 import copy_way
from services.gpu_worker.backends.exl3.first_launches import FirstLaunches
from services.gpu_worker.backends.exl3.on_demand import OnDemand
from services.gpu_worker.backends.exl3.records import PinnedRecords
from services.gpu_worker.patches.dispatch import DecodeStep
from services.gpu_worker.patches.expert_load import MoeLayer

log = logging.getLogger(__name__)

_MAPPED_PORTABLE = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
SCRATCH_WORD = 64  # bytes into the pager's words


@dataclass(frozen=True)
class FastSetup:
    """What `fast` needs beside the cache.

    region: the control region that cpu_expert serves, or None for no CPU lane. The store removes and closes it at its end.
    """

    region: Region | None
    options: FastOptions = field(default_factory=FastOptions)


def why_not(shapes: Sequence[ExpertShape], capability: str) -> str:
    """Why decode cannot run on the integer kernels, or "".

    Args:
        shapes: of every layer's experts.
        capability: the GPU's compute capability without its dot, such as 90.
    """
    if problem := cuda_expert.why_not_on(capability):
        return problem
    for layer, shape in enumerate(shapes):
        if lack := cuda_expert.why_not(shape):
            return f"experts of MoE layer {layer}: {lack}"
    return ""


class MappedRegion:
    """The control region's memory, mapped for the GPU: it writes activations there and reads cpu_expert's rows."""

    def __init__(self, region: Region, records: PinnedRecords) -> None:
        self._region = region  # mapped as long as the GPU may touch it
        self.address = region.address
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(self.address, region.total_bytes, _MAPPED_PORTABLE))
        if code != 0:
            raise OSError(f"the GPU driver refuses to map the control region (CUDA error {code})")
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * region.total_bytes).from_address(self.address))
        self.on_device = records.on_device(torch.from_numpy(memory))

    def close(self) -> None:
        """Unmaps. The device must be idle."""
        torch.cuda.cudart().cudaHostUnregister(self.address)


class FastSteps(OnDemand):
    """The pager of `fast` with its kernels and memory. Arguments as `OnDemand`'s.

    Raises:
        ValueError: the device or a shape is not one of the kernels'.
        OSError: the driver refuses to map the control region.
    """

    _pager: FastPager

    def __init__(
        self,
        setup: FastSetup,
        records: PinnedRecords,
        table: torch.Tensor,
        slots: torch.Tensor,
        max_rows: int,
        top_k: int,
        copy_stream: Any,
        policy: PagerPolicy | None = None,
        copy: copy_way.Asked = "engine",
    ) -> None:
        self._setup = setup
        device, hidden = table.device, records.shapes[0].hidden
        self._max_rows, self._top_k, self._hidden = max_rows, top_k, hidden
        self._kernels: dict[bytes, CudaExperts] = {}
        self._addresses = torch.zeros((records.num_layers, records.num_experts), dtype=torch.int64, device=device)
        self._addresses_mirror = pinned((records.num_layers, records.num_experts), torch.int64)
        self._y = torch.zeros((max_rows * top_k, hidden), dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(4, dtype=torch.int32, device=device)
        self._own_rows = pinned((max_rows * top_k, hidden), torch.float32)
        self._rows_at = pinned((1,), torch.int64)
        self._no_weights = torch.zeros((max_rows, top_k), dtype=torch.float16, device=device)
        self._region = MappedRegion(setup.region, records) if setup.region is not None else None
        super().__init__(records, table, slots, max_rows, top_k, copy_stream, policy, copy)

    def _start(self, layout: PagerLayout, records: PinnedRecords, policy: PagerPolicy | None, driver: PagerDriver | None) -> FastPager:
        handles = [self._kernels_for(shape).handle for shape in records.shapes]
        fast = FastLayout(
            records_device=self._addresses.data_ptr(),
            records_mirror_address=self._addresses_mirror.data_ptr(),
            picks_device=records.on_device(self._picks),
            y_device=self._y.data_ptr(),
            arrivals_device=self._arrivals.data_ptr(),
            own_rows_address=self._own_rows.data_ptr(),
            own_rows_device=records.on_device(self._own_rows),
            rows_at_address=self._rows_at.data_ptr(),
            rows_at_device=records.on_device(self._rows_at),
            region_device=self._region.on_device if self._region is not None else 0,
        )
        first = FirstLaunches(self._max_rows, self._top_k, self._hidden, self._y, self._stream())
        first.publish(fast.picks_device, layout.words_device + SCRATCH_WORD, self._arrivals)
        for kernels in self._kernels.values():
            first.run(kernels)
        options = self._setup.options
        if layout.num_slots:
            last = layout.slots_device + (layout.num_slots - 1) * layout.record_stride
            slots = [last - i % layout.num_slots * layout.record_stride for i in range(self._top_k)]
            fixed, each = first.time(self._kernels_for(records.shapes[0]), slots)
            options = replace(options, costs=replace(options.costs, kernel_a_us=fixed, kernel_b_us=each))
            log.info("the GPU's expert kernels take %.1f us a step and %.1f us an expert in VRAM", fixed, each)
        functions = cuda_expert.step_functions()
        return FastPager(layout, records.offsets, fast, records.arena, self._setup.region, handles, functions, options, policy, driver)

    def _kernels_for(self, shape: ExpertShape) -> CudaExperts:
        key = bytes(shape)
        if key not in self._kernels:
            self._kernels[key] = CudaExperts(shape, self._max_rows * self._top_k, self._table.device.index or 0)
        return self._kernels[key]

    def step(self, layer: int, rows: int, selected: torch.Tensor) -> None:
        """Not of `fast`: its steps are `decode_step`'s."""
        raise RuntimeError(f"a step of layer {layer} for exllamav3's kernels, where {selected.shape[0]} of {rows} rows are decoded by ours")

    def decode_step(self, layer: MoeLayer, stock: DecodeStep) -> DecodeStep:
        """What runs a decode step of the layer's experts.

        Args:
            layer: loaded.
            stock: exllamav3's own, which computes the shared expert too where it has one inside.

        The step raises BackendLostError when the device refuses a call, or does not come to a step.
        """
        out: torch.Tensor = layer.mlp.experts_cfg.out_bszn
        shared = out.data_ptr() if layer.mlp.bc_sh_exp else 0
        if out.dtype != torch.float32 or out.shape[1] != self._hidden or not out.is_contiguous():
            raise ValueError(f"MoE layer {layer.index}: its result is {out.dtype} {list(out.shape)}, not float32 [rows, {self._hidden}]")

        checked: set[int] = set()  # numbers of rows whose tensors have been looked at: a call costs microseconds of every layer

        def run(y: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> None:
            rows = y.shape[0]
            if rows not in checked:
                check_arguments(y, selected, weights, self._hidden, self._top_k)
                checked.add(rows)
            try:
                self.begin(layer.index, y, selected)
                if shared:
                    stock(y, selected, self._no_weights[:rows])
                if self._early is not None:
                    self.hint(layer.index, rows, self._stream())
                self.end(layer.index, weights, out, shared)
            except KernelError as error:
                raise BackendLostError(str(error)) from error

        return run

    def begin(self, layer: int, y: torch.Tensor, selected: torch.Tensor) -> None:
        """Enqueues the first half of a step: the pager learns its picks. Arguments as `DecodeStep`'s."""
        self._pager.publish(layer, y.shape[0], selected.data_ptr(), y.data_ptr(), self._stream())

    def end(self, layer: int, weights: torch.Tensor, out: torch.Tensor, shared: int = 0) -> None:
        """Enqueues the second half: out gets the sum of all picks, plus what is at the device address `shared`."""
        self._pager.finish(layer, weights.shape[0], weights.data_ptr(), out.data_ptr(), shared=shared, stream=self._stream())
        self._settle()

    def force(self, placement: Forced, seed: int = 0) -> None:
        """Tests and measurements: where picks are computed from the next step on."""
        self._pager.force(placement, seed)

    @property
    def lane_up(self) -> bool:
        """True while cpu_expert takes jobs."""
        return self._pager.lane_up

    def stats(self) -> dict[str, Any]:
        """Picks by lane, the lane's state, costs, and how well steps were foretold; JSON-ready."""
        return {"mode": "fast", **self._pager.fast_stats()}

    def close(self) -> None:
        """Ends the pager's thread and gives kernels and mapping back. The device must be idle."""
        super().close()
        for kernels in self._kernels.values():
            kernels.close()
        if self._region is not None and self._setup.region is not None:
            self._region.close()
            self._setup.region.unlink()
            self._setup.region.close()


def check_arguments(y: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor, hidden: int, top_k: int) -> None:
    """Raises ValueError when exllamav3 hands over anything but what the kernels read."""
    wanted = (("y", y, torch.float16, hidden), ("selected", selected, torch.int64, top_k), ("weights", weights, torch.float16, top_k))
    for name, tensor, dtype, width in wanted:
        if tensor.dtype != dtype or tensor.shape != (y.shape[0], width) or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, need contiguous {dtype} [{y.shape[0]}, {width}]")


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in pinned host memory."""
    return torch.zeros(shape, dtype=dtype, pin_memory=True)
