import json

import numpy as np
import pytest
from safetensors import safe_open

from models.tiny.recipe import config
from models.tiny.recipe.render import CHECKPOINT

TEXT = config.text_config()
LAYERS, EXPERTS, HIDDEN = TEXT["num_hidden_layers"], TEXT["n_routed_experts"], TEXT["hidden_size"]
INNER, DENSE = TEXT["moe_intermediate_size"], TEXT["intermediate_size"]
MUL1 = np.uint32(0x83DCD12D).view(np.int32)


def linear(key, inputs, outputs, bits=3):
    """The tensors of one quantised linear."""
    return {
        f"{key}.trellis": (inputs // 16, outputs // 16, 16 * bits),
        f"{key}.suh": (inputs,),
        f"{key}.svh": (outputs,),
        f"{key}.mul1": (),
    }


def swiglu(key, inner):
    return {
        **linear(key + "gate_proj", HIDDEN, inner),
        **linear(key + "up_proj", HIDDEN, inner),
        **linear(key + "down_proj", inner, HIDDEN),
    }


def moe(key):
    tensors = {f"{key}gate.weight": (EXPERTS, HIDDEN), f"{key}gate.e_score_correction_bias": (EXPERTS,)}
    for expert in ["shared_experts.", *(f"experts.{e}." for e in range(EXPERTS))]:
        tensors |= swiglu(key + expert, INNER)
    return tensors


def mla(key):
    heads, rank, latent = TEXT["num_attention_heads"], TEXT["q_lora_rank"], TEXT["kv_lora_rank"]
    width, index = TEXT["index_head_dim"], key + "indexer."
    return {
        **linear(key + "q_a_proj", HIDDEN, rank),
        **linear(key + "q_b_proj", rank, heads * TEXT["qk_nope_head_dim"]),
        **linear(key + "kv_a_proj_with_mqa", HIDDEN, latent),
        **linear(key + "o_proj", heads * TEXT["v_head_dim"], HIDDEN),
        **linear(index + "wq_b", rank, TEXT["index_n_heads"] * width),
        key + "q_a_layernorm.weight": (rank,),
        key + "kv_a_layernorm.weight": (latent,),
        key + "kv_b_proj.weight": (heads * (TEXT["qk_nope_head_dim"] + TEXT["v_head_dim"]), latent),
        index + "wk.weight": (width, HIDDEN),
        index + "k_norm.weight": (width,),
        index + "k_norm.bias": (width,),
        index + "weights_proj.weight": (TEXT["index_n_heads"], HIDDEN),
        index + "index_kpool_compress_ape": (TEXT["index_kpool"], width),
        index + "index_kpool_compress_gate": (width, HIDDEN),
    }


def kda(key):
    heads, dim = TEXT["linear_num_heads"], TEXT["linear_head_dim"]
    return {
        **linear(key + "qkv_proj", HIDDEN, 3 * heads * dim),
        **linear(key + "o_proj", heads * dim, HIDDEN),
        key + "conv1d.weight": (3 * heads * dim, 1, TEXT["linear_conv_kernel_dim"]),
        key + "f_a_proj.weight": (dim, HIDDEN),
        key + "f_b_proj.weight": (heads * dim, dim),
        key + "g_a_proj.weight": (dim, HIDDEN),
        key + "g_b_proj.weight": (heads * dim, dim),
        key + "b_proj.weight": (heads, HIDDEN),
        key + "A_log": (heads,),
        key + "dt_bias": (heads * dim,),
        key + "o_norm.weight": (dim,),
    }


def norms(key):
    return {f"{key}input_layernorm.weight": (HIDDEN,), f"{key}post_attention_layernorm.weight": (HIDDEN,)}


def expected():
    """Every text and MTP tensor with its shape."""
    base = "model.language_model."
    tensors = {
        **linear("lm_head", HIDDEN, config.VOCAB_SIZE, bits=6),
        base + "embed_tokens.weight": (config.VOCAB_SIZE, HIDDEN),
        base + "norm.weight": (HIDDEN,),
    }
    for number, kind in enumerate(config.LAYER_TYPES):
        key = f"{base}layers.{number}."
        tensors |= norms(key) | (kda if kind == config.KDA else mla)(key + "self_attn.")
        tensors |= swiglu(key + "mlp.", DENSE) if number == 0 else moe(key + "mlp.")
        for site in ("attn", "ffn"):
            tensors |= {f"{key}hc_{site}_fn": (24, 4 * HIDDEN), f"{key}hc_{site}_base": (24,), f"{key}hc_{site}_scale": (3,)}
    key = f"{base}layers.{LAYERS}."
    tensors |= norms(key) | mla(key + "self_attn.") | moe(key + "mlp.") | linear(key + "eh_proj", 2 * HIDDEN, HIDDEN)
    tensors |= {f"{key}{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return tensors


@pytest.fixture(scope="module")
def weights():
    with safe_open(CHECKPOINT / "model.safetensors", "np") as file:
        yield file


def test_every_tensor_is_there(weights):
    """The file holds exactly the expected text and MTP tensors, with their shapes, and a vision stub."""
    shapes = {k: tuple(weights.get_slice(k).get_shape()) for k in weights.keys() if not k.startswith("model.visual.")}  # noqa: SIM118
    assert shapes == expected()
    assert any(k.startswith("model.visual.") for k in weights.keys())  # noqa: SIM118


def test_codebook_is_mul1_everywhere(weights):
    """Every quantised linear carries the MUL1 marker and no other codebook's."""
    markers = [k for k in weights.keys() if k.endswith((".mul1", ".mcg"))]  # noqa: SIM118
    assert len(markers) == sum(k.endswith(".trellis") for k in weights.keys())  # noqa: SIM118
    assert all(k.endswith(".mul1") and weights.get_tensor(k) == MUL1 for k in markers)


def test_scales_are_finite_and_used(weights):
    """Scale vectors of all experts are finite fp16 without zeros, and trellises differ between experts."""
    for layer in range(1, LAYERS):
        seen = set()
        for expert in range(EXPERTS):
            key = f"model.language_model.layers.{layer}.mlp.experts.{expert}.gate_proj"
            for name in ("suh", "svh"):
                scale = weights.get_tensor(f"{key}.{name}")
                assert scale.dtype == np.float16
                assert np.isfinite(scale).all()
                assert np.count_nonzero(scale) == scale.size
            seen.add(weights.get_tensor(f"{key}.trellis").tobytes())
        assert len(seen) == EXPERTS


def test_config_is_the_recipes():
    """config.json states the recipe's dimensions, the keys that exllamav3 needs and the quantisation."""
    shipped = json.loads((CHECKPOINT / "config.json").read_text())
    assert {k: shipped["text_config"][k] for k in TEXT} == TEXT
    vision = config.vision_config()
    assert {k: shipped["vision_config"][k] for k in vision} == vision
    text = shipped["text_config"]
    assert text["linear_attn_config"]["gate_lower_bound"] == text["linear_lower_bound"] == -5.0
    assert (text["scoring_func"], text["topk_method"], text["num_nextn_predict_layers"]) == ("sigmoid", "noaux_tc", 1)
    assert shipped["architectures"] == ["Glm5NextForConditionalGeneration"]
    quantisation = shipped["quantization_config"]
    assert (quantisation["quant_method"], quantisation["bits"], quantisation["codebook"]) == ("exl3", 3.0, "mul1")


def test_context_fits_the_dense_selection():
    """The indexer selects every key up to the served context, so decode equals a full forward."""
    assert TEXT["index_topk"] >= TEXT["max_position_embeddings"] == 16384
    assert TEXT["index_topk"] % TEXT["index_kpool"] == 0


def test_storage_map_names_the_file(weights):
    """quantization_config.json describes tensors of the file, and every quantised linear of the trunk as EXL3."""
    storage = json.loads((CHECKPOINT / "quantization_config.json").read_text())["tensor_storage"]
    for module in storage.values():
        for name, stored in module["stored_tensors"].items():
            assert weights.get_slice(name).get_shape() == stored["shape"]
    trunk = tuple(f"model.language_model.layers.{n}." for n in range(LAYERS))
    quantised = {k.removesuffix(".trellis") for k in weights.keys() if k.startswith(trunk) and k.endswith(".trellis")}  # noqa: SIM118
    described = {k for k, module in storage.items() if module.get("quant_format") == "exl3"}
    assert {k for k in quantised if ".indexer." not in k} <= described


def test_folder_is_small():
    """The whole of models/tiny stays within 16 MB."""
    folder = CHECKPOINT.parent
    files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in files) <= 16_000_000
