"""Loads the dense part of a glm5_next checkpoint into the layout of kernels/include/text_ops.h.

Projections that read the same input are packed side by side, so that a layer is a handful of calls. Everything is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.python import text_ops
from services.common.errors import CheckpointError
from services.gpu_worker.checkpoint import TEXT_PREFIX, Checkpoint
from services.gpu_worker.model_config import LINEAR_ATTENTION, TextConfig

Array = NDArray[np.float32]


class Packed:
    """A packed linear: panels [inputs * outputs] and its widths (outputs padded to 8)."""

    __slots__ = ("address", "inputs", "outputs", "panels")

    def __init__(self, *weights: Array) -> None:
        dense = weights[0] if len(weights) == 1 else np.concatenate(weights, axis=1)
        self.panels = text_ops.pack(np.ascontiguousarray(dense))
        self.address = text_ops.address(self.panels)
        self.inputs = dense.shape[0]
        self.outputs = text_ops.padded(dense.shape[1])


@dataclass
class Mlp:
    """A SwiGLU block: gate and up side by side, then down."""

    gate_up: Packed
    down: Packed
    inter: int


@dataclass
class Moe:
    """Router and shared expert; `index` is the arena's layer index of the routed experts."""

    index: int
    gate: Packed
    bias: Array
    shared: Mlp


@dataclass
class KdaLayer:
    """Projections of one linear-attention layer; `index` counts such layers."""

    index: int
    inputs: Packed  # q, k, v, f_a, g_a, b
    forget: Packed
    gate: Packed
    out: Packed
    weights: text_ops.Kda


@dataclass
class MlaLayer:
    """Projections of one full-attention layer; `index` counts such layers."""

    index: int
    inputs: Packed  # q_a, kv_a
    q_norm: Array
    kv_norm: Array
    query: Packed  # q_b and the key half of kv_b in one: from the query's rank to every head's latent space
    out: Packed  # the value half of kv_b and o in one: from every head's latent space to the model width


@dataclass
class Layer:
    """One decoder layer."""

    attention: KdaLayer | MlaLayer
    mlp: Mlp | Moe
    attn_site: text_ops.HyperSite
    ffn_site: text_ops.HyperSite


@dataclass
class TextWeights:
    """The whole dense part. `keep` holds the arrays whose addresses the ctypes structures carry."""

    config: TextConfig
    embed: Array
    norm: Array
    head: Packed
    layers: list[Layer] = field(default_factory=list)
    keep: list[Array] = field(default_factory=list)

    @property
    def num_kda(self) -> int:
        """Linear-attention layers."""
        return sum(isinstance(layer.attention, KdaLayer) for layer in self.layers)

    @property
    def num_mla(self) -> int:
        """Full-attention layers."""
        return len(self.layers) - self.num_kda


def load(checkpoint: Checkpoint, progress: Callable[[float, str], None]) -> TextWeights:
    """Reads and packs every tensor of the text model but the routed experts.

    Args:
        progress: called with a fraction 0..1 and what is being loaded.

    Raises:
        CheckpointError: a tensor is missing or wrong; names it and its file.
    """
    config = checkpoint.config
    weights = TextWeights(
        config,
        embed=checkpoint.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size),
        norm=checkpoint.tensor("norm.weight", config.hidden_size),
        head=Packed(checkpoint.linear("lm_head", config.hidden_size, config.vocab_size, prefix="")),
    )
    for layer in range(config.num_hidden_layers):
        progress(layer / config.num_hidden_layers, f"layer {layer}")
        weights.layers.append(_layer(checkpoint, weights, layer))
    return weights


def _layer(checkpoint: Checkpoint, weights: TextWeights, layer: int) -> Layer:
    config, key = checkpoint.config, f"layers.{layer}."
    if config.layer_types[layer] == LINEAR_ATTENTION:
        attention: KdaLayer | MlaLayer = _kda(checkpoint, weights, key + "self_attn.")
    else:
        attention = _mla(checkpoint, weights, key + "self_attn.")
    if config.mlp_layer_types[layer] == "dense":
        mlp: Mlp | Moe = _mlp(checkpoint, key + "mlp.", config.intermediate_size)
    else:
        mlp = _moe(checkpoint, key + "mlp.", config.moe_layers.index(layer))
    return Layer(
        attention,
        mlp,
        _hyper_site(checkpoint, weights, key + "hc_attn_", key + "input_layernorm.weight"),
        _hyper_site(checkpoint, weights, key + "hc_ffn_", key + "post_attention_layernorm.weight"),
    )


def _kept(weights: TextWeights, array: Array) -> int:
    """Address of an array that stays alive as long as the weights do."""
    array = np.ascontiguousarray(array, np.float32)
    weights.keep.append(array)
    return text_ops.address(array)


def _hyper_site(checkpoint: Checkpoint, weights: TextWeights, key: str, norm: str) -> text_ops.HyperSite:
    config = checkpoint.config
    streams, hidden = config.hc_mult, config.hidden_size
    mix = (2 + streams) * streams
    fn = Packed(np.ascontiguousarray(checkpoint.tensor(key + "fn", mix, streams * hidden).T))
    if fn.outputs != mix:
        raise CheckpointError(f"{checkpoint.path}/config.json: text_config.hc_mult {streams} is not supported, need 4")
    weights.keep.append(fn.panels)
    scale = checkpoint.tensor(key + "scale", 3)
    return text_ops.HyperSite(
        fn_panels=fn.address,
        base=_kept(weights, checkpoint.tensor(key + "base", mix)),
        scale=tuple(float(s) for s in scale),
        norm_eps=config.rms_norm_eps,
        eps=config.hc_eps,
        sinkhorn_iters=config.hc_sinkhorn_iters,
        num_streams=streams,
        hidden=hidden,
        sublayer_norm=_kept(weights, checkpoint.tensor(norm, hidden)),
        sublayer_eps=config.rms_norm_eps,
    )


def _conv(checkpoint: Checkpoint, key: str, width: int, taps: int) -> Array:
    """Convolution taps as [taps, 3 * width]; quantised checkpoints store them fused, sources per projection."""
    if f"{TEXT_PREFIX}{key}q_conv1d.weight" in checkpoint.files:
        fused = np.concatenate([checkpoint.tensor(f"{key}{name}_conv1d.weight", width, 1, taps) for name in "qkv"])
    else:
        fused = checkpoint.tensor(key + "conv1d.weight", 3 * width, 1, taps)
    return np.ascontiguousarray(fused[:, 0, :].T)


def _query_key_value(checkpoint: Checkpoint, key: str, hidden: int, width: int) -> list[Array]:
    """The three projections' weights; quantised checkpoints store them fused, sources apart."""
    if any(f"{TEXT_PREFIX}{key}q_proj.{part}" in checkpoint.files for part in ("trellis", "weight")):
        return [checkpoint.linear(f"{key}{name}_proj", hidden, width) for name in "qkv"]
    return [checkpoint.linear(key + "qkv_proj", hidden, 3 * width)]


def _kda(checkpoint: Checkpoint, weights: TextWeights, key: str) -> KdaLayer:
    config = checkpoint.config
    hidden, heads, dim = config.hidden_size, config.linear_num_heads, config.linear_head_dim
    width, bound = heads * dim, config.linear_lower_bound
    parts = _query_key_value(checkpoint, key, hidden, width)
    parts += [checkpoint.linear(f"{key}{name}_a_proj", hidden, dim) for name in "fg"]
    parts.append(checkpoint.linear(key + "b_proj", hidden, heads))
    kernel = text_ops.Kda(
        num_heads=heads,
        head_dim=dim,
        conv_kernel=config.linear_conv_kernel_dim,
        has_lower_bound=int(bound is not None),
        lower_bound=0.0 if bound is None else bound,
        norm_eps=config.rms_norm_eps,
        conv=_kept(weights, _conv(checkpoint, key, width, config.linear_conv_kernel_dim)),
        dt_bias=_kept(weights, checkpoint.tensor(key + "dt_bias", width)),
        a_exp=_kept(weights, np.exp(checkpoint.tensor(key + "A_log", heads))),
        o_norm=_kept(weights, checkpoint.tensor(key + "o_norm.weight", dim)),
    )
    return KdaLayer(
        weights.num_kda,
        Packed(*parts),
        Packed(checkpoint.linear(key + "f_b_proj", dim, width)),
        Packed(checkpoint.linear(key + "g_b_proj", dim, width)),
        Packed(checkpoint.linear(key + "o_proj", width, hidden)),
        kernel,
    )


def _mla(checkpoint: Checkpoint, weights: TextWeights, key: str) -> MlaLayer:
    """Attention in the space of latents: kv_b is folded into its neighbours, so that a token of context is one latent."""
    config = checkpoint.config
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    key_dim, value_dim = config.qk_nope_head_dim, config.v_head_dim
    q_b = checkpoint.linear(key + "q_b_proj", config.q_lora_rank, heads * key_dim).reshape(-1, heads, key_dim)
    kv_b = checkpoint.linear(key + "kv_b_proj", rank, heads * (key_dim + value_dim)).reshape(rank, heads, -1)
    out = checkpoint.linear(key + "o_proj", heads * value_dim, hidden).reshape(heads, value_dim, hidden)
    # The products are made in fp64: rounding twice would cost more than the whole pass does.
    query = np.einsum("qhd,rhd->qhr", q_b, kv_b[..., :key_dim], dtype=np.float64, optimize=True)
    value = np.einsum("rhd,hdo->hro", kv_b[..., key_dim:], out, dtype=np.float64, optimize=True)
    return MlaLayer(
        weights.num_mla,
        Packed(
            checkpoint.linear(key + "q_a_proj", hidden, config.q_lora_rank),
            checkpoint.linear(key + "kv_a_proj_with_mqa", hidden, rank),
        ),
        checkpoint.tensor(key + "q_a_layernorm.weight", config.q_lora_rank),
        checkpoint.tensor(key + "kv_a_layernorm.weight", rank),
        Packed(query.reshape(config.q_lora_rank, heads * rank).astype(np.float32)),
        Packed(value.reshape(heads * rank, hidden).astype(np.float32)),
    )


def _mlp(checkpoint: Checkpoint, key: str, inter: int) -> Mlp:
    hidden = checkpoint.config.hidden_size
    gate, up = (checkpoint.linear(f"{key}{name}_proj", hidden, inter) for name in ("gate", "up"))
    return Mlp(Packed(gate, up), Packed(checkpoint.linear(key + "down_proj", inter, hidden)), inter)


def _moe(checkpoint: Checkpoint, key: str, index: int) -> Moe:
    config = checkpoint.config
    experts = config.n_routed_experts
    gate = Packed(np.ascontiguousarray(checkpoint.tensor(key + "gate.weight", experts, config.hidden_size).T))
    # Padding columns are no experts: a bias of -inf keeps them from being chosen.
    bias = np.full(gate.outputs, -np.inf, np.float32)
    bias[:experts] = checkpoint.tensor(key + "gate.e_score_correction_bias", experts)
    shared = _mlp(checkpoint, key + "shared_experts.", config.moe_intermediate_size * config.n_shared_experts)
    return Moe(index, gate, bias, shared)
