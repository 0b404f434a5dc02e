"""The CPU backend's dense part against the same model in transformers: `python -m bench.cpu_backend` → docs/results/cpu_backend.json.

Both evaluate the routed experts with the same in-process tier engine, in one process and one run, with one thread. transformers gets the
two cheap fixes that are known for it: eager experts' place is taken by the engine, and KDA runs in chunks of 16.
Also measured: whether a stream's logits depend on who else is being served (bits that differ between a batch of 4 and alone).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.models.glm5_next import modeling_glm5_next as glm

from bench import report
from bench.engine_direct import DirectBackend
from services.gpu_worker.checkpoint import Checkpoint
from tests.support.transformers_oracle import Oracle

OUT = report.ROOT / "docs" / "results" / "cpu_backend.json"
PROMPT, STEPS = 256, 48


class Transformers:
    """transformers' glm5_next with the routed experts replaced by the tier engine."""

    def __init__(self, checkpoint: Checkpoint, engine: Any) -> None:
        stock = glm.chunk_kimi_delta_attention
        glm.chunk_kimi_delta_attention = lambda *a, **k: stock(*a, **{"chunk_size": 16, **k})
        text_config = json.loads((checkpoint.path / "config.json").read_text())["text_config"]
        oracle = Oracle(checkpoint, text_config)
        self.model, self.head = oracle.model, oracle.head
        experts = [m for m in self.model.modules() if isinstance(m, glm.Glm5NextTextExperts)]
        for index, module in enumerate(experts):
            module.forward = _through(engine, index)
            del module.gate_up_proj, module.down_proj

    @torch.no_grad()
    def step(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Logits of the last position, [batch, vocab]."""
        hidden = self.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        return hidden @ self.head

    def run(self, prompts: torch.Tensor) -> tuple[float, float, torch.Tensor]:
        """(prefill seconds, decode seconds for STEPS steps, logits of the first decode step)."""
        cache = DynamicCache(config=self.model.config)
        began = time.perf_counter()
        logits = self.step(prompts, cache)
        prefilled = time.perf_counter()
        first = None
        for _ in range(STEPS):
            logits = self.step(logits.argmax(-1, keepdim=True), cache)
            first = logits if first is None else first
        assert first is not None
        return prefilled - began, time.perf_counter() - prefilled, first


def _through(engine: Any, index: int) -> Callable[..., torch.Tensor]:
    def forward(hidden: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x, sel, w = hidden.contiguous(), picks.contiguous(), weights.float().contiguous()
        out = torch.empty_like(x)
        rows, top_k = sel.shape
        pointers = (x.data_ptr(), sel.data_ptr(), w.data_ptr())
        engine.forward_ptr(index, rows, top_k, *pointers, prefill=rows > 8, out=out.data_ptr())
        return out

    return forward


def run_ours(backend: Any, prompts: list[list[int]]) -> tuple[float, float, np.ndarray[Any, Any]]:
    """The same through the CPU backend."""
    streams = [backend.open_stream() for _ in prompts]
    began = time.perf_counter()
    rows = [backend.prefill(stream, ids, all_logits=False)[-1] for stream, ids in zip(streams, prompts, strict=True)]
    prefilled = time.perf_counter()
    first = None
    for _ in range(STEPS):
        rows = list(backend.decode(streams, [int(row.argmax()) for row in rows]))
        first = np.stack(rows) if first is None else first
    took = time.perf_counter() - prefilled
    for stream in streams:
        backend.close_stream(stream)
    assert first is not None
    return prefilled - began, took, first


def main() -> None:
    """Alternates the two and writes the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = report.start("bench.cpu_backend")
    rows: list[dict[str, Any]] = []
    generator = np.random.default_rng(1)
    with DirectBackend() as direct:
        checkpoint = direct.checkpoint
        prompts = generator.integers(300, checkpoint.config.vocab_size - 64, (4, PROMPT)).tolist()
        assert direct.backend._tiers is not None
        theirs = Transformers(checkpoint, direct.backend._tiers.engine)
        for number in range(args.rounds + 1):
            for batch in (1, 4):
                their = theirs.run(torch.tensor(prompts[:batch]))
                our = run_ours(direct.backend, prompts[:batch])
                alone = run_ours(direct.backend, prompts[:1])[2][0]
                their_alone = theirs.run(torch.tensor(prompts[:1]))[2][0]
                row = {
                    "round": number,
                    "batch": batch,
                    "transformers_prefill_tok_s": batch * PROMPT / their[0],
                    "ours_prefill_tok_s": batch * PROMPT / our[0],
                    "transformers_decode_tok_s": batch * STEPS / their[1],
                    "ours_decode_tok_s": batch * STEPS / our[1],
                    "logits_max_diff": float(np.abs(their[2].numpy() - our[2]).max()),
                    "transformers_batch_vs_alone_max_diff": float((their[2][0] - their_alone).abs().max()),
                    "ours_batch_vs_alone_max_diff": float(np.abs(our[2][0] - alone).max()),
                }
                if number:  # the first round warms up
                    rows.append(row)
    summary: dict[str, float] = {}
    for batch in (1, 4):
        chosen = [row for row in rows if row["batch"] == batch]
        for what in ("prefill", "decode"):
            theirs_s, ours_s = (statistics.median(r[f"{who}_{what}_tok_s"] for r in chosen) for who in ("transformers", "ours"))
            summary[f"{what}_b{batch}_ours_tok_s"] = round(ours_s, 1)
            summary[f"{what}_b{batch}_vs_transformers"] = round(ours_s / theirs_s, 2)
        for key in ("logits_max_diff", "transformers_batch_vs_alone_max_diff", "ours_batch_vs_alone_max_diff"):
            summary[f"b{batch}_{key}"] = max(r[key] for r in chosen)
    report.write_result(args.out, started, rows, summary)


if __name__ == "__main__":
    main()
