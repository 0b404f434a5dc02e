"""Offline replay of routing traces against cache policies, and a generator of synthetic traces."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
import numpy.typing as npt

from kernels.python import shm_lib
from kernels.python.errors import raise_last


class CachePolicy(enum.IntEnum):
    """HEAT is the engine's own code; BELADY knows the future and is the bound."""

    HEAT = 0
    CLOCK = 1
    LRU = 2
    BELADY = 3


@dataclasses.dataclass(frozen=True)
class CacheOutcome:
    """Counts after the warm-up."""

    picks: int
    hits: int
    admissions: int

    @property
    def hit_ratio(self) -> float:
        """Hits per pick."""
        return self.hits / self.picks if self.picks else 0.0


def synthetic_trace(
    tokens: int,
    *,
    num_layers: int = 42,
    experts_per_layer: int = 288,
    top_k: int = 8,
    sigma: tuple[float, float] = (0.33, 1.5),
    reuse: float = 0.35,
    seed: int = 0,
) -> npt.NDArray[np.uint16]:
    """Picks of one decode stream, uint16 [tokens, num_layers, top_k], distinct within a layer step.

    Popularity is log-normal per layer with a sigma that grows over depth; each pick repeats one of the token before with
    probability `reuse` and is drawn by popularity, without replacement, otherwise.
    """
    rng = np.random.default_rng(seed)
    picks = np.empty((tokens, num_layers, top_k), np.uint16)
    for layer in range(num_layers):
        depth = layer / max(1, num_layers - 1)
        logits = rng.standard_normal(experts_per_layer) * (sigma[0] + (sigma[1] - sigma[0]) * depth)
        previous = np.empty(0, np.int64)
        for token in range(tokens):
            kept = previous[rng.random(previous.size) < reuse]
            # Gumbel-top-k: an ordered draw without replacement.
            order = np.argpartition(-(logits + rng.gumbel(size=experts_per_layer)), 2 * top_k)[: 2 * top_k + 1]
            fresh = order[~np.isin(order, kept)][: top_k - kept.size]
            previous = np.concatenate([kept, fresh])
            picks[token, layer] = previous
    return picks


def simulate(
    policy: CachePolicy, trace: npt.NDArray[np.uint16], experts_per_layer: int, num_slots: int, *, warm_tokens: int = 0, **options: float
) -> CacheOutcome:
    """Replays a trace, uint16 [tokens, num_layers, top_k]; layers share the slots.

    options: of the engine (admit_after, admit_margin, heat_slow_half_life, ...), for HEAT. Raises ValueError naming what is wrong.
    """
    if trace.dtype != np.uint16 or trace.ndim != 3:
        raise ValueError(f"trace: expected uint16 [tokens, layers, picks], got {trace.dtype} {list(trace.shape)}")
    library = shm_lib.load()
    text = "\n".join(f"{name}={value}" for name, value in {"num_slots": num_slots, **options}.items())
    trace = np.ascontiguousarray(trace)
    outcome = np.zeros(3, np.uint64)
    code = library.glm53_simulate_cache(
        int(policy), trace.ctypes.data, *trace.shape, experts_per_layer, warm_tokens, text.encode(), outcome.ctypes.data
    )
    if code != 0:
        raise_last(library)
    return CacheOutcome(*(int(count) for count in outcome))
