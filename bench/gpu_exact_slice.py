"""Decode of a full-shape slice of GLM-5.3-Flash in `exact`: `python -m bench.gpu_exact_slice`. Needs an NVIDIA GPU with exllamav3 1.5.1.

Real widths and record sizes, random EXL3 bits, routing forced from a trace (bench/routing_trace.py). The dense part goes through a
checkpoint, the experts' random records straight into the arena, which a second run takes over. The bound of a step is the step with every
expert in VRAM plus the distinct missing bytes at the copy engine's measured rate.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import io
import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import report, routing_trace
from kernels.python.arena import Arena
from kernels.python.cache_sim import CachePolicy, simulate
from kernels.python.expert import ExpertShape
from kernels.python.pager import PagerPolicy
from services.gpu_worker.backends.base import BackendInfo
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import ExpertOptions, ExpertStore
from services.gpu_worker.backends.exl3.pages import PAGE_TOKENS
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.patches import triton_tuners, upstream
from services.gpu_worker.patches.replace import Replacements

HIDDEN, INTER, BITS = 4096, 2048, 3
DENSE_LAYERS = 3
TEXT = "model.language_model."
TINY = report.ROOT / "models" / "tiny" / "checkpoint"
PROMPT = 64
# The simulator's heat with the GPU backend's parameters.
HEAT = {"admit_after": 1, "admit_margin": 1.0, "heat_slow_half_life": 400, "heat_fast_half_life": 12, "heat_fast_weight": 1.0}
PREFILLED = ("every expert in VRAM", "slots, on demand")
Tensors = dict[str, tuple[str, list[int], bytes]]


def config_document(num_moe: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    layers = DENSE_LAYERS + num_moe
    document["text_config"] |= {
        "hidden_size": HIDDEN,
        "intermediate_size": 12288,
        "moe_intermediate_size": INTER,
        "n_routed_experts": routing_trace.EXPERTS,
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
    return document


class LayerWriter:
    """Random tensors of one layer."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors: Tensors = {}

    def exl3(self, key: str, inputs: int, outputs: int, bits: int) -> None:
        rng, put = self.rng, self.tensors
        put[key + ".trellis"] = ("I16", [inputs // 16, outputs // 16, 16 * bits], rng.bytes(inputs * outputs * bits // 8))
        put[key + ".suh"] = ("F16", [inputs], rng.choice(np.array([-1, 1], np.float16), inputs).tobytes())
        put[key + ".svh"] = ("F16", [outputs], (rng.choice([-1, 1], outputs) * 0.7 * inputs**-0.5).astype(np.float16).tobytes())
        put[key + ".mul1"] = ("I32", [], struct.pack("<I", 0x83DCD12D))

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
        with path.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _, _, raw in self.tensors.values():
                out.write(raw)


def write_layer(path: Path, layer: int) -> None:
    """The dense part of one layer: everything but routed experts."""
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


def write_checkpoint(path: Path, num_moe: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    document = config_document(num_moe)
    (path / "config.json").write_text(json.dumps(document))
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        shutil.copy(TINY / name, path)
    w, vocab = LayerWriter(999), document["text_config"]["vocab_size"]
    w.floats(TEXT + "embed_tokens.weight", "BF16", vocab, HIDDEN, scale=0.02)
    w.floats(TEXT + "norm.weight", "BF16", HIDDEN, value=1.0)
    w.exl3("lm_head", HIDDEN, vocab, 6)
    w.write(path / "model-head.safetensors")
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda layer: write_layer(path, layer), range(DENSE_LAYERS + num_moe)))


def open_arena(path: Path, shapes: list[ExpertShape]) -> Arena:
    """Random records with sane scales; those of an earlier run where they are still there."""
    digest = bytes([len(shapes)]) * 32
    arena = Arena.attach_or_create(str(path), shapes, routing_trace.EXPERTS, digest)
    if arena.reattached:
        return arena
    rng = np.random.default_rng(3)
    noise = np.frombuffer(rng.bytes(256 << 20), np.uint8)

    def fill(layer: int) -> None:
        shape = shapes[layer]
        scales = {}
        for projection, inputs, outputs in (("gate", HIDDEN, INTER), ("up", HIDDEN, INTER), ("down", INTER, HIDDEN)):
            scales[f"{projection}_suh"] = np.random.default_rng(1).choice(np.array([-1, 1], np.float16), inputs)
            scales[f"{projection}_svh"] = (np.random.default_rng(2).choice([-1, 1], outputs) * 0.7 * inputs**-0.5).astype(np.float16)
        for expert in range(routing_trace.EXPERTS):
            record = arena.record(layer, expert)
            start = (layer * routing_trace.EXPERTS + expert) * 65537 % (len(noise) - shape.record_bytes)
            record[:] = noise[start : start + shape.record_bytes]
            for part, values in scales.items():
                offset = int(getattr(shape, part))
                record[offset : offset + values.nbytes] = values.view(np.uint8)
        arena.finish(layer)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(fill, range(len(shapes))))
    arena.seal()
    return arena


class ForcedRouting:
    """Replaces the router's picks by the trace's, one token of it per decode step."""

    def __init__(self, loaded: loader.Loaded, trace: np.ndarray) -> None:
        self.trace = torch.from_numpy(trace.astype(np.int64)).to(loaded.table.device)
        self.step = -1
        for layer in loaded.layers:
            layer.mlp.routing_fn = self._wrap(layer.mlp.routing_fn, layer.index)

    def _wrap(self, stock: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def routed(rows: int, config: Any, y: Any, params: Any) -> Any:
            selected, weights = stock(rows, config, y, params)
            if rows <= self.trace.shape[1] and self.step >= 0:
                selected.copy_(self.trace[self.step % len(self.trace), :rows, layer])
                weights.fill_(2.5 / routing_trace.TOP_K)
            return selected, weights

        return routed


def link_rate(store: ExpertStore, loaded: loader.Loaded) -> float:
    """Bytes per second of the copy engine, record by record, best of five."""
    count = min(64, store.placement.num_slots)
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(count):
            store._slots[i].copy_(loaded.records.host[i], non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, count * loaded.records.stride / (time.perf_counter() - began))
    return best


def decode(backend: Exl3Backend, routing: ForcedRouting, streams: int, warm: int, steps: int, deadline: float) -> dict[str, Any]:
    """Steady decode: (ms per step, counters)."""
    routing.step = -1
    opened = [backend.open_stream() for _ in range(streams)]
    rng = np.random.default_rng(4)
    for stream in opened:
        backend.prefill(stream, rng.integers(10, 2000, PROMPT).tolist(), all_logits=False)
    times, before = [], {}
    for step in range(warm + steps):
        if time.monotonic() > deadline:
            break
        if step == warm:
            before = dict(backend.stats())
        routing.step = step
        began = time.perf_counter()
        backend.decode(opened, rng.integers(10, 2000, streams).tolist())
        if step >= warm:
            times.append(time.perf_counter() - began)
    for stream in opened:
        backend.close_stream(stream)
    routing.step = -1
    if not times:
        return {"steps": 0}
    after = backend.stats()
    picks, hits, missed = (after[k] - before[k] for k in ("decode_picks", "decode_hits", "decode_records_missed"))
    ms = 1000 * float(np.mean(times))
    return {
        "steps": len(times),
        "ms": round(ms, 3),
        "ms_median": round(1000 * float(np.median(times)), 3),
        "tok_s": round(streams * 1000 / ms, 2),
        "hit_rate": round(hits / picks, 4) if picks else None,
        "missed_mib_per_step": round(missed * backend.experts._records.stride / len(times) / 2**20, 1),
        "copied_mib_per_step": round((after["bytes_copied"] - before["bytes_copied"]) / len(times) / 2**20, 1),
    }


def prefill(backend: Exl3Backend, tokens: int) -> dict[str, Any]:
    """One prompt in one pass, the second time."""
    times = []
    for _ in range(2):
        stream = backend.open_stream()
        ids = np.random.default_rng(5).integers(10, 2000, tokens).tolist()
        torch.cuda.synchronize()
        began = time.perf_counter()
        backend.prefill(stream, ids, all_logits=False)
        times.append(time.perf_counter() - began)
        backend.close_stream(stream)
    return {"first_s": round(times[0], 3), "s": round(times[1], 3), "tok_s": round(tokens / times[1])}


def measure(args: argparse.Namespace, loaded: loader.Loaded, checkpoint: Checkpoint, deadline: float) -> tuple[list[Any], dict[str, Any]]:
    depths = tuple(routing_trace.SLICE_DEPTHS[i * len(routing_trace.SLICE_DEPTHS) // args.layers] for i in range(args.layers))
    trace = routing_trace.make(args.seed, args.warm + args.steps, streams=8, depths=depths)
    routing = ForcedRouting(loaded, trace)
    count = loaded.records.num_records
    slots = round(routing_trace.SLOT_SHARE * count)
    info = BackendInfo(
        checkpoint.config.vocab_size, 2048, 8, "cuda", "", "exact", "", "exllamav3", "", 0, 0, "", chunk_size=2048, page_tokens=PAGE_TOKENS
    )
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {"slots": slots, "records": count, "depths": depths}
    resident_ms: dict[int, float] = {}
    modes = (
        ("every expert in VRAM", count, {"admit": False}),
        ("slots, on demand", slots, {"on_demand": True}),
        ("slots, admitted between steps", slots, {}),
        ("no slot", 1, {"admit": False}),
    )
    for name, num_slots, how in modes:
        with Replacements() as into:
            options = ExpertOptions(PlacementOptions(admit_after=args.admit_after), pager=PagerPolicy(admit_after=args.admit_after), **how)
            store = loader.make_store(loaded, num_slots, routing_trace.TOP_K, options, into)
            store.place(loader.spread(num_slots, count) if num_slots > 1 else ())
            backend = Exl3Backend(loaded.model, loaded.cache, store, loaded.records, Replacements(), info)
            if name == "every expert in VRAM":
                figures["link_gb_s"] = round(link_rate(store, loaded) / 1e9, 2)
                store.place(range(count))
                decode(backend, routing, 1, 0, 30, deadline)  # compiles
            for streams in (1, 2, 4, 8) if name != "no slot" else (1,):
                row = {"name": name, "streams": streams, **decode(backend, routing, streams, args.warm, args.steps, deadline)}
                if name == "every expert in VRAM" and row["steps"]:
                    resident_ms[streams] = row["ms"]
                elif row["steps"] and streams in resident_ms:
                    bound = resident_ms[streams] + row["missed_mib_per_step"] * 2**20 / (figures["link_gb_s"] * 1e9) * 1000
                    row |= {"bound_ms": round(bound, 3), "over_bound": round(row["ms"] / bound, 3)}
                rows.append(row)
                print(row, flush=True)
                args.save(rows, figures)
            if name in PREFILLED and time.monotonic() < deadline:
                rows.append({"name": name, "prefill": args.prefill, **prefill(backend, args.prefill)})
                print(rows[-1], flush=True)
                args.save(rows, figures)
            store.close()
            del backend, store
    one = trace[:, :1].reshape(len(trace), -1, routing_trace.TOP_K)
    for policy in CachePolicy:
        options = HEAT if policy is CachePolicy.HEAT else {}
        outcome = simulate(policy, np.ascontiguousarray(one), routing_trace.EXPERTS, slots, warm_tokens=args.warm, **options)
        figures[f"{policy.name.lower()}_hit_rate"] = round(outcome.hit_ratio, 4)
    return rows, figures


def quietly_write(out: Path, started: dict[str, Any], rows: list[Any], figures: dict[str, Any]) -> None:
    """The result file as it stands: a later mode may hang."""
    with contextlib.redirect_stdout(io.StringIO()):
        report.write_result(out, started, rows, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, choices=range(1, 13), help="MoE layers")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/glm53-slice"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm", type=int, default=150, help="decode steps before measuring")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the measured prefill")
    parser.add_argument("--admit-after", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, default=report.ROOT / "docs" / "results" / "gpu_exact_slice.json")
    args = parser.parse_args()
    began = time.monotonic()
    started = report.start("bench.gpu_exact_slice")
    upstream.check()
    import exllamav3  # noqa: F401 - its kernels are looked for below
    from triton.runtime.autotuner import Autotuner

    started["machine"]["gpu"] = torch.cuda.get_device_name(0)
    started["triton_tuners_pinned"] = triton_tuners.use_first_configurations(triton_tuners.find(Autotuner))
    if not (args.folder / "model-head.safetensors").exists():
        write_checkpoint(args.folder, args.layers)
    print(f"dense part written after {time.monotonic() - began:.1f} s", flush=True)
    checkpoint = Checkpoint(args.folder)
    shapes = [ExpertShape.create(HIDDEN, INTER, BITS, act_limit=checkpoint.config.swiglu_limit) for _ in range(args.layers)]
    arena = open_arena(args.folder.with_name(args.folder.name + "-arena"), shapes)
    print(f"arena {'taken over' if arena.reattached else 'filled'} after {time.monotonic() - began:.1f} s", flush=True)
    loaded = loader.load_model(checkpoint, arena, shapes, cache_tokens=16_384, max_streams=8, chunk=2048)
    print(f"loaded after {time.monotonic() - began:.1f} s, {torch.cuda.memory_allocated() / 1e9:.1f} GB of VRAM", flush=True)
    args.save = lambda rows, figures: quietly_write(args.out, started, rows, figures)
    rows, figures = measure(args, loaded, checkpoint, began + args.seconds)
    figures["seconds"] = round(time.monotonic() - began, 1)
    report.write_result(args.out, started, rows, figures)


if __name__ == "__main__":
    main()
