"""Patch `decode_blocks`: a decode step's blocks run exllamav3's own kernels with less Python between them.

With every expert resident a step of one stream is bound by the host: enqueueing takes longer than the device computes, most of it in the
blocks between attention and experts (`bench.gpu_exact_slice ours`, its table of modules). Which kernels run, in which order and on which
values stays stock's, and so do all bits; what goes is the host's work around them: shapes, checks, workspaces looked up by name.

A pass takes this way when its params have DECODE, which the backend sets for one token each of up to MAX_ROWS streams. Any other pass goes
through stock's functions. A block that is not of the kind written for here keeps stock's, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from services.gpu_worker.patches.replace import Replacements

NAME = "decode_blocks"
DECODE = "glm53_decode"  # in a pass's params: its rows
MAX_ROWS = 8
STREAMS = 4  # residual streams of a hyper-connection that exllamav3's kernels are made for

Forward = Callable[..., Any]


class Workspaces:
    """Device memory of the mixers, for each number of rows; all blocks use the same in turn, as stock's do.

    Args:
        ext: exllamav3's extension.
        hidden: width of a residual stream.
        device: where the blocks are.
    """

    def __init__(self, ext: Any, hidden: int, device: Any) -> None:
        self._ext, self._hidden, self._device = ext, hidden, device
        self._made: dict[int, Workspace] = {}

    def of(self, rows: int) -> Workspace:
        """Made at first use."""
        made = self._made.get(rows)
        if made is None:
            chunks = int(self._ext.hc_mix_num_chunks(rows, STREAMS * self._hidden))
            made = self._made[rows] = Workspace(rows, self._hidden, chunks, self._device)
        return made


class Workspace:
    """What a mixer writes: partial sums, gates, the mix, and its norm."""

    def __init__(self, rows: int, hidden: int, chunks: int, device: Any) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        columns = 2 * STREAMS + STREAMS * STREAMS + 1
        self.partials = empty(rows, chunks, columns)
        self.post = empty(rows, STREAMS)
        self.comb = empty(rows, STREAMS, STREAMS)
        self.mixed = empty(rows, hidden, dtype=torch.float16)
        self.normed = empty(rows, hidden, dtype=torch.float16)
        self.outputs = (self.partials, self.post, self.comb, self.mixed)
        # As the modules take them: [rows, 1 token, ...].
        self.normed3 = self.normed.view(rows, 1, hidden)


class Site:
    """A mixer with the norm behind it."""

    def __init__(self, ext: Any, mixer: Any, norm: Any) -> None:
        self._mix, self._norm = ext.hc_mix, ext.rms_norm
        if mixer.fn_h is None:
            mixer.fn_h = mixer.fn.half()  # as stock does in its first decode step
        self._fixed = (mixer.fn_h, mixer.base, mixer.scale, mixer.rms_eps, mixer.hc_eps, mixer.sinkhorn_iters)
        self._weight = norm.weight
        self._norm_fixed = (norm.rms_norm_eps, norm.constant_bias, norm.constant_scale, False, False, 1)

    def run(self, streams: torch.Tensor, at: Workspace) -> None:
        """From the residual streams, float32 [rows, 4, hidden], to `at.normed`; `at.post` and `at.comb` are for the result's way back."""
        self._mix(streams, *self._fixed, *at.outputs)
        self._norm(at.mixed, self._weight, at.normed, *self._norm_fixed)


class EarlyStreams(Protocol):
    """Who guesses, while a layer's experts are brought, what the next layer picks (early_router.py)."""

    def hold(self, streams: torch.Tensor) -> None:
        """The experts that run next read these residual streams, float32 [rows, 4, hidden], through mixer and norm."""
        ...


class DecodeBlock:
    """A block's forward pass. `early` is told what goes into its experts; the streams may be read until those have been launched.

    Args:
        ext: exllamav3's extension.
        block: its TransformerBlock, loaded.
        spaces: the workspaces of all blocks.
    """

    def __init__(self, ext: Any, block: Any, spaces: Workspaces) -> None:
        self.stock: Forward = block.forward
        self._block, self._spaces, self._apply = block, spaces, ext.hc_apply
        self._hidden = int(block.attn_hc.hidden_size)
        self._attention = Site(ext, block.attn_hc, block.attn_norm)
        self._experts = Site(ext, block.mlp_hc, block.mlp_norm)
        self.early: EarlyStreams | None = None

    def forward(self, x: torch.Tensor, params: dict[str, Any], out_dtype: Any = None) -> Any:
        """As the block's own; x: float32 [rows, 1, 4, hidden], which is changed in place."""
        rows = params.get(DECODE)
        if rows is None or out_dtype is not None:
            return self.stock(x, params, out_dtype)
        block, at, width = self._block, self._spaces.of(rows), self._hidden
        streams = x.view(rows, STREAMS, width)
        self._attention.run(streams, at)
        y = block.attn.forward(at.normed3, params)
        self._apply(streams, y.view(rows, width), at.post, at.comb)
        self._experts.run(streams, at)
        if self.early is not None:
            self.early.hold(streams)
        y = block.mlp.forward(at.normed3, params)
        self._apply(streams, y.view(rows, width), at.post, at.comb)
        return x


class DecodeExperts:
    """Forward pass of a layer of routed experts: its router, the seam of `dispatch`, the decode kernels.

    Args:
        mlp: exllamav3's BlockSparseMLP, loaded. What other patches replace in it is looked up at each call.
    """

    def __init__(self, mlp: Any) -> None:
        self.stock: Forward = mlp.forward
        self._mlp, self._hidden = mlp, int(mlp.hidden_size)
        out = mlp.experts_cfg.out_bszn
        self._out = [out[:rows].view(rows, 1, self._hidden) for rows in range(MAX_ROWS + 1)]

    def forward(self, x: torch.Tensor, params: dict[str, Any], out_dtype: Any = None) -> Any:
        """As the layer's own; x: float16 [rows, 1, hidden]. The result is float32, in memory that the next layer writes."""
        rows = params.get(DECODE)
        if rows is None or out_dtype is not None:
            return self.stock(x, params, out_dtype)
        mlp, y = self._mlp, x.view(rows, self._hidden)
        selected, weights = mlp.routing_fn(rows, mlp.routing_cfg, y, params)
        partial = pending = None
        if mlp.cpu_split_first is not None:
            partial, pending = mlp.cpu_split_submit(y, rows, selected, weights)
        mlp.bc.run_bszN(y, selected, weights)
        out = self._out[rows]
        return mlp.cpu_split_combine(out, partial, pending, out.shape)


class DecodeEmbedding:
    """Rows of the table of tokens, which exllamav3 keeps in host memory: while they are looked up the device has nothing to do.

    Args:
        embedding: exllamav3's Embedding, loaded.
    """

    def __init__(self, embedding: Any) -> None:
        self.stock: Forward = embedding.forward
        self._table = embedding.embedding.weight.data
        width, dtype = self._table.shape[1], self._table.dtype
        self._rows = [torch.empty((rows, width), dtype=dtype) for rows in range(MAX_ROWS + 1)]
        # As stock's own staging: the step before has been waited for when the next one is written.
        staged = pinned((MAX_ROWS, 1, width))
        self._staged = [staged[:rows] for rows in range(MAX_ROWS + 1)]

    def forward(self, x: torch.Tensor, params: dict[str, Any], out_dtype: Any = None) -> Any:
        """As the module's own; x: int64 [rows, 1]. Gives float32 [rows, 1, hidden] in pinned memory."""
        rows = params.get(DECODE)
        if rows is None or out_dtype is not None:
            return self.stock(x, params, out_dtype)
        found, staged = self._rows[rows], self._staged[rows]
        torch.index_select(self._table, 0, x.view(-1), out=found)
        staged[:, 0].copy_(found)
        return staged


def pinned(shape: tuple[int, ...]) -> torch.Tensor:
    """float32 in pinned host memory."""
    return torch.empty(shape, pin_memory=True)


def why_not_embedding(module: Any) -> str:
    """Why an embedding keeps stock's forward pass, or ""."""
    if module.multiplier != 1.0 or module.normalize or module.out_dtype != torch.float32:
        return "its rows are scaled, or of another type"
    return "" if module.embedding.weight.device.type == "cpu" else "its table is on the device"


def why_not_block(block: Any) -> str:
    """Why a block keeps stock's forward pass, or ""."""
    parts = ("attn", "attn_hc", "attn_norm", "mlp", "mlp_hc", "mlp_norm")
    if missing := [name for name in parts if getattr(block, name, None) is None]:
        return f"it has no {', '.join(missing)}"
    extras = ("attn_post_norm", "mlp_post_norm", "attn_resid_scalar", "mlp_resid_scalar", "layer_scalar_f", "out_dtype")
    if found := [name for name in extras if getattr(block, name, None) is not None]:
        return f"it has {', '.join(found)}"
    for mixer in (block.attn_hc, block.mlp_hc):
        if type(mixer).__name__ != "HyperConnection" or mixer.hc_mult != STREAMS or mixer.hidden_size % 4:
            return f"its mixer is no hyper-connection of {STREAMS} streams"
    for norm in (block.attn_norm, block.mlp_norm):
        if type(norm).__name__ != "RMSNorm" or norm.span_heads or norm.groups != 1 or norm.unweighted or norm.weight is None:
            return "its norm is no RMSNorm with a weight for each channel"
    return ""


def why_not_experts(mlp: Any) -> str:
    """Why a layer of experts keeps stock's forward pass, or ""."""
    absent = ("router_pre_norm", "routed_pre_norm", "routed_post_norm", "latent_in", "latent_out", "routing_device", "shared_gate")
    facts = (
        (mlp.bc is not None and bool(mlp.is_quantized), "it has no compiled decode kernels"),
        (mlp.routing_gate is not None, "its router is elsewhere"),
        (all(getattr(mlp, name, None) is None for name in absent), f"it has one of {', '.join(absent)}"),
        (not mlp.alt_residual_channel and not mlp.cpu_offload and not mlp.tp_reduce, "its input or result goes another way"),
        (mlp.num_local_experts == mlp.num_experts and mlp.intermediate_size > 0, "its experts are split over devices"),
        (not mlp.config.infer_params.no_reconstruct, "exllamav3's setting no_reconstruct is on"),
        (mlp.shared_experts is None or bool(mlp.bc_sh_exp), "its shared expert is not computed by the decode kernels"),
        (mlp.hidden_size == mlp.expert_size, "its experts have another width than its input"),
    )
    return next((problem for holds, problem in facts if not holds), "")


def install(replacements: Replacements, model: Any, ext: Any, moe_class: type[Any]) -> tuple[int, list[str]]:
    """Patches every block that it was written for, and the embedding in front of them.

    Args:
        replacements: undoes the patch; before the model is unloaded.
        model: exllamav3's, loaded on one device.
        ext: its extension.
        moe_class: its BlockSparseMLP.

    Returns:
        How many blocks were patched, and why the others were not.
    """
    spaces: dict[tuple[int, Any], Workspaces] = {}
    patched, reasons = 0, []
    blocks: list[Any] = [module for module, _, _ in model.fwd_modules]
    if type(blocks[0]).__name__ == "Embedding":
        if problem := why_not_embedding(blocks[0]):
            reasons.append(f"{blocks[0].key}: {problem}")
        else:
            replacements.set(blocks[0], "forward", DecodeEmbedding(blocks[0]).forward)
    for module in blocks:
        if getattr(module, "attn", None) is None or getattr(module, "mlp", None) is None:
            continue
        if problem := why_not_block(module):
            reasons.append(f"{module.key}: {problem}")
            continue
        key = (int(module.attn_hc.hidden_size), module.device)
        if key not in spaces:
            spaces[key] = Workspaces(ext, *key)
        replacements.set(module, "forward", DecodeBlock(ext, module, spaces[key]).forward)
        patched += 1
        if not isinstance(module.mlp, moe_class):
            continue
        if problem := why_not_experts(module.mlp):
            reasons.append(f"{module.mlp.key}: {problem}")
        else:
            replacements.set(module.mlp, "forward", DecodeExperts(module.mlp).forward)
    return patched, reasons
