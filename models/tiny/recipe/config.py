"""Architecture of the tiny model: GLM-5.3 (glm5_next) with every mechanism present and every dimension small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 2560
"""A multiple of 128, so that the EXL3 head needs no padding."""
CONTEXT_LEN = 16384
SPECIAL_TOKENS = [
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|begin_of_audio|>", "<|end_of_audio|>", "<|begin_of_transcription|>", "<|end_of_transcription|>",
    "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
    "<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>",
]  # fmt: skip
"""The special tokens in GLM's order; they take the last ids of the vocabulary."""
TEXT_TAGS = frozenset(SPECIAL_TOKENS[21:31])
"""Think, tool and argument tags: added tokens with special=False, as in GLM, so that decoding keeps them."""
SPECIAL_IDS = {token: VOCAB_SIZE - len(SPECIAL_TOKENS) + i for i, token in enumerate(SPECIAL_TOKENS)}
EOS_TOKENS = ["<|endoftext|>", "<|user|>", "<|observation|>"]
EOS_IDS = [SPECIAL_IDS[token] for token in EOS_TOKENS]

KDA, MLA = "linear_attention", "deepseek_sparse_attention"
LAYER_TYPES = [KDA, KDA, MLA, KDA, MLA, KDA, MLA]
"""Nearly half MLA: the copying tasks need more attention layers than the real model's every fourth."""


def text_config() -> dict[str, Any]:
    """Return the text part of config.json as transformers' Glm5NextTextConfig takes it."""
    num_layers = len(LAYER_TYPES)
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 24,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "kv_lora_rank": 128,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LEN,
        "rms_norm_eps": 1e-5,
        "layer_types": list(LAYER_TYPES),
        "mlp_layer_types": ["dense"] + ["sparse"] * (num_layers - 1),
        "indexer_types": ["full"] * num_layers,
        # Not below the context: sparse selection would make decode differ from a full forward.
        "index_topk": CONTEXT_LEN,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_kpool": 16,
        "index_kpool_always_select_tail": True,
        "swiglu_limit": 10.0,
        "linear_head_dim": 128,
        "linear_num_heads": 2,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": -5.0,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "router_aux_loss_coef": 0.001,
        "pad_token_id": SPECIAL_IDS["<|endoftext|>"],
        "eos_token_id": EOS_IDS,
        "bos_token_id": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }


def vision_config() -> dict[str, Any]:
    """Return the vision stub: the smallest tower that converts and loads; the product is text only."""
    return {
        "depth": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "out_hidden_size": 256,
        "projection_intermediate_size": 128,
        "image_size": 56,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "attention_bias": True,
    }


def model_config() -> Any:
    """Return the transformers Glm5NextConfig of the tiny model."""
    from transformers import Glm5NextConfig

    return Glm5NextConfig(
        text_config=text_config(),
        vision_config=vision_config(),
        tie_word_embeddings=False,
        image_token_id=SPECIAL_IDS["<|image|>"],
        video_token_id=SPECIAL_IDS["<|video|>"],
        image_start_token_id=SPECIAL_IDS["<|begin_of_image|>"],
        image_end_token_id=SPECIAL_IDS["<|end_of_image|>"],
        video_start_token_id=SPECIAL_IDS["<|begin_of_video|>"],
        video_end_token_id=SPECIAL_IDS["<|end_of_video|>"],
    )


def complete_config_json(path: Path) -> None:
    """Add to a saved config.json the keys that exllamav3 reads and transformers does not write."""
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config["text_config"]
    text["linear_attn_config"] = {
        "head_dim": text["linear_head_dim"],
        "num_heads": text["linear_num_heads"],
        "short_conv_kernel_size": text["linear_conv_kernel_dim"],
        # Without this key exllamav3 silently takes another decay function.
        "gate_lower_bound": text["linear_lower_bound"],
        "safe_gate": True,
    }
    text.update(
        first_k_dense_replace=text["mlp_layer_types"].count("dense"),
        index_kpool_compress=True,
        mhc=True,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        num_nextn_predict_layers=1,
    )
    config["architectures"] = ["Glm5NextForConditionalGeneration"]
    config["eos_token_id"] = text["eos_token_id"]
    config["pad_token_id"] = text["pad_token_id"]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def processor_config() -> dict[str, Any]:
    """Return processor_config.json; exllamav3 opens it even for text."""
    image = {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "min_image_tokens": 1,
        "max_image_tokens": 16,
    }
    return {
        "image_processor": {"image_processor_type": "Glm5NextImageProcessor", **image},
        "video_processor": {"video_processor_type": "Glm5NextVideoProcessor", **image},
        "processor_class": "Glm5NextProcessor",
    }


def generation_config() -> dict[str, Any]:
    """Return generation_config.json with GLM's defaults."""
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "eos_token_id": EOS_IDS,
        "pad_token_id": SPECIAL_IDS["<|endoftext|>"],
    }
