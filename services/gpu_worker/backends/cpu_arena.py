"""A checkpoint's routed experts as records of the arena."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.python.exl3 import Codebook
from kernels.python.expert import ExpertShape
from services.common.errors import CheckpointError
from services.gpu_worker.checkpoint import PROJECTIONS, Checkpoint
from services.gpu_worker.safetensors_files import TensorReader, check_finite


def expert_shape(checkpoint: Checkpoint, layer: int, *, whole: bool = True) -> ExpertShape:
    """The record layout of a model layer's routed experts, after checking every tensor of theirs (`whole`), or those of the first.

    Raises:
        CheckpointError: a tensor is missing or wrong; names it and its file.
    """
    config, layout = checkpoint.config, checkpoint.expert_layout(layer, whole=whole)
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


def expert_shapes(checkpoint: Checkpoint) -> list[ExpertShape]:
    """The record layout of every layer with routed experts, as its first expert has it; `check_experts` looks at the others.

    Raises:
        CheckpointError: a tensor is missing or wrong; names it and its file.
    """
    return [expert_shape(checkpoint, layer, whole=False) for layer in checkpoint.config.moe_layers]


def check_experts(checkpoint: Checkpoint) -> None:
    """Checks every tensor of every routed expert, without reading weights.

    Raises:
        CheckpointError: a tensor is missing or wrong; names it and its file.
    """
    for layer in checkpoint.config.moe_layers:
        checkpoint.expert_layout(layer)


def fill_record(
    checkpoint: Checkpoint, layer: int, expert: int, shape: ExpertShape, record: NDArray[np.uint8], reader: TensorReader | None = None
) -> None:
    """Reads one expert's tensors to their offsets; bytes between parts become zero.

    Args:
        layer: the model's layer.
        record: uint8 [>= record_bytes].
        reader: of this checkpoint's files; None opens one for this record.

    Raises:
        CheckpointError: a tensor cannot be read, names an unknown codebook, or has a scale that is no finite number.
    """
    if reader is None:
        with TensorReader(checkpoint.files) as own:
            fill_record(checkpoint, layer, expert, shape, record, own)
        return
    for projection in PROJECTIONS:
        checkpoint.check_multiplier(checkpoint.expert_key(layer, expert, projection), reader.read)
    end = 0
    for part, name in sorted(checkpoint.expert_tensors(layer, expert), key=lambda item: int(getattr(shape, item[0]))):
        entry, start = checkpoint.files.entry(name), int(getattr(shape, part))
        record[end:start] = 0
        end = start + entry.num_bytes
        reader.into(name, record[start:end])
        if not part.endswith("trellis"):
            check_finite(entry, record[start:end].view(np.float16))
    record[end : shape.record_bytes] = 0
