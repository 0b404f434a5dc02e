"""What of exllamav3 the patches were written against."""

from __future__ import annotations

import importlib.util
import pathlib
import re

from services.common.errors import ConfigError
from services.gpu_worker.patches import guard
from services.gpu_worker.patches.guard import Target

PACKAGE = "exllamav3"
VERSION = "1.5.1"
# Brings that version with the torch it was built for, and builds its extension, which a bare pip would not.
INSTALL = "`scripts/install.sh --gpu` in this installation's folder"
# Its autotuned kernels: a part that it imports only when the first pass needs it.
TUNED = "exllamav3.vendor.fla"

TARGETS = (
    Target("exllamav3.modules.linear", "Linear.load", "974bd8b8b4e11460"),
    Target("exllamav3.modules.linear", "Linear.load_exl3", "320fb5c2f679828f"),
    Target("exllamav3.modules.quant.exl3", "LinearEXL3.__init__", "6399eb4a4f7665be"),
    Target("exllamav3.modules.multilinear", "MultiLinear", "773f034cde37be8c"),
    Target("exllamav3.modules.block_sparse_mlp", "BlockSparseMLP.load", "fdacba0bc71ec3e4"),
    Target("exllamav3.modules.block_sparse_mlp", "BlockSparseMLP.load_local", "195fe594d5be2c2b"),
    Target("exllamav3.modules.block_sparse_mlp", "BlockSparseMLP.forward", "cafbe8cdf3da9640"),
    Target("exllamav3.modules.block_sparse_mlp", "BlockSparseMLP._batch_recon_layer", "0f8a8439b1fedebc"),
    Target("exllamav3.modules.block_sparse_mlp_routing", "RoutingCFG", "802f2c75a6724fe6"),
    Target("exllamav3.modules.block_sparse_mlp_routing", "routing_dots", "5e5dcb86be617858"),
    Target("exllamav3.modules.block_sparse_mlp_cpu", "BlockSparseMLP_CPU", "5b812bff2cc88197"),
    Target("exllamav3.modules.embedding", "Embedding.forward", "02e41a46fdd43e79"),
    Target("exllamav3.modules.mla_attn", "MLAttention._update_pool_plane", "da35005e1c76d106"),
    Target("exllamav3.modules.transformer", "TransformerBlock.forward", "a58fb4f774827454"),
    Target("exllamav3.modules.gated_delta_net", "GDNState", "ce3226899cba3f96"),
    Target("exllamav3.modules.gated_delta_net", "GDNLayerState.stash", "1187ffe34285f0f5"),
    Target("exllamav3.modules.gated_delta_net", "GatedDeltaNet.forward", "714be3824d7a1312"),
    Target("exllamav3.cache.recurrent_util", "advance_recurrent_states", "f432a902a6ec93d1"),
    Target("exllamav3.modules.hyperconnections", "HyperConnection.mix", "2bf3d201d2814f17"),
    Target("exllamav3.modules.hyperconnections", "HyperConnection.apply_", "d6508e0a817a7cbe"),
    Target("exllamav3.modules.rmsnorm", "RMSNorm.forward", "d013735ab8a9278c"),
    Target("exllamav3.modules.moe_batch_recon", "BatchReconLayer", "f93e76344d016db9"),
    Target("exllamav3.model.model", "Model.forward", "feb232766f44f6bd"),
    Target("exllamav3.model.model_ls", "Model_LSMixin.forward_ls", "0af732b4646f81b8"),
    Target("exllamav3.model.model_ls", "Model_LSMixin.prefill_ls", "58145dd4d1002cd7"),
    Target("exllamav3.model.model_ls", "Model_LSMixin._load_single", "e173ccbe6ff80414"),
)


def installed() -> bool:
    """True when the package can be found; it is not imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def _source(module: str) -> str:
    """Source text of a module, without importing it: importing exllamav3 would compile or load its extension."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{PACKAGE} is not installed: run {INSTALL}", param="GLM53_DEVICE")
    root = pathlib.Path(spec.submodule_search_locations[0])
    path = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if not path.is_file():
        raise KeyError(module)
    return path.read_text(encoding="utf-8")


def check() -> None:
    """Refuses another version or a changed source, before anything of it is imported.

    Raises:
        ConfigError: names version or functions, and the fix.
    """
    match = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", _source(f"{PACKAGE}.version"), re.MULTILINE)
    guard.check(PACKAGE, match[1] if match else "unknown", VERSION, TARGETS, _source, INSTALL)
