"""Cache policies on synthetic routing traces: `python -m bench.cache_policy` → docs/results/cache_policy.json.

The shape of GLM-5.3-Flash: 42 MoE layers x 288 experts, 8 picks a layer, slots for 11.5 % of the records. Popularity is log-normal with a
sigma that grows from 0.33 to 1.5 over depth, and a pick repeats one of the token before with probability 0.35. Two traces per seed: a
steady stream, and one whose popularity changes completely half way (another subject); counted is the second half.

`heat` is the engine's own planner, heat table and slot table, replayed; CLOCK and LRU admit every miss; Belady knows the future.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from kernels.python.cache_sim import CachePolicy, simulate, synthetic_trace

OUT = report.ROOT / "docs" / "results" / "cache_policy.json"
NUM_LAYERS, EXPERTS, TOP_K, SLOT_SHARE = 42, 288, 8, 0.115


def measure(tokens: int, seeds: int) -> list[dict[str, Any]]:
    """One row per trace and policy."""
    num_slots = int(NUM_LAYERS * EXPERTS * SLOT_SHARE)
    rows = []
    for seed in range(seeds):
        steady = synthetic_trace(tokens, num_layers=NUM_LAYERS, experts_per_layer=EXPERTS, top_k=TOP_K, seed=seed)
        other = synthetic_trace(tokens // 2, num_layers=NUM_LAYERS, experts_per_layer=EXPERTS, top_k=TOP_K, seed=1000 + seed)
        shifted = np.concatenate([steady[: tokens // 2], other])
        for name, trace in (("steady", steady), ("shift", shifted)):
            for policy in CachePolicy:
                got = simulate(policy, trace, EXPERTS, num_slots, warm_tokens=tokens // 2)
                rows.append(
                    {
                        "trace": name,
                        "seed": seed,
                        "policy": policy.name.lower(),
                        "hit_ratio": round(got.hit_ratio, 4),
                        "admissions_per_token": round(got.admissions / (tokens // 2), 1),
                    }
                )
    return rows


def main() -> None:
    """Measures and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    started = report.start("bench.cache_policy")
    rows = measure(arguments.tokens, arguments.seeds)
    summary: dict[str, Any] = {}
    for trace in ("steady", "shift"):
        ratio = {
            policy.name.lower(): statistics.mean(
                row["hit_ratio"] for row in rows if row["trace"] == trace and row["policy"] == policy.name.lower()
            )
            for policy in CachePolicy
        }
        summary |= {f"{trace}_{policy}_hit_ratio": round(value, 4) for policy, value in ratio.items()}
        summary[f"{trace}_heat_of_belady_pct"] = round(100 * ratio["heat"] / ratio["belady"], 1)
        summary[f"{trace}_heat_over_clock_points"] = round(100 * (ratio["heat"] - ratio["clock"]), 1)
    report.write_result(arguments.out, started, rows, summary)


if __name__ == "__main__":
    main()
