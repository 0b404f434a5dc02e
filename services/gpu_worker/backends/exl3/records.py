"""The arena's records as the GPU sees them: pinned host memory, and views of it that are device tensors."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.python.arena import Arena
from kernels.python.exl3 import Codebook
from kernels.python.expert import ExpertShape
from services.common.errors import ConfigError
from services.gpu_worker.patches import pointer_tables
from services.gpu_worker.patches.expert_load import Place

log = logging.getLogger(__name__)

# Pinned in few large ranges: each costs a call into the kernel driver, and none may end inside a layer, so that one copy never spans two.
MAX_RANGE_BYTES = 16 << 30
_MAPPED_PORTABLE = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class PinnedRecords:
    """Every record of an arena, registered with CUDA.

    Args:
        arena: sealed; stays mapped as long as this object lives.
        shapes: one per layer.
        device: the CUDA device's index; must be the current one.
        extension: gives exllamav3's compiled module; called when everything is pinned, which another thread may import it beside.

    Raises:
        ConfigError: the driver refuses.
    """

    def __init__(self, arena: Arena, shapes: list[ExpertShape], device: int, extension: Callable[[], Any]) -> None:
        self.arena, self.shapes, self.device = arena, shapes, device
        self.num_layers, self.num_experts = arena.num_layers, arena.experts_per_layer
        self.base = _address(arena, 0, 0)
        self.stride = (_address(arena, 0, 1) if self.num_experts > 1 else _address(arena, 1, 0)) - self.base
        self._registered: list[int] = []
        began = time.perf_counter()
        self._pin()
        self.pin_seconds = time.perf_counter() - began
        log.info("%.1f GiB of records are pinned after %.1f s", self.num_bytes / (1 << 30), self.pin_seconds)
        try:
            self._extension = extension()
            self.device_base = int(self._extension.cuda_host_get_device_pointer(self.base))
        except BaseException:
            self.close()
            raise
        buffer = (ctypes.c_uint8 * self.num_bytes).from_address(self.base)
        buffer._keep = arena.handle  # type: ignore[attr-defined]
        # uint8 [records, stride] on the host
        self.host = torch.from_numpy(np.ctypeslib.as_array(buffer).reshape(self.num_records, self.stride))
        # int64 [layers, 9]: where a record's parts begin
        self.offsets = np.array([[getattr(shape, row) for row in pointer_tables.ROWS] for shape in shapes], np.int64)

    @property
    def num_records(self) -> int:
        """Records of all layers."""
        return self.num_layers * self.num_experts

    @property
    def num_bytes(self) -> int:
        """Bytes that are pinned."""
        return self.num_records * self.stride

    def _pin(self) -> None:
        layer_bytes = self.num_experts * self.stride
        step = max(1, MAX_RANGE_BYTES // layer_bytes) * layer_bytes
        runtime = torch.cuda.cudart()
        for start in range(0, self.num_bytes, step):
            size = min(step, self.num_bytes - start)
            code = int(runtime.cudaHostRegister(self.base + start, size, _MAPPED_PORTABLE))
            if code != 0:
                self.close()
                raise ConfigError(
                    f"the GPU driver refuses to pin {size >> 20} MiB of expert records (CUDA error {code}): is `ulimit -l` unlimited?",
                    param="GLM53_SHM_DIR",
                )
            self._registered.append(self.base + start)

    def view(self, place: Place, part: str) -> torch.Tensor:
        """A device tensor over one part of a record: int16 [in/16, out/16, 16 K] trellis, or fp16 scales. Reads go over the link."""
        record = place.layer * self.num_experts + place.expert
        typed = typed_part(self.host[record], self.shapes[place.layer], place.projection, part)
        view: torch.Tensor = self._extension.pinned_cuda_view(typed, self.device)
        return view

    def on_device(self, pinned: torch.Tensor) -> int:
        """The address by which the device reaches pinned host memory."""
        return int(self._extension.cuda_host_get_device_pointer(pinned.data_ptr()))

    def marker(self, place: Place, codebook: str) -> torch.Tensor | None:
        """A tensor when the layer's experts use that codebook ("mcg", "mul1"): exllamav3 asks only whether there is one."""
        used = Codebook(self.shapes[place.layer].codebook).name.lower() == codebook
        return torch.ones((), dtype=torch.int32) if used else None

    def addresses(self, layer: int) -> NDArray[np.int64]:
        """Device addresses of every record of a layer in place: int64 [experts]."""
        first = self.device_base + layer * self.num_experts * self.stride
        return first + np.arange(self.num_experts, dtype=np.int64) * self.stride

    def close(self) -> None:
        """Unpins. The device must be idle; views must not be read any more."""
        runtime = torch.cuda.cudart()
        while self._registered:
            runtime.cudaHostUnregister(self._registered.pop())


def typed_part(record: torch.Tensor, shape: ExpertShape, projection: str, part: str) -> torch.Tensor:
    """One part of a record's bytes (uint8 [>= record_bytes], host or device) as exllamav3 wants it."""
    inputs, outputs = (shape.inter, shape.hidden) if projection == "down" else (shape.hidden, shape.inter)
    start = int(getattr(shape, f"{projection}_{part}"))
    if part == "trellis":
        bits = int(getattr(shape, f"k_{projection}"))
        size = inputs * outputs * bits // 8
        return record[start : start + size].view(torch.int16).view(inputs // 16, outputs // 16, 16 * bits)
    width = inputs if part == "suh" else outputs
    return record[start : start + 2 * width].view(torch.float16)


def pinned_empty(shape: tuple[int, ...]) -> torch.Tensor:
    """int64 in pinned host memory: copies from and to it need not be waited for."""
    return torch.empty(shape, dtype=torch.int64, pin_memory=True)


def _address(arena: Arena, layer: int, expert: int) -> int:
    return int(arena.record(layer, expert).ctypes.data)
