"""Puts a checkpoint's routed experts into the arena of records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.python.exl3 import Codebook
from kernels.python.expert import ExpertShape
from services.common.errors import CheckpointError
from services.gpu_worker.checkpoint import Checkpoint


class RecordStore(Protocol):
    """The part of kernels.python.arena.Arena that filling needs."""

    def record(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """The bytes of one record, writable until the arena is sealed."""
        ...


def expert_shape(checkpoint: Checkpoint, layer: int) -> ExpertShape:
    """The record layout of a model layer's routed experts, after checking every tensor of theirs.

    Raises:
        CheckpointError: a tensor is missing or wrong; names it and its file.
    """
    config, layout = checkpoint.config, checkpoint.expert_layout(layer)
    try:
        return ExpertShape.create(
            config.hidden_size,
            config.moe_intermediate_size,
            (layout.k["gate"], layout.k["up"], layout.k["down"]),
            codebook=Codebook(layout.codebook),
            act_limit=config.swiglu_limit,
        )
    except ValueError as error:
        key = checkpoint.expert_key(layer, 0, "gate")
        raise CheckpointError(f"tensor {key}.trellis in {checkpoint.files.entry(key + '.trellis').file}: {error}") from None


def fill_record(checkpoint: Checkpoint, layer: int, expert: int, shape: ExpertShape, record: NDArray[np.uint8]) -> None:
    """Copies one expert's tensors to their offsets; bytes between parts become zero."""
    end = 0
    for part, raw in sorted(checkpoint.expert_parts(layer, expert), key=lambda item: int(getattr(shape, item[0]))):
        start = int(getattr(shape, part))
        record[end:start] = 0
        record[start : start + raw.size] = raw
        end = start + raw.size
    record[end : shape.record_bytes] = 0


def fill(checkpoint: Checkpoint, shapes: list[ExpertShape], arena: RecordStore, progress: Callable[[float, str], None]) -> None:
    """Fills every record of the arena; arena layer i is the i-th layer with routed experts."""
    layers = checkpoint.config.moe_layers
    for index, layer in enumerate(layers):
        progress(index / len(layers), f"experts of layer {layer}")
        for expert in range(checkpoint.config.n_routed_experts):
            fill_record(checkpoint, layer, expert, shapes[index], arena.record(index, expert))
