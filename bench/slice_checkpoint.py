"""A checkpoint of GLM-5.3-Flash's real widths with random EXL3 bits and a chosen number of MoE layers: for measurements, not for answers.

`write` makes the whole of it, one process per layer; without the routed experts it is what a run needs whose arena is filled otherwise.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bench import report, routing_trace

HIDDEN, INTER, BITS = 4096, 2048, 3
DENSE_LAYERS = 3
TEXT = "model.language_model."
TINY = report.ROOT / "models" / "tiny" / "checkpoint"
DONE = "written.json"
MUL1 = struct.pack("<I", 0x83DCD12D)
NOISE_BYTES = 64 << 20
DISTINCT_ROWS = 4096
Tensors = dict[str, tuple[str, list[int], Any]]


def config_document(num_moe: int, experts: int = routing_trace.EXPERTS, vocab: int = 0) -> dict[str, Any]:
    """The shipped model's config.json with the real widths.

    Args:
        vocab: tokens; 0 for the shipped model's few.
    """
    document: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    layers = DENSE_LAYERS + num_moe
    document["text_config"] |= {
        "hidden_size": HIDDEN,
        "intermediate_size": 12288,
        "moe_intermediate_size": INTER,
        "n_routed_experts": experts,
        "num_experts_per_tok": routing_trace.TOP_K,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 256,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "layer_types": ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "indexer_types": ["full"] * layers,
        "mlp_layer_types": ["dense"] * DENSE_LAYERS + ["sparse"] * num_moe,
        "first_k_dense_replace": DENSE_LAYERS,
        "linear_num_heads": 64,
        "linear_head_dim": 128,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 65536,
    }
    document["text_config"]["linear_attn_config"] |= {"num_heads": 64, "head_dim": 128}
    if vocab:
        document["text_config"]["vocab_size"] = vocab
    return document


class LayerWriter:
    """Random tensors of one file."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.noise = memoryview(self.rng.bytes(NOISE_BYTES))
        self.tensors: Tensors = {}

    def exl3(self, key: str, inputs: int, outputs: int, bits: int) -> None:
        rng, put, size = self.rng, self.tensors, inputs * outputs * bits // 8
        # Bits out of one pool, from another place each time: random bytes for all would take longer to make than to write.
        start = int(rng.integers(0, max(1, NOISE_BYTES - size) // 64 + 1)) * 64
        bits_of = self.noise[start : start + size] if size <= NOISE_BYTES - start else rng.bytes(size)
        put[key + ".trellis"] = ("I16", [inputs // 16, outputs // 16, 16 * bits], bits_of)
        put[key + ".suh"] = ("F16", [inputs], rng.choice(np.array([-1, 1], np.float16), inputs).tobytes())
        put[key + ".svh"] = ("F16", [outputs], (rng.choice([-1, 1], outputs) * 0.7 * inputs**-0.5).astype(np.float16).tobytes())
        put[key + ".mul1"] = ("I32", [], MUL1)

    def floats(self, key: str, dtype: str, *shape: int, scale: float = 0.0, value: float = 0.0) -> None:
        data = np.full(shape, value, np.float32)
        if scale:
            data += self.rng.standard_normal(shape, np.float32) * np.float32(scale)
        raw = {"F32": data, "F16": data.astype(np.float16), "BF16": (data.view(np.uint32) >> 16).astype(np.uint16)}[dtype].tobytes()
        self.tensors[key] = (dtype, list(shape), raw)

    def write(self, path: Path) -> None:
        header, offset = {}, 0
        for key, (dtype, shape, raw) in self.tensors.items():
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(raw)]}
            offset += len(raw)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        part = path.with_name(path.name + ".part")
        with part.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _, _, raw in self.tensors.values():
                out.write(raw)
        os.replace(part, path)


def write_dense(path: Path, layer: int) -> None:
    """One layer without its routed experts."""
    w, key = LayerWriter(layer), f"{TEXT}layers.{layer}."
    for site in ("attn", "ffn"):
        w.floats(key + f"hc_{site}_base", "F32", 24)
        w.floats(key + f"hc_{site}_fn", "F32", 24, 4 * HIDDEN, scale=0.005)
        w.floats(key + f"hc_{site}_scale", "F32", 3, value=0.1)
    for name in ("input_layernorm", "post_attention_layernorm"):
        w.floats(key + name + ".weight", "BF16", HIDDEN, value=1.0)
    attention = key + "self_attn."
    if layer % 4 == 3:
        for name, inputs, outputs in (
            ("q_a_proj", HIDDEN, 1536),
            ("q_b_proj", 1536, 16384),
            ("kv_a_proj_with_mqa", HIDDEN, 512),
            ("o_proj", 16384, HIDDEN),
            ("indexer.wq_b", 1536, 4096),
        ):
            w.exl3(attention + name, inputs, outputs, 4)
        w.floats(attention + "kv_b_proj.weight", "F16", 32768, 512, scale=0.04)
        w.floats(attention + "indexer.wk.weight", "F16", 128, HIDDEN, scale=0.02)
        w.floats(attention + "indexer.weights_proj.weight", "F16", 32, HIDDEN, scale=0.02)
        w.floats(attention + "indexer.index_kpool_compress_gate", "F16", 128, HIDDEN, scale=0.02)
        w.floats(attention + "indexer.index_kpool_compress_ape", "F32", 16, 128)
        w.floats(attention + "indexer.k_norm.weight", "F16", 128, value=1.0)
        w.floats(attention + "indexer.k_norm.bias", "F16", 128)
        w.floats(attention + "q_a_layernorm.weight", "BF16", 1536, value=1.0)
        w.floats(attention + "kv_a_layernorm.weight", "BF16", 512, value=1.0)
    else:
        w.exl3(attention + "qkv_proj", HIDDEN, 24576, 4)
        w.exl3(attention + "o_proj", 8192, HIDDEN, 4)
        w.floats(attention + "b_proj.weight", "F16", 64, HIDDEN, scale=0.01)
        for gate in "fg":
            w.floats(attention + f"{gate}_a_proj.weight", "F16", 128, HIDDEN, scale=0.01)
            w.floats(attention + f"{gate}_b_proj.weight", "F16", 8192, 128, scale=0.05)
        w.floats(attention + "A_log", "F32", 64, value=1.5)
        w.floats(attention + "dt_bias", "F32", 8192)
        w.floats(attention + "conv1d.weight", "BF16", 24576, 1, 4, scale=0.3)
        w.floats(attention + "o_norm.weight", "BF16", 128, value=1.0)
    mlp = key + "mlp."
    inter, prefix, bits = (12288, mlp, 4) if layer < DENSE_LAYERS else (INTER, mlp + "shared_experts.", 4)
    for name, inputs, outputs in (("gate_proj", HIDDEN, inter), ("up_proj", HIDDEN, inter), ("down_proj", inter, HIDDEN)):
        w.exl3(prefix + name, inputs, outputs, bits)
    if layer >= DENSE_LAYERS:
        w.floats(mlp + "gate.weight", "F16", routing_trace.EXPERTS, HIDDEN, scale=0.02)
        w.floats(mlp + "gate.e_score_correction_bias", "F32", routing_trace.EXPERTS)
    w.write(path / f"model-{layer:03d}.safetensors")


def write_experts(path: Path, layer: int, experts: int = routing_trace.EXPERTS) -> None:
    """The routed experts of one layer, in a file of their own: 2.7 GB for 288."""
    w = LayerWriter(10_000 + layer)
    for expert in range(experts):
        for name, inputs, outputs in (("gate", HIDDEN, INTER), ("up", HIDDEN, INTER), ("down", INTER, HIDDEN)):
            w.exl3(f"{TEXT}layers.{layer}.mlp.experts.{expert}.{name}_proj", inputs, outputs, BITS)
    w.write(path / f"model-{layer:03d}-experts.safetensors")


def write_head(path: Path, vocab: int) -> None:
    """Embedding, last norm, output."""
    w, embedding = LayerWriter(999), TEXT + "embed_tokens.weight"
    # Rows of a large vocabulary repeat: random numbers for all of them would take longer than everything else.
    w.floats(embedding, "BF16", min(vocab, DISTINCT_ROWS), HIDDEN, scale=0.02)
    dtype, (distinct, _), raw = w.tensors[embedding]
    whole, rest = divmod(vocab, distinct)
    w.tensors[embedding] = (dtype, [vocab, HIDDEN], raw * whole + raw[: len(raw) // distinct * rest])
    w.floats(TEXT + "norm.weight", "BF16", HIDDEN, value=1.0)
    w.exl3("lm_head", HIDDEN, vocab, 6)
    w.write(path / "model-head.safetensors")


def _one(job: tuple[str, Path, int]) -> None:
    kind, path, number = job
    {"dense": write_dense, "experts": write_experts, "head": write_head}[kind](path, number)


def jobs(path: Path, num_moe: int, *, experts: bool, vocab: int = 0) -> list[tuple[str, Path, int]]:
    """What is to be written, the largest files first."""
    layers = range(DENSE_LAYERS, DENSE_LAYERS + num_moe)
    large: Iterable[tuple[str, Path, int]] = [("experts", path, layer) for layer in layers] if experts else []
    dense = [("dense", path, layer) for layer in range(DENSE_LAYERS + num_moe)]
    head = ("head", path, config_document(num_moe, vocab=vocab)["text_config"]["vocab_size"])
    return [*large, head, *dense] if vocab else [*large, *dense, head]


def write_experts_only(path: Path, num_moe: int, experts: int) -> None:
    """Layers of routed experts and nothing else: enough to fill an arena from."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_document(num_moe, experts)))
    for layer in range(DENSE_LAYERS, DENSE_LAYERS + num_moe):
        write_experts(path, layer, experts)


def write(path: Path, num_moe: int, *, experts: bool = True, vocab: int = 0, processes: int = 14) -> bool:
    """Writes what is not there yet; False when it was all there.

    Args:
        experts: the routed ones too.
        vocab: tokens; 0 for the shipped model's few.
    """
    wanted = {"num_moe": num_moe, "experts": experts} | ({"vocab": vocab} if vocab else {})
    done = path / DONE
    if done.exists() and json.loads(done.read_text()) == wanted:
        return False
    path.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    for left in path.glob("*.safetensors*"):
        left.unlink()
    (path / "config.json").write_text(json.dumps(config_document(num_moe, vocab=vocab)))
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        shutil.copy(TINY / name, path)
    with concurrent.futures.ProcessPoolExecutor(processes) as pool:
        list(pool.map(_one, jobs(path, num_moe, experts=experts, vocab=vocab)))
    done.write_text(json.dumps(wanted))
    return True
