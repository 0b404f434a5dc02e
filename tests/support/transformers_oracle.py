"""The same checkpoint in transformers' glm5_next, with every expert dequantised: what our logits are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Glm5NextTextConfig
from transformers.models.glm5_next import modeling_glm5_next as glm

from kernels.python import exl3
from services.gpu_worker.checkpoint import PROJECTIONS, TEXT_PREFIX, Checkpoint
from services.gpu_worker.model_config import LINEAR_ATTENTION


class Oracle:
    """transformers' text model and head in fp32.

    Args:
        checkpoint: an opened checkpoint.
        text_config: its text_config.
        affine_experts: MUL1 experts as docs/arithmetic.md defines their weights, without the fp16 rounding that a GPU's decoder adds.
    """

    def __init__(self, checkpoint: Checkpoint, text_config: dict[str, Any], *, affine_experts: bool = False) -> None:
        torch.set_num_threads(1)
        config = Glm5NextTextConfig(**text_config)
        config._attn_implementation = "eager"
        self.model = glm.Glm5NextTextModel(config).float().eval()
        # After the activation, as the checkpoint's own runtime clamps; the stock forwards clamp before.
        for module in self.model.modules():
            if isinstance(module, glm.Glm5NextTextMLP):
                module.forward = _clamp_after.__get__(module)  # type: ignore[method-assign]
            if isinstance(module, glm.Glm5NextTextExperts):
                module._apply_gate = _gate_after.__get__(module)  # type: ignore[method-assign]
                module.config = config
        self.head = torch.from_numpy(checkpoint.linear("lm_head", config.hidden_size, config.vocab_size, prefix=""))
        missing, unexpected = self.model.load_state_dict(_state(checkpoint, affine_experts), strict=False)
        assert not unexpected, unexpected
        assert not missing, missing
        self.model.set_experts_implementation("eager")

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """fp32 [tokens, vocab] of one full forward pass."""
        hidden = self.model(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
        return np.asarray((hidden @ self.head).numpy(), np.float32)


def _clamp_after(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate = torch.nn.functional.silu(self.gate_proj(x)).clamp(max=self.swiglu_limit)
    return self.down_proj(gate * self.up_proj(x).clamp(-self.swiglu_limit, self.swiglu_limit))


def _gate_after(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).clamp(max=self.swiglu_limit) * up.clamp(-self.swiglu_limit, self.swiglu_limit)


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


def _state(checkpoint: Checkpoint, affine: bool) -> dict[str, torch.Tensor]:
    """The model's state dict under transformers' names."""
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
