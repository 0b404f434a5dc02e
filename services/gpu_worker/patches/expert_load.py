"""Patch `expert_load`: a routed expert's tensors are views of its record in the arena.

Stock reads every expert from the checkpoint into VRAM. Here the bytes are in pinned host memory already; the linear is made from device
views of them, so that every kernel works at once, reading over the link. Where the bytes really come from is decided later, by addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from services.common.errors import ConfigError
from services.gpu_worker.patches.replace import Replacements

NAME = "expert_load"
PROJECTIONS = ("gate", "up", "down")
SCALES = ("suh", "svh")


@dataclass(frozen=True)
class Place:
    """Which expert's which projection a linear is."""

    layer: int  # the arena's layer index
    expert: int
    projection: str


@dataclass(frozen=True)
class MoeLayer:
    """One layer with routed experts as exllamav3 built it."""

    index: int  # the arena's layer index
    mlp: Any  # BlockSparseMLP
    num_experts: int


def find_moe_layers(model: Any, block_class: type) -> list[MoeLayer]:
    """The model's layers with routed experts, in the order of the forward pass.

    Raises:
        ConfigError: there is none, or one that these patches cannot serve; names it and says why.
    """
    found = [module.mlp for module, _, _ in model.fwd_modules if isinstance(getattr(module, "mlp", None), block_class)]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no {block_class.__name__}: only experts that run through it can be served from host memory",
            param="GLM53_MODEL_DIR",
        )
    layers = [MoeLayer(i, mlp, len(mlp.ups)) for i, mlp in enumerate(found)]
    for layer in layers:
        if problem := _unsupported(layer):
            raise ConfigError(f"{layer.mlp.key}: {problem}", param="GLM53_MODEL_DIR")
    return layers


def _unsupported(layer: MoeLayer) -> str:
    mlp = layer.mlp
    facts = (
        (bool(mlp.gated), "experts without a gate projection are not supported"),
        (len(mlp.gates) == len(mlp.ups) == len(mlp.downs), "gate, up and down differ in number"),
        (mlp.num_local_experts == mlp.num_experts == layer.num_experts, "its experts are split over devices"),
        (mlp.cpu_split_first is None and not mlp.cpu_offload, "exllamav3's own CPU offload is on"),
    )
    return next((problem for holds, problem in facts if not holds), "")


def places(layers: Iterable[MoeLayer]) -> dict[int, Place]:
    """id of every expert's linear -> which one it is."""
    table: dict[int, Place] = {}
    for layer in layers:
        for projection, linears in zip(PROJECTIONS, (layer.mlp.gates, layer.mlp.ups, layer.mlp.downs), strict=True):
            for expert, linear in enumerate(linears):
                table[id(linear)] = Place(layer.index, expert, projection)
    return table


def install(
    replacements: Replacements,
    layers: Iterable[MoeLayer],
    linear_class: Callable[..., Any],
    view: Callable[[Place, str], Any],
    marker: Callable[[Place, str], Any],
) -> None:
    """Makes every expert's linear load as views. The checkpoint's files are not asked: the arena has been filled from them.

    Args:
        replacements: undoes the patch.
        layers: from `find_moe_layers`.
        linear_class: exllamav3's LinearEXL3.
        view: (which linear, "trellis" | "suh" | "svh") -> device tensor over the record's bytes.
        marker: (which linear, "mcg" | "mul1") -> a tensor when the linear uses that codebook, else None.
    """
    layers = list(layers)
    where = places(layers)
    for layer in layers:
        for linear in [*layer.mlp.gates, *layer.mlp.ups, *layer.mlp.downs]:
            replacements.set(linear, "load_exl3", _loader(linear, where[id(linear)], linear_class, view, marker))


def _loader(
    linear: Any,
    place: Place,
    linear_class: Callable[..., Any],
    view: Callable[[Place, str], Any],
    marker: Callable[[Place, str], Any],
) -> Callable[[str], bool]:
    def load_exl3(key: str) -> bool:
        linear.used_alt_key = key == linear.alt_key
        linear.inner = linear_class(
            linear.config,
            linear.in_features,
            linear.out_features,
            suh=view(place, "suh"),
            svh=view(place, "svh"),
            trellis=view(place, "trellis"),
            mcg=marker(place, "mcg"),
            mul1=marker(place, "mul1"),
            out_dtype=linear.out_dtype,
            key=linear.key,
        )
        linear.quant_type = "exl3"
        return True

    return load_exl3
