"""What one stream keeps between forward passes on the CPU: convolution windows, recurrent states, latents of attention.

Each stream owns its memory, so joining or leaving a batch moves nothing: a pass is given one pointer per stream and layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.python import text_ops
from services.gpu_worker.backends.cpu_weights import TextWeights

MIN_CAPACITY = 256


@dataclass(frozen=True)
class StateShape:
    """Sizes of a stream's state, in floats."""

    conv: tuple[int, ...]  # [layers, taps - 1, 3 * width]
    recurrent: tuple[int, ...]  # [layers, heads, dim, dim]
    mla_layers: int
    latent: int  # per token and layer
    max_tokens: int

    @staticmethod
    def of(weights: TextWeights, max_tokens: int) -> StateShape:
        """The shape for a model and a context of `max_tokens` tokens."""
        config = weights.config
        width = config.linear_num_heads * config.linear_head_dim
        return StateShape(
            (weights.num_kda, config.linear_conv_kernel_dim - 1, 3 * width),
            (weights.num_kda, config.linear_num_heads, config.linear_head_dim, config.linear_head_dim),
            weights.num_mla,
            config.kv_lora_rank,
            max_tokens,
        )


class StreamState:
    """State of one stream. `length` tokens are stored; room is made by doubling, so growth copies each token a constant number of times.

    Attributes:
        tables: addresses of each layer's part of conv, recurrent and latents, uint64 [layers of the kind].
    """

    def __init__(self, shape: StateShape) -> None:
        self.shape = shape
        self.length = 0
        self.capacity = 0
        self.conv = np.zeros(shape.conv, np.float32)
        self.recurrent = np.zeros(shape.recurrent, np.float32)
        self.latents: NDArray[np.float32] = np.zeros((shape.mla_layers, 0), np.float32)
        self.tables = (layer_pointers(self.conv), layer_pointers(self.recurrent), layer_pointers(self.latents))

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the stream holds."""
        return self.conv.nbytes + self.recurrent.nbytes + self.latents.nbytes

    def copy(self) -> StreamState:
        """The same state in memory of its own, no larger than it needs."""
        twin = StreamState(self.shape)
        twin.reserve(self.length)
        twin.length = self.length
        twin.conv[:] = self.conv
        twin.recurrent[:] = self.recurrent
        used = self.length * self.shape.latent
        twin.latents[:, :used] = self.latents[:, :used]
        return twin

    @property
    def holds_memory(self) -> bool:
        """Nothing that streams lack: each has memory of its own."""
        return False

    def release(self) -> None:
        """Nothing to do: a copy's memory is its own."""

    def reserve(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` more tokens.

        Raises:
            ValueError: the stream would outgrow its context.
        """
        need = self.length + num_tokens
        if need > self.shape.max_tokens:
            raise ValueError(f"stream of {need} tokens exceeds the context of {self.shape.max_tokens}")
        if need <= self.capacity:
            return
        capacity = max(MIN_CAPACITY, self.capacity)
        while capacity < need:
            capacity *= 2
        capacity = -(-min(capacity, self.shape.max_tokens) // text_ops.POSITIONS) * text_ops.POSITIONS
        self.latents = self._grown(self.latents, capacity * self.shape.latent)
        self.tables = (*self.tables[:2], layer_pointers(self.latents))
        self.capacity = capacity

    @staticmethod
    def _grown(old: NDArray[np.float32], floats: int) -> NDArray[np.float32]:
        new = np.zeros((old.shape[0], floats), np.float32)
        new[:, : old.shape[1]] = old
        return new


def layer_pointers(array: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Addresses of every layer's part of an array whose first axis is the layer: uint64 [layers]."""
    return np.uint64(array.ctypes.data) + np.arange(array.shape[0], dtype=np.uint64) * np.uint64(array.strides[0])
