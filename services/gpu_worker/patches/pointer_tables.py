"""Patch `pointer_tables`: all tables of expert addresses are parts of one tensor, so that one copy or one scatter moves any expert.

exllamav3 keeps nine int64 tables per layer and gives their addresses to its kernels when a layer is loaded; a table may be written in
place at any time, in stream order, but never be exchanged. So the tables are put into the shared tensor while the layer loads, before their
addresses are taken. The reconstruct path keeps copies of the scale addresses; it is given the same tables instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from services.common.errors import ConfigError
from services.gpu_worker.patches.expert_load import PROJECTIONS, MoeLayer, Place
from services.gpu_worker.patches.replace import Replacements

NAME = "pointer_tables"
# Rows of a layer's part of the shared tensor.
ROWS = tuple(f"{projection}_{part}" for projection in PROJECTIONS for part in ("trellis", "suh", "svh"))


def row_of(projection: str, part: str) -> int:
    """Row of a layer's part: which table."""
    return ROWS.index(f"{projection}_{part}")


def install(replacements: Replacements, module: Any, where: dict[int, Place], shared: Any) -> None:
    """While this is installed, the tables of experts' linears are made inside `shared`.

    Args:
        replacements: undoes the patch; what was made stays.
        module: exllamav3.modules.block_sparse_mlp.
        where: id of an expert's linear -> which one it is.
        shared: int64 [layers, 9, experts] on the device.
    """
    original: Callable[..., Any] = module.MultiLinear

    def make(device: Any, linears: list[Any], allow_bias: bool = False) -> Any:
        tables = original(device, linears, allow_bias)
        place = where.get(id(linears[0]))
        if place is not None:
            for part in ("trellis", "suh", "svh"):
                row = shared[place.layer, row_of(place.projection, part), : len(linears)]
                row.copy_(getattr(tables, f"ptrs_{part}"))
                setattr(tables, f"ptrs_{part}", row)
        return tables

    replacements.set(module, "MultiLinear", make)


def share_reconstruct_scales(layers: Iterable[MoeLayer], make_probe: Callable[[Any], Any]) -> None:
    """Builds every layer's batched-reconstruct state now and points its scale tables at the shared ones.

    Args:
        layers: loaded.
        make_probe: mlp -> an activation of one row, which tells the state its width.

    Raises:
        ConfigError: a layer did not load into the paths that these patches serve; names it.
    """
    for layer in layers:
        mlp = layer.mlp
        if mlp.bc is None or mlp.multi_up is None or not mlp.support_quant_paths:
            raise ConfigError(f"{mlp.key}: its experts do not run through the EXL3 kernels", param="GLM53_MODEL_DIR")
        recon = mlp._batch_recon_layer(make_probe(mlp))
        if recon is None or not recon.folded:
            continue  # scales that were copied by value stay right wherever the record goes
        for short, tables in (("g", mlp.multi_gate), ("u", mlp.multi_up), ("d", mlp.multi_down)):
            recon.scale_ptrs[short] = (tables.ptrs_suh, tables.ptrs_svh)
