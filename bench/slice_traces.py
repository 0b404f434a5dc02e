"""The traces that the slice is driven by, and what cache policies hit on them by counts alone, with one capacity and one warm-up for all.

`steady` has one popularity. `drift` changes to another subject half way, which with equal warm-up and measurement is where counting begins.
`scan` is steady with one long prompt of another stream in the middle of what is counted: CLOCK and LRU admit the experts that it touches,
all of every layer; Belady and the engine, which keeps prompts out of its heat, are counted without it. What lending slots to the prompt
costs the engine is in the row that is measured.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import routing_trace
from kernels.python.cache_sim import CachePolicy, simulate

SEEDS = 5
OTHER_SUBJECT = 1000  # added to a seed
TRACES = ("drift", "scan")
# The simulator's heat with the GPU backend's parameters.
HEAT: dict[str, Any] = {
    "admit_after": 1,
    "admit_margin": 1.0,
    "heat_slow_half_life": 400,
    "heat_fast_half_life": 10,
    "heat_fast_weight": 1.0,
    "heat_forget_below": 0.85,
}
Trace = NDArray[np.uint16]


def drifting(seed: int, tokens: int, depths: tuple[int, ...], streams: int = 1) -> Trace:
    """Another popularity from the middle on, uint16 [tokens, streams, layers, 8]."""
    first = routing_trace.make(seed, tokens // 2, streams=streams, depths=depths)
    second = routing_trace.make(seed + OTHER_SUBJECT, tokens - tokens // 2, streams=streams, depths=depths)
    return np.concatenate([first, second])


def scan_of_all(layers: int) -> Trace:
    """What a long prompt touches, as steps of decode: every expert of every layer once."""
    every = np.arange(routing_trace.EXPERTS, dtype=np.uint16).reshape(-1, routing_trace.TOP_K)
    return np.ascontiguousarray(np.repeat(every[:, None], layers, axis=1))


def middle(warm: int, tokens: int) -> int:
    """The step before which the scan's prompt comes."""
    return warm + (tokens - warm) // 2


def hits(policy: CachePolicy, trace: Trace, slots: int, warm: int) -> tuple[int, int]:
    """(hits, picks) behind the warm-up."""
    options = HEAT if policy is CachePolicy.HEAT else {}
    got = simulate(policy, np.ascontiguousarray(trace), routing_trace.EXPERTS, slots, warm_tokens=warm, **options)
    return got.hits, got.picks


def rates(trace: Trace, slots: int, warm: int, *, scan: bool = False) -> dict[str, float]:
    """Hit rate of every policy on one stream's trace, uint16 [tokens, layers, 8]."""
    result = {}
    for policy in CachePolicy:
        counted = hits(policy, trace, slots, warm)
        if scan and policy in (CachePolicy.CLOCK, CachePolicy.LRU):
            counted = _beside_the_scan(policy, trace, slots, warm)
        result[policy.name.lower()] = round(counted[0] / counted[1], 4) if counted[1] else 0.0
    return result


def _beside_the_scan(policy: CachePolicy, trace: Trace, slots: int, warm: int) -> tuple[int, int]:
    """(hits, picks) of decode alone: these policies do not know what comes, so the scan's own are those of the trace up to its end."""
    at = middle(warm, len(trace))
    scan = scan_of_all(trace.shape[1])
    whole = hits(policy, np.concatenate([trace[:at], scan, trace[at:]]), slots, warm)
    to_end = hits(policy, np.concatenate([trace[:at], scan]), slots, warm)
    to_start = hits(policy, trace[:at], slots, warm)
    return whole[0] - to_end[0] + to_start[0], whole[1] - to_end[1] + to_start[1]


def all_rates(seed: int, tokens: int, warm: int, depths: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Rates by trace: the seed's own (`steady`), four more seeds, drift and scan."""
    slots = round(routing_trace.SLOT_SHARE * routing_trace.EXPERTS * len(depths))
    one = routing_trace.make(seed, tokens, depths=depths)[:, 0]
    result = {"steady": rates(one, slots, warm)}
    for other in range(seed + 1, seed + SEEDS):
        result[f"seed {other}"] = rates(routing_trace.make(other, tokens, depths=depths)[:, 0], slots, warm)
    result["drift"] = rates(drifting(seed, tokens, depths)[:, 0], slots, warm)
    result["scan"] = rates(one, slots, warm, scan=True)
    return result
