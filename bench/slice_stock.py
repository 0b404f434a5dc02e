"""Stock exllamav3 on the full-shape slice: 1.5.1's CPU split or every expert in VRAM, and 1.6.5's split with its cache of experts. Driven
through its own generator.

The trace's experts are renumbered by how often each is picked, so that the split's experts in VRAM (its first ones) are the ideal static
choice for exactly this trace.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench import routing_trace, slice_traces
from bench.kept_rows import Row
from bench.slice_cases import STOCK_165, Case, Mode

PROMPT = 64
MORE_TOKENS = 4096  # of the cache, beside one long context
CASE_S = 60.0  # of a case that nobody has measured: a long prompt through the split
CHUNK = 2048
WARM_STEPS = 40
CHILD_S = 5.0
VRAM_GB = 130  # what the loader may use; the split decides what it takes


def by_popularity(trace: np.ndarray) -> np.ndarray:
    """The trace, int64 [tokens, streams, layers, k], with every layer's experts renumbered: 0 is picked most."""
    out = np.empty(trace.shape, np.int64)
    for layer in range(trace.shape[2]):
        counts = np.bincount(trace[:, :, layer].ravel(), minlength=routing_trace.EXPERTS)
        rank = np.empty(routing_trace.EXPERTS, np.int64)
        rank[np.argsort(-counts, kind="stable")] = np.arange(routing_trace.EXPERTS)
        out[:, :, layer] = rank[trace[:, :, layer]]
    return out


class StockEngine:
    """One loaded stock model.

    Args:
        side: stock or stock_resident, which are 1.5.1's; or stock165, which is 1.6.5's split with promotion of what was missed.
        args: folder, warm, steps, prefill, context.
        trace: as routing_trace.make's.
        deadline: monotonic seconds; a case that is not over then is broken off.
    """

    def __init__(self, side: str, args: argparse.Namespace, trace: np.ndarray, deadline: float = float("inf")) -> None:
        import exllamav3 as exl3
        from exllamav3.modules.block_sparse_mlp import BlockSparseMLP

        self._exl3, self._args, self._deadline = exl3, args, deadline
        self._until = deadline
        trace = by_popularity(trace)
        in_vram = round(routing_trace.SLOT_SHARE * routing_trace.EXPERTS)
        threads = max(1, (os.cpu_count() or 2) - 1)
        config = exl3.Config.from_directory(str(args.folder))
        split, self._warm = side != "stock_resident", min(WARM_STEPS, args.warm)
        if split:
            config.infer_params.moe_cpu_split = routing_trace.EXPERTS - in_vram
            config.infer_params.moe_cpu_threads = threads
        if side == STOCK_165:
            config.infer_params.moe_cpu_pinned_arena = True  # without it nothing is promoted
            self._warm = args.warm  # its cache learns
        model = exl3.Model.from_config(config)
        cache = exl3.Cache(model, max_num_tokens=args.context + MORE_TOKENS, max_batch_size=8)
        began = time.perf_counter()
        if split:
            model.load(use_per_device=[VRAM_GB], max_chunk_size=CHUNK, progressbar=False)
        else:
            model.load(device="cuda:0", max_chunk_size=CHUNK, progressbar=False)
        self._facts: Row = {
            f"{side}_load_s": round(time.perf_counter() - began, 1),
            f"{side}_vram_gib": round(torch.cuda.memory_allocated() / 2**30, 2),
        }
        if split:
            self._facts |= {
                f"{side}_experts_in_vram_per_layer": in_vram,
                f"{side}_threads": threads,
                f"{side}_hit_share": round(float((trace[:, :1] < in_vram).mean()), 4),
            }
        self._trace = torch.from_numpy(trace).to("cuda:0")
        self._step, self._forcing = 0, False
        mlps = [m.mlp for m, _, _ in model.fwd_modules if isinstance(getattr(m, "mlp", None), BlockSparseMLP)]
        if len(mlps) != trace.shape[2]:
            raise RuntimeError(f"stock has {len(mlps)} MoE layers, the trace {trace.shape[2]}")
        for layer, mlp in enumerate(mlps):
            mlp.routing_fn = self._wrap(mlp.routing_fn, layer)
        self._model = model
        self._generator = exl3.Generator(model, cache, exl3.Tokenizer.from_config(config), max_batch_size=8, max_chunk_size=CHUNK)
        self._meet_experts()
        self._decode(1, 60, 20)  # compiles

    def _meet_experts(self) -> None:
        """Steps that pick every expert once: the split's worker has just loaded, and the first use of memory is no speed of its own."""
        trace = self._trace
        every = slice_traces.scan_of_all(trace.shape[2])[:, None].astype(np.int64)
        self._trace = torch.from_numpy(np.repeat(every, trace.shape[1], axis=1)).to(trace.device)
        self._decode(1, len(every), 2)
        self._trace = trace

    def _wrap(self, stock: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def routed(rows: int, config: Any, y: Any, params: Any) -> Any:
            selected, weights = stock(rows, config, y, params)
            if self._forcing and rows <= self._trace.shape[1]:
                if layer == 0:
                    self._step += 1
                selected.copy_(self._trace[self._step % len(self._trace), :rows, layer])
                weights.fill_(2.5 / routing_trace.TOP_K)
            return selected, weights

        return routed

    def _job(self, tokens: int, new: int) -> Any:
        from exllamav3.generator.sampler import ArgmaxSampler

        return self._exl3.Job(
            input_ids=torch.randint(10, 2000, (1, tokens)), max_new_tokens=new, min_new_tokens=new, sampler=ArgmaxSampler()
        )

    def _iterate(self) -> list[dict[str, Any]]:
        """One iteration.

        Raises:
            TimeoutError: the case takes too long; its jobs are cancelled.
            RuntimeError: a job failed.
        """
        if time.monotonic() > self._until:
            self._generator.clear_queue()
            raise TimeoutError(f"broken off after the time that one case may take ({CASE_S:.0f} s, or what the command had left)")
        results = list(self._generator.iterate())
        for result in results:
            if result["stage"] == "error":
                raise RuntimeError(f"stock fails: {result}")
        return results

    def _decode(self, streams: int, steps: int, warm: int, prompt: int = PROMPT) -> Row:
        self._step, self._forcing = 0, True
        for _ in range(streams):
            self._generator.enqueue(self._job(prompt, steps + warm))
        tokens, began, tokens_before = 0, None, 0
        try:
            while self._generator.num_remaining_jobs():
                for result in self._iterate():
                    if result["stage"] == "streaming" and "token_ids" in result:
                        tokens += result["token_ids"].shape[-1]
                if began is None and tokens >= warm * streams:
                    torch.cuda.synchronize()
                    began, tokens_before = time.perf_counter(), tokens
            torch.cuda.synchronize()
        finally:
            self._forcing = False
        assert began is not None
        seconds, counted = time.perf_counter() - began, tokens - tokens_before
        ms = 1000 * seconds * streams / counted
        return {"steps": round(counted / streams), "ms": round(ms, 3), "tok_s": round(counted / seconds, 2)}

    def enter(self, mode: Mode | None) -> None:
        """Stock's experts stay where they are."""

    def measure(self, case: Case) -> Row:
        self._until = min(self._deadline, time.monotonic() + CASE_S)
        tokens = self._args.context if case.long else self._args.prefill
        if case.kind == "prefill":
            return self._prefill(tokens)
        if not case.long:
            return self._decode(case.streams, self._args.steps, self._warm)
        return self._decode(case.streams, max(1, self._args.steps // case.share), self._warm, tokens) | {"context": tokens}

    def _prefill(self, tokens: int) -> Row:
        times = []
        for _ in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self._generator.enqueue(self._job(tokens, 1))
            while self._generator.num_remaining_jobs():
                self._iterate()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return {"tokens": tokens, "first_s": round(times[0], 3), "s": round(times[-1], 3), "tok_s": round(tokens / times[-1])}

    def after(self) -> Row:
        return {}

    def facts(self) -> Row:
        return self._facts

    def close(self) -> None:
        """The process is about to end, and with it all that stock holds; its CPU worker would wait for an orderly end that may not come."""
        for child in multiprocessing.active_children():
            child.terminate()
            child.join(CHILD_S)
