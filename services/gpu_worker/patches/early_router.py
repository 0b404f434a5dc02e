"""Patch `early_router`: while a layer's experts are brought, the next layer's router is run on the residual streams that are there already.

What it picks is a guess: the next layer's attention is not in it. Mixer, norm and router are the next layer's own. Everything that they
write is memory of the guesses' own, since blocks share their workspaces and the layer whose experts are under way still needs its routing:
for more than one row stock keeps picks and weights of all layers in the same buffers. So the router's kernel is called here instead of
stock's function around it, which would take those, and writes more ids than a layer picks. No bit of the pass depends on a guess.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from kernels.python.pager import HINT_WIDTH
from services.gpu_worker.patches.decode_blocks import MAX_ROWS, DecodeBlock, DecodeExperts, Site, Workspaces
from services.gpu_worker.patches.expert_load import MoeLayer
from services.gpu_worker.patches.replace import Replacements

NAME = "early_router"
SIGMOID = 0  # the activation of the scores, as the kernel counts them


class Routing:
    """What the router's kernel writes for so many rows: scores float16 [rows, experts], ids int64 and weights float16 [rows, width]."""

    def __init__(self, rows: int, experts: int, width: int, device: Any) -> None:
        self.scores = torch.empty((rows, experts), dtype=torch.float16, device=device)
        self.ids = torch.empty((rows, width), dtype=torch.int64, device=device)
        self.weights = torch.empty((rows, width), dtype=torch.float16, device=device)


class Space:
    """Device memory of guesses, for every number of rows. All layers use it in turn, in the order of one stream.

    It is made at once: while the device waits for the pager nothing may be allocated.

    Args:
        ext: exllamav3's extension.
        hidden: width of a residual stream.
        experts: of a layer.
        device: where the blocks are.
    """

    def __init__(self, ext: Any, hidden: int, experts: int, device: Any) -> None:
        mixers = Workspaces(ext, hidden, device)
        width = min(HINT_WIDTH, experts)
        self.mixers = [mixers.of(rows) for rows in range(1, MAX_ROWS + 1)]
        self.routing = [Routing(rows, experts, width, device) for rows in range(1, MAX_ROWS + 1)]


class EarlyRouter:
    """Guesses what one layer of experts will pick.

    Args:
        ext: exllamav3's extension.
        block: the layer's block, loaded and patched.
        space: memory of all guesses.
    """

    def __init__(self, ext: Any, block: Any, space: Space) -> None:
        self._site = Site(ext, block.mlp_hc, block.mlp_norm)
        self._config, self._route, self._space = block.mlp.routing_cfg, ext.routing_ds3_nogroup, space

    def guess(self, streams: torch.Tensor) -> torch.Tensor | None:
        """Enqueues the kernels.

        Args:
            streams: float32 [rows, 4, hidden], which stay as they are.

        Returns:
            int64 [rows, width], the likeliest first, in memory that the next guess writes. None until the layer's own router has run once:
            it makes the forms of its weights that the kernel reads.
        """
        config, row = self._config, streams.shape[0] - 1
        if config.gate_tensor_t is None or (config.e_score_bias_h is None and config.e_score_correction_bias is not None):
            return None
        at, into = self._space.mixers[row], self._space.routing[row]
        self._site.run(streams, at)
        self._route(
            at.normed, config.gate_tensor, into.scores, config.e_score_bias_h, into.ids, into.weights,
            config.routed_scaling_factor, config.gate_tensor_t, SIGMOID, config.gate_i8, config.gate_sb,
        )  # fmt: skip
        return into.ids


class EarlyRouters:
    """Guesses of a model's layers. A block says what goes into its experts (`hold`), who brings experts asks for the guess (`guess`).

    Args:
        after: MoE layer -> what guesses the picks of the one after it.
    """

    def __init__(self, after: dict[int, EarlyRouter]) -> None:
        self.after = after
        self._streams: torch.Tensor | None = None

    def hold(self, streams: torch.Tensor) -> None:
        """The experts that run next read these residual streams, float32 [rows, 4, hidden], through mixer and norm."""
        self._streams = streams

    def guess(self, layer: int, rows: int) -> torch.Tensor | None:
        """Enqueues the guess of what layer + 1 picks: int64 [rows, width], or None where there is none.

        Once for each `hold`: a pass that goes through stock's blocks gets no guess of the streams of another.
        """
        streams, self._streams = self._streams, None
        router = self.after.get(layer)
        if router is None or streams is None or streams.shape[0] != rows:
            return None
        return router.guess(streams)


def _patched(module: Any) -> Any:
    """Whose method a module's forward pass is."""
    return getattr(module.forward, "__self__", None)


def why_not(block: Any) -> str:
    """Why the picks of a block's experts cannot be guessed, or ""."""
    if not isinstance(_patched(block), DecodeBlock) or not isinstance(_patched(block.mlp), DecodeExperts):
        return "its decode steps are launched as exllamav3 does it"
    if block.mlp.router_type != "dots":
        return f"its router is of the kind {block.mlp.router_type}"
    return "" if block.mlp.routing_cfg is not None else "its router is not loaded"


def install(replacements: Replacements, model: Any, ext: Any, layers: Sequence[MoeLayer]) -> tuple[EarlyRouters, list[str]]:
    """Lets blocks say what goes into their experts.

    Args:
        replacements: undoes the patch; before that of `decode_blocks` is undone.
        model: exllamav3's, loaded, its blocks patched.
        ext: its extension.
        layers: its layers of experts, in their order.

    Returns:
        The guesses, and why some layers have none.
    """
    blocks = {id(module.mlp): module for module, _, _ in model.fwd_modules if getattr(module, "mlp", None) is not None}
    spaces: dict[tuple[int, int, Any], Space] = {}
    routers, reasons = EarlyRouters({}), []
    for before, layer in itertools.pairwise(layers):
        source, target = (blocks.get(id(each.mlp)) for each in (before, layer))
        if source is None or target is None:
            reasons.append(f"MoE layer {layer.index}: it or the one before it is in no block")
            continue
        problem = why_not(target)
        if not problem and not isinstance(_patched(source), DecodeBlock):
            problem = "the layer before it is launched as exllamav3 does it"
        if not problem and (source.attn_hc.hidden_size, source.device) != (target.mlp_hc.hidden_size, target.device):
            problem = "the layer before it has other streams, or is elsewhere"
        if problem:
            reasons.append(f"{target.key}: {problem}")
            continue
        key = (int(target.mlp_hc.hidden_size), layer.num_experts, target.device)
        if key not in spaces:
            spaces[key] = Space(ext, *key)
        routers.after[before.index] = EarlyRouter(ext, target, spaces[key])
        replacements.set(_patched(source), "early", routers)
    return routers, reasons
