"""Writes an untrained glm5_next checkpoint in exactly the EXL3 layout: random trellis bits, sane scales, the rest fp16, bf16 or fp32.

Its answers are noise, but they are this architecture's noise: every code path of loading and serving runs on it.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

TINY = pathlib.Path(__file__).parents[2] / "models" / "tiny" / "checkpoint"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "processor_config.json")
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
TEXT = "model.language_model."


@dataclass(frozen=True)
class Recipe:
    """What to vary. `text` overrides fields of the tiny checkpoint's text_config."""

    seed: int = 0
    k: int = 3
    head_k: int = 6
    codebook: str = "mul1"  # or "mcg" or "3inst"
    num_layers: int | None = None
    num_experts: int | None = None
    num_files: int = 1
    fused_qkv: bool = True  # as the converter writes linear attention; sources have three projections
    # How much the routed experts add. Large values make routing chaotic: rounding of one expert then decides which experts come next.
    expert_gain: float = 0.25
    text: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """A tensor as it goes into the file."""

    dtype: str
    data: NDArray[Any]


def write(directory: pathlib.Path, recipe: Recipe | None = None) -> pathlib.Path:
    """Writes the checkpoint into `directory` (created) and returns it."""
    recipe = recipe or Recipe()
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(TINY / name, directory / name)
    document = config_document(recipe)
    (directory / "config.json").write_text(json.dumps(document, indent=1))
    tensors = make_tensors(document, recipe)
    (directory / "quantization_config.json").write_text(json.dumps(_quantization_record(tensors)))
    names = sorted(tensors)
    for i in range(recipe.num_files):
        part = {name: tensors[name] for name in names[i :: recipe.num_files]}
        file = "model.safetensors" if recipe.num_files == 1 else f"model-{i + 1:05d}-of-{recipe.num_files:05d}.safetensors"
        save(directory / file, part)
    return directory


def config_document(recipe: Recipe) -> dict[str, Any]:
    """The tiny checkpoint's config.json with the recipe's changes."""
    document: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    text = document["text_config"]
    if recipe.num_layers is not None:
        depth = recipe.num_layers
        text["num_hidden_layers"] = depth
        for name in ("layer_types", "mlp_layer_types", "indexer_types"):
            text[name] = (text[name] * depth)[:depth] if name == "indexer_types" else text[name][:depth]
    if recipe.num_experts is not None:
        text["n_routed_experts"] = recipe.num_experts
    text.update(recipe.text)
    document["quantization_config"] = {
        "quant_method": "exl3",
        "version": "1.5.1",
        "bits": float(recipe.k),
        "head_bits": recipe.head_k,
        "codebook": recipe.codebook,
    }
    return document


def save(path: pathlib.Path, tensors: dict[str, Stored]) -> None:
    """Writes one safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, stored in tensors.items():
        header[name] = {"dtype": stored.dtype, "shape": list(stored.data.shape), "data_offsets": [offset, offset + stored.data.nbytes]}
        offset += stored.data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for stored in tensors.values():
            stream.write(np.ascontiguousarray(stored.data).tobytes())


def _quantization_record(tensors: dict[str, Stored]) -> dict[str, Any]:
    storage: dict[str, Any] = {}
    for name, stored in tensors.items():
        key, _, part = name.rpartition(".")
        storage.setdefault(key, {"stored_tensors": {}})["stored_tensors"][f"{key}.{part}"] = {
            "shape": list(stored.data.shape),
            "dtype": stored.dtype,
        }
    return {"tensor_storage": storage}


class _Maker:
    def __init__(self, recipe: Recipe) -> None:
        self.rng = np.random.default_rng(recipe.seed)
        self.recipe = recipe
        self.out: dict[str, Stored] = {}

    def bf16(self, name: str, values: NDArray[Any]) -> None:
        bits = np.asarray(values, np.float32).view(np.uint32)
        self.out[name] = Stored("BF16", (bits >> 16).astype(np.uint16))

    def f16(self, name: str, values: NDArray[Any]) -> None:
        self.out[name] = Stored("F16", np.asarray(values, np.float16))

    def f32(self, name: str, values: NDArray[Any]) -> None:
        self.out[name] = Stored("F32", np.asarray(values, np.float32))

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> NDArray[np.float64]:
        return mean + std * self.rng.standard_normal(shape)

    def plain(self, key: str, inputs: int, outputs: int, gain: float = 1.0) -> None:
        """An unquantised linear."""
        self.f16(f"{key}.weight", self.normal(outputs, inputs, std=gain * inputs**-0.5))

    def exl3(self, key: str, inputs: int, outputs: int, gain: float = 1.0, k: int | None = None) -> None:
        """A quantised linear: its dense weight has a standard deviation of about gain / sqrt(inputs)."""
        k = k or self.recipe.k
        bits = self.rng.integers(-32768, 32768, (inputs // 16, outputs // 16, 16 * k), dtype=np.int16)
        self.out[f"{key}.trellis"] = Stored("I16", bits)
        signs = self.rng.choice([-1.0, 1.0], inputs) * self.rng.uniform(0.8, 1.2, inputs)
        self.f16(f"{key}.suh", signs * gain * inputs**-0.5)
        self.f16(f"{key}.svh", self.rng.choice([-1.0, 1.0], outputs) * self.rng.uniform(0.8, 1.2, outputs))
        if self.recipe.codebook in MULTIPLIERS:
            word = np.array(MULTIPLIERS[self.recipe.codebook], np.uint32).view(np.int32)
            self.out[f"{key}.{self.recipe.codebook}"] = Stored("I32", word.reshape(()))

    def norm(self, name: str, width: int) -> None:
        self.bf16(name, self.normal(width, std=0.1, mean=1.0))


def make_tensors(document: dict[str, Any], recipe: Recipe) -> dict[str, Stored]:
    """All tensors of the checkpoint by storage name."""
    text = document["text_config"]
    make = _Maker(recipe)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    make.bf16(TEXT + "embed_tokens.weight", make.normal(vocab, hidden))
    make.norm(TEXT + "norm.weight", hidden)
    make.exl3("lm_head", hidden, vocab, gain=2.5, k=recipe.head_k)
    for layer in range(text["num_hidden_layers"]):
        _decoder_layer(make, text, layer)
    if text.get("num_nextn_predict_layers"):
        _mtp_layer(make, text, text["num_hidden_layers"])
    _vision_stub(make, document["vision_config"])
    return make.out


def _decoder_layer(make: _Maker, text: dict[str, Any], layer: int) -> None:
    key, hidden, streams = f"{TEXT}layers.{layer}.", text["hidden_size"], text["hc_mult"]
    make.norm(key + "input_layernorm.weight", hidden)
    make.norm(key + "post_attention_layernorm.weight", hidden)
    mix = (2 + streams) * streams
    for site in ("attn", "ffn"):
        make.f32(f"{key}hc_{site}_fn", make.normal(mix, streams * hidden, std=0.03))
        make.f32(f"{key}hc_{site}_base", make.normal(mix, std=0.5))
        make.f32(f"{key}hc_{site}_scale", make.normal(3, std=0.1, mean=1.0))
    if text["layer_types"][layer] == "linear_attention":
        _kda(make, text, key + "self_attn.")
    else:
        _mla(make, text, key + "self_attn.")
    if text["mlp_layer_types"][layer] == "dense":
        _mlp(make, key + "mlp.", hidden, text["intermediate_size"])
    else:
        _moe(make, text, key + "mlp.")


def _kda(make: _Maker, text: dict[str, Any], key: str) -> None:
    linear = text["linear_attn_config"]
    hidden, heads, dim, taps = text["hidden_size"], linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    width = heads * dim
    if make.recipe.fused_qkv:
        make.exl3(key + "qkv_proj", hidden, 3 * width)
        make.bf16(key + "conv1d.weight", make.normal(3 * width, 1, taps, std=0.5))
    else:
        for name in "qkv":
            make.exl3(f"{key}{name}_proj", hidden, width)
            make.bf16(f"{key}{name}_conv1d.weight", make.normal(width, 1, taps, std=0.5))
    for name in "fg":
        make.plain(f"{key}{name}_a_proj", hidden, dim)
        make.plain(f"{key}{name}_b_proj", dim, width)
    make.plain(key + "b_proj", hidden, heads)
    make.f32(key + "A_log", make.normal(heads, std=0.3))
    make.f32(key + "dt_bias", make.normal(width, std=0.5, mean=-2.0))
    make.norm(key + "o_norm.weight", dim)
    make.exl3(key + "o_proj", width, hidden)


def _mla(make: _Maker, text: dict[str, Any], key: str) -> None:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    q_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
    make.exl3(key + "q_a_proj", hidden, q_rank)
    make.norm(key + "q_a_layernorm.weight", q_rank)
    make.exl3(key + "q_b_proj", q_rank, heads * text["qk_nope_head_dim"], gain=1.5)
    make.exl3(key + "kv_a_proj_with_mqa", hidden, kv_rank)
    make.norm(key + "kv_a_layernorm.weight", kv_rank)
    make.plain(key + "kv_b_proj", kv_rank, heads * (text["qk_nope_head_dim"] + text["v_head_dim"]))
    make.exl3(key + "o_proj", heads * text["v_head_dim"], hidden)
    dim = text["index_head_dim"]
    make.exl3(key + "indexer.wq_b", q_rank, text["index_n_heads"] * dim)
    make.plain(key + "indexer.wk", hidden, dim)
    make.norm(key + "indexer.k_norm.weight", dim)
    make.bf16(key + "indexer.k_norm.bias", make.normal(dim, std=0.1))
    make.plain(key + "indexer.weights_proj", hidden, text["index_n_heads"])
    make.bf16(key + "indexer.index_kpool_compress_ape", make.normal(text["index_kpool"], dim, std=0.1))
    make.bf16(key + "indexer.index_kpool_compress_gate", make.normal(dim, hidden, std=0.02))


def _mlp(make: _Maker, key: str, hidden: int, inter: int, gain: float = 1.0) -> None:
    make.exl3(key + "gate_proj", hidden, inter)
    make.exl3(key + "up_proj", hidden, inter)
    make.exl3(key + "down_proj", inter, hidden, gain)


def _moe(make: _Maker, text: dict[str, Any], key: str) -> None:
    hidden, inter, experts = text["hidden_size"], text["moe_intermediate_size"], text["n_routed_experts"]
    make.f16(key + "gate.weight", make.normal(experts, hidden, std=hidden**-0.5))
    make.f32(key + "gate.e_score_correction_bias", make.normal(experts, std=0.05))
    for expert in range(experts):
        _mlp(make, f"{key}experts.{expert}.", hidden, inter, make.recipe.expert_gain)
    _mlp(make, key + "shared_experts.", hidden, inter * text["n_shared_experts"])


def _mtp_layer(make: _Maker, text: dict[str, Any], layer: int) -> None:
    key, hidden = f"{TEXT}layers.{layer}.", text["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"):
        make.norm(f"{key}{name}.weight", hidden)
    make.plain(key + "eh_proj", 2 * hidden, hidden)
    _mla(make, text, key + "self_attn.")
    _moe(make, text, key + "mlp.")


def _vision_stub(make: _Maker, vision: dict[str, Any]) -> None:
    width, patch = vision["hidden_size"], vision["patch_size"]
    make.bf16(
        "model.visual.patch_embed.proj.weight",
        make.normal(width, vision["in_channels"], vision["temporal_patch_size"], patch, patch, std=0.02),
    )
    make.bf16("model.visual.post_layernorm.weight", make.normal(width, std=0.1, mean=1.0))
