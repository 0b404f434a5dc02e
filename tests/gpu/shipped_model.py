"""The shipped checkpoint on a GPU, its experts in an arena of the test's: for processes that tests start, since each keeps its VRAM."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.python.arena import Arena
from kernels.python.expert import ExpertShape
from services.gpu_worker.backends import arena_fill, cpu_arena
from services.gpu_worker.backends.base import BackendInfo
from services.gpu_worker.backends.exl3 import loader
from services.gpu_worker.backends.exl3.backend import Exl3Backend
from services.gpu_worker.backends.exl3.experts import ExpertOptions
from services.gpu_worker.checkpoint import Checkpoint
from services.gpu_worker.patches import triton_tuners, upstream
from services.gpu_worker.patches.replace import Replacements

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny" / "checkpoint"


@dataclass(frozen=True)
class Shipped:
    """A loaded model without slots, and where its arena lies."""

    loaded: loader.Loaded
    checkpoint: Checkpoint
    shapes: list[ExpertShape]
    folder: str

    @property
    def num_records(self) -> int:
        """Experts of all layers."""
        return self.loaded.records.num_records

    @property
    def top_k(self) -> int:
        """Picks of a token."""
        return self.checkpoint.config.num_experts_per_tok


@contextlib.contextmanager
def shipped(name: str, **sizes: Any) -> Iterator[Shipped]:
    """Loads it; its arena goes at the end.

    Args:
        name: of the test, for the arena's folder.
        sizes: cache_tokens, max_streams and chunk, as `loader.load_model` takes them.
    """
    upstream.check()
    # Late, as exllamav3 imports them. Timing every configuration takes over a minute, and the first do as well.
    from triton.runtime.autotuner import Autotuner

    importlib.import_module(upstream.TUNED)
    triton_tuners.use_first_configurations(triton_tuners.find(Autotuner))
    checkpoint = Checkpoint(MODEL)
    shapes = cpu_arena.expert_shapes(checkpoint)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"glm53-{name}-") as folder:
        arena = Arena.create(f"{folder}/arena", shapes, checkpoint.config.n_routed_experts, checkpoint.hash)
        arena_fill.fill(checkpoint, shapes, arena, lambda _fraction, _words: None)
        arena.seal()
        yield Shipped(loader.load_model(checkpoint, arena, shapes, **sizes), checkpoint, shapes, folder)
        torch.cuda.synchronize()


@contextlib.contextmanager
def backend_of(shipped: Shipped, num_slots: int, options: ExpertOptions, info: BackendInfo) -> Iterator[Exl3Backend]:
    """A backend over so many slots, which hold the same share of every layer at first."""
    with Replacements() as into:
        store = loader.make_store(shipped.loaded, num_slots, shipped.top_k, options, into)
        try:
            store.place(loader.spread(num_slots, shipped.num_records))
            yield Exl3Backend(shipped.loaded.model, shipped.loaded.cache, store, shipped.loaded.records, Replacements(), info)
        finally:
            torch.cuda.synchronize()
            store.close()
