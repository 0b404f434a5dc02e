"""An EXL3 checkpoint's weights, dequantised, under transformers' names: to go on training from it, and to compare with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.python import exl3
from services.gpu_worker.checkpoint import PROJECTIONS, TEXT_PREFIX, Checkpoint
from services.gpu_worker.model_config import LINEAR_ATTENTION


def dense_expert(checkpoint: Checkpoint, layer: int, expert: int, projection: str, *, affine: bool = False) -> NDArray[np.float32]:
    """One dequantised projection [inputs, outputs]."""
    key, files = checkpoint.expert_key(layer, expert, projection), checkpoint.files
    trellis, suh, svh = (files.array(f"{key}.{part}") for part in ("trellis", "suh", "svh"))
    codebook = exl3.Codebook(checkpoint.expert_layout(layer).codebook)
    if not affine:
        return exl3.dequantize(trellis, suh, svh, codebook)
    assert codebook is exl3.Codebook.MUL1
    # The GPU's weight is the affine form of a byte sum, rounded to fp16: the byte sum comes back by rounding.
    step = 1774 / 2**18
    sums = np.rint((exl3.decode(trellis, codebook).astype(np.float64) + 3.453125) / step)
    weight = _hadamard(_hadamard(sums * step - 3.453125).T).T
    return (suh.astype(np.float64)[:, None] * weight * svh.astype(np.float64)).astype(np.float32)


def _hadamard(weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """The 128-wide transform along the rows' axis."""
    index = np.arange(128)
    signs = (-1.0) ** np.bitwise_count(index[:, None] & index)
    blocks = weight.reshape(-1, 128, weight.shape[1])
    return (np.einsum("ij,bjn->bin", signs, blocks) / np.sqrt(128)).reshape(weight.shape)


def text_state(checkpoint: Checkpoint, *, affine: bool = False) -> dict[str, torch.Tensor]:
    """fp32 state dict of `Glm5NextTextModel`; `affine`: MUL1 experts without the fp16 rounding of a GPU's decoder."""
    config, files = checkpoint.config, checkpoint.files
    state: dict[str, torch.Tensor] = {}

    def put(name: str, array: NDArray[np.float32]) -> None:
        state[name] = torch.from_numpy(np.ascontiguousarray(array))

    def copy(name: str, stored: str | None = None) -> None:
        full = TEXT_PREFIX + (stored or name)
        put(name, files.float32(full, files.entry(full).shape))

    def linear(name: str, inputs: int, outputs: int, stored: str | None = None) -> None:
        put(name + ".weight", checkpoint.linear(stored or name, inputs, outputs).T)

    copy("embed_tokens.weight")
    copy("norm.weight")
    for i in range(config.num_hidden_layers):
        key = f"layers.{i}."
        copy(key + "input_layernorm.weight")
        copy(key + "post_attention_layernorm.weight")
        for site in ("attn", "ffn"):
            for part in ("fn", "base", "scale"):
                copy(f"{key}{site}_hc.{part}", f"{key}hc_{site}_{part}")
        hidden, attn = config.hidden_size, key + "self_attn."
        if config.layer_types[i] == LINEAR_ATTENTION:
            dim = config.linear_head_dim
            width = config.linear_num_heads * dim
            for name, weight in zip("qkv", _query_key_value(checkpoint, attn, width), strict=True):
                put(f"{attn}{name}_proj.weight", weight.T)
            put(attn + "conv1d.weight", _conv(checkpoint, attn, width))
            linear(attn + "forget_gate.f_a_proj", hidden, dim, attn + "f_a_proj")
            linear(attn + "forget_gate.f_b_proj", dim, width, attn + "f_b_proj")
            copy(attn + "forget_gate.A_log", attn + "A_log")
            copy(attn + "forget_gate.dt_bias", attn + "dt_bias")
            linear(attn + "b_proj", hidden, config.linear_num_heads)
            linear(attn + "g_a_proj", hidden, dim)
            linear(attn + "g_b_proj", dim, width)
            copy(attn + "o_norm.weight")
            linear(attn + "o_proj", width, hidden)
        else:
            heads, q_rank, kv_rank = config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
            linear(attn + "q_a_proj", hidden, q_rank)
            copy(attn + "q_a_layernorm.weight")
            linear(attn + "q_b_proj", q_rank, heads * config.qk_nope_head_dim)
            linear(attn + "kv_a_proj_with_mqa", hidden, kv_rank)
            copy(attn + "kv_a_layernorm.weight")
            linear(attn + "kv_b_proj", kv_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
            linear(attn + "o_proj", heads * config.v_head_dim, hidden)
            linear(attn + "indexer.wq_b", q_rank, config.index_n_heads * config.index_head_dim)
            linear(attn + "indexer.wk", hidden, config.index_head_dim)
            linear(attn + "indexer.weights_proj", hidden, config.index_n_heads)
            for name in ("k_norm.weight", "k_norm.bias", "index_kpool_compress_ape", "index_kpool_compress_gate"):
                copy(f"{attn}indexer.{name}")
        if config.mlp_layer_types[i] == "dense":
            _mlp(linear, key + "mlp.", hidden, config.intermediate_size)
        else:
            copy(key + "mlp.gate.weight")
            copy(key + "mlp.gate.e_score_correction_bias")
            _mlp(linear, key + "mlp.shared_experts.", hidden, config.moe_intermediate_size * config.n_shared_experts)
            dense = {p: [dense_expert(checkpoint, i, e, p, affine=affine).T for e in range(config.n_routed_experts)] for p in PROJECTIONS}
            put(
                key + "mlp.experts.gate_up_proj",
                np.stack([np.concatenate([g, u]) for g, u in zip(dense["gate"], dense["up"], strict=True)]),
            )
            put(key + "mlp.experts.down_proj", np.stack(dense["down"]))
    return state


def _query_key_value(checkpoint: Checkpoint, attn: str, width: int) -> list[NDArray[np.float32]]:
    hidden = checkpoint.config.hidden_size
    if f"{TEXT_PREFIX}{attn}qkv_proj.trellis" in checkpoint.files:
        return np.split(checkpoint.linear(attn + "qkv_proj", hidden, 3 * width), 3, axis=1)
    return [checkpoint.linear(f"{attn}{name}_proj", hidden, width) for name in "qkv"]


def _conv(checkpoint: Checkpoint, attn: str, width: int) -> NDArray[np.float32]:
    taps = checkpoint.config.linear_conv_kernel_dim
    if f"{TEXT_PREFIX}{attn}conv1d.weight" in checkpoint.files:
        return checkpoint.tensor(attn + "conv1d.weight", 3 * width, 1, taps)
    return np.concatenate([checkpoint.tensor(f"{attn}{name}_conv1d.weight", width, 1, taps) for name in "qkv"])


def _mlp(linear: Any, key: str, hidden: int, inter: int) -> None:
    linear(key + "gate_proj", hidden, inter)
    linear(key + "up_proj", hidden, inter)
    linear(key + "down_proj", inter, hidden)


def head_weight(checkpoint: Checkpoint) -> torch.Tensor:
    """fp32 [vocab, hidden] of the language-model head."""
    config = checkpoint.config
    return torch.from_numpy(np.ascontiguousarray(checkpoint.linear("lm_head", config.hidden_size, config.vocab_size, prefix="").T))
