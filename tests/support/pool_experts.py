"""Routed experts evaluated straight from the checkpoint with the kernel pool: no tiers, no processes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.python.expert import ExpertPool, ExpertShape, ExpertTask
from services.gpu_worker.backends.cpu_arena import expert_shape, fill_record
from services.gpu_worker.checkpoint import Checkpoint


class PoolExperts:
    """A `RoutedExperts` whose placement is "everything here"."""

    def __init__(self, checkpoint: Checkpoint, variant: str = "auto") -> None:
        self.pool = ExpertPool(variant)
        self.shapes: list[ExpertShape] = []
        self.records: list[NDArray[np.uint8]] = []
        self.calls: list[tuple[int, int, bool]] = []  # (layer, rows, prefill)
        for layer in checkpoint.config.moe_layers:
            shape = expert_shape(checkpoint, layer)
            records = shape.empty_records(checkpoint.config.n_routed_experts)
            for expert in range(checkpoint.config.n_routed_experts):
                fill_record(checkpoint, layer, expert, shape, records[expert])
            self.shapes.append(shape)
            self.records.append(records)

    def forward_ptr(self, layer: int, rows: int, top_k: int, x: int, sel: int, weights: int, *, prefill: bool, out: int) -> None:
        """The tier engine's call on addresses."""
        hidden = self.shapes[layer].hidden
        self.forward(
            layer,
            _view(x, ctypes.c_float, rows, hidden),
            _view(sel, ctypes.c_int64, rows, top_k),
            _view(weights, ctypes.c_float, rows, top_k),
            prefill,
            _view(out, ctypes.c_float, rows, hidden),
        )

    def forward(
        self,
        layer: int,
        x: NDArray[np.float32],
        sel: NDArray[np.int64],
        weights: NDArray[np.float32],
        prefill: bool,
        out: NDArray[np.float32],
    ) -> None:
        """out[t] = sum_k weights[t, k] * expert[sel[t, k]](x[t]) in ascending k."""
        self.calls.append((layer, len(x), prefill))
        tokens, top_k = sel.shape
        rows = np.zeros((tokens * top_k, x.shape[1]), np.float32)
        tasks = []
        for expert in np.unique(sel):
            token, slot = np.nonzero(sel == expert)
            tasks.append(
                ExpertTask(
                    self.shapes[layer],
                    self.records[layer][expert],
                    x,
                    rows,
                    token.astype(np.uint32),
                    (token * top_k + slot).astype(np.uint32),
                )
            )
        self.pool.run(tasks)
        out[:] = 0
        picks = rows.reshape(tokens, top_k, -1)
        for k in range(top_k):
            out += weights[:, k, None] * picks[:, k]


def _view(address: int, kind: Any, rows: int, columns: int) -> NDArray[Any]:
    return np.ctypeslib.as_array((kind * (rows * columns)).from_address(address)).reshape(rows, columns)
