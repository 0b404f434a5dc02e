"""Save a trained model in the layout of the real checkpoint: bf16, with an untrained MTP layer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .build_static import write_static
from .config import text_config
from .render import CHECKPOINT

_KEEP_FP32 = ("e_score_correction_bias", "dt_bias", "A_log")


def new_model(seed: int) -> Any:
    """A freshly initialised stock transformers model of the tiny configuration, fp32, on the CPU."""
    from transformers import Glm5NextForConditionalGeneration

    from .config import model_config

    torch.manual_seed(seed)
    return Glm5NextForConditionalGeneration(model_config())


def mtp_tensors(seed: int = 1) -> dict[str, Tensor]:
    """The MTP layer, untrained: one plain residual block with MLA, indexer and MoE, under layers.{num_layers}."""
    t = text_config()
    generator = torch.Generator().manual_seed(seed)
    hidden, rank, heads = t["hidden_size"], t["q_lora_rank"], t["num_attention_heads"]
    nope, value, latent = t["qk_nope_head_dim"], t["v_head_dim"], t["kv_lora_rank"]
    inner, index_dim = t["moe_intermediate_size"], t["index_head_dim"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    tensors = {
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "eh_proj.weight": normal(hidden, 2 * hidden),
        "shared_head.norm.weight": torch.ones(hidden),
        "input_layernorm.weight": torch.ones(hidden),
        "post_attention_layernorm.weight": torch.ones(hidden),
        "self_attn.q_a_proj.weight": normal(rank, hidden),
        "self_attn.q_a_layernorm.weight": torch.ones(rank),
        "self_attn.q_b_proj.weight": normal(heads * nope, rank),
        "self_attn.kv_a_proj_with_mqa.weight": normal(latent, hidden),
        "self_attn.kv_a_layernorm.weight": torch.ones(latent),
        "self_attn.kv_b_proj.weight": normal(heads * (nope + value), latent),
        "self_attn.o_proj.weight": normal(hidden, heads * value),
        "self_attn.indexer.wq_b.weight": normal(t["index_n_heads"] * index_dim, rank),
        "self_attn.indexer.wk.weight": normal(index_dim, hidden),
        "self_attn.indexer.k_norm.weight": torch.ones(index_dim),
        "self_attn.indexer.k_norm.bias": torch.zeros(index_dim),
        "self_attn.indexer.weights_proj.weight": normal(t["index_n_heads"], hidden),
        "self_attn.indexer.index_kpool_compress_ape": torch.zeros(t["index_kpool"], index_dim),
        "self_attn.indexer.index_kpool_compress_gate": normal(index_dim, hidden),
        "mlp.gate.weight": normal(t["n_routed_experts"], hidden),
        "mlp.gate.e_score_correction_bias": torch.zeros(t["n_routed_experts"]),
    }
    for block in ["shared_experts", *(f"experts.{e}" for e in range(t["n_routed_experts"]))]:
        tensors[f"mlp.{block}.gate_proj.weight"] = normal(inner, hidden)
        tensors[f"mlp.{block}.up_proj.weight"] = normal(inner, hidden)
        tensors[f"mlp.{block}.down_proj.weight"] = normal(hidden, inner)
    prefix = f"model.language_model.layers.{t['num_hidden_layers']}."
    return {prefix + name: (x if name.endswith(_KEEP_FP32) else x.to(torch.bfloat16)).contiguous() for name, x in tensors.items()}


def save_source(model: Any, folder: Path) -> None:
    """Write the bf16 source checkpoint: stock names, MTP layer added, static files beside it. Casts the model."""
    model = model.to(torch.bfloat16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(_KEEP_FP32):
            tensor.data = tensor.data.float()
    model.save_pretrained(folder)
    write_static(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT / name, folder / name)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    tensors.update(mtp_tensors())
    save_file(tensors, weights, metadata={"format": "pt"})
