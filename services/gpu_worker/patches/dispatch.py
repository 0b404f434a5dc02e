"""Patch `dispatch`: who decides where experts' bytes are is asked before a layer's experts run, and told when they have been launched.

The seam is exllamav3's own, made for its CPU split: two methods that an instance may override. Two of its paths read an expert's tensors
instead of the tables; they are reached through the layer's compiled object, which is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from services.gpu_worker.patches.expert_load import MoeLayer
from services.gpu_worker.patches.replace import Replacements

NAME = "dispatch"


# (activations fp16 [rows, hidden], selected int64 [rows, top_k], weights fp16 [rows, top_k])
DecodeStep = Callable[[Any, Any, Any], None]


# (layer, rows) -> int64 [rows, width] on the device, the likeliest first: what the next layer may pick; None for no guess. It never waits.
EarlyPicks = Callable[[int, int], Any]


class Residency(Protocol):
    """What the patch calls, always in the thread of the forward pass. None of the calls may wait for the device."""

    def before_experts(self, layer: int, rows: int, selected: Any) -> None:
        """The layer's router is enqueued. selected: int64 [rows, top_k] on the device. Its kernels see table writes enqueued now."""
        ...

    def after_experts(self, layer: int) -> None:
        """The layer's expert kernels are enqueued."""
        ...

    def before_single_expert(self, layer: int, expert: int) -> None:
        """The next kernel reads this expert's tensors, not the tables."""
        ...

    def decode_step(self, layer: MoeLayer, stock: DecodeStep) -> DecodeStep:
        """What runs a decode step (up to 8 rows) of this layer's experts instead of `stock`, or `stock` itself.

        Same arguments, same place of the result: float32 rows in the layer's `experts_cfg.out_bszn`.
        """
        ...


class CompiledLayer:
    """The layer's compiled object with a call before the kernels that read tensors."""

    def __init__(self, compiled: Any, layer: MoeLayer, residency: Residency) -> None:
        self._compiled = compiled
        self._layer = layer.index
        self._residency = residency
        self.run_bszN = residency.decode_step(layer, compiled.run_bszN)

    def run_single_expert(self, state: Any, expert: int) -> Any:
        """As the compiled object's, from wherever the expert's bytes are."""
        self._residency.before_single_expert(self._layer, expert)
        return self._compiled.run_single_expert(state, expert)

    def run_single_expert_dq(self, state: Any, expert: int, *buffers: Any) -> Any:
        """As the compiled object's, from wherever the expert's bytes are."""
        self._residency.before_single_expert(self._layer, expert)
        return self._compiled.run_single_expert_dq(state, expert, *buffers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def install(replacements: Replacements, layers: Iterable[MoeLayer], residency: Residency) -> None:
    """Puts `residency` into every layer. The layers must be loaded, and `replacements` be undone before they are unloaded."""
    for layer in layers:
        mlp, index = layer.mlp, layer.index

        def submit(y: Any, rows: int, selected: Any, weights: Any, index: int = index) -> tuple[None, None]:
            del y, weights
            residency.before_experts(index, rows, selected)
            return None, None

        def combine(final: Any, partial: Any, pending: Any, shape: Any, index: int = index) -> Any:
            del partial, pending, shape
            residency.after_experts(index)
            return final

        replacements.set(mlp, "cpu_split_submit", submit)
        replacements.set(mlp, "cpu_split_combine", combine)
        replacements.set(mlp, "bc", CompiledLayer(mlp.bc, layer, residency))
        replacements.set(mlp, "cpu_split_first", 0)
