"""What choosing a token costs at the model's vocabulary: `python -m bench.sampling [--out FILE]`.

Rows look like a language model's: a few tokens far above a broad rest. Each kind of request is timed beside the plain way to do the same
(every pass in double precision over the whole row, in new arrays), in turns, so that noise hits both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import report
from services.gpu_worker.request import SamplingParams
from services.gpu_worker.sampling import Sampler

VOCAB = 154_880
ROWS = 8
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top-p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "temperature 1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "temperature 0.7, top-k 50, top-p 0.95": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    "temperature 0.7, min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "temperature 0.7, presence penalty": {"temperature": 0.7, "top_p": 0.95, "presence_penalty": 0.5},
}


def rows() -> list[NDArray[np.float32]]:
    """Logits: a broad rest, and some hundred candidates that fall by rank."""
    made = []
    for seed in range(ROWS):
        rng = np.random.default_rng(seed)
        row = (2.0 * rng.standard_normal(VOCAB)).astype(np.float32)
        row[rng.choice(VOCAB, 300, replace=False)] += np.linspace(18, 4, 300, dtype=np.float32)
        made.append(row)
    return made


def by_definition(scores: NDArray[np.float32], params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(tokens that may be drawn, in the order of the draw; their weights): the distribution as it is defined, in double precision."""
    weights = np.exp((scores.astype(np.float64) - float(scores.max())) / params.temperature)
    if params.top_k <= 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return np.arange(len(scores)), weights
    order = np.argsort(-weights, kind="stable")
    kept = weights[order]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1.0:
        kept = kept[np.cumsum(kept) - kept < params.top_p * kept.sum()]
    if params.min_p > 0.0:
        kept = kept[kept >= params.min_p * kept[0]]
    return order[: len(kept)], kept


def plain(params: SamplingParams) -> Callable[[NDArray[np.float32]], int]:
    """Draws by the definition."""
    rng = np.random.default_rng(1)

    def choose(row: NDArray[np.float32]) -> int:
        if params.temperature == 0.0:
            return int(row.argmax())
        order, kept = by_definition(row, params)
        running = np.cumsum(kept)
        return int(order[np.searchsorted(running, rng.random() * running[-1], side="right")])

    return choose


def measure(kind: dict[str, Any], made: list[NDArray[np.float32]], rounds: int) -> dict[str, Any]:
    """Microseconds a token, ours and the plain way's: the least and the median."""
    params = SamplingParams(seed=1, **kind)
    ways = {"ours": Sampler(params, (1, 2, 3), frozenset(), VOCAB).choose, "plain": plain(params)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 3):
        for name, choose in ways.items():
            began = time.perf_counter()
            choose(made[number % ROWS])
            if number >= 3:
                times[name].append(1e6 * (time.perf_counter() - began))
    return {
        f"{name}_{what}": round(float(f(values)), 1) for name, values in times.items() for what, f in (("best_us", min), ("us", np.median))
    }


def main() -> None:
    """Prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=report.ROOT / "docs" / "results" / "sampling.json")
    args = parser.parse_args()
    started = report.start("bench.sampling")
    made = rows()
    results = []
    for name, kind in KINDS.items():
        results.append({"name": name, **measure(kind, made, args.rounds)})
        print(results[-1], flush=True)
    worst = max(results, key=lambda row: row["ours_us"])
    report.write_result(args.out, started, results, {"vocab": VOCAB, "worst_us": worst["ours_us"], "worst": worst["name"]})


if __name__ == "__main__":
    main()
