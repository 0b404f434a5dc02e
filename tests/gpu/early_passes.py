"""Decodes the shipped checkpoint with hints and without; prints whether all bits are the same, and how good the guesses were.

Started by test_early_router.py in a process of its own: it keeps VRAM.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from bench.backend_info import gpu_info
from bench.gpu_exact_script import same_bits
from kernels.python.pager import HINT_WIDTH, PagerPolicy
from services.gpu_worker.backends.exl3 import fast_setup
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import DECODE_ROWS, ExpertOptions
from services.gpu_worker.backends.exl3.fast import FastSetup
from services.gpu_worker.backends.exl3.placement import PlacementOptions
from services.gpu_worker.patches.early_router import EarlyRouters
from services.gpu_worker.patches.replace import Replacements
from tests.gpu.shipped_model import Shipped, backend_of, shipped

STEPS = 48
STREAMS = (1, 4)
RECORDS = 3  # that a hint brings ahead
PROMPT = 24
# Of the experts. What is missed is named by guesses, and there is room for what these bring.
SLOTS = 1 / 2


class Watch:
    """What was guessed and picked in every step, and the streams of the last one, in memory that is there before the first step."""

    def __init__(self, model: Shipped, routers: EarlyRouters) -> None:
        device, layers = model.loaded.table.device, len(model.loaded.layers)
        hidden = int(model.loaded.layers[0].mlp.hidden_size)
        self.step, self.routers = -1, routers
        self.streams = torch.zeros((layers, DECODE_ROWS, 4, hidden), device=device)
        self.ids = torch.full((STEPS, layers, DECODE_ROWS, HINT_WIDTH), -1, dtype=torch.int64, device=device)
        self.picks = torch.full((STEPS, layers, DECODE_ROWS, model.top_k), -1, dtype=torch.int64, device=device)

    @contextlib.contextmanager
    def watching(self, model: Shipped) -> Iterator[None]:
        with Replacements() as replaced:
            for layer, router in self.routers.after.items():
                replaced.set(router, "guess", self._guess(layer, router.guess))
            for each in model.loaded.layers:
                replaced.set(each.mlp, "routing_fn", self._route(each.index, each.mlp.routing_fn))
            yield

    def _guess(self, layer: int, stock: Any) -> Any:
        def guess(streams: torch.Tensor) -> Any:
            ids = stock(streams)
            if ids is not None and self.step >= 0:
                self.streams[layer, : len(streams)].copy_(streams)
                self.ids[self.step, layer + 1, : len(ids), : ids.shape[1]].copy_(ids)
            return ids

        return guess

    def _route(self, layer: int, stock: Any) -> Any:
        def route(rows: int, config: Any, y: Any, params: Any) -> Any:
            selected, weights = stock(rows, config, y, params)
            if self.step >= 0:
                self.picks[self.step, layer, :rows].copy_(selected)
            return selected, weights

        return route

    def recall(self, rows: int, top_k: int) -> float:
        """Share of a layer's picks that stood among as many first ids of its guess."""
        guessed = self.ids[:, sorted(layer + 1 for layer in self.routers.after), :rows, :top_k]
        picked = self.picks[:, sorted(layer + 1 for layer in self.routers.after), :rows]
        return float((guessed[..., None, :] == picked[..., None]).any(-1).double().mean())

    def against_stock(self, model: Shipped, rows: int) -> tuple[int, int, float]:
        """Of the last step's guesses: how many there are, how many begin with what stock's modules pick on the same streams, which share of
        their ids float64 has among so many first too."""
        blocks = {id(module.mlp): module for module, _, _ in model.loaded.model.fwd_modules if getattr(module, "mlp", None) is not None}
        equal, shares = 0, []
        for layer in self.routers.after:
            mlp = model.loaded.layers[layer + 1].mlp
            block, ids = blocks[id(mlp)], self.ids[STEPS - 1, layer + 1, :rows]
            _, _, mixed = block.mlp_hc.mix(self.streams[layer, :rows].unsqueeze(1).contiguous(), {})
            y = block.mlp_norm.forward(mixed.half(), {}, out_dtype=torch.half).view(rows, -1)
            selected, _ = mlp.routing_fn(rows, mlp.routing_cfg, y, {})
            equal += torch.equal(ids[:, : model.top_k], selected)
            width = min(HINT_WIDTH, mlp.num_experts)
            keys = (y.double() @ mlp.routing_cfg.gate_tensor.double()).sigmoid()
            if mlp.routing_cfg.e_score_correction_bias is not None:
                keys = keys + mlp.routing_cfg.e_score_correction_bias.double()
            first = keys.topk(width, dim=1).indices
            shares.append(float((ids[:, :width, None] == first[:, None]).any(-1).double().mean()))
        return len(self.routers.after), equal, min(shares)


def decode(backend: Exl3Backend, streams: int, watch: Watch | None) -> list[torch.Tensor]:
    """Logits of prompts and of steps with given tokens."""
    opened = [backend.open_stream() for _ in range(streams)]
    rows = []
    for number, stream in enumerate(opened):
        prompt = [10 + (37 * token + 11 * number) % 2000 for token in range(PROMPT + number)]
        rows.append(torch.from_numpy(backend.prefill(stream, prompt, all_logits=False).copy()))
    for step in range(STEPS):
        if watch is not None:
            watch.step = step
        tokens = [50 + (7 * step + 131 * number) % 2000 for number in range(streams)]
        rows.append(torch.from_numpy(backend.decode(opened, tokens).copy()))
    if watch is not None:
        watch.step = -1
    for stream in opened:
        backend.close_stream(stream)
    return rows


def compare(model: Shipped, mode: str, streams: int) -> dict[str, Any]:
    """One way to decode, without hints and with them."""
    sides, row = [], {"mode": mode, "streams": streams}
    info = gpu_info(model.checkpoint.config.vocab_size, 1024, max(STREAMS), 2048, "fast" if mode == "fast" else "exact")
    for hint_records in (0, RECORDS):
        options = ExpertOptions(
            PlacementOptions(admit_after=1),
            on_demand=mode == "in_step",
            pager=PagerPolicy(hint_records=hint_records),
            fast=FastSetup(None) if mode == "fast" else None,
        )
        with backend_of(model, round(SLOTS * model.num_records), options, info) as backend:
            if not hint_records:
                sides.append(decode(backend, streams, None))
                continue
            pager: Any = backend.experts._on_demand
            watch = Watch(model, pager._early.__self__)
            with watch.watching(model):
                sides.append(decode(backend, streams, watch))
            with torch.inference_mode():
                guesses, equal, plain = watch.against_stock(model, streams)
            stats, verified = backend.stats(), backend.verify()
            row |= {name: value for name, value in stats.items() if name.startswith("hint_")}
            row |= {"guesses": guesses, "as_stock": equal, "as_float64": plain, "recall": watch.recall(streams, model.top_k)}
            row |= {"bad": verified.records_bad + verified.slots_bad, "missed": stats["decode_records_missed"]}
    return row | {"passes": len(sides[0]), "equal": sum(same_bits(a, b) for a, b in zip(*sides, strict=True))}


def main() -> None:
    with shipped("early", cache_tokens=8192, max_streams=max(STREAMS), chunk=2048) as model:
        no_fast = fast_setup.problem(model.shapes, "fast")
        modes = ["in_step", *([] if no_fast else ["fast"])]
        rows = [compare(model, mode, streams) for mode in modes for streams in STREAMS]
        chance = model.top_k / model.loaded.layers[0].num_experts
    print(json.dumps({"rows": rows, "no_fast": no_fast, "chance": chance}))  # noqa: T201 - this is what the test reads
    sys.stdout.flush()


if __name__ == "__main__":
    main()
