"""Routing traces of GLM-5.3-Flash's shape, for measurements whose weights are random: random weights route unlike a trained model.

Popularity of expert e in MoE layer j is proportional to exp(sigma_j z_e) with z_e standard normal and sigma_j = 0.33 + 1.17 min(1, j / 15):
nearly flat in the first layer, a tenth of the experts with most of the picks from the sixteenth on. A pick repeats, with probability
`reuse`, one of the same stream's picks of that layer in the last 24 tokens; picks of a token are distinct.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

EXPERTS, TOP_K, WINDOW = 288, 8, 24
# The twelve layers of a slice stand for these of the model's 42.
SLICE_DEPTHS = (0, 4, 7, 11, 15, 19, 22, 26, 30, 34, 37, 41)
SLOT_SHARE = 1376 / 12096
# Fitted so that CLOCK over all layers, admitting at the first touch, hits 39.5 % of one stream's picks: `python -m bench.routing_trace`.
REUSE = 0.381


def popularity(seed: int, depth: int) -> NDArray[np.float64]:
    """Probability of every expert of MoE layer `depth`: [experts]."""
    sigma = 0.33 + 1.17 * min(1.0, depth / 15)
    weights = np.exp(sigma * np.random.default_rng((seed, depth)).standard_normal(EXPERTS))
    result: NDArray[np.float64] = weights / weights.sum()
    return result


def make(seed: int, tokens: int, *, streams: int = 1, depths: tuple[int, ...] = SLICE_DEPTHS, reuse: float = REUSE) -> NDArray[np.uint16]:
    """Picks, uint16 [tokens, streams, layers, 8]."""
    out = np.empty((tokens, streams, len(depths), TOP_K), np.uint16)
    for layer, depth in enumerate(depths):
        edges = np.cumsum(popularity(seed, depth))
        for stream in range(streams):
            rng = np.random.default_rng((seed, depth, stream))
            recent: deque[int] = deque(maxlen=WINDOW * TOP_K)
            for token in range(tokens):
                chosen: list[int] = []
                while len(chosen) < TOP_K:
                    if recent and rng.random() < reuse:
                        pick = recent[int(rng.integers(len(recent)))]
                    else:
                        pick = min(int(np.searchsorted(edges, rng.random())), EXPERTS - 1)
                    if pick not in chosen:
                        chosen.append(pick)
                recent.extend(chosen)
                out[token, stream, layer] = chosen
    return out


def main() -> None:
    """Fits `reuse`."""
    from kernels.python.cache_sim import CachePolicy, simulate

    tokens = 600
    slots = round(SLOT_SHARE * EXPERTS * len(SLICE_DEPTHS))
    low, high = 0.0, 0.9
    for _ in range(9):
        reuse = (low + high) / 2
        ratios = [
            simulate(CachePolicy.CLOCK, make(seed, tokens, reuse=reuse)[:, 0], EXPERTS, slots, warm_tokens=tokens // 3).hit_ratio
            for seed in range(3)
        ]
        hit = float(np.mean(ratios))
        print(f"reuse {reuse:.4f}: CLOCK hits {hit:.4f}")
        low, high = (reuse, high) if hit < 0.395 else (low, reuse)


if __name__ == "__main__":
    main()
